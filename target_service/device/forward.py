"""Who runs what lies between a step's drafts and its logits, or, where every row is greedy, its verdicts?

Uniform steps (only decode rows, all of one length) are padded to a captured number of rows and run as one CUDA graph;
any other runs as it is. Both call the same functions over the same buffers. The runner asks a `StepForward` and does
not know whether one rank runs the step (`local_forward.py`) or several (`pcp/step_forward.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.decoder import Decoder
from engine.graphs import GraphCache
from target_service.device.buffers import StepShape
from target_service.device.padding import Padding
from target_service.messages import RankLoad
from target_service.pcp.laps import Lap


@dataclass(frozen=True, slots=True)
class HostRows:
    """What the host knows of a batch's R rows, for whoever shares them out.

    context_lens: at most so, and exact for prompt chunks. query_lens: 0 for rows that are not launched. num_logits: how
    many of a row's last tokens need logits.
    """

    context_lens: list[int]
    query_lens: list[int]
    num_logits: list[int]
    is_prompt: list[bool]


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step that is not uniform brings beside its shape.

    starts: [R + 1] int32, where each row's tokens begin. is_prompt [R] bool, prompt_starts [R] int64 and prompt_tokens:
    see `prepare_target_inputs`. logit_rows: [N] int64, the tokens whose logits are needed.
    """

    starts: torch.Tensor
    is_prompt: torch.Tensor
    prompt_starts: torch.Tensor
    prompt_tokens: torch.Tensor
    logit_rows: torch.Tensor
    host: HostRows


@dataclass(frozen=True, slots=True)
class StepOutput:
    """captured: [T, A * H] or None. logits: [N, V] float32, None where no row samples or verdicts are committed.

    loads, lap: what each rank runs, and the time in collectives; on a target of one rank there is neither, and of a
    uniform step there is no lap.
    """

    captured: torch.Tensor | None
    logits: torch.Tensor | None
    loads: tuple[RankLoad, ...] = ()
    lap: Lap | None = None


class StepForward(Protocol):
    """Used by one thread, under one stream. graphs: of uniform steps, which `padding` pads."""

    decoder: Decoder
    padding: Padding
    graphs: GraphCache

    def uniform(
        self, shape: StepShape, hidden_layers: tuple[int, ...], greedy: bool, context_lens: Sequence[int]
    ) -> StepOutput:
        """A uniform step, through its graph. greedy: to the end, verdicts committed, without logits; else to them.
        context_lens: see Launch; for whoever shares the rows out.
        """
        ...

    def capture(self, shape: StepShape, hidden_layers: tuple[int, ...], greedy: bool) -> None:
        """Capture what `uniform` runs. The plan on the device must have no row with a seat."""
        ...

    def ragged(self, shape: StepShape, batch: Batch, hidden_layers: tuple[int, ...]) -> StepOutput:
        """Any other step, to its logits."""
        ...
