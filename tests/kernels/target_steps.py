"""Cases for the target's step kernels: rows of every kind, with a reply that may be wrong in every way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.kernels.triton.device import POISON

NUM_SEATS = 6
VOCAB = 50
SEQ, EPOCH, NUM_REPLY_ROWS = 12, 3, 4


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def reply(tag: tuple[int, int, int] = (SEQ, EPOCH, NUM_REPLY_ROWS)) -> list[torch.Tensor]:
    """Header, tokens, has_probs: five rows of four drafts, of which the tag counts four."""
    tokens = torch.tensor(
        [[5, 6, 7, 8], [9, VOCAB, 3, 4], [11, 12, -1, 13], [-1, 2, 3, 4], [40, 41, 42, 43]], dtype=torch.int64
    )
    return [torch.tensor([*tag, 0, 0, 0, 0, 0]), tokens, torch.tensor([True, False, True, False, True])]


def take_inputs() -> list[torch.Tensor]:
    """places, seats, query_lens, limits, known_lens, context_lens. Rows: three with drafts of every kind, one at its
    limit, one whose limit cuts its drafts, a prompt chunk, one without a seat, one without tokens, two with places
    that are none.
    """
    return [
        ints(0, 1, 2, 0, 0, 0, 0, 0, 4, -1),
        ints(0, 1, 2, 3, 4, 5, -1, 0, 1, 2),
        ints(4, 4, 3, 4, 4, 7, 4, 0, 4, 4),
        ints(99, 99, 99, 20, 33, 0, 99, 99, 99, 99),
        ints(-1, -1, -1, -1, -1, 17, -1, -1, -1, -1),
        ints(10, 11, 12, 20, 30, 8),
    ]


def take_outputs(width: int) -> list[torch.Tensor]:
    """out_seats, out_seq_lens, out_drafts, out_num_drafts, out_start_positions, out_has_probs, out_missed; garbage."""
    rows = 10
    return [
        torch.full((rows,), POISON, dtype=torch.int32),
        torch.full((rows,), POISON, dtype=torch.int32),
        torch.full((rows, width), POISON, dtype=torch.int64),
        torch.full((rows,), POISON, dtype=torch.int32),
        torch.full((rows,), POISON, dtype=torch.int64),
        torch.ones(rows, dtype=torch.bool),
        torch.full((1,), POISON, dtype=torch.int32),
    ]


def run_take(
    kernel: Callable[..., None],
    device: torch.device,
    width: int = 3,
    tag: tuple[int, int, int] | None = (SEQ, EPOCH, NUM_REPLY_ROWS),
    query_stride: int = 0,
    with_probs: bool = True,
) -> dict[str, Any]:
    """What `take_drafts` makes of the case, as lists. tag: of the reply's header; None: no reply."""

    def there(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.to(device) for tensor in tensors]

    header, tokens, has_probs = there(reply(tag)) if tag is not None else (None, None, None)
    inputs, outputs = there(take_inputs()), there(take_outputs(width))
    ring_header = torch.arange(8, device=device) + 1
    kernel(
        *(header, tokens, has_probs if with_probs else None),
        *(SEQ, EPOCH, NUM_REPLY_ROWS, VOCAB, query_stride),
        *inputs,
        ring_header,
        *outputs,
    )
    names = ["seats", "seq_lens", "drafts", "num_drafts", "start_positions", "has_probs", "missed"]
    found: dict[str, Any] = {name: output.tolist() for name, output in zip(names, outputs, strict=True)}
    return {**found, "context_lens": inputs[-1].tolist(), "ring_header": ring_header.tolist()}


def run_commit(kernel: Callable[..., None], device: torch.device, width: int = 3) -> dict[str, Any]:
    """What `commit_rows` makes of six rows: two decode rows, a chunk that samples, one that does not, and two that do
    not run, whose verdicts are garbage.
    """
    rows = 6
    tokens = torch.arange(rows * width, dtype=torch.int64).view(rows, width) + 100
    inputs = [
        tokens,
        ints(min(2, width), 1, 1, 0, min(3, width), 7),
        ints(3, 0, 1, 4, -1, -1),
        ints(3, 3, 5, 6, 3, 0),
        ints(-1, -1, 0, 6, -1, -1),
        ints(width - 1, min(1, width - 1), 0, 0, 2, 2),
        ints(1),
        ints(10, 11, 12, 13, 14, 15),
        torch.arange(6) + 70,
    ]
    outputs = [
        torch.full((rows,), POISON, dtype=torch.int32),
        torch.full((rows,), POISON, dtype=torch.int32),
        torch.full((rows,), POISON, dtype=torch.int32),
        torch.full((rows,), POISON, dtype=torch.int64),
        torch.full((rows, 5 + width), POISON, dtype=torch.int64),
    ]
    inputs = [tensor.to(device) for tensor in inputs]
    outputs = [tensor.to(device) for tensor in outputs]
    kernel(*inputs, *outputs)
    names = ["query_lens", "num_sampled", "num_rejected", "anchors", "table"]
    found: dict[str, Any] = {name: output.tolist() for name, output in zip(names, outputs, strict=True)}
    return {**found, "context_lens": inputs[7].tolist(), "seat_anchors": inputs[8].tolist()}


def run_ring(
    kernel: Callable[..., None],
    device: torch.device,
    width: int = 5,
    with_tables: bool = True,
    seats: tuple[int, ...] = (2, -1, 0, 1, -1),
) -> dict[str, Any]:
    """The entry that `write_ring_entry` makes of five rows over garbage: a batch padded to four tokens a row, of which
    the plan gave the rows 4, 3, 2, 1 and 0.
    """
    num_rows, num_tokens = len(seats), 4 * len(seats)
    batch = torch.arange(num_tokens, dtype=torch.int64)
    row = torch.arange(num_rows, dtype=torch.int64)
    hidden = (torch.arange(num_tokens)[:, None] * 100.0 + torch.arange(width)) if width else None
    tables = torch.arange(num_rows * 3, dtype=torch.int32).view(num_rows, 3) if with_tables else None
    query_lens = ints(*(4, 3, 2, 1, 0)[:num_rows])
    inputs: list[torch.Tensor | None] = [
        torch.arange(num_rows + 1, dtype=torch.int32) * 4,
        ints(*seats),
        query_lens,
        ints(*(30, 0, 40, 50, 0)[:num_rows]),
        *((row + 1).to(torch.int32), (row + 11).to(torch.int32), row + 21, row + 31),
        *(row.to(torch.float32) / 4, row - 7),
        *(batch + 1000, batch + 2000, batch + 3000),
        tables,
        hidden,
    ]
    rows, tokens = 8, 30

    def garbage(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, 12345, dtype=dtype)

    outputs: list[torch.Tensor | None] = [
        garbage(8, dtype=torch.int64),
        garbage(rows + 1, dtype=torch.int32),
        *(garbage(rows, dtype=torch.int32) for _ in range(4)),
        *(garbage(rows, dtype=torch.int64) for _ in range(2)),
        garbage(rows, dtype=torch.float32),
        garbage(rows, dtype=torch.int64),
        *(garbage(tokens, dtype=torch.int64) for _ in range(3)),
        garbage(rows, 4, dtype=torch.int32),
        garbage(tokens, width, dtype=torch.float32) if width else None,
    ]
    inputs = [tensor if tensor is None else tensor.to(device) for tensor in inputs]
    outputs = [tensor if tensor is None else tensor.to(device) for tensor in outputs]
    kernel(EPOCH, int(query_lens.sum()), *inputs, *outputs)
    names = [
        *("header", "query_start_loc", "seats", "seq_lens", "num_sampled", "num_rejected", "anchors"),
        *("next_prompt_tokens", "temperatures", "seeds", "positions", "input_ids", "slot_mapping", "block_tables"),
        "hidden",
    ]
    found: dict[str, Any] = {}
    total = int(torch.where(ints(*seats) >= 0, query_lens, 0).sum())
    for name, output in zip(names, outputs, strict=True):
        if output is None:
            continue
        # What lies behind the real tokens is nobody's business.
        cut = total if name in ("positions", "input_ids", "slot_mapping", "hidden") else None
        found[name] = output[:cut].tolist()
    return found
