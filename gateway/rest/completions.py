"""How is `POST /v1/completions` asked and answered?"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any, Literal, NotRequired, TypedDict

from gateway.generation import Delta, FinishReason, Generation, TokenLogprob
from gateway.rest.answers import (
    ChoiceExtension,
    Usage,
    UsageTally,
    chunk_extension,
    extend,
    finite_logprob,
    token_label,
)
from gateway.rest.generations import build_generations, check_shared
from gateway.rest.problems import invalid
from gateway.rest.running import Event
from gateway.rest.schemas import CompletionRequest
from gateway.rest.served import ServedModel
from gateway.rest.spans import SpanWriter
from gateway.text.decoding import IncrementalDecoder, make_decoder
from gateway.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


class Logprobs(TypedDict):
    """`choices[i].logprobs`: four parallel lists. text_offset counts characters of the answer's text before the
    token.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Choice(TypedDict):
    """`choices[i]`, of a whole answer or of a chunk."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    outrider: ChoiceExtension


class Completion(TypedDict):
    """The answer, or a chunk of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: NotRequired[Usage | None]


async def prepare(request: CompletionRequest, served: ServedModel) -> tuple[list[Generation], CompletionAnswer]:
    """The generations asked for and the answer to fill from them. Raises ApiError naming the field."""
    check_shared(request, served)
    num_choices = request.n or 1
    if request.best_of is not None and request.best_of != num_choices:
        raise invalid("best_of", "only as many as n are supported", "unsupported_parameter")
    prompts: list[tuple[int, ...]] = []
    for index, prompt in enumerate(request.prompt):
        path = "prompt" if len(request.prompt) == 1 else f"prompt[{index}]"
        if isinstance(prompt, str):
            prompts.append(await served.encode(prompt, path, add_special_tokens=True))
            await asyncio.sleep(0)  # everybody else's turn: many short texts are as long as one long one
        else:
            if not prompt:
                raise invalid(path, "must not be empty")
            served.check_token_ids(prompt, path)
            prompts.append(tuple(prompt))
    answer_id = f"cmpl-{uuid.uuid4().hex}"
    generations = build_generations(
        request,
        prompts,
        answer_id=answer_id,
        input_field="prompt",
        max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
        num_logprobs=-1 if request.logprobs is None else request.logprobs,
    )
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    return generations, CompletionAnswer(answer_id, served, generations, num_choices, include_usage)


class CompletionAnswer:
    """See `answers.Answer`."""

    def __init__(
        self,
        answer_id: str,
        served: ServedModel,
        generations: list[Generation],
        choices_per_prompt: int,
        include_usage: bool,
    ) -> None:
        self._id = answer_id
        self._created = int(time.time())
        self._model = served.name
        self._include_usage = include_usage
        self._tally = UsageTally(choices_per_prompt)
        self._logprobs = [
            None if generation.sampling.num_logprobs < 0 else _LogprobWriter(served.tokenizer)
            for generation in generations
        ]
        self._spans = [SpanWriter(served.tokenizer) for _ in generations]
        self._choices = [_empty_choice(index, writer) for index, writer in enumerate(self._logprobs)]

    def chunk(self, event: Event) -> dict[str, Any]:
        """See `answers.Answer`."""
        self._tally.add(event)
        delta = event.delta
        choice = Choice(
            index=event.choice,
            text=delta.text,
            logprobs=self._delta_logprobs(event.choice, delta),
            finish_reason=delta.finish_reason,
            outrider=chunk_extension(delta, self._spans[event.choice]),
        )
        answer = self._envelope([choice])
        if self._include_usage:
            answer["usage"] = None
        return dict(answer)

    def usage_chunk(self) -> dict[str, Any]:
        """See `answers.Answer`."""
        answer = self._envelope([])
        answer["usage"] = self._tally.usage()
        return dict(answer)

    def add(self, event: Event) -> None:
        """See `answers.Answer`."""
        self._tally.add(event)
        delta, choice = event.delta, self._choices[event.choice]
        choice["text"] += delta.text
        choice["finish_reason"] = delta.finish_reason
        extend(choice["outrider"], delta)
        added = self._delta_logprobs(event.choice, delta)
        if choice["logprobs"] is not None and added is not None:
            choice["logprobs"]["tokens"] += added["tokens"]
            choice["logprobs"]["token_logprobs"] += added["token_logprobs"]
            choice["logprobs"]["top_logprobs"] += added["top_logprobs"]
            choice["logprobs"]["text_offset"] += added["text_offset"]

    def whole(self) -> dict[str, Any]:
        """See `answers.Answer`."""
        answer = self._envelope(self._choices)
        answer["usage"] = self._tally.usage()
        return dict(answer)

    def _delta_logprobs(self, choice: int, delta: Delta) -> Logprobs | None:
        writer = self._logprobs[choice]
        return None if writer is None else writer.write(delta.logprobs)

    def _envelope(self, choices: list[Choice]) -> Completion:
        return Completion(
            id=self._id, object="text_completion", created=self._created, model=self._model, choices=choices
        )


def _empty_choice(index: int, writer: _LogprobWriter | None) -> Choice:
    return Choice(
        index=index,
        text="",
        logprobs=None if writer is None else writer.write(()),
        finish_reason=None,
        outrider=ChoiceExtension(token_ids=[], from_draft=[]),
    )


class _LogprobWriter:
    """Writes one choice's log probabilities, and keeps count of the characters before each token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder: IncrementalDecoder = make_decoder(tokenizer)
        self._offset = 0

    def write(self, logprobs: tuple[TokenLogprob, ...]) -> Logprobs:
        """The four lists for these tokens."""
        lists = Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for entry in logprobs:
            label = token_label(self._tokenizer.token_bytes(entry.token_id))
            logprob = finite_logprob(entry.logprob)
            top = {
                token_label(self._tokenizer.token_bytes(token_id)): finite_logprob(value)
                for token_id, value in entry.top
            }
            top.setdefault(label, logprob)
            lists["tokens"].append(label)
            lists["token_logprobs"].append(logprob)
            lists["top_logprobs"].append(top)
            lists["text_offset"].append(self._offset)
            self._offset += len(self._decoder.push(entry.token_id))
        return lists
