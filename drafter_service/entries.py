"""How does the drafter take a ring entry over from another process?

It copies what it needs, makes sure that the entry was not overwritten meanwhile, and checks that the numbers make sense
before anything is indexed by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from drafter_service.messages import RowRequest
from drafter_service.residency import Resident
from drafter_service.speculator import DraftRow
from engine.channel.interface import ChannelSpec, RingEntry
from engine.errors import ChannelError
from kernels.layout import PAD_SLOT


def copy_entry(entry: RingEntry, with_hidden: bool, with_layout: bool) -> RingEntry:
    """A private copy. with_hidden: the hidden states too. with_layout: the target's slots and block tables too."""
    nothing = torch.empty(0, dtype=torch.int64)
    return RingEntry(
        seq=entry.seq,
        num_rows=entry.num_rows,
        num_tokens=entry.num_tokens,
        hidden=entry.hidden.clone() if with_hidden and entry.hidden is not None else None,
        positions=entry.positions.clone(),
        input_ids=entry.input_ids.clone(),
        query_start_loc=entry.query_start_loc.clone(),
        seq_lens=entry.seq_lens.clone(),
        seats=entry.seats.clone(),
        num_sampled=entry.num_sampled.clone(),
        num_rejected=entry.num_rejected.clone(),
        anchors=entry.anchors.clone(),
        next_prompt_tokens=entry.next_prompt_tokens.clone(),
        temperatures=entry.temperatures.clone(),
        seeds=entry.seeds.clone(),
        slot_mapping=entry.slot_mapping.clone() if with_layout else nothing,
        block_tables=entry.block_tables.clone() if with_layout else nothing,
    )


def entry_on(entry: RingEntry, device: torch.device) -> RingEntry:
    """The entry with its tensors on `device`; itself where they are there."""
    if entry.positions.device == device:
        return entry
    tensors: dict[str, Any] = {
        field.name: value.to(device)
        for field in fields(entry)
        if isinstance(value := getattr(entry, field.name), torch.Tensor)
    }
    return replace(entry, **tensors)


def check_entry(entry: RingEntry, spec: ChannelSpec, num_rows: int) -> None:
    """ChannelError naming the tensor that cannot be right."""
    if entry.num_rows != num_rows:
        raise ChannelError(f"num_rows: the entry has {entry.num_rows} rows, the plan {num_rows}")
    if num_rows == 0:
        return
    starts = entry.query_start_loc.to(torch.int64)
    lens = starts[1:] - starts[:-1]
    if int(starts[0]) != 0 or int(starts[-1]) != entry.num_tokens or int(lens.min()) < 0:
        raise ChannelError("query_start_loc: not an ascending partition of the entry's tokens")
    contexts = entry.seq_lens.to(torch.int64) - lens
    if bool((contexts[lens > 0] < 0).any()):
        raise ChannelError("seq_lens: shorter than the row's query")
    rejected = entry.num_rejected.to(torch.int64)
    if bool(((rejected < 0) | (rejected > (lens - 1).clamp(min=0))).any()):
        raise ChannelError("num_rejected: not below the row's query length")
    for name in ("input_ids", "anchors", "next_prompt_tokens"):
        ids = getattr(entry, name)
        lowest = 0 if name == "input_ids" else -1
        if ids.numel() and (int(ids.min()) < lowest or int(ids.max()) >= spec.vocab_size):
            raise ChannelError(f"{name}: an id outside the vocabulary of {spec.vocab_size}")
    if entry.num_tokens:
        expected = torch.arange(entry.num_tokens) - torch.repeat_interleave(starts[:-1] - contexts, lens)
        if not torch.equal(entry.positions, expected):
            raise ChannelError("positions: not those of the rows' context and query lengths")
    num_slots = spec.num_blocks * spec.block_size
    # Empty where the layout was not copied: then nobody reads it.
    for name, values, lowest, end in (
        ("slot_mapping", entry.slot_mapping, PAD_SLOT, num_slots),
        ("block_tables", entry.block_tables, 0, spec.num_blocks),
    ):
        if values.numel() and (int(values.min()) < lowest or int(values.max()) >= end):
            raise ChannelError(f"{name}: outside the target's cache of {spec.num_blocks} blocks")


def draft_rows(
    entry: RingEntry,
    requests: Sequence[RowRequest],
    residents: Sequence[Resident | None],
    max_draft_len: int,
    max_model_len: int,
) -> tuple[DraftRow, ...]:
    """The rows that ran and whose request is resident, in the entry's order.

    draft_len is cut so that every draft, verified, still leaves room for the target's own token after it. A chunk of a
    prompt that is not its last has no anchor, and nothing is drafted after it.
    """
    starts = entry.query_start_loc.tolist()
    seq_lens, rejected = entry.seq_lens.tolist(), entry.num_rejected.tolist()
    anchors, next_tokens = entry.anchors.tolist(), entry.next_prompt_tokens.tolist()
    rows = []
    for index, (request, resident) in enumerate(zip(requests, residents, strict=True)):
        query_len = starts[index + 1] - starts[index]
        if resident is None or query_len == 0:
            continue
        committed_len = seq_lens[index] - rejected[index]
        room = min(resident.max_total_len, max_model_len) - (committed_len + 1) - 1  # the anchor counts too
        draft_len = min(request.draft_len, max_draft_len, room) if anchors[index] >= 0 else 0
        rows.append(
            DraftRow(
                index=index,
                resident=resident,
                query_start=starts[index],
                query_len=query_len,
                context_len=seq_lens[index] - query_len,
                num_rejected=rejected[index],
                anchor=anchors[index],
                next_prompt_token=next_tokens[index],
                draft_len=max(draft_len, 0),
            )
        )
    return tuple(rows)
