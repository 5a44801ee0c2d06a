"""How is one training step run without waiting for the host?

Target forward, unrolled loss, backward pass, clipping and weight update are one function of static tensors. On a GPU it
is recorded once for each shape as a CUDA graph and replayed; on a CPU it is simply called. A GPU works on a bf16 copy
of the head, which is refreshed from the fp32 weights after every update.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
import torch

from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training.head_optimizer import HeadOptimizer
from drafter_service.training.loss import LossOptions, LossOutput, unrolled_loss
from drafter_service.training.step_inputs import StepInputs, StepShape, unpack
from drafter_service.training.target_view import TargetView

# How many steps' inputs may be on their way: the host is never further ahead.
_IN_FLIGHT = 3


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """Sums over the steps since the last asking. cross_entropy: [S]; alive: [S + 1]; tried: [S]."""

    steps: int
    loss: float
    cross_entropy: tuple[float, ...]
    alive: tuple[float, ...]
    tried: tuple[float, ...]


class StepRunner:
    """Owns the working copy, the recorded graphs and their static inputs. The head's weights change in place.

    feature_rms: [A * H] float32, what captured states are divided by. draft_ids: [Vd] target ids.
    """

    def __init__(
        self,
        target: TargetView,
        head: Eagle3Head,
        optimizer: HeadOptimizer,
        feature_rms: torch.Tensor,
        draft_ids: torch.Tensor,
        shapes: tuple[StepShape, ...],
        options: LossOptions,
    ) -> None:
        self._target, self._head, self._optimizer = target, head, optimizer
        self._feature_rms, self._draft_ids, self._options = feature_rms, draft_ids, options
        self._device = target.decoder.device
        self._records = self._device.type == "cuda"
        self._working = self._working_copy()
        self._learned: list[torch.Tensor] = [p for p in self._working.parameters() if p.requires_grad]
        self._gradients = [torch.zeros_like(parameter) for parameter in optimizer.parameters]
        steps = options.num_steps
        self._rate = torch.zeros((), device=self._device)
        self._sums = torch.zeros(3 * steps + 3, device=self._device)
        size = max(shape.size for shape in shapes)
        self._packed = torch.zeros(size, dtype=torch.int32, device=self._device)
        self._staging = [torch.zeros(size, dtype=torch.int32, pin_memory=self._records) for _ in range(_IN_FLIGHT)]
        self._copied: list[torch.cuda.Event | None] = [None] * _IN_FLIGHT
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._records else None
        self._turn = 0

    def run(self, inputs: StepInputs, rate: float) -> None:
        """One step. Returns before a GPU is done with it, but not more than a few steps before."""
        self._load(inputs)
        self._rate.fill_(rate)
        if not self._records:
            self._step(inputs.shape)
            return
        if inputs.shape not in self._graphs:
            self._graphs[inputs.shape] = self._record(inputs.shape)
        self._graphs[inputs.shape].replay()
        event = torch.cuda.Event()
        event.record()
        self._copied[self._turn] = event
        self._turn = (self._turn + 1) % _IN_FLIGHT

    def take_statistics(self) -> StepStatistics:
        """What the steps since the last call came to; waits for them."""
        steps = self._options.num_steps
        loss, *rest, count = self._sums.tolist()
        self._sums.zero_()
        return StepStatistics(
            round(count), loss, tuple(rest[:steps]), tuple(rest[steps : 2 * steps + 1]), tuple(rest[2 * steps + 1 :])
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the head's fp32 weights over; after each update, and when a checkpoint was read."""
        if self._working is not self._head:
            torch._foreach_copy_(self._learned, self._optimizer.parameters)

    def loss_and_gradients(self, shape: StepShape) -> tuple[LossOutput, list[torch.Tensor]]:
        """Of the packed batch, without an update. Gradients in the working copy's dtype."""
        token_ids, chains = unpack(self._packed, shape)
        low = self._target.decoder.dtype
        hidden, captured = self._target.run(token_ids)
        targets = self._target.soft_targets(hidden.index_select(0, chains.wanted), self._draft_ids, low)
        scaled = (captured.float() / self._feature_rms).to(low)
        output = unrolled_loss(self._working, scaled, token_ids, chains, targets, self._options)
        gradients = list(torch.autograd.grad(output.loss, self._learned))
        # The graph must not outlive this call: nodes of another stream would spoil a recording.
        return replace(output, loss=output.loss.detach()), gradients

    def _load(self, inputs: StepInputs) -> None:
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        staged = self._staging[self._turn]
        np.copyto(staged.numpy()[: inputs.packed.size], inputs.packed)
        self._packed[: inputs.packed.size].copy_(staged[: inputs.packed.size], non_blocking=True)

    def _step(self, shape: StepShape) -> None:
        output, gradients = self.loss_and_gradients(shape)
        torch._foreach_copy_(self._gradients, gradients)
        self._optimizer.step(self._gradients, self._rate)
        self.refresh()
        with torch.no_grad():
            one = torch.ones(1, device=self._device)
            values = (output.loss[None], output.step_losses, output.alive, output.tried, one)
            self._sums += torch.cat(values)

    def _record(self, shape: StepShape) -> torch.cuda.CUDAGraph:
        """Gradients are computed once beforehand, so that kernels are compiled and libraries set up; weights stay."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.loss_and_gradients(shape)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Another thread prepares batches meanwhile, and may.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(shape)
        return graph

    def _working_copy(self) -> Eagle3Head:
        low = self._target.decoder.dtype
        if self._head.norm.weight.dtype == low:
            return self._head
        embedding, self._head.embed_tokens = self._head.embed_tokens, None
        try:
            working = copy.deepcopy(self._head).to(low)
        finally:
            self._head.embed_tokens = embedding
        working.attach_embedding(self._target.decoder.embed_weight)
        return working
