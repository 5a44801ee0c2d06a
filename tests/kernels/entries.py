"""Which ring entries do the tests of `take_entry` read? Right ones, and ones that a peer has made up."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from kernels import layout
from kernels.reference.take_entry import (
    CAPACITY,
    COMPUTED,
    DRAFT_LEN,
    FRESH,
    MAX_TOTAL_LEN,
    PLAN_FIELDS,
    QUERY_LEN,
    RECORD_FIELDS,
    SAMPLES,
    SEAT,
    START,
    EntryTensors,
    TakenLayout,
    TakenRows,
)

SEQ, EPOCH, VOCAB, MAX_LEN, NUM_SEATS, WIDTH, NUM_BLOCKS, BLOCK_SIZE = 9, 3, 50, 40, 7, 11, 90, 4
MAX_ROWS, MAX_TOKENS = 6, 64


@dataclass
class Case:
    """One call's tensors, on the CPU. taken, layout: poisoned."""

    entry: EntryTensors
    plan: torch.Tensor
    updates: torch.Tensor
    state: torch.Tensor
    tables: torch.Tensor
    reply_header: torch.Tensor
    taken: TakenRows
    layout: TakenLayout | None
    max_entry_tokens: int

    def copy(self, device: torch.device | str = "cpu") -> Case:
        """The same on `device`, nothing shared."""

        def there(value: Any) -> Any:
            return value.clone().to(device) if isinstance(value, torch.Tensor) else value

        def deep(value: Any) -> Any:
            if isinstance(value, EntryTensors | TakenRows | TakenLayout):
                return type(value)(**{field.name: there(getattr(value, field.name)) for field in fields(value)})
            return there(value)

        return Case(**{field.name: deep(getattr(self, field.name)) for field in fields(self)})

    def arguments(self) -> tuple[object, ...]:
        """In `take_entry`'s order."""
        return (
            *(self.entry, self.plan, self.updates, SEQ, EPOCH, self.max_entry_tokens, VOCAB, MAX_LEN),
            *(self.state, self.tables, self.reply_header, self.taken, self.layout),
        )

    def written(self) -> dict[str, list[object]]:
        """Everything that the call may write."""
        tensors = {
            "state": self.state,
            "tables": self.tables,
            "reply_header": self.reply_header,
            **{field.name: getattr(self.taken, field.name) for field in fields(self.taken)},
        }
        if self.layout is not None:
            tensors |= {"slots": self.layout.slots, "block_tables": self.layout.block_tables}
        return {name: tensor.tolist() for name, tensor in tensors.items()}


def make_case(seed: int, with_layout: bool = False, num_rows: int | None = None) -> Case:
    """A right entry: rows of any kind, some that do not run, some without a seat, fresh seats and known ones."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, MAX_ROWS - 1)) if num_rows is None else num_rows
    query = rng.integers(0, 6, rows)
    context = rng.integers(0, 20, rows)
    starts = layout.make_query_start_loc(query)
    total = int(starts[-1])
    seats = rng.permutation(NUM_SEATS)[:rows]
    begun = rng.integers(0, 4, rows).clip(max=context)
    plan = np.zeros((PLAN_FIELDS, rows), np.int32)
    plan[SEAT] = np.where(rng.random(rows) < 0.15, -1, seats)
    plan[QUERY_LEN] = query + rng.integers(0, 2, rows)
    plan[CAPACITY] = rng.integers(24, 44, rows)
    plan[MAX_TOTAL_LEN] = rng.integers(20, 60, rows)
    plan[DRAFT_LEN] = rng.integers(0, 6, rows)
    plan[FRESH] = rng.random(rows) < 0.3
    plan[START] = np.where(rng.random(rows) < 0.5, -1, 0)
    plan[COMPUTED] = context
    plan[SAMPLES] = rng.random(rows) < 0.5
    state = np.zeros((2, NUM_SEATS), np.int32)
    state[0, seats], state[1, seats] = begun, context + rng.integers(0, 2, rows)
    sampled = rng.random(rows) < 0.7
    rejected = rng.integers(0, 6, rows) % np.maximum(query, 1)

    def padded(values: np.ndarray, size: int, dtype: torch.dtype) -> torch.Tensor:
        out = torch.full((size,), 77_777, dtype=dtype)
        out[: len(values)] = torch.from_numpy(np.asarray(values)).to(dtype)
        return out

    entry = EntryTensors(
        header=torch.tensor([SEQ, EPOCH, rows, total, 0, 0, 0, 0]),
        positions=padded(layout.make_positions(context, query), MAX_TOKENS, torch.int64),
        input_ids=padded(rng.integers(0, VOCAB, total), MAX_TOKENS, torch.int64),
        query_start_loc=padded(starts, MAX_ROWS + 1, torch.int32),
        seq_lens=padded(context + query, MAX_ROWS, torch.int32),
        num_rejected=padded(rejected, MAX_ROWS, torch.int32),
        anchors=padded(np.where(sampled, rng.integers(0, VOCAB, rows), -1), MAX_ROWS, torch.int64),
        next_prompt_tokens=padded(np.where(sampled, -1, rng.integers(0, VOCAB, rows)), MAX_ROWS, torch.int64),
        temperatures=padded(rng.random(rows) * (rng.random(rows) < 0.6), MAX_ROWS, torch.float32),
        seeds=padded(rng.integers(-(2**62), 2**62, rows), MAX_ROWS, torch.int64),
        slot_mapping=padded(rng.integers(-1, NUM_BLOCKS * BLOCK_SIZE, total), MAX_TOKENS, torch.int64),
        block_tables=torch.from_numpy(rng.integers(1, NUM_BLOCKS, (MAX_ROWS, WIDTH + 1)).astype(np.int32)),
    )
    entry.block_tables[:, 9:] = 0
    padded_rows = rows + int(rng.integers(0, 3))
    padded_tokens = total + int(rng.integers(0, 5))
    num_updates = int(rng.integers(0, 5))
    updates = np.stack((rng.permutation(NUM_SEATS * WIDTH)[:num_updates], rng.integers(0, NUM_BLOCKS, num_updates)))
    records = torch.full((MAX_ROWS + 3, RECORD_FIELDS), 654_321)
    taken = poison(TakenRows.zeros(MAX_ROWS + 3, MAX_TOKENS + 5, torch.device("cpu"), records))
    mirror = None
    if with_layout:
        slots = torch.full((padded_tokens,), 654_321)
        mirror = TakenLayout(
            slots, torch.full((padded_rows, WIDTH), 654_321, dtype=torch.int32), NUM_BLOCKS, BLOCK_SIZE
        )
    return Case(
        entry=entry,
        plan=torch.from_numpy(plan),
        updates=torch.from_numpy(updates.astype(np.int32)),
        state=torch.from_numpy(state),
        tables=torch.arange(NUM_SEATS * WIDTH, dtype=torch.int32).view(NUM_SEATS, WIDTH),
        reply_header=torch.full((8,), 5),
        taken=taken.sized(padded_rows, padded_tokens),
        layout=mirror,
        max_entry_tokens=min(padded_tokens, MAX_TOKENS),
    )


def poison(taken: TakenRows) -> TakenRows:
    """Every buffer full of garbage."""
    for field in fields(taken):
        getattr(taken, field.name).fill_(654_321)
    return taken


def with_garbage(case: Case, seed: int) -> Case:
    """The same case with a few words of the entry overwritten by anything; the tag stays right."""
    rng = np.random.default_rng(seed)
    copied = case.copy()
    names = [field.name for field in fields(copied.entry)]
    for _ in range(int(rng.integers(1, 4))):
        name = names[int(rng.integers(len(names)))]
        tensor = getattr(copied.entry, name)
        flat = tensor.view(-1)
        low = 2 if name == "header" else 0
        index = int(rng.integers(low, min(flat.shape[0], max(low + 1, 8))))
        extreme = [-(2**31), -5, -1, 0, 1, 7, 63, 2**31 - 1]
        if tensor.dtype == torch.int64:
            extreme += [-(2**63), 2**63 - 1, 2**40]
        flat[index] = float("nan") if tensor.is_floating_point() else extreme[int(rng.integers(len(extreme)))]
    return copied


def swapped_tag(case: Case, word: int, value: int) -> Case:
    """The same case with one word of the entry's header changed."""
    header = case.entry.header.clone()
    header[word] = value
    return replace(case.copy(), entry=replace(case.entry, header=header))
