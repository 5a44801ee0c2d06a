"""What does it cost to pass a step from target to drafter and its drafts back, by channel kind?

Two processes. A round is: the target fills a ring entry and publishes it; the drafter takes it, copies the hidden
states out and publishes its drafts; the target takes them. No model runs, so what is left is the channel: half of the
smallest round is a hop. `bytes` travels over a gRPC stream on localhost, as in the services. Prints a table, then one
JSON object as the last line, in microseconds. For `cuda_ipc`, whose hops no host takes part in: benchmarks/hop.py.

    python -m benchmarks.channel [--rounds N] [--hidden-width W]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, fields

import grpc
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.channel import (
    BytesDrafterEnd,
    BytesTargetEnd,
    ChannelDescription,
    ChannelSpec,
    DrafterChannel,
    EntryMessage,
    RingEntry,
    TargetChannel,
    attach_drafter_channel,
    describe,
    open_target_channel,
)
from protos import target_pb2, target_pb2_grpc

WAIT_S = 30.0
WARM_UP_ROUNDS = 50
MAX_MESSAGE_BYTES = 1 << 28
GRPC_OPTIONS = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", -1))


@dataclass(frozen=True, slots=True)
class Case:
    """Rows and tokens of the step passed, and the width of its hidden states."""

    name: str
    num_rows: int
    num_tokens: int
    hidden_width: int


def to_proto(entry: EntryMessage) -> target_pb2.RingEntry:
    """A ring entry as the target's codec makes it."""
    return target_pb2.RingEntry(
        channel_id=entry.channel_id,
        epoch=entry.epoch,
        seq=entry.seq,
        num_rows=entry.num_rows,
        num_tokens=entry.num_tokens,
        tensors=entry.tensors,
    )


def reply_to_proto(entry: EntryMessage) -> target_pb2.ReplyEntry:
    """A reply entry as the drafter's client makes it."""
    return target_pb2.ReplyEntry(
        channel_id=entry.channel_id, epoch=entry.epoch, seq=entry.seq, num_rows=entry.num_rows, tensors=entry.tensors
    )


def from_proto(message: target_pb2.RingEntry | target_pb2.ReplyEntry) -> EntryMessage:
    """Either entry as the other side's codec reads it."""
    num_tokens = message.num_tokens if isinstance(message, target_pb2.RingEntry) else 0
    return EntryMessage(
        message.channel_id, message.epoch, message.seq, message.num_rows, num_tokens, dict(message.tensors)
    )


class ExchangeOnly(target_pb2_grpc.TargetServiceServicer):
    """TargetService with nothing but Exchange, for one channel."""

    def __init__(self, end: BytesTargetEnd) -> None:
        self._end = end

    def Exchange(
        self, request_iterator: Iterator[target_pb2.ReplyEntry], context: grpc.ServicerContext
    ) -> Iterator[target_pb2.RingEntry]:
        """Carry entries until the channel is closed."""
        next(request_iterator)  # names the channel
        self._end.link_up()
        threading.Thread(target=self._read, args=(request_iterator,), daemon=True).start()
        while not self._end.closed:
            if (entry := self._end.outgoing(1.0)) is not None:
                yield to_proto(entry)

    def _read(self, replies: Iterator[target_pb2.ReplyEntry]) -> None:
        try:
            for reply in replies:
                self._end.deliver(from_proto(reply))
        except grpc.RpcError:
            self._end.link_down()  # the drafter process ended


def answer(channel: DrafterChannel) -> None:
    """The drafter's loop: copy the hidden states out, propose as many drafts as the channel takes."""
    torch.set_num_threads(1)
    spec = channel.spec
    own = torch.empty(spec.max_tokens, max(1, spec.hidden_width), dtype=spec.hidden_dtype)
    drafts = torch.ones(spec.max_rows, spec.max_draft_len, dtype=torch.int64)
    seq = 1
    while (entry := channel.take_entry(seq, WAIT_S)) is not None:
        if entry.hidden is not None:
            own[: entry.num_tokens].copy_(entry.hidden)
        assert channel.entry_intact(seq)
        channel.publish_reply(seq, drafts[: entry.num_rows], None, None)
        seq += 1


def run_drafter(description: ChannelDescription, port: int) -> None:
    """The drafter's process; `port` is used for kind `bytes`."""
    channel = attach_drafter_channel(description)
    if not isinstance(channel, BytesDrafterEnd):
        answer(channel)
        return
    carry(channel, port)


def carry(channel: BytesDrafterEnd, port: int) -> None:
    """Answer over an Exchange stream."""
    hello = target_pb2.ReplyEntry(channel_id=channel.spec.channel_id, epoch=channel.spec.epoch)

    def replies() -> Iterator[target_pb2.ReplyEntry]:
        yield hello
        while not channel.closed:
            if (entry := channel.outgoing(1.0)) is not None:
                yield reply_to_proto(entry)

    with grpc.insecure_channel(f"127.0.0.1:{port}", options=GRPC_OPTIONS) as connection:
        entries = target_pb2_grpc.TargetServiceStub(connection).Exchange(replies())
        channel.link_up()
        worker = threading.Thread(target=answer, args=(channel,))
        worker.start()
        try:
            for message in entries:
                channel.deliver(from_proto(message))
        except grpc.RpcError:
            pass  # the target is done
        channel.link_down()
        worker.join()


def fill(entry: RingEntry, sources: dict[str, torch.Tensor]) -> None:
    """Write every tensor of the entry."""
    for name, source in sources.items():
        getattr(entry, name).copy_(source)


def measure(channel: TargetChannel, case: Case, rounds: int, console: Console) -> list[float]:
    """Microseconds of each round."""
    sources: dict[str, torch.Tensor] = {}
    times: list[float] = []
    steps = range(1, WARM_UP_ROUNDS + rounds + 1)
    for seq in track(steps, description=f"{channel.kind}: {case.name}", console=console, transient=True):
        start = time.perf_counter()
        entry = channel.begin(seq, case.num_rows, case.num_tokens)
        if not sources:
            tensors = {field.name: getattr(entry, field.name) for field in fields(entry)}
            sources = {name: torch.zeros_like(t) for name, t in tensors.items() if isinstance(t, torch.Tensor)}
        fill(entry, sources)
        channel.publish(seq)
        if channel.take_reply(seq, WAIT_S) is None:
            raise RuntimeError("the drafter process did not answer")
        if seq > WARM_UP_ROUNDS:
            times.append((time.perf_counter() - start) * 1e6)
    return times


def run_case(kind: str, case: Case, rounds: int, console: Console) -> list[float]:
    """Open a channel, start a drafter process for it, measure, close all."""
    spec = ChannelSpec(
        channel_id=f"bench-{kind}",
        epoch=1,
        depth=4,
        max_rows=32,
        max_tokens=512,
        max_draft_len=4,
        hidden_width=case.hidden_width,
        hidden_dtype=torch.float32,
        vocab_size=49_152,
        max_blocks_per_row=128,
        block_size=16,
        num_blocks=512,
        draft_probs=False,
    )
    channel = open_target_channel(spec, kind)
    server, port = None, 0
    if isinstance(channel, BytesTargetEnd):
        server = grpc.server(futures.ThreadPoolExecutor(2), options=GRPC_OPTIONS)
        target_pb2_grpc.add_TargetServiceServicer_to_server(ExchangeOnly(channel), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
    process = multiprocessing.get_context("spawn").Process(target=run_drafter, args=(describe(channel), port))
    process.start()
    try:
        return measure(channel, case, rounds, console)
    finally:
        channel.close()
        process.join(WAIT_S)
        if server is not None:
            server.stop(1.0).wait()


def main() -> None:
    """Measure every case with every kind."""
    parser = argparse.ArgumentParser(description="Round trips over a channel.")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--hidden-width", type=int, default=3 * 576, help="A * H of the drafter")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = [
        Case("1 row of 5, no hidden states", 1, 5, 0),
        Case("1 row of 5", 1, 5, arguments.hidden_width),
        Case("8 rows of 5", 8, 40, arguments.hidden_width),
        Case("prompt chunk of 512", 1, 512, arguments.hidden_width),
    ]
    console = Console(stderr=True)
    table = Table("kind", "step", "round p50, us", "p99, us", "hop, us")
    results = []
    for kind in ("shm", "bytes"):
        for case in cases:
            times = sorted(run_case(kind, case, arguments.rounds, console))
            p50, p99 = statistics.median(times), times[int(len(times) * 0.99) - 1]
            table.add_row(kind, case.name, f"{p50:,.0f}", f"{p99:,.0f}", f"{p50 / 2:,.0f}")
            figures = {"round_p50_us": round(p50, 1), "round_p99_us": round(p99, 1)}
            results.append({"kind": kind, "step": case.name, **figures})
    Console().print(table)
    print(json.dumps({"rounds": arguments.rounds, "hidden_width": arguments.hidden_width, "results": results}))


if __name__ == "__main__":
    main()
