"""How does one rank, this process, run a step's forward?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.decoder import Decoder
from engine.graphs import GraphCache
from engine.kv_cache import KVCache
from kernels.attention.interface import AttentionBackend
from target_service.device.buffers import StepShape
from target_service.device.forward import Batch, StepOutput
from target_service.device.frame import StepFrame
from target_service.device.padding import Padding


class LocalStepForward:
    """A StepForward on one rank. Owner of the model, its cache and the graphs."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        backends: Sequence[AttentionBackend],
        frame: StepFrame,
        padding: Padding,
        graphs: GraphCache,
    ) -> None:
        """backends: one per KV group, none of which needs host lengths."""
        self.decoder = decoder
        self.padding = padding
        self.graphs = graphs
        self._kv = kv
        self._backends = tuple(backends)
        self._frame = frame

    def uniform(
        self, shape: StepShape, hidden_layers: tuple[int, ...], greedy: bool, context_lens: Sequence[int]
    ) -> StepOutput:
        """See StepForward."""
        key = (shape.num_rows, shape.query_stride, hidden_layers, greedy)
        return self.graphs.run(key, self._alone(shape, hidden_layers, greedy))

    def capture(self, shape: StepShape, hidden_layers: tuple[int, ...], greedy: bool) -> None:
        """See StepForward."""
        key = (shape.num_rows, shape.query_stride, hidden_layers, greedy)
        self.graphs.capture(key, self._alone(shape, hidden_layers, greedy))

    def ragged(self, shape: StepShape, batch: Batch, hidden_layers: tuple[int, ...]) -> StepOutput:
        """See StepForward."""
        self._frame.prepare(shape, batch.starts, batch.is_prompt, batch.prompt_starts, batch.prompt_tokens)
        return self._run(shape, hidden_layers, batch)

    def _alone(self, shape: StepShape, hidden_layers: tuple[int, ...], greedy: bool) -> Callable[[], StepOutput]:
        return self._frame.uniform_step(shape, greedy, lambda: self._run(shape, hidden_layers, None))

    def _run(self, shape: StepShape, hidden_layers: tuple[int, ...], batch: Batch | None) -> StepOutput:
        """Forward and logits. batch: None for a uniform step, all of whose tokens have logits."""
        if shape.num_tokens == 0:
            return StepOutput(None, None)
        plans = [backend.plan(shape.metadata) for backend in self._backends]
        output = self.decoder.forward(shape.input_ids, shape.positions, plans, self._kv, hidden_layers)
        hidden = output.hidden
        if batch is not None:
            if batch.logit_rows.shape[0] == 0:
                return StepOutput(output.captured, None)
            hidden = hidden.index_select(0, batch.logit_rows)
        return StepOutput(output.captured, self.decoder.logits(hidden))
