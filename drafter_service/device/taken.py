"""Where does `take_entry` put a step's rows? In buffers made once; what the host reads back is in a report."""

from __future__ import annotations

from dataclasses import replace

import torch

from drafter_service.device.plan_buffers import REPORT_HEAD, ReportLayout
from kernels.reference.take_entry import RECORD_FIELDS, TakenRows


def make_taken(report: torch.Tensor, layout: ReportLayout, device: torch.device) -> TakenRows:
    """Zeroed buffers of the layout's size. report: [layout.num_words] int64; records and ids are views of it."""
    records = report[REPORT_HEAD : layout.ids_from].view(layout.max_rows, RECORD_FIELDS)
    taken = TakenRows.zeros(layout.max_rows, layout.max_tokens, device, records)
    return replace(taken, input_ids=report[layout.ids_from :])
