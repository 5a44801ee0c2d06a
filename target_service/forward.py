"""Who runs a step's forward?

The runner asks a `BatchForward` for hidden states and does not know whether one rank runs them or several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.decoder import Decoder
from engine.kv_cache import KVCache
from kernels.attention.interface import AttentionBackend
from target_service.batch import StepBatch
from target_service.messages import RankLoad


@dataclass(frozen=True, slots=True)
class StepOutput:
    """logit_hidden: [N, H], of the tokens in `StepBatch.logit_rows`; captured: [T, A * H]. None where none were wanted.

    loads: what each rank ran; empty on a target of one rank.
    """

    logit_hidden: torch.Tensor | None
    captured: torch.Tensor | None
    loads: tuple[RankLoad, ...] = ()


class BatchForward(Protocol):
    """Runs the tokens of a batch that has some. Used by one thread."""

    def run(self, batch: StepBatch, hidden_layers: tuple[int, ...]) -> StepOutput:
        """Forward, KV written; hidden_layers: whose output is captured."""
        ...

    def take_collective_ms(self) -> float:
        """How long rank 0 stood in collectives since the last call; once the step's verdict is on the host."""
        ...


class LocalForward:
    """On one rank: this process."""

    def __init__(self, decoder: Decoder, kv: KVCache, backends: Sequence[AttentionBackend]) -> None:
        """backends: one per KV group of the decoder."""
        self._decoder = decoder
        self._kv = kv
        self._backends = tuple(backends)

    def run(self, batch: StepBatch, hidden_layers: tuple[int, ...]) -> StepOutput:
        """See BatchForward."""
        plans = [backend.plan(batch.metadata) for backend in self._backends]
        output = self._decoder.forward(batch.input_ids, batch.positions, plans, self._kv, hidden_layers)
        logit_hidden = output.hidden[batch.logit_rows] if batch.logit_rows.shape[0] else None
        return StepOutput(logit_hidden, output.captured)

    def take_collective_ms(self) -> float:
        """None at all."""
        return 0.0
