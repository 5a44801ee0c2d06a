"""How do the two ends work where they share no host and entries travel in RPCs?

Kind `bytes`: the same two interfaces over bounded stores in each process. The target's end turns a published step
into a message that TargetService.Exchange carries away (`outgoing`), and takes in the replies that it brings
(`deliver`); the drafter's end does the reverse. The RPC itself is the services' business, and so is telling each end
when the stream stands and when it broke (`link_up`, `link_down`): that is this kind's heartbeat. A broken stream ends
the channel; the drafter attaches anew and gets another. Tensors are raw bytes, C order, little-endian; shapes follow
from spec and counts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from engine.channel.deadline import Deadline
from engine.channel.description import ChannelDescription
from engine.channel.interface import ChannelSpec, ReplyEntry, RingEntry
from engine.channel.layout import check_spec, describe_layout, entry_shapes, reply_shapes, spec_of
from engine.channel.reply import check_reply_shapes, fill_reply, usable_tokens
from engine.channel.shm import check_entry_size
from engine.errors import ChannelError

KIND = "bytes"


@dataclass(frozen=True, slots=True)
class EntryMessage:
    """A ring or reply entry on its way; mirrors RingEntry and ReplyEntry of protos/target.proto.

    num_tokens: 0 in replies. tensors: by region name (`ring.positions`, `reply.tokens`), cut to the entry's size.
    """

    channel_id: str
    epoch: int
    seq: int
    num_rows: int
    num_tokens: int
    tensors: Mapping[str, bytes]


class _End:
    """What both ends have: a bounded store of what came in, one of what goes out, and whether the stream stands.

    When a store is full the oldest entry goes, as an old ring entry is overwritten in shared memory.
    """

    def __init__(self, spec: ChannelSpec, attach_deadline_s: float) -> None:
        check_spec(spec)
        self.spec = spec
        self.kind = KIND
        self._attach_end = time.monotonic() + attach_deadline_s
        self._changed = threading.Condition()
        self._incoming: dict[int, EntryMessage] = {}
        self._newest = 0
        self._outgoing: deque[EntryMessage] = deque(maxlen=spec.depth)
        self._published = 0
        self._linked = False
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether this end was closed or its stream broke."""
        return self._closed

    def link_up(self) -> None:
        """The Exchange stream stands. ChannelError: the channel had one already, or is closed."""
        with self._changed:
            if self._linked or self._closed:
                raise ChannelError(f"channel {self.spec.channel_id} takes one Exchange stream in its life")
            self._linked = True
            self._changed.notify_all()

    def link_down(self) -> None:
        """The stream ended, and with it the channel. Idempotent."""
        self.close()

    def peer_alive(self) -> bool:
        """Whether the stream stands; before it came, whether it may still."""
        if self._closed:
            return False
        return self._linked or time.monotonic() < self._attach_end

    def outgoing(self, deadline_s: float) -> EntryMessage | None:
        """The next entry to send, oldest first. None: deadline passed, or closed (ask `closed`)."""
        deadline = Deadline(deadline_s)
        with self._changed:
            while not self._outgoing and not self._closed and not deadline.passed:
                self._changed.wait(deadline.left_s)
            return self._outgoing.popleft() if self._outgoing and not self._closed else None

    def close(self) -> None:
        """Drop everything and release whoever waits here. Idempotent."""
        with self._changed:
            self._closed = True
            self._incoming.clear()
            self._outgoing.clear()
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelError(f"channel {self.spec.channel_id} is closed")

    def _send(self, seq: int, num_rows: int, num_tokens: int, tensors: Mapping[str, torch.Tensor]) -> None:
        message = EntryMessage(
            self.spec.channel_id,
            self.spec.epoch,
            seq,
            num_rows,
            num_tokens,
            {name: to_bytes(tensor) for name, tensor in tensors.items()},
        )
        with self._changed:
            self._outgoing.append(message)
            self._published = seq
            self._changed.notify_all()

    def _accept(self, message: EntryMessage, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bool:
        """Store a message of this channel and epoch; False for any other, which is dropped."""
        if message.channel_id != self.spec.channel_id or message.epoch != self.spec.epoch:
            return False
        for name, (dtype, shape) in shapes.items():
            if name not in message.tensors:
                raise ChannelError(f"tensors[{name}]: missing from the entry of step {message.seq}")
            wanted = dtype.itemsize * torch.Size(shape).numel()
            if (size := len(message.tensors[name])) != wanted:
                raise ChannelError(f"tensors[{name}]: {size} bytes in the entry of step {message.seq}, not {wanted}")
        with self._changed:
            if self._closed or message.seq <= self._newest:
                return False
            # Only what belongs to an entry is kept: what else a peer sends would be memory without a bound.
            self._incoming[message.seq] = replace(message, tensors={name: message.tensors[name] for name in shapes})
            self._newest = message.seq
            for seq in [seq for seq in self._incoming if seq <= message.seq - self.spec.depth]:
                del self._incoming[seq]
            self._changed.notify_all()
        return True

    def _take(self, seq: int, deadline_s: float) -> EntryMessage | None:
        deadline = Deadline(deadline_s)
        with self._changed:
            while self._newest < seq and not deadline.passed and self.peer_alive():
                self._changed.wait(self._until_news(deadline))
            return None if self._closed else self._incoming.get(seq)

    def _until_news(self, deadline: Deadline) -> float:
        """Seconds that a waiter may sleep: nobody wakes it when the time for the stream to come runs out."""
        if self._linked:
            return deadline.left_s
        return min(deadline.left_s, max(0.0, self._attach_end - time.monotonic()))


class BytesTargetEnd(_End):
    """The target's end of a `bytes` channel. See interface.TargetChannel."""

    def __init__(self, spec: ChannelSpec, attach_deadline_s: float) -> None:
        super().__init__(spec, attach_deadline_s)
        self._begun: tuple[int, int, int, dict[str, torch.Tensor]] | None = None

    def describe(self) -> ChannelDescription:
        """What a drafter needs to attach: sizes only, there is no handle."""
        return describe_layout(self.spec, KIND, b"")

    def begin(self, seq: int, num_rows: int, num_tokens: int) -> RingEntry:
        """See TargetChannel.begin."""
        self._check_open()
        check_entry_size(self.spec, num_rows, num_tokens)
        if seq <= self._published:
            raise ChannelError(f"seq: step {seq} is not after step {self._published}, already published")
        shapes = entry_shapes(self.spec, num_rows, num_tokens)
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()}
        self._begun = (seq, num_rows, num_tokens, tensors)
        return _ring_entry(seq, num_rows, num_tokens, tensors)

    def publish(self, seq: int) -> None:
        """See TargetChannel.publish."""
        self._check_open()
        if self._begun is None or self._begun[0] != seq:
            raise ChannelError(f"seq: step {seq} was not begun ({self._begun and self._begun[0]} was)")
        self._send(*self._begun)
        self._begun = None

    def deliver(self, message: EntryMessage) -> bool:
        """Take in a reply; False when it is of another channel or epoch, or late.

        ChannelError names what is malformed.
        """
        if not 0 <= message.num_rows <= self.spec.max_rows:
            raise ChannelError(f"max_rows: a reply of {message.num_rows} rows; the channel takes {self.spec.max_rows}")
        return self._accept(message, reply_shapes(self.spec, message.num_rows))

    def take_reply(self, seq: int, deadline_s: float) -> ReplyEntry | None:
        """See TargetChannel.take_reply."""
        message = self._take(seq, deadline_s)
        if message is None:
            return None
        parts = _tensors(message, reply_shapes(self.spec, message.num_rows))
        tokens = usable_tokens(parts["reply.tokens"], self.spec.vocab_size)
        return ReplyEntry(seq, message.num_rows, tokens, parts.get("reply.probs"), parts.get("reply.has_probs"))


class BytesDrafterEnd(_End):
    """The drafter's end of a `bytes` channel. See interface.DrafterChannel."""

    def __init__(self, description: ChannelDescription, attach_deadline_s: float) -> None:
        super().__init__(spec_of(description), attach_deadline_s)

    def deliver(self, message: EntryMessage) -> bool:
        """Take in a ring entry; False when it is of another channel or epoch, or late. ChannelError: malformed."""
        check_entry_size(self.spec, message.num_rows, message.num_tokens)
        return self._accept(message, entry_shapes(self.spec, message.num_rows, message.num_tokens))

    def take_entry(self, seq: int, deadline_s: float) -> RingEntry | None:
        """See DrafterChannel.take_entry."""
        message = self._take(seq, deadline_s)
        if message is None:
            return None
        shapes = entry_shapes(self.spec, message.num_rows, message.num_tokens)
        return _ring_entry(seq, message.num_rows, message.num_tokens, _tensors(message, shapes))

    def entry_intact(self, seq: int) -> bool:
        """Always while the channel is open: what was taken is a copy that nobody writes to."""
        return not self._closed and seq <= self._newest

    def publish_reply(
        self, seq: int, tokens: torch.Tensor, probs: torch.Tensor | None, has_probs: torch.Tensor | None
    ) -> None:
        """See DrafterChannel.publish_reply."""
        self._check_open()
        num_rows = check_reply_shapes(self.spec, tokens, probs, has_probs)
        if seq <= self._published:
            raise ChannelError(f"seq: the reply to step {seq} is not after that to step {self._published}")
        # Zeros: rows without probs leave theirs unwritten, and no bytes of this process may travel by accident.
        parts = {
            name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in reply_shapes(self.spec, num_rows).items()
        }
        fill_reply(parts, tokens, probs, has_probs)
        self._send(seq, num_rows, 0, parts)


def to_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a CPU tensor, C order; all machines this runs on are little-endian."""
    if not tensor.numel():
        return b""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of its own memory; len(data) must be what dtype and shape need."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def _tensors(
    message: EntryMessage, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> dict[str, torch.Tensor]:
    return {name: from_bytes(message.tensors[name], dtype, shape) for name, (dtype, shape) in shapes.items()}


def _ring_entry(seq: int, num_rows: int, num_tokens: int, tensors: Mapping[str, torch.Tensor]) -> RingEntry:
    parts = {name.removeprefix("ring."): tensor for name, tensor in tensors.items()}
    hidden = parts.pop("hidden", None)
    return RingEntry(seq, num_rows, num_tokens, hidden, **parts)
