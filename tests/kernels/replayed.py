"""Kernels whose later launches are replayed from the first one's tensors, as prepared ones are, on any device.

A form that is kept under a key which leaves something out runs on the wrong tensors, and its step goes wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from kernels.forms import Form, Preparations
from kernels.kernel_set import KernelSet
from kernels.reference.take_entry import TakenLayout, TakenRows


@dataclass
class Counts:
    """Of each kernel: forms made, and later launches."""

    made: dict[str, int] = field(default_factory=dict)
    launched: dict[str, int] = field(default_factory=dict)

    def prepared(self, name: str, again: Form) -> Form:
        """`again`, counted."""
        self.made[name] = self.made.get(name, 0) + 1

        def launch(*numbers: int) -> None:
            self.launched[name] = self.launched.get(name, 0) + 1
            again(*numbers)

        return launch


def sized(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """As many rows from where the tensor begins."""
    return tensor.as_strided((rows, *tensor.shape[1:]), tensor.stride(), tensor.storage_offset())


def replayed(kernels: KernelSet, counts: Counts) -> KernelSet:
    """The kernels with forms."""

    def take_drafts(*first: Any) -> Form | None:
        kernels.take_drafts(*first)
        if not first[9].shape[0]:
            return None

        def again(num_rows: int, query_stride: int, seq: int, num_reply_rows: int) -> None:
            arguments = list(first)
            arguments[3], arguments[5], arguments[7] = seq, num_reply_rows, query_stride
            for place in (*range(8, 13), *range(15, 21)):
                arguments[place] = sized(first[place], num_rows)
            kernels.take_drafts(*arguments)

        return counts.prepared("take_drafts", again)

    def write_ring_entry(*first: Any) -> Form:
        kernels.write_ring_entry(*first)
        return counts.prepared(
            "write_ring_entry", lambda max_tokens: kernels.write_ring_entry(first[0], max_tokens, *first[2:])
        )

    def take_entry(*first: Any) -> Form:
        kernels.take_entry(*first)
        entry, plan, updates, *_ = first
        taken, layout = first[-2:]

        def again(padded_rows: int, padded_tokens: int, num_updates: int, seq: int, max_entry_tokens: int) -> None:
            by_token = ("positions", "input_ids")
            rows = TakenRows(
                **{
                    field.name: sized(
                        getattr(taken, field.name),
                        padded_tokens if field.name in by_token else padded_rows + (field.name == "query_start_loc"),
                    )
                    for field in fields(TakenRows)
                }
            )
            mirror: TakenLayout | None = layout and replace(
                layout, slots=sized(layout.slots, padded_tokens), block_tables=sized(layout.block_tables, padded_rows)
            )
            changes = updates.as_strided((2, num_updates), (num_updates, 1), updates.storage_offset())
            vocab_size, max_len, state, tables, reply_header = first[6:-2]
            kernels.take_entry(
                *(entry, plan, changes, seq, first[4], max_entry_tokens, vocab_size, max_len, state, tables),
                *(reply_header, rows, mirror),
            )

        return counts.prepared("take_entry", again)

    def finish_reply(*first: Any) -> Form:
        kernels.finish_reply(*first)
        return counts.prepared(
            "finish_reply",
            lambda num_rows, seq: kernels.finish_reply(first[0], seq, first[2], num_rows, *first[4:]),
        )

    return replace(kernels, prepare=Preparations(take_drafts, write_ring_entry, take_entry, finish_reply))
