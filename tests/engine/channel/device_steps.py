"""Steps over the device interface whose every byte follows from their number; the same code on any device.

What would be a kernel is a function here. `Runner` puts it on the end's stream: torch does that by itself on a GPU, a
simulated device takes the function as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from engine.channel.cuda_ipc import CudaIpcDrafterEnd, CudaIpcTargetEnd
from engine.channel.device import ReplyViews
from engine.channel.interface import ChannelSpec, RingEntry
from engine.channel.layout import EPOCH, NUM_ROWS, NUM_TOKENS, SEQ
from tests.engine.channel.entries import pattern, tensors_of

POLL_S = 0.0005


class Runner(Protocol):
    """Something with a stream."""

    def run(self, kernel: Callable[[], None]) -> None: ...

    def synchronize(self, timeout_s: float = 30.0) -> None: ...


class CudaRunner:
    """torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, kernel: Callable[[], None]) -> None:
        kernel()

    def synchronize(self, timeout_s: float = 30.0) -> None:
        """TimeoutError where a call of the driver's would wait for ever."""
        event = torch.cuda.Event()
        event.record()
        end = time.monotonic() + timeout_s
        while not event.query():
            if time.monotonic() > end:
                raise TimeoutError(f"the stream was not done within {timeout_s} s")
            time.sleep(POLL_S)


def tag(header: torch.Tensor, spec: ChannelSpec, seq: int, num_rows: int, num_tokens: int) -> None:
    header[EPOCH] = spec.epoch
    header[NUM_ROWS] = num_rows
    header[NUM_TOKENS] = num_tokens
    header[SEQ] = seq


def is_tagged(header: torch.Tensor, spec: ChannelSpec, seq: int) -> torch.Tensor:
    return (header[SEQ] == seq) & (header[EPOCH] == spec.epoch)


def reply_tensors(reply: ReplyViews) -> dict[str, torch.Tensor]:
    tensors = {"reply.tokens": reply.tokens, "reply.probs": reply.probs, "reply.has_probs": reply.has_probs}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def write_entry(header: torch.Tensor, entry: RingEntry, spec: ChannelSpec, seq: int) -> None:
    header[SEQ] = 0
    for name, tensor in tensors_of(entry).items():
        tensor.copy_(pattern(name, tensor, seq))
    tag(header, spec, seq, spec.max_rows, spec.max_tokens)


def write_reply(reply: ReplyViews, spec: ChannelSpec, seq: int) -> None:
    reply.header[SEQ] = 0
    for name, tensor in reply_tensors(reply).items():
        tensor.copy_(pattern(name, tensor, seq))
    tag(reply.header, spec, seq, spec.max_rows, 0)


class Counts:
    """What was read so far: entries with another tag, and elements that are not what their writer wrote."""

    def __init__(self, device: torch.device) -> None:
        self.absent = torch.zeros((), dtype=torch.int64, device=device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)

    def note(self, header: torch.Tensor, tensors: dict[str, torch.Tensor], spec: ChannelSpec, seq: int) -> None:
        present = is_tagged(header, spec, seq)
        self.absent += ~present
        for name, tensor in tensors.items():
            self.wrong += ((tensor != pattern(name, tensor, seq)) & present).sum()


def target_step(end: CudaIpcTargetEnd, runner: Runner, seq: int, counts: Counts, deadline_s: float) -> None:
    """Enqueue: read the reply to step seq - 1, write step seq, publish it."""
    spec = end.spec
    if seq > 1:
        reply = end.reply(seq - 1)
        end.wait_reply(seq - 1, deadline_s)
        runner.run(lambda: counts.note(reply.header, reply_tensors(reply), spec, seq - 1))
    header, entry = end.ring(seq)
    runner.run(lambda: write_entry(header, entry, spec, seq))
    end.publish(seq)


def drafter_step(end: CudaIpcDrafterEnd, runner: Runner, seq: int, counts: Counts, deadline_s: float) -> None:
    """Enqueue: read step seq, write the reply to it, publish that."""
    spec = end.spec
    header, entry = end.ring(seq)
    end.wait_entry(seq, deadline_s)
    runner.run(lambda: counts.note(header, tensors_of(entry), spec, seq))
    reply = end.reply(seq)
    runner.run(lambda: write_reply(reply, spec, seq))
    end.publish_reply(seq)
