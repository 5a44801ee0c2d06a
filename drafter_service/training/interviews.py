"""What does the target write when nobody asks it anything?

One interview is a conversation that the target writes with itself: a user turn sampled after a few first words or none
(Xu et al. 2024, Magpie), then the answer, greedy more often than not, because greedy answers are what acceptance is
measured on; now and then a second question and answer. Given prompts, and ones put together from parts, take the
place of the first user turn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from drafter_service.training.chat_format import ChatFormat
from drafter_service.training.compose_chat import chat_prompt, follow_up
from drafter_service.training.compose_code import code_prompt
from drafter_service.training.compose_math import math_ending, math_prompt
from drafter_service.training.corpus import Conversation
from drafter_service.training.generator import Job, Written
from drafter_service.training.seeds import BY_KIND, PLAIN, SYSTEMS
from engine.errors import ConfigError

_QUESTION_LEN = 160
_SHORTEST_QUESTION = 3
_MIN_P = 0.02
_COMPOSED_FOLLOW_UPS = 0.5
_ENDED_QUESTIONS = 0.5
_COMPOSERS = {"chat": chat_prompt, "code": code_prompt, "math": math_prompt}


@dataclass(frozen=True, slots=True)
class InterviewOptions:
    """shares: how often each kind of first words is used; what is left over is an empty user turn.

    answer_temperatures: (temperature, share). given_share: share of conversations that begin with a given prompt, while
    there are any. composed: (kind, share) of those that begin with one put together from parts. second_turn_share:
    share of first answers followed by one more question; every other one is composed.
    """

    shares: tuple[tuple[str, float], ...] = (("chat", 0.28), ("code", 0.24), ("math", 0.2))
    answer_temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.72), (0.7, 0.13), (1.0, 0.15))
    question_temperatures: tuple[float, ...] = (0.6, 0.8, 1.0, 1.0)
    given_share: float = 0.12
    composed: tuple[tuple[str, float], ...] = (("chat", 0.24), ("code", 0.08), ("math", 0.11))
    second_turn_share: float = 0.3
    max_answer: int = 384


@dataclass(frozen=True, slots=True)
class _Question:
    """A user turn being written: tokens before it, its first words, and what is known of the conversation."""

    before: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    kind: str
    greedy: bool


@dataclass(frozen=True, slots=True)
class _Answer:
    spans: tuple[tuple[int, int], ...]
    kind: str
    greedy: bool
    may_go_on: bool


class Interviewer:
    """Hands out jobs without end and turns what was written into conversations.

    Iterate over it for jobs (as BatchGenerator.run does); give every Written to `finish`.
    """

    def __init__(
        self,
        chat: ChatFormat,
        given: Sequence[str],
        options: InterviewOptions,
        max_len: int,
        stop_ids: frozenset[int],
        seed: int,
    ) -> None:
        self._chat, self._options, self._max_len = chat, options, max_len
        self._stop_ids = stop_ids
        self._random = random.Random(seed)
        self._waiting: list[Job] = []
        self._given = [tokens for text in given if (tokens := self._given_prompt(text)) is not None]
        self._random.shuffle(self._given)
        self._openings = {system: chat.opening_with(system) for system in dict.fromkeys(SYSTEMS)}
        self._seen: set[int] = set()
        self.dropped = 0

    def __iter__(self) -> Iterator[Job]:
        while True:
            yield self._waiting.pop() if self._waiting else self._new_job()

    def finish(self, written: Written) -> Conversation | None:
        """Take a text back. A question that is whole becomes the next job; an answer becomes a conversation."""
        if isinstance(written.job.tag, _Question):
            self._take_question(written, written.job.tag)
            return None
        assert isinstance(written.job.tag, _Answer)
        return self._take_answer(written, written.job.tag)

    def _take_question(self, written: Written, tag: _Question) -> None:
        question = (*written.job.prompt[len(tag.before) :], *written.tokens)
        body = question[:-1] if question and question[-1] in self._stop_ids else question
        fingerprint = hash(body)
        if written.reason != "stop" or len(body) < _SHORTEST_QUESTION or fingerprint in self._seen:
            self.dropped += 1
            return
        self._seen.add(fingerprint)
        # The end token that the model wrote is the first of `to_answer` in chat templates; other glue is put in whole.
        if tag.kind == "math" and not tag.spans and self._random.random() < _ENDED_QUESTIONS:
            body = (*body, *self._chat.encode(math_ending(self._random)))
        prompt = (*tag.before, *body, *self._chat.to_answer)
        self._ask(prompt, tag.spans, tag.kind, tag.greedy)

    def _take_answer(self, written: Written, tag: _Answer) -> Conversation | None:
        start = len(written.job.prompt)
        tokens = (*written.job.prompt, *written.tokens)
        spans = (*tag.spans, (start, len(tokens)))
        greedy = tag.greedy and written.job.temperature == 0.0
        room = self._max_len - len(tokens) - _QUESTION_LEN
        goes_on = (
            tag.may_go_on
            and self._chat.has_turns
            and written.reason == "stop"
            and room > _QUESTION_LEN
            and self._random.random() < self._options.second_turn_share
        )
        if goes_on:
            if self._random.random() < _COMPOSED_FOLLOW_UPS:
                prompt = self._chat.later_turn(tokens, follow_up(self._random))
                self._waiting.append(self._answer_job(prompt, spans, tag.kind, greedy, False))
                return None
            before = self._chat.after_answer(tokens)
            self._waiting.append(self._question_job(_Question(before, spans, tag.kind, greedy), ()))
            return None
        if len(written.tokens) < 2:
            self.dropped += 1
            return None
        return Conversation(np.array(tokens, dtype=np.int32), spans, tag.kind, greedy)

    def _new_job(self) -> Job:
        if self._given and self._random.random() < self._options.given_share:
            return self._answer_job(self._given.pop(), (), "given", True, True)
        if self._chat.has_turns and (composed := self._drawn(self._options.composed)):
            prompt = self._chat.first_turn(_COMPOSERS[composed](self._random), self._random.choice(SYSTEMS))
            return self._answer_job(prompt, (), composed, True, True)
        kind, words = self._first_words()
        if not self._chat.has_turns:
            prompt = (*self._chat.opening, *self._chat.encode(words))
            return self._answer_job(prompt or self._chat.encode("The"), (), kind, True, False)
        before = self._openings[self._random.choice(SYSTEMS)]
        return self._question_job(_Question(before, (), kind, True), self._chat.encode(words))

    def _first_words(self) -> tuple[str, str]:
        if not self._chat.has_turns:
            return "plain", self._random.choice(PLAIN)
        kind = self._drawn(self._options.shares)
        return (kind, self._random.choice(BY_KIND[kind])) if kind else ("open", "")

    def _drawn(self, shares: Sequence[tuple[str, float]]) -> str | None:
        """One of the kinds, or None for what the shares leave over."""
        draw = self._random.random()
        for kind, share in shares:
            if draw < share:
                return kind
            draw -= share
        return None

    def _question_job(self, tag: _Question, first_words: tuple[int, ...]) -> Job:
        temperature = self._random.choice(self._options.question_temperatures)
        return Job((*tag.before, *first_words), _QUESTION_LEN, temperature, _MIN_P, tag)

    def _ask(self, prompt: tuple[int, ...], spans: tuple[tuple[int, int], ...], kind: str, greedy: bool) -> None:
        if len(prompt) + 16 > self._max_len:
            self.dropped += 1
            return
        self._waiting.append(self._answer_job(prompt, spans, kind, greedy, not spans))

    def _answer_job(
        self, prompt: tuple[int, ...], spans: tuple[tuple[int, int], ...], kind: str, greedy: bool, may_go_on: bool
    ) -> Job:
        temperatures, weights = zip(*self._options.answer_temperatures, strict=True)
        temperature = float(self._random.choices(temperatures, weights)[0])
        return Job(prompt, self._options.max_answer, temperature, 0.0, _Answer(spans, kind, greedy, may_go_on))

    def _given_prompt(self, text: str) -> tuple[int, ...] | None:
        tokens = (
            self._chat.first_turn(text) if self._chat.has_turns else (*self._chat.opening, *self._chat.encode(text))
        )
        return tokens if 0 < len(tokens) <= self._max_len // 2 else None


def read_prompts(paths: Sequence[Path]) -> list[str]:
    """Prompts of text files, one a line, and of JSONL files: each line a string, or an object with `prompt`,
    `question`, `query`, `turns` or `messages` (the first user message). ConfigError names the file and line that is
    none of these.
    """
    prompts: list[str] = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("prompts", f"{path}: {error}") from error
        for number, line in enumerate(lines, start=1):
            if line.strip():
                prompts.append(_prompt_of(line, path, number))
    return prompts


def _prompt_of(line: str, path: Path, number: int) -> str:
    if path.suffix not in (".json", ".jsonl"):
        return line
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError("prompts", f"{path}:{number}: {error}") from error
    if isinstance(item, dict):
        messages = item.get("messages")
        if isinstance(messages, list):
            user = [m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "user"]
            item = user[0] if user else None
        else:
            turns = item.get("turns")
            first = turns[0] if isinstance(turns, list) and turns else None
            item = item.get("prompt") or item.get("question") or item.get("query") or first
    if not isinstance(item, str):
        raise ConfigError("prompts", f"{path}:{number}: no prompt in this line")
    return item
