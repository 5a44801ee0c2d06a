"""Launches that come again on the same tensors, for the tests of prepared ones: numbers and contents differ each time.

Every kind has two entries, that is two forms, which take turns. Nothing here imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol

import torch

from kernels.reference.take_entry import PLAN_FIELDS, RECORD_FIELDS, EntryTensors, TakenLayout, TakenRows
from tests.kernels.entries import (
    BLOCK_SIZE,
    EPOCH,
    MAX_LEN,
    MAX_ROWS,
    MAX_TOKENS,
    NUM_BLOCKS,
    NUM_SEATS,
    VOCAB,
    WIDTH,
    make_case,
    poison,
)
from tests.kernels.target_steps import reply, take_inputs, take_outputs

# Where Triton would specialise: on 1, and on what 16 divides.
SEQS = (1, 16, 7, 2, 48, 33, 2**31 - 1)


def seq_of(index: int) -> int:
    return SEQS[index % len(SEQS)]


class FormCase(Protocol):
    """One kernel over tensors of its own. Launch `index` (from 0) is the same in every instance of a kind."""

    name: str

    def put(self, index: int) -> None:
        """What its launch finds, in place."""
        ...

    def arguments(self, index: int) -> tuple[Any, ...]:
        """The kernel's."""
        ...

    def numbers(self, index: int) -> tuple[int, ...]:
        """Those of a later launch of the form (see `forms.Preparations`)."""
        ...

    def tensors(self) -> list[torch.Tensor]:
        """Whatever a launch may write."""
        ...


def form_of(index: int) -> int:
    """Which of the two forms a launch is of."""
    return index % 2


class TakeDrafts:
    """`take_drafts`, two entries of reply and ring, of one to ten rows."""

    name = "take_drafts"

    def __init__(self, device: torch.device | str, width: int = 3) -> None:
        self._width = width
        self._replies = [[tensor.to(device) for tensor in reply()] for _ in range(2)]
        self._rings = torch.ones((2, 8), dtype=torch.int64, device=device)
        self._inputs = [tensor.to(device) for tensor in take_inputs()]
        self._context_lens = self._inputs[-1].clone()
        self._outputs = [tensor.to(device) for tensor in take_outputs(width)]

    def put(self, index: int) -> None:
        header = self._replies[form_of(index)][0]
        header.copy_(torch.tensor([seq_of(index) if index % 5 else 0, EPOCH, 4 - index % 2, 0, 0, 0, 0, 0]))
        self._rings.fill_(index + 1)
        self._inputs[-1].copy_(self._context_lens)

    def arguments(self, index: int) -> tuple[Any, ...]:
        rows = 1 + index % 10
        *by_row, context_lens = self._inputs
        seats, seq_lens, drafts, *rest, missed = self._outputs
        places = drafts.view(-1)[: rows * self._width].view(rows, self._width)
        entry = form_of(index)
        return (
            *self._replies[entry],
            *(seq_of(index), EPOCH, 4 - index % 2, VOCAB, (0, 4, 1)[index % 3]),
            *(tensor[:rows] for tensor in by_row),
            *(context_lens, self._rings[entry], seats[:rows], seq_lens[:rows], places),
            *(*(tensor[:rows] for tensor in rest), missed),
        )

    def numbers(self, index: int) -> tuple[int, ...]:
        return 1 + index % 10, (0, 4, 1)[index % 3], seq_of(index), 4 - index % 2

    def tensors(self) -> list[torch.Tensor]:
        return [self._rings, self._inputs[-1], *self._outputs]


class RingEntry:
    """`write_ring_entry`, of four rows, of four tokens each in the batch and up to so many in the plan."""

    name = "write_ring_entry"

    def __init__(self, device: torch.device | str, width: int = 40) -> None:
        int32, int64, rows, tokens = torch.int32, torch.int64, 4, 16

        def counting(*shape: int, dtype: torch.dtype = int64) -> torch.Tensor:
            count = torch.Size(shape).numel()
            return torch.arange(count, dtype=torch.float64).view(shape).to(dtype).to(device)

        def garbage(*shape: int, dtype: torch.dtype = int64) -> torch.Tensor:
            return torch.full((2, *shape), 123, dtype=dtype, device=device)

        self._query_lens = torch.zeros(rows, dtype=int32, device=device)
        self._inputs = [
            *(counting(rows + 1, dtype=int32) * 4, torch.tensor([3, -1, 0, 2], dtype=int32).to(device)),
            *(self._query_lens, *(counting(rows, dtype=int32) + start for start in (30, 1, 11))),
            *(counting(rows), counting(rows) + 31, counting(rows, dtype=torch.float32) / 4, counting(rows) - 7),
            *(counting(tokens) + 1000, counting(tokens) + 2000, counting(tokens) + 3000),
            *(counting(rows, 3, dtype=int32), counting(tokens, width, dtype=torch.float32)),
        ]
        self._outputs = [
            *(garbage(8), garbage(rows + 2, dtype=int32), *(garbage(rows + 1, dtype=int32) for _ in range(4))),
            *(garbage(rows + 1), garbage(rows + 1), garbage(rows + 1, dtype=torch.float32), garbage(rows + 1)),
            *(*(garbage(tokens + 3) for _ in range(3)), garbage(rows + 1, 4, dtype=int32)),
            garbage(tokens + 3, width, dtype=torch.float32),
        ]

    def put(self, index: int) -> None:
        self._query_lens.copy_(torch.tensor([(index + row) % 5 for row in range(4)], dtype=torch.int32))

    def arguments(self, index: int) -> tuple[Any, ...]:
        return EPOCH, *self.numbers(index), *self._inputs, *(output[form_of(index)] for output in self._outputs)

    def numbers(self, index: int) -> tuple[int, ...]:
        return (sum((index + row) % 5 for row in range(4)),)

    def tensors(self) -> list[torch.Tensor]:
        return self._outputs


class TakeEntry:
    """`take_entry`, two entries of three rows each; every launch has another entry's contents."""

    name = "take_entry"

    def __init__(self, device: torch.device | str, with_layout: bool = True) -> None:
        self._with_layout = with_layout
        first = self._case(0).entry
        self._entries = [
            EntryTensors(**{field.name: getattr(first, field.name).to(device) for field in fields(first)})
            for _ in range(2)
        ]
        self._plan = torch.zeros(PLAN_FIELDS * 3 + 2 * 9, dtype=torch.int32, device=device)
        self._state = torch.zeros((2, NUM_SEATS), dtype=torch.int32, device=device)
        self._tables = torch.zeros((NUM_SEATS, WIDTH), dtype=torch.int32, device=device)
        self._replies = torch.full((2, 8), 5, device=device)
        records = torch.full((MAX_ROWS + 3, RECORD_FIELDS), 654_321, device=device)
        self._taken = poison(TakenRows.zeros(MAX_ROWS + 3, MAX_TOKENS + 5, torch.device(device), records))
        self._slots = torch.full((MAX_TOKENS + 5,), 654_321, device=device)
        self._mirror = torch.full((MAX_ROWS + 3, WIDTH), 654_321, dtype=torch.int32, device=device)

    def _case(self, index: int) -> Any:
        return make_case(index, self._with_layout, num_rows=3)

    def put(self, index: int) -> None:
        case, entry = self._case(index), self._entries[form_of(index)]
        case.entry.header[0] = seq_of(index) if index % 6 else 0
        for field in fields(entry):
            getattr(entry, field.name).copy_(getattr(case.entry, field.name))
        words = torch.cat((case.plan.view(-1), case.updates.reshape(-1)))
        self._plan[: words.shape[0]] = words.to(self._plan.device)
        self._state.copy_(case.state)
        self._tables.copy_(case.tables)
        self._replies.fill_(index + 1)

    def arguments(self, index: int) -> tuple[Any, ...]:
        padded_rows, padded_tokens, num_updates, seq, max_entry_tokens = self.numbers(index)
        split = PLAN_FIELDS * 3
        layout = TakenLayout(self._slots, self._mirror, NUM_BLOCKS, BLOCK_SIZE)
        return (
            self._entries[form_of(index)],
            self._plan[:split].view(PLAN_FIELDS, 3),
            self._plan[split : split + 2 * num_updates].view(2, num_updates),
            *(seq, EPOCH, max_entry_tokens, VOCAB, MAX_LEN, self._state, self._tables, self._replies[form_of(index)]),
            self._taken.sized(padded_rows, padded_tokens),
            layout.sized(padded_rows, padded_tokens) if self._with_layout else None,
        )

    def numbers(self, index: int) -> tuple[int, ...]:
        case = self._case(index)
        sizes = (case.taken.seats.shape[0], case.taken.positions.shape[0], case.updates.shape[1])
        return *sizes, seq_of(index), case.max_entry_tokens

    def tensors(self) -> list[torch.Tensor]:
        taken = [getattr(self._taken, field.name) for field in fields(self._taken)]
        return [self._state, self._tables, self._replies, self._slots, self._mirror, *taken]


class FinishReply:
    """`finish_reply`, two entries and replies, of none to five rows."""

    name = "finish_reply"

    def __init__(self, device: torch.device | str, with_probs: bool = True) -> None:
        rows, width = 5, 3
        self._headers = torch.zeros((2, 8), dtype=torch.int64, device=device)
        self._drafts = torch.arange(4 * (rows + 1), device=device).view(4, rows + 1).t()
        records = torch.zeros((rows, RECORD_FIELDS), dtype=torch.int64, device=device)
        self._taken = TakenRows.zeros(rows, 1, torch.device(device), records)
        self._taken.seats.copy_(torch.tensor([4, 0, -1, 2, 6]))
        self._taken.temperatures.copy_(torch.tensor([0.0, 1.0, 0.5, 0.0, 2.0]))
        self._state = torch.zeros((2, NUM_SEATS), dtype=torch.int32, device=device)
        self._replies = torch.zeros((2, 8), dtype=torch.int64, device=device)
        self._tokens = torch.full((2, rows + 1, width), 99, device=device)
        self._has_probs = torch.zeros((2, rows + 1), dtype=torch.bool, device=device) if with_probs else None

    def put(self, index: int) -> None:
        taken, device = self._taken, self._state.device
        self._headers[form_of(index)] = torch.tensor([seq_of(index) if index % 4 else 0, EPOCH, 0, 0, 0, 0, 0, 0]).to(
            device
        )
        rows = torch.arange(5, device=device)
        taken.num_drafts.copy_((rows + index) % 5)
        taken.anchor_positions.copy_(rows * 3 + index)
        taken.records.copy_(((rows[:, None] + 1) * torch.arange(RECORD_FIELDS, device=device) + index) % 7)

    def arguments(self, index: int) -> tuple[Any, ...]:
        entry, (num_rows, seq) = form_of(index), self.numbers(index)
        has_probs = None if self._has_probs is None else self._has_probs[entry]
        return (
            *(self._headers[entry], seq, EPOCH, num_rows, self._drafts, self._taken, self._state),
            *(self._replies[entry], self._tokens[entry], has_probs),
        )

    def numbers(self, index: int) -> tuple[int, ...]:
        return index % 6, seq_of(index)

    def tensors(self) -> list[torch.Tensor]:
        probs = [] if self._has_probs is None else [self._has_probs]
        return [self._taken.records, self._state, self._replies, self._tokens, *probs]


CASES: dict[str, Callable[[torch.device | str], FormCase]] = {
    "take_drafts": TakeDrafts,
    "take_drafts, no drafts": lambda device: TakeDrafts(device, 0),
    "write_ring_entry": RingEntry,
    "take_entry": lambda device: TakeEntry(device, False),
    "take_entry, reuse": TakeEntry,
    "finish_reply": lambda device: FinishReply(device, False),
    "finish_reply, probabilities": FinishReply,
}
