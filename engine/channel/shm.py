"""How do the two ends use memory that both have mapped?

Kind `shm`. Entries are views: the target writes its tensors where the drafter reads them, and nothing is copied on
the way. A header per entry carries the tag. The writer clears its seq, writes data, writes the tag, then advances the
counter; the reader waits for the counter, looks at the tag, reads, and looks at the tag again.
"""

from __future__ import annotations

import mmap
import weakref

import torch

from engine.channel.control import ControlPage, DrafterState, Heartbeat, State, Word
from engine.channel.deadline import Deadline
from engine.channel.description import ChannelDescription
from engine.channel.futex import Futex
from engine.channel.interface import ChannelSpec, ReplyEntry, RingEntry
from engine.channel.layout import (
    EPOCH,
    NUM_ROWS,
    NUM_TOKENS,
    REPLY_HEADER,
    RING_HEADER,
    SEQ,
    ChannelLayout,
    describe_layout,
    entry_shapes,
    plan_layout,
    reply_shapes,
    spec_of,
)
from engine.channel.memory import ExportedMemory, attach_memory
from engine.channel.reply import check_reply_shapes, fill_reply, usable_tokens
from engine.channel.views import region_tensors
from engine.errors import ChannelError

KIND = "shm"
POISON = 0xA5


class ShmTargetChannel:
    """The target's end of an `shm` channel: makes the memory and frees it. See interface.TargetChannel."""

    def __init__(
        self,
        spec: ChannelSpec,
        heartbeat_deadline_s: float,
        attach_deadline_s: float,
        poison: bool = False,
        futex: Futex | None = None,
    ) -> None:
        self.spec = spec
        self.kind = KIND
        self._deadline_ns = int(heartbeat_deadline_s * 1e9)
        self._attach_ns = int(attach_deadline_s * 1e9)
        self._poison = poison
        layout = plan_layout(spec)
        self._memory = ExportedMemory(layout.num_bytes)
        self._control = ControlPage(self._memory.buffer, futex or Futex())
        self._control.format(layout.num_bytes, spec.epoch, spec.channel_id)
        self._regions = _region_tensors(self._memory.buffer, layout)
        self._begun: int | None = None
        self._published = 0
        self._heartbeat = Heartbeat(self._control, Word.TARGET_BEAT_NS, heartbeat_deadline_s)
        # Also when nobody called close: the thread must not outlive the channel.
        self._stop_beating = weakref.finalize(self, self._heartbeat.stop)

    def describe(self) -> ChannelDescription:
        """What a drafter needs to attach."""
        return describe_layout(self.spec, KIND, self._memory.name.encode())

    def begin(self, seq: int, num_rows: int, num_tokens: int) -> RingEntry:
        """See TargetChannel.begin."""
        self._check_open()
        check_entry_size(self.spec, num_rows, num_tokens)
        if seq <= self._published:
            raise ChannelError(f"seq: step {seq} is not after step {self._published}, already published")
        index = seq % self.spec.depth
        header = self._regions[RING_HEADER][index]
        header[SEQ] = 0
        self._control.fence()
        if self._poison:
            for name in entry_shapes(self.spec, 0, 0):
                self._regions[name][index].view(torch.uint8).fill_(POISON)
        header[EPOCH] = self.spec.epoch
        header[NUM_ROWS] = num_rows
        header[NUM_TOKENS] = num_tokens
        self._begun = seq
        return _ring_entry(self._regions, self.spec, seq, num_rows, num_tokens)

    def publish(self, seq: int) -> None:
        """See TargetChannel.publish."""
        self._check_open()
        if seq != self._begun:
            raise ChannelError(f"seq: step {seq} was not begun ({self._begun} was)")
        self._control.fence()
        self._regions[RING_HEADER][seq % self.spec.depth, SEQ] = seq
        self._control.advance(Word.TARGET_SEQ, seq)
        self._begun = None
        self._published = seq

    def take_reply(self, seq: int, deadline_s: float) -> ReplyEntry | None:
        """See TargetChannel.take_reply."""
        deadline = Deadline(deadline_s)
        control = self._control
        while (seen := control.get(Word.DRAFTER_SEQ)) < seq:
            if control.closed or deadline.passed or not self.peer_alive():
                return None
            control.sleep(Word.DRAFTER_SEQ, seen, deadline.left_s)
        if control.closed:
            return None
        control.fence()
        num_rows = self._reply_rows(seq)
        if num_rows is None:
            return None
        index = seq % self.spec.depth
        parts = {name: self._regions[name][index, :num_rows] for name in reply_shapes(self.spec, 0)}
        tokens = usable_tokens(parts["reply.tokens"], self.spec.vocab_size)
        control.fence()
        if self._reply_rows(seq) != num_rows:
            return None
        return ReplyEntry(seq, num_rows, tokens, parts.get("reply.probs"), parts.get("reply.has_probs"))

    def peer_alive(self) -> bool:
        """See TargetChannel.peer_alive."""
        return self._control.drafter_alive(self._deadline_ns, self._attach_ns)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._control.closed

    def close(self) -> None:
        """See TargetChannel.close."""
        self._control.set(Word.STATE, State.CLOSED)
        self._control.wake_all()
        self._stop_beating()
        self._memory.close()

    def _reply_rows(self, seq: int) -> int | None:
        """Rows of the reply to `seq`, or None where its place holds anything else."""
        found_seq, epoch, num_rows, _ = self._regions[REPLY_HEADER][seq % self.spec.depth, :4].tolist()
        if found_seq != seq or epoch != self.spec.epoch or not 0 <= num_rows <= self.spec.max_rows:
            return None
        return int(num_rows)

    def _check_open(self) -> None:
        if self._control.closed:
            raise ChannelError(f"channel {self.spec.channel_id} is closed")


class ShmDrafterChannel:
    """The drafter's end of an `shm` channel: a mapping of the target's memory. See interface.DrafterChannel."""

    def __init__(
        self, description: ChannelDescription, heartbeat_deadline_s: float, futex: Futex | None = None
    ) -> None:
        """Raises ChannelError when the memory is not there or is not what the description says."""
        self.spec = spec_of(description)
        self.kind = KIND
        self._deadline_ns = int(heartbeat_deadline_s * 1e9)
        layout = plan_layout(self.spec)
        buffer = attach_memory(description.control.handle.decode(errors="replace"), layout.num_bytes)
        self._control = ControlPage(buffer, futex or Futex())
        self._control.check(layout.num_bytes, self.spec.epoch, self.spec.channel_id)
        self._regions = _region_tensors(buffer, layout)
        self._published = 0
        self._detached = False
        self._heartbeat = Heartbeat(self._control, Word.DRAFTER_BEAT_NS, heartbeat_deadline_s)
        self._control.set(Word.DRAFTER_STATE, DrafterState.ATTACHED)
        self._stop_beating = weakref.finalize(self, self._heartbeat.stop)

    def take_entry(self, seq: int, deadline_s: float) -> RingEntry | None:
        """See DrafterChannel.take_entry."""
        deadline = Deadline(deadline_s)
        control = self._control
        while (seen := control.get(Word.TARGET_SEQ)) < seq:
            if self.closed or deadline.passed or not self.peer_alive():
                return None
            control.sleep(Word.TARGET_SEQ, seen, deadline.left_s)
        if self.closed:
            return None
        control.fence()
        num_rows, num_tokens = self._regions[RING_HEADER][seq % self.spec.depth, NUM_ROWS : NUM_TOKENS + 1].tolist()
        # The counter says that the entry was published; the tag, read after the counts, that they are still its own.
        if not self.entry_intact(seq):
            return None
        if not (0 <= num_rows <= self.spec.max_rows and 0 <= num_tokens <= self.spec.max_tokens):
            return None
        return _ring_entry(self._regions, self.spec, seq, num_rows, num_tokens)

    def entry_intact(self, seq: int) -> bool:
        """See DrafterChannel.entry_intact."""
        if self.closed:
            return False
        self._control.fence()
        found_seq, epoch = self._regions[RING_HEADER][seq % self.spec.depth, :2].tolist()
        return bool(found_seq == seq and epoch == self.spec.epoch)

    def publish_reply(
        self, seq: int, tokens: torch.Tensor, probs: torch.Tensor | None, has_probs: torch.Tensor | None
    ) -> None:
        """See DrafterChannel.publish_reply."""
        if self.closed:
            raise ChannelError(f"channel {self.spec.channel_id} is closed")
        num_rows = check_reply_shapes(self.spec, tokens, probs, has_probs)
        if seq <= self._published:
            raise ChannelError(f"seq: the reply to step {seq} is not after that to step {self._published}")
        index = seq % self.spec.depth
        header = self._regions[REPLY_HEADER][index]
        header[SEQ] = 0
        self._control.fence()
        header[EPOCH] = self.spec.epoch
        header[NUM_ROWS] = num_rows
        parts = {name: self._regions[name][index, :num_rows] for name in reply_shapes(self.spec, 0)}
        fill_reply(parts, tokens, probs, has_probs)
        self._control.fence()
        header[SEQ] = seq
        self._control.advance(Word.DRAFTER_SEQ, seq)
        self._published = seq

    def peer_alive(self) -> bool:
        """See DrafterChannel.peer_alive."""
        return not self._detached and self._control.target_alive(self._deadline_ns)

    @property
    def closed(self) -> bool:
        """Whether either end has closed."""
        return self._detached or self._control.closed

    def close(self) -> None:
        """See DrafterChannel.close."""
        if self._detached:
            return
        self._detached = True
        self._stop_beating()
        self._control.set(Word.DRAFTER_STATE, DrafterState.DETACHED)
        self._control.wake_all()


def check_entry_size(spec: ChannelSpec, num_rows: int, num_tokens: int) -> None:
    """ChannelError naming the bound when a step does not fit the channel."""
    if not 0 <= num_rows <= spec.max_rows:
        raise ChannelError(f"max_rows: the step has {num_rows} rows, the channel takes {spec.max_rows}")
    if not 0 <= num_tokens <= spec.max_tokens:
        raise ChannelError(f"max_tokens: the step has {num_tokens} tokens, the channel takes {spec.max_tokens}")


def _region_tensors(buffer: mmap.mmap, layout: ChannelLayout) -> dict[str, torch.Tensor]:
    """Every region over the mapping. torch holds the mapping itself, so it lives as long as any view does."""
    with torch.inference_mode(False):  # as in region_tensors
        return region_tensors(torch.frombuffer(buffer, dtype=torch.uint8), layout)


def _ring_entry(
    regions: dict[str, torch.Tensor], spec: ChannelSpec, seq: int, num_rows: int, num_tokens: int
) -> RingEntry:
    index = seq % spec.depth
    parts = {
        name.removeprefix("ring."): regions[name][index, : shape[0]]
        for name, (_, shape) in entry_shapes(spec, num_rows, num_tokens).items()
    }
    hidden = parts.pop("hidden", None)
    return RingEntry(seq, num_rows, num_tokens, hidden, **parts)
