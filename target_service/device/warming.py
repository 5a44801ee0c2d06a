"""What is slow the first time a step of some size runs, and how is it done before?

Kernels are compiled for the sizes they meet, and uniform steps are captured. Every job here runs one size over a plan
without rows, so it changes nothing, and takes a fraction of a second, or seconds where nothing was compiled before.
Jobs run before the service takes calls, and, for the hidden states that a drafter asks for when it attaches, while
nothing is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from engine.channel.device import ReplyViews
from engine.channel.interface import ChannelSpec, RingEntry
from engine.channel.local import LocalChannel
from kernels.kernel_set import KernelSet
from target_service.channels import OpenChannel
from target_service.device.buffers import StepBuffers, StepShape
from target_service.device.forward import Batch, HostRows, StepForward
from target_service.device.frame import StepFrame
from target_service.device.packing import Launch
from target_service.device.plan_buffer import HostPlan, PlanBuffer
from target_service.device.publishing import write_entry
from target_service.device.sampling import SamplingNeeds
from target_service.messages import StepRequest

# Query tokens from which on attention takes another form.
LONG_CHUNK = 32
# Rows of logits, few and many, which are filtered by different kernels (kernels/triton/sampling.py).
FILTERED_ROWS = (1, 64)
_NO_STEP = StepRequest(1, "", 0, (), 0, 0)

Take = Callable[[Launch, int, torch.Tensor | None], None]


class Warming:
    """Makes the jobs. Used by one thread, while nothing is under way.

    plan: a host buffer that no step ever has. take: the runner's call of `take_drafts`.
    """

    def __init__(
        self,
        forward: StepForward,
        frame: StepFrame,
        buffers: StepBuffers,
        plans: PlanBuffer,
        kernels: KernelSet,
        take: Take,
    ) -> None:
        self._forward = forward
        self._padding = forward.padding
        self._frame = frame
        self._buffers = buffers
        self._plans = plans
        self._kernels = kernels
        self._take = take

    def jobs(
        self,
        plan: HostPlan,
        hidden_layers: tuple[int, ...],
        query_lens: Sequence[int],
        channel: OpenChannel | None = None,
    ) -> Iterator[Callable[[], None]]:
        """One for each captured number of rows and each of query_lens, then those of steps with prompts. channel: to
        which steps of these hidden_layers are published.
        """
        scratch = None if channel is None else self._scratch(channel.end.spec)
        for query_len in query_lens:
            for num_rows in self._padding.warmed:
                if self._padding.padded_rows(num_rows, query_len) == num_rows:
                    yield lambda rows=num_rows, length=query_len: self._uniform(  # type: ignore[misc]
                        plan, rows, length, hidden_layers, scratch
                    )
                elif self._padding.padded_rows(num_rows, query_len) is None:  # over ranks that cannot capture
                    yield lambda rows=num_rows, length=query_len: self._ragged(  # type: ignore[misc]
                        plan, rows, length, 0, hidden_layers, scratch
                    )
        for num_rows in self._padding.warmed:
            yield lambda rows=num_rows: self._ragged(  # type: ignore[misc]
                plan, rows, max(query_lens), LONG_CHUNK, hidden_layers, scratch
            )

    def _scratch(self, spec: ChannelSpec) -> LocalChannel:
        return LocalChannel(replace(spec, depth=1), self._forward.decoder.device)

    def _uniform(
        self,
        plan: HostPlan,
        num_rows: int,
        query_len: int,
        hidden_layers: tuple[int, ...],
        scratch: LocalChannel | None,
    ) -> None:
        shape = self._buffers.uniform(num_rows, query_len)
        self._begin(plan, shape, scratch)
        self._forward.capture(shape, hidden_layers, greedy=True)
        if num_rows == self._padding.warmed[0]:
            self._sample(shape, query_len)
        if scratch is not None:
            captured = self._forward.uniform(shape, hidden_layers, True, ()).captured
            starts = self._buffers.uniform_starts(num_rows, query_len)
            self._entry(shape, num_rows, starts, captured, scratch)

    def _ragged(
        self,
        plan: HostPlan,
        num_rows: int,
        query_len: int,
        chunk: int,
        hidden_layers: tuple[int, ...],
        scratch: LocalChannel | None,
    ) -> None:
        """A step that is not captured. chunk: tokens of a prompt in it, 0: rows that verify drafts alone."""
        num_tokens = num_rows * query_len + chunk
        if num_rows > self._buffers.sizes.max_rows or num_tokens > self._buffers.sizes.max_tokens:
            return
        shape = self._buffers.shape(num_rows, num_tokens, query_len - 1, max(chunk, query_len))
        self._begin(plan, shape, scratch)
        rows = self._plans.rows
        starts = rows["batch_starts"][: num_rows + 1]
        num_logits = [1 if chunk else query_len] * num_rows
        batch = Batch(
            starts,
            rows["is_prompt"][:num_rows],
            rows["prompt_starts"][:num_rows],
            torch.zeros(num_tokens, dtype=torch.int64, device=starts.device),
            torch.zeros(sum(num_logits), dtype=torch.int64, device=starts.device),
            # The device finds rows that do not run; ranks share them out all the same.
            HostRows(
                [0] * num_rows,
                [chunk + query_len] + [query_len] * (num_rows - 1),
                num_logits,
                [chunk > 0] + [False] * (num_rows - 1),
            ),
        )
        if not chunk and num_rows == self._padding.warmed[0]:
            self._sample(shape, query_len)
        output = self._forward.ragged(shape, batch, hidden_layers)
        assert output.logits is not None
        if output.lap is not None:
            output.lap.drop()  # of a step that nobody is told of
        no_logits = rows["logit_starts"][: num_rows + 1]
        verdict = self._kernels.verify_greedy(output.logits, no_logits, shape.drafts)
        self._frame.commit(shape, verdict.tokens, verdict.num_sampled)
        if scratch is not None:
            self._entry(shape, num_rows, starts, output.captured, scratch)

    def _sample(self, shape: StepShape, query_len: int) -> None:
        """What rows that are not greedy need behind their logits, whatever their number."""
        rows, num_rows, decoder = self._plans.rows, shape.num_rows, self._forward.decoder
        vocab_size, device = decoder.config.vocab_size, decoder.device
        for count in FILTERED_ROWS:
            logits = torch.zeros((count, vocab_size), device=device)
            owners = torch.zeros(count, dtype=torch.int64, device=device)
            names = ("temperature", "top_k", "top_p", "min_p")
            self._kernels.filter_logits(logits, *(rows[name][owners] for name in names))
        self._kernels.verify(
            torch.zeros((shape.num_tokens, vocab_size), device=device),
            self._buffers.uniform_starts(num_rows, query_len),
            shape.drafts,
            rows["temperature"][:num_rows],
            rows["seeds"][:num_rows],
            shape.start_positions,
            rows["match_only"][:num_rows],
            None,
            None,
        )

    def _begin(self, plan: HostPlan, shape: StepShape, scratch: LocalChannel | None) -> None:
        """A plan without rows is on the device; rows that might have drafts have been looked at."""
        plan.clear()
        self._plans.upload(plan)
        self._take(_launch(shape, None), 0, None)
        if scratch is not None:
            header, _ = scratch.target.ring(0)
            self._take(_launch(shape, scratch.target.reply(0)), 0, header)

    def _entry(
        self,
        shape: StepShape,
        num_rows: int,
        starts: torch.Tensor,
        captured: torch.Tensor | None,
        scratch: LocalChannel,
    ) -> None:
        entry: tuple[torch.Tensor, RingEntry] = scratch.target.ring(0)
        most = min(shape.num_tokens, scratch.target.spec.max_tokens)
        if num_rows <= scratch.target.spec.max_rows:
            write_entry(
                self._kernels.write_ring_entry,
                shape,
                num_rows,
                most,
                scratch.target.spec.epoch,
                entry,
                starts,
                self._plans,
                captured,
                False,
            )


def _launch(shape: StepShape, reply: ReplyViews | None) -> Launch:
    return Launch(_NO_STEP, (), 0, shape, SamplingNeeds(), None, None, None, None, None, reply, 0)
