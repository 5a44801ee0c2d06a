"""What is a method of drafting, to the runner of device steps?

A program enqueues what lies between `take_entry` and `finish_reply`: it reads the entry, follows it into its own KV and
leaves drafts in a buffer. It decides nothing by what is on the device, and owns every buffer that its graphs read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from drafter_service.device.metadata import MetadataCounts
from drafter_service.device.seat_tables import SeatTables
from drafter_service.device.shapes import StepShape
from drafter_service.residency import Resident
from engine.channel.device import ReplyViews
from engine.channel.interface import RingEntry
from engine.graphs import GraphCounts
from engine.step_marks import StepMarks
from kernels.reference.take_entry import TakenLayout, TakenRows


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """graph_rows: row counts to pad to, ascending; none: steps run at their own size. cuda_graphs: capture them.

    fused: the metadata of all KV groups in one launch; shadow: compare it with each group's own builder.
    """

    graph_rows: tuple[int, ...] = ()
    cuda_graphs: bool = True
    fused: bool = True
    shadow: bool = False


class DrafterProgram(Protocol):
    """One method of drafting on a device. Used by one thread, always on the same stream.

    taken: what `take_entry` fills; layout: where it mirrors the target's own to, or None. report: [words] int64, what
    the host reads back of a step (`ReportLayout`); taken's records and ids lie in it. drafts: [max_rows, max_draft_len]
    int64, any stride.
    """

    device: torch.device
    max_rows: int
    max_tokens: int
    max_draft_len: int
    max_len: int
    taken: TakenRows
    layout: TakenLayout | None
    tables: SeatTables
    report: torch.Tensor
    drafts: torch.Tensor
    counts: MetadataCounts

    @property
    def graph_counts(self) -> GraphCounts:
        """Captures and replays so far."""
        ...

    def draws(self, resident: Resident) -> bool:
        """Whether the resident's drafts are drawn, and published with their probabilities."""
        ...

    def first_state(self, resident: Resident, context_len: int) -> tuple[int, int]:
        """What the device begins the resident's seat with, whose first row stands at context_len: start (-1: where the
        row does) and computed.
        """
        ...

    def bound(self, resident: Resident, context_len: int, query_len: int, draft_len: int) -> int:
        """Make room for a row of at most these lengths: drafter positions that it may use. 0: it does not run."""
        ...

    def shape(self, num_rows: int, max_tokens: int, max_query_len: int, draft_len: int, drawn: bool) -> StepShape:
        """The size that such a step runs in."""
        ...

    def rows_of(self, shape: StepShape) -> TakenRows:
        """`taken` in that size."""
        ...

    def catch_up(self, fresh: Sequence[tuple[Resident, int]]) -> None:
        """Enqueue what fresh residents need whose first row stands at that context length, apart from the entry."""
        ...

    def read_entry(self, shape: StepShape, entry: RingEntry) -> None:
        """Enqueue what reads the entry itself, apart from what `take_entry` takes over right after it."""
        ...

    def follow(
        self, taken: TakenRows, shape: StepShape, reply: ReplyViews, num_target_tokens: int, marks: StepMarks
    ) -> None:
        """Enqueue the draft prefill of the taken rows, then their drafts, of num_target_tokens ids. Sets the mark
        PREFILLED between the two.
        """
        ...

    def followed(self, resident: Resident, start: int, committed_len: int) -> None:
        """A step is done that ran a row of the resident: its KV covers target positions [start, committed_len)."""
        ...

    def not_followed(self, resident: Resident, length: int | None) -> None:
        """A step is done that could not run a row. length: drafter positions it would have needed; None: a hole."""
        ...

    def warm_up(self) -> None:
        """Compile and capture what steps will run, before the first."""
        ...
