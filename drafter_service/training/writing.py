"""How does the corpus grow?

The generation phase: interviews run until there is time or text enough; what is finished is put to disk about once a
minute. A later sitting goes on from the shards that are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from drafter_service.training.chat_format import ChatFormat
from drafter_service.training.corpus import Conversation, load_shards, save_shard
from drafter_service.training.generator import BatchGenerator
from drafter_service.training.interviews import Interviewer
from drafter_service.training.options import TrainOptions
from drafter_service.training.progress import PhaseProgress
from engine.decoder import Decoder

_SHARD_EVERY_S = 45.0


@dataclass(frozen=True, slots=True)
class WritingReport:
    """What this sitting wrote. answer_tokens: all conversations of the corpus; tokens_per_second: every token
    sampled.
    """

    seconds: float
    conversations: int
    answer_tokens: int
    tokens_per_second: float
    complete: bool


def write_corpus(
    decoder: Decoder,
    chat: ChatFormat,
    given: Sequence[str],
    directory: Path,
    options: TrainOptions,
    seconds_before: float,
    should_stop: Callable[[], bool],
) -> tuple[list[Conversation], WritingReport]:
    """Extend the shards in `directory` for what is left of the phase. seconds_before: spent on it by earlier
    sittings.
    """
    directory.mkdir(parents=True, exist_ok=True)
    corpus = load_shards(directory)
    num_shards = len(list(directory.glob("corpus-*.npz")))
    answer_tokens = sum(item.num_answer_tokens for item in corpus)
    budget = options.generate_minutes * 60 - seconds_before
    started = time.monotonic()

    def fraction() -> float:
        if options.generate_tokens:
            return answer_tokens / options.generate_tokens
        return 1 - max(0.0, budget - (time.monotonic() - started)) / max(1e-9, options.generate_minutes * 60)

    if fraction() >= 1 or (not options.generate_tokens and budget <= 0):
        return corpus, WritingReport(0.0, len(corpus), answer_tokens, 0.0, True)
    seed = options.seed * 1000 + num_shards
    stop_ids = frozenset(decoder.config.eos_token_ids)
    interviewer = Interviewer(chat, given, options.interview, options.max_len, stop_ids, seed)
    seats = options.num_seats or default_seats(decoder, options.max_len)
    generator = BatchGenerator(decoder, seats, options.max_len, decoder.dtype, decoder.device, seed, stop_loops=True)
    unsaved: list[Conversation] = []
    last_saved = time.monotonic()
    with PhaseProgress("writing") as progress:
        for written in generator.run(interviewer, lambda: fraction() >= 1 or should_stop()):
            conversation = interviewer.finish(written)
            if conversation is None:
                continue
            unsaved.append(conversation)
            answer_tokens += conversation.num_answer_tokens
            if time.monotonic() - last_saved > _SHARD_EVERY_S:
                save_shard(directory / f"corpus-{num_shards:05d}.npz", unsaved)
                corpus += unsaved
                unsaved, num_shards, last_saved = [], num_shards + 1, time.monotonic()
            rate = generator.tokens_written / max(1e-6, time.monotonic() - started)
            progress.update(fraction(), f"{answer_tokens / 1e6:.2f}M answer tokens, {rate:,.0f} tok/s, {seats} seats")
        if unsaved:
            save_shard(directory / f"corpus-{num_shards:05d}.npz", unsaved)
            corpus += unsaved
    seconds = time.monotonic() - started
    return corpus, WritingReport(
        seconds, len(corpus), answer_tokens, generator.tokens_written / max(1e-6, seconds), fraction() >= 1
    )


def default_seats(decoder: Decoder, max_len: int) -> int:
    """As many texts at once as half of the GPU's free memory holds, at most 3072; few on a CPU."""
    if decoder.device.type != "cuda":
        return 32
    config = decoder.config
    per_seat = 2 * config.num_layers * max_len * config.num_kv_heads * config.head_dim * decoder.dtype.itemsize
    per_seat += 16 * config.vocab_size  # logits, noise and their copies, fp32
    free, _ = torch.cuda.mem_get_info(decoder.device)
    return int(max(8, min(3072, free // 2 // per_seat // 8 * 8)))
