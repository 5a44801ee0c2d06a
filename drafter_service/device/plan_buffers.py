"""Where do a plan's numbers lie on their way to the device, and a step's outcome on its way back?

One set of host buffers for each step that can be under way, pinned where the device is a GPU, so that copies are
enqueued and nothing waits. A set is written when its step is launched and read when the step is done; nobody else
touches it in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.cuda.copying import Copy, prepare_copy
from engine.step_marks import StepMarks
from kernels.reference.take_entry import PLAN_FIELDS, RECORD_FIELDS

# Words in front of the records: [0] counts metadata elements that differ from their yardstick (`metadata_shadow`).
REPORT_HEAD = 8
MISMATCHES = 0


@dataclass(frozen=True, slots=True)
class ReportLayout:
    """Where things lie in a report [words] int64: a head, records of max_rows rows, ids of max_tokens tokens."""

    max_rows: int
    max_tokens: int

    @property
    def ids_from(self) -> int:
        """Where the ids begin."""
        return REPORT_HEAD + self.max_rows * RECORD_FIELDS

    @property
    def num_words(self) -> int:
        """All of it."""
        return self.ids_from + self.max_tokens


class StepBuffers:
    """One step's host buffers, and its marks. report: the device's (`DrafterProgram.report`)."""

    def __init__(self, layout: ReportLayout, max_changes: int, report: torch.Tensor) -> None:
        device = report.device
        pinned = device.type == "cuda"
        words = PLAN_FIELDS * layout.max_rows + 2 * max_changes
        self.marks = StepMarks(device)
        self._layout = layout
        self._pinned = pinned
        self._plan = torch.zeros(words, dtype=torch.int32, pin_memory=pinned)
        self._plan_np = self._plan.numpy()
        self._report = torch.zeros(layout.num_words, dtype=torch.int64, pin_memory=pinned)
        self._report_np = self._report.numpy()
        self._fetch = prepare_copy(self._report, report)
        self._send: Copy | None = None
        self._sent_to: torch.Tensor | None = None

    def fields(self, num_rows: int) -> np.ndarray:
        """[PLAN_FIELDS, num_rows] int32, to be filled."""
        return self._plan_np[: PLAN_FIELDS * num_rows].reshape(PLAN_FIELDS, num_rows)

    def put_changes(self, num_rows: int, where: np.ndarray, blocks: np.ndarray) -> int:
        """Write changes of the block tables behind the fields. Returns how many words are to be sent."""
        start, count = PLAN_FIELDS * num_rows, len(where)
        if start + 2 * count > self._plan_np.shape[0]:  # many long prompts at once: rare, and worth a wait
            plan = torch.zeros(2 * (start + 2 * count), dtype=torch.int32, pin_memory=self._pinned)
            plan[:start] = self._plan[:start]
            self._plan, self._plan_np = plan, plan.numpy()
            self._send = None
        if count:
            self._plan_np[start : start + count] = where
            self._plan_np[start + count : start + 2 * count] = blocks
        return start + 2 * count

    def send(self, num_words: int, out: torch.Tensor) -> None:
        """Enqueue the copy of that many words to the device's plan, int32, one place for all steps but for growth."""
        if self._send is None or self._sent_to is not out:
            self._send, self._sent_to = prepare_copy(out, self._plan), out
        self._send(num_words)

    def fetch(self, num_tokens: int) -> None:
        """Enqueue the copy of the report of a step of at most num_tokens tokens."""
        self._fetch(self._layout.ids_from + num_tokens)

    def records(self, num_rows: int) -> list[list[int]]:
        """Of a step that is done."""
        flat = self._report_np[REPORT_HEAD : REPORT_HEAD + num_rows * RECORD_FIELDS]
        rows: list[list[int]] = flat.reshape(num_rows, RECORD_FIELDS).tolist()
        return rows

    def ids(self, start: int, count: int) -> list[int]:
        """Input ids of a step that is done."""
        first = self._layout.ids_from + start
        ids: list[int] = self._report_np[first : first + count].tolist()
        return ids

    @property
    def mismatches(self) -> int:
        """Of a step that is done."""
        return int(self._report_np[MISMATCHES])
