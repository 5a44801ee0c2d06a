"""How does a step begin on the device? With `take_drafts`: which rows run, and which drafts they verify."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.forms import Form, Forms
from kernels.kernel_set import KernelSet
from target_service.channels import OpenChannel
from target_service.device.buffers import StepBuffers
from target_service.device.packing import Launch
from target_service.device.plan_buffer import PlanBuffer


class Taking:
    """Enqueues it, over the runner's buffers. Used by one thread."""

    def __init__(self, kernels: KernelSet, buffers: StepBuffers, plans: PlanBuffer, vocab_size: int) -> None:
        self._kernels = kernels
        self._buffers = buffers
        self._plans = plans
        self._vocab_size = vocab_size
        self._alone = Forms()  # of steps that are published to nobody

    def step(self, launch: Launch, channel: OpenChannel | None, ring_header: torch.Tensor | None) -> None:
        """Of a step. channel: where its drafts come from and where it is published, ring_header: in which entry; both
        None where it is published to nobody.
        """
        shape, seq = launch.shape, launch.step.drafts_from_seq
        if channel is None or ring_header is None:
            forms, epoch, entries = self._alone, 0, (-1, -1)
        else:
            spec, forms = channel.end.spec, channel.forms
            drafts_from = seq % spec.depth if launch.reply is not None else -1
            epoch, entries = spec.epoch, (launch.step.seq % spec.depth, drafts_from)
        key = ("take", entries, launch.wants_probs, shape.drafts.shape[1])
        form = forms.get(key)
        if form is not None and shape.num_rows:
            form(shape.num_rows, shape.query_stride, seq, launch.num_reply_rows)
        else:
            forms.keep(key, self._call(self._kernels.prepare.take_drafts, launch, epoch, ring_header))

    def once(self, launch: Launch, epoch: int, ring_header: torch.Tensor | None) -> None:
        """Of something that does not come again. epoch: of the channel."""
        self._call(self._kernels.take_drafts, launch, epoch, ring_header)

    def _call(
        self, kernel: Callable[..., Form | None], launch: Launch, epoch: int, ring_header: torch.Tensor | None
    ) -> Form | None:
        shape, reply = launch.shape, launch.reply
        buffers, rows = self._buffers, self._plans.first(shape.num_rows)
        return kernel(
            reply.header if reply is not None else None,
            reply.tokens if reply is not None else None,
            reply.has_probs if reply is not None and launch.wants_probs else None,
            launch.step.drafts_from_seq,
            epoch,
            launch.num_reply_rows,
            self._vocab_size,
            shape.query_stride,
            rows["places"],
            rows["seats"],
            rows["query_lens"],
            rows["limits"],
            rows["known_lens"],
            buffers.context_lens,
            ring_header,
            shape.seats,
            shape.seq_lens,
            shape.drafts,
            shape.num_drafts,
            shape.start_positions,
            shape.has_probs,
            buffers.missed,
        )
