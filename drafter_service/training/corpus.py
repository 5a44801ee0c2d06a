"""Where is the target's own text kept, and how is it cut into training batches?

A conversation is its tokens and the spans that are answers. Shards are written as they come, so that a run which is cut
short goes on from them; batches are whole conversations of similar length, padded on the right.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.errors import ModelError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Conversation:
    """tokens [N]; spans: (start, end) of each answer in tokens; greedy: every answer is the target's greedy one."""

    tokens: npt.NDArray[np.int32]
    spans: tuple[tuple[int, int], ...]
    kind: str
    greedy: bool

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that a drafter could have proposed."""
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True, slots=True)
class Batch:
    """token_ids [B, L], padded with 0; answers [B, L] bool: the token is part of an answer; lens [B]."""

    token_ids: Ints
    answers: npt.NDArray[np.bool_]
    lens: Ints

    @property
    def num_tokens(self) -> int:
        """Tokens without the padding."""
        return int(self.lens.sum())


def save_shard(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write conversations to one compressed file, atomically."""
    longest_id = max((int(item.tokens.max()) for item in conversations), default=0)
    dtype = np.uint16 if longest_id < 1 << 16 else np.int32
    spans = [(row, start, end) for row, item in enumerate(conversations) for start, end in item.spans]
    temporary = path.with_suffix(".tmp.npz")
    np.savez_compressed(
        temporary,
        tokens=np.concatenate([item.tokens for item in conversations]).astype(dtype),
        lens=np.array([item.tokens.size for item in conversations], dtype=np.int32),
        spans=np.array(spans, dtype=np.int32).reshape(-1, 3),
        kinds=np.array([item.kind for item in conversations]),
        greedy=np.array([item.greedy for item in conversations], dtype=np.bool_),
    )
    os.replace(temporary, path)


def load_shards(directory: Path) -> list[Conversation]:
    """All conversations under `directory`, in the order they were written."""
    found: list[Conversation] = []
    for path in sorted(directory.glob("corpus-*.npz")):
        try:
            with np.load(path, allow_pickle=False) as shard:
                parts = {name: shard[name] for name in ("tokens", "lens", "spans", "kinds", "greedy")}
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{path}: not a corpus shard ({error}); remove it and run again") from error
        texts = np.split(parts["tokens"].astype(np.int32), np.cumsum(parts["lens"])[:-1])
        spans: list[list[tuple[int, int]]] = [[] for _ in texts]
        for row, start, end in parts["spans"].tolist():
            spans[row].append((start, end))
        for text, row_spans, kind, greedy in zip(
            texts, spans, parts["kinds"].tolist(), parts["greedy"].tolist(), strict=True
        ):
            found.append(Conversation(text, tuple(row_spans), str(kind), bool(greedy)))
    return found


def split_held_out(
    conversations: Sequence[Conversation], every: int = 50, at_most: int = 512
) -> tuple[list[Conversation], list[Conversation]]:
    """(training, held out): one in `every`, at most `at_most`, is kept out of training to watch it by."""
    held = [item for index, item in enumerate(conversations) if index % every == 0 and item.num_answer_tokens > 8][
        :at_most
    ]
    chosen = {id(item) for item in held}
    return [item for item in conversations if id(item) not in chosen], held


def token_counts(conversations: Sequence[Conversation], vocab_size: int) -> Ints:
    """How often each token id is part of an answer: [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for item in conversations:
        for start, end in item.spans:
            counts += np.bincount(item.tokens[start:end], minlength=vocab_size)
    return counts


def make_batch(conversations: Sequence[Conversation], max_len: int, multiple: int = 32) -> Batch:
    """Conversations side by side, each cut to max_len, padded to a multiple of `multiple` (but not beyond max_len)."""
    lens = np.array([min(item.tokens.size, max_len) for item in conversations], dtype=np.int64)
    width = min(max_len, -(-int(lens.max()) // multiple) * multiple)
    token_ids = np.zeros((len(conversations), width), dtype=np.int64)
    answers = np.zeros((len(conversations), width), dtype=np.bool_)
    for row, item in enumerate(conversations):
        token_ids[row, : lens[row]] = item.tokens[: lens[row]]
        for start, end in item.spans:
            answers[row, start : min(end, int(lens[row]))] = True
    return Batch(token_ids, answers, lens)
