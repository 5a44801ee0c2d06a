"""How is a step told to the drafter, from the device?

One kernel writes the ring entry, from what the step left in its buffers; then its tag; then the counter that the
drafter's stream waits for. What the host cannot know (which rows ran, how many of their drafts were there) the kernel
leaves out by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from engine.channel.interface import RingEntry
from engine.errors import ChannelError
from kernels.forms import Form
from kernels.kernel_set import KernelSet
from target_service.channels import OpenChannel
from target_service.device.buffers import StepShape
from target_service.device.packing import Launch
from target_service.device.plan_buffer import PlanBuffer

_log = logging.getLogger(__name__)


def publish_step(
    kernels: KernelSet,
    launch: Launch,
    channel: OpenChannel,
    entry: tuple[torch.Tensor, RingEntry],
    starts: torch.Tensor,
    plans: PlanBuffer,
    captured: torch.Tensor | None,
    comes_again: bool,
) -> None:
    """Enqueue the ring entry and its publication. A channel that cannot take it costs drafts, never the step.

    entry: header and tensors of the step's entry. starts: [>= R + 1] int32, where each row's tokens begin in the batch.
    plans: the step's plan, on the device. comes_again: `captured` is None or a graph's, so that later steps have it
    where it is.
    """
    step, num_rows, spec = launch.step, len(launch.rows), channel.end.spec
    if num_rows > spec.max_rows or launch.num_tokens > spec.max_tokens:
        _log.warning("step %d does not fit the channel of drafter %s", step.seq, channel.drafter_id)
        return
    # Block tables are for who mirrors them; over host channels everybody gets them, as with host execution.
    with_tables = channel.shares_blocks or channel.end.kind != "cuda_ipc"
    # A uniform step finds what it writes from where the last one of its size did; its hidden states too, in a graph. Of
    # any other no form is kept, which would hold hidden states that nobody asks for again.
    shape, hidden = launch.shape, 0 if captured is None else captured.data_ptr()
    key = ("publish", step.seq % spec.depth, num_rows, shape.num_rows, shape.query_stride, hidden)
    may_have_form = launch.batch is None and comes_again
    form = channel.forms.get(key) if may_have_form else None
    if form is not None:
        form(launch.num_tokens)
    else:
        write = kernels.prepare.write_ring_entry if may_have_form else kernels.write_ring_entry
        rest = (entry, starts, plans, captured, with_tables)
        form = write_entry(write, shape, num_rows, launch.num_tokens, spec.epoch, *rest)
        if may_have_form:
            channel.forms.keep(key, form)
    plans.copies.copy(entry[0], plans.rows["tag"], 1)
    try:
        channel.device_end.publish(step.seq)
    except ChannelError as error:
        _log.warning("step %d not published to drafter %s: %s", step.seq, channel.drafter_id, error)
        return
    places = {(row.request.request_id, row.request.epoch): index for index, row in enumerate(launch.rows)}
    channel.remember(step.seq, places)


def write_entry(
    write: Callable[..., Form | None],
    shape: StepShape,
    num_rows: int,
    max_tokens: int,
    epoch: int,
    entry: tuple[torch.Tensor, RingEntry],
    starts: torch.Tensor,
    plans: PlanBuffer,
    captured: torch.Tensor | None,
    with_tables: bool,
) -> Form | None:
    """Enqueue the entry of a step of num_rows rows, all but its tag. write: the kernel, or what prepares it, whose form
    is returned. max_tokens: the most tokens that it can have.
    """
    header, ring = entry
    rows = plans.first(num_rows)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if num_rows == shape.num_rows else tensor[:num_rows]

    tables = shape.metadata.block_tables[:num_rows, : ring.block_tables.shape[1]] if with_tables else None
    return write(
        epoch,
        max_tokens,
        starts[: num_rows + 1],
        cut(shape.seats),
        cut(shape.query_lens),
        cut(shape.seq_lens),
        cut(shape.num_sampled),
        cut(shape.num_rejected),
        cut(shape.anchors),
        rows["next_prompt_tokens"],
        rows["temperature"],
        rows["seeds"],
        shape.positions,
        shape.input_ids,
        shape.metadata.slot_mapping,
        tables,
        captured if ring.hidden is not None else None,
        header,
        ring.query_start_loc,
        ring.seats,
        ring.seq_lens,
        ring.num_sampled,
        ring.num_rejected,
        ring.anchors,
        ring.next_prompt_tokens,
        ring.temperatures,
        ring.seeds,
        ring.positions,
        ring.input_ids,
        ring.slot_mapping,
        ring.block_tables,
        ring.hidden,
    )
