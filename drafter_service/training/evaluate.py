"""How good is a head on real prompts, without starting any service?

The target writes its answers in large batches, greedily and at temperature 1; one unrolled pass over each text then
gives what the services would have accepted (see `acceptance`). Speed follows from acceptance and the measured cost of
a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from drafter_service.eagle3.checkpoint import load_head
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training.acceptance import AcceptanceCount, measure, total
from drafter_service.training.chat_format import ChatFormat
from drafter_service.training.corpus import Conversation
from drafter_service.training.generator import BatchGenerator, Job
from drafter_service.training.progress import PhaseProgress
from drafter_service.training.prompt_sets import PromptSet
from drafter_service.training.target_view import TargetView
from engine.decoder import Decoder
from engine.errors import ConfigError, ModelError


@dataclass(frozen=True, slots=True)
class SetResult:
    """Acceptance on one prompt set at one temperature. per_position[i]: share of steps whose draft i + 1 was accepted.

    vocab_coverage: share of the answers' tokens that the draft vocabulary holds, an upper bound of the first.
    """

    prompt_set: str
    temperature: float
    draft_len: int
    conversations: int
    tokens: int
    steps: int
    mean_accepted_len: float
    per_position: tuple[float, ...]
    vocab_coverage: float


def write_answers(
    decoder: Decoder,
    chat: ChatFormat,
    prompts: PromptSet,
    temperature: float,
    max_new: int,
    max_len: int,
    num_seats: int,
    seed: int,
) -> list[Conversation]:
    """The target's own conversations over a prompt set: every turn is asked on top of the answers before it.

    A conversation whose next turn no longer fits ends early. Prompts longer than half of max_len are left out;
    ConfigError when no other is left.
    """
    texts: dict[int, tuple[int, ...]] = {}
    spans: dict[int, list[tuple[int, int]]] = {}
    seats = min(num_seats, max(1, len(prompts.items)))
    generator = BatchGenerator(decoder, seats, max_len, decoder.dtype, decoder.device, seed, stop_loops=False)
    num_turns = max(len(turns) for turns in prompts.items)
    for turn in range(num_turns):
        jobs = []
        for index, turns in enumerate(prompts.items):
            if turn >= len(turns) or (turn and index not in texts):
                continue
            prompt = chat.later_turn(texts[index], turns[turn]) if turn else _first(chat, turns[0])
            if len(prompt) <= (max_len // 2 if turn == 0 else max_len - max_new // 4):
                jobs.append(Job(prompt, max_new, temperature, 0.0, index))
        for written in generator.run(jobs):
            item = written.job.tag
            assert isinstance(item, int)
            texts[item] = (*written.job.prompt, *written.tokens)
            spans.setdefault(item, []).append((len(written.job.prompt), len(texts[item])))
    if not texts:
        raise ConfigError("prompt_sets", f"{prompts.name}: every prompt is longer than {max_len // 2} tokens")
    return [
        Conversation(np.array(text, dtype=np.int32), tuple(spans[index]), prompts.name, temperature == 0.0)
        for index, text in sorted(texts.items())
    ]


def measure_set(
    head: Eagle3Head,
    target: TargetView,
    conversations: Sequence[Conversation],
    name: str,
    temperature: float,
    draft_len: int,
    max_len: int,
) -> SetResult:
    """Acceptance of the head on conversations that the target wrote."""
    counts = measure(head, target, conversations, draft_len, max_len, target.decoder.device)
    everything: AcceptanceCount = total(counts, draft_len)
    known = head.t2d.cpu().numpy()
    answers = [item.tokens[start:end] for item in conversations for start, end in item.spans]
    tokens = np.concatenate(answers) if answers else np.zeros(0, dtype=np.int32)
    return SetResult(
        name,
        temperature,
        draft_len,
        len(conversations),
        everything.tokens,
        everything.steps,
        everything.mean_accepted_len,
        tuple(everything.per_position),
        float(known[tokens].mean()) if tokens.size else 0.0,
    )


def evaluate(
    head: Eagle3Head,
    target: TargetView,
    chat: ChatFormat,
    sets: Sequence[PromptSet],
    temperatures: Sequence[float],
    draft_len: int,
    max_new: int,
    num_seats: int,
    max_len: int = 2048,
    seed: int = 0,
) -> list[SetResult]:
    """Every set at every temperature, in order."""
    results: list[SetResult] = []
    max_len = min(max_len, target.decoder.config.max_model_len)
    with PhaseProgress("measuring") as progress:
        for index, prompts in enumerate(sets):
            for column, temperature in enumerate(temperatures):
                texts = write_answers(
                    target.decoder, chat, prompts, temperature, max_new, max_len, num_seats, seed + index
                )
                result = measure_set(head, target, texts, prompts.name, temperature, draft_len, max_len)
                results.append(result)
                done = (index * len(temperatures) + column + 1) / (len(sets) * len(temperatures))
                words = f"{prompts.name} at {temperature:g}: accepted length {result.mean_accepted_len:.2f}"
                progress.update(done, words)
    return results


def load_for_evaluation(
    model: Path, checkpoint: Path, dtype: torch.dtype, device: torch.device
) -> tuple[Eagle3Head, TargetView]:
    """A head and its target. ModelError when they do not belong together."""
    decoder = Decoder.load(model, dtype, device)
    head = load_head(checkpoint, dtype, device)
    config = head.config
    if config.vocab_size != decoder.config.vocab_size or config.target_hidden_size != decoder.config.hidden_size:
        raise ModelError(
            f"{checkpoint}: made for a target of vocabulary {config.vocab_size} and hidden size "
            f"{config.target_hidden_size}; {model} has {decoder.config.vocab_size} and {decoder.config.hidden_size}"
        )
    if head.embed_tokens is None:
        head.attach_embedding(decoder.embed_weight)
    return head.requires_grad_(False), TargetView(decoder, config.layers_of_target(decoder.config.num_layers))


def _first(chat: ChatFormat, text: str) -> tuple[int, ...]:
    return chat.first_turn(text) if chat.has_turns else (*chat.opening, *chat.encode(text))
