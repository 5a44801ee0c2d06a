"""How does a test publish drafts as a drafter would, right or wrong ones as it likes?

Attaches by RPC and through the channel, `shm` or `bytes`. A thread waits for each step's ring entry, checks it
against what the test knows, and answers with the next tokens of a known sequence.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from engine.channel import (
    BytesDrafterEnd,
    ChannelDescription,
    EntryMessage,
    RegionDescription,
    RingEntry,
    attach_drafter_channel,
    host_id,
)
from protos import common_pb2, target_pb2, target_pb2_grpc

ENTRY_DEADLINE_S = 20.0

# (row, position of the first draft, the drafts of the known sequence) -> the drafts to publish
Script = Callable[[int, int, list[int]], list[int]]


def as_known(row: int, position: int, drafts: list[int]) -> list[int]:
    """Publish the known sequence itself."""
    return drafts


@dataclass(frozen=True)
class Expected:
    """One step as the test announced it: each row's known sequence and draft_len."""

    seq: int
    rows: Sequence[tuple[Sequence[int], int]]


def description_from_proto(message: common_pb2.ChannelDescriptor) -> ChannelDescription:
    def region(item: common_pb2.RegionDescriptor) -> RegionDescription:
        return RegionDescription(
            item.name, item.kind, item.handle, item.offset, tuple(item.shape), item.dtype, item.device_uuid
        )

    fields = {
        name: getattr(message, name)
        for name in [
            "channel_id",
            "epoch",
            "kind",
            "depth",
            "max_rows",
            "max_tokens",
            "max_draft_len",
            "hidden_width",
            "vocab_size",
            "max_blocks_per_row",
            "block_size",
            "num_blocks",
            "draft_probs",
        ]
    }
    return ChannelDescription(
        control=region(message.control), regions=tuple(region(item) for item in message.regions), **fields
    )


class ScriptedDrafter:
    """One attached drafter and its thread. `entries` collects copies of the ring entries it saw."""

    def __init__(
        self,
        address: str,
        kind: str = "shm",
        script: Script = as_known,
        hidden_layers: Sequence[int] = (),
        draft_probs: bool = False,
        drafter_id: str = "scripted",
        silent: bool = False,
        metadata_source: str = "build",
    ) -> None:
        self._grpc = grpc.insecure_channel(address)
        self._stub = target_pb2_grpc.TargetServiceStub(self._grpc)
        self.reply = self._stub.Attach(
            target_pb2.AttachRequest(
                drafter_id=drafter_id,
                instance_id="test",
                host_id=host_id(),
                kinds=[kind],
                hidden_layers=list(hidden_layers),
                max_draft_len=7,
                draft_probs=draft_probs,
                metadata_source=metadata_source,
                block_size=16,
                num_blocks=64,
                vocab_size=512,
            ),
            timeout=10,
        )
        self.channel_id = self.reply.channel.channel_id
        self.channel_epoch = self.reply.channel.epoch
        self.script = script
        self.propose: Callable[[RingEntry], tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] | None = None
        self.silent = silent
        self.entries: list[dict[str, Any]] = []
        self.failure: BaseException | None = None
        self.end = attach_drafter_channel(description_from_proto(self.reply.channel))
        self._expected: queue.Queue[Expected | None] = queue.Queue(maxsize=1)
        self._exchange: Any = None
        if isinstance(self.end, BytesDrafterEnd):
            self._open_exchange(self.end)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> ScriptedDrafter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self.failure is not None:
            raise self.failure

    def expect(self, seq: int, rows: Sequence[tuple[Sequence[int], int]]) -> None:
        """Announce a step that is about to be planned.

        Waits until no more than the one before it is unread: a target that is asked for no drafts waits for nobody, and
        would write over what this drafter has yet to read.
        """
        self._announce(Expected(seq, rows))
        if self.failure is not None:
            raise self.failure

    def _announce(self, expected: Expected | None) -> None:
        end = time.monotonic() + ENTRY_DEADLINE_S
        while self._thread.is_alive():
            try:
                self._expected.put(expected, timeout=0.1)
            except queue.Full:
                assert time.monotonic() < end, "the scripted drafter is stuck"
            else:
                return

    def close(self, detach: bool = True) -> None:
        """Stop drafting, close this end, tell the target. Idempotent."""
        self._announce(None)
        self._thread.join(ENTRY_DEADLINE_S)
        self.end.close()
        if self._exchange is not None:
            self._exchange.cancel()
        if detach:
            self.detach()
        self._grpc.close()

    def detach(self) -> None:
        """Tell the target that this channel is not used any more."""
        self._stub.Detach(target_pb2.DetachRequest(channel_id=self.channel_id, epoch=self.channel_epoch), timeout=10)

    def _run(self) -> None:
        try:
            for expected in iter(self._expected.get, None):
                entry = self.end.take_entry(expected.seq, ENTRY_DEADLINE_S)
                if entry is None:
                    raise AssertionError(f"no ring entry for step {expected.seq}")
                self._keep(entry)
                if not self.silent:
                    self._answer(expected, entry)
        except BaseException as error:
            self.failure = error

    def _keep(self, entry: RingEntry) -> None:
        names = [name for name in RingEntry.__dataclass_fields__ if name not in ("seq", "num_rows", "num_tokens")]
        copied = {name: None if getattr(entry, name) is None else getattr(entry, name).clone() for name in names}
        self.entries.append({"seq": entry.seq, "num_rows": entry.num_rows, "num_tokens": entry.num_tokens, **copied})

    def _answer(self, expected: Expected, entry: RingEntry) -> None:
        if self.propose is not None:
            self.end.publish_reply(expected.seq, *self.propose(entry))
            return
        assert entry.num_rows == len(expected.rows)
        tokens = torch.full((entry.num_rows, 7), -1, dtype=torch.int64)
        for row, (known, draft_len) in enumerate(expected.rows):
            if int(entry.num_sampled[row]) == 0 or draft_len == 0:
                continue
            context_len = int(entry.seq_lens[row] - entry.num_rejected[row])
            if known:
                assert int(entry.anchors[row]) == known[context_len], "the anchor is not the expected token"
            drafts = self.script(row, context_len + 1, list(known[context_len + 1 : context_len + 1 + draft_len]))
            tokens[row, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
        self.end.publish_reply(expected.seq, tokens, None, None)

    def _open_exchange(self, end: BytesDrafterEnd) -> None:
        def replies() -> Iterator[target_pb2.ReplyEntry]:
            yield target_pb2.ReplyEntry(channel_id=self.channel_id, epoch=self.channel_epoch)
            while not end.closed:
                message = end.outgoing(0.2)
                if message is not None:
                    yield target_pb2.ReplyEntry(
                        channel_id=message.channel_id,
                        epoch=message.epoch,
                        seq=message.seq,
                        num_rows=message.num_rows,
                        tensors=message.tensors,
                    )

        def read() -> None:
            try:
                for entry in self._exchange:
                    end.deliver(
                        EntryMessage(
                            entry.channel_id,
                            entry.epoch,
                            entry.seq,
                            entry.num_rows,
                            entry.num_tokens,
                            dict(entry.tensors),
                        )
                    )
            except grpc.RpcError:
                return
            finally:
                end.link_down()

        end.link_up()
        self._exchange = self._stub.Exchange(replies())
        threading.Thread(target=read, daemon=True).start()
