"""Which channels to drafters are open, and when does each end?

Opened by Attach, closed by Detach, by a newer Attach of the same drafter, when the drafter's lease runs out, and at
the end of the service. RPC threads and the reaper only take a channel out of use; its memory is freed by the device
thread, which alone reads and writes it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import cast

import torch

from engine.channel.bytes import BytesTargetEnd
from engine.channel.cuda_ipc import CudaIpcTargetEnd
from engine.channel.description import ChannelDescription
from engine.channel.device import DeviceTargetEnd
from engine.channel.host import host_id
from engine.channel.interface import ChannelSpec, TargetChannel
from engine.channel.opening import DEVICE_KINDS, choose_kind, kinds_of, open_device_channel, open_target_channel
from engine.channel.shm import ShmTargetChannel
from engine.errors import CapacityError, ChannelError, InvalidRequest
from kernels.forms import Forms
from target_service.batch import StepBatch
from target_service.device.host_edges import HostEdges

_log = logging.getLogger(__name__)

MAX_DRAFTER_ID_LEN = 100
MAX_DRAFT_LEN = 64


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """What a drafter asks for; the fields are those of target.proto."""

    drafter_id: str
    instance_id: str
    host_id: str
    kinds: tuple[str, ...]
    hidden_layers: tuple[int, ...]
    max_draft_len: int
    draft_probs: bool
    metadata_source: str
    block_size: int
    num_blocks: int
    vocab_size: int
    device_uuid: str = ""


@dataclass(frozen=True, slots=True)
class Attached:
    """What a drafter gets. dtype: of hidden states, numpy-style name."""

    channel: ChannelDescription
    target_instance_id: str
    dtype: str
    hidden_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step as the drafter is told of it. places: each placement's row. temperatures, seeds: by seat; the rest by
    row.
    """

    seq: int
    places: dict[tuple[str, int], int]
    batch: StepBatch
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    anchors: torch.Tensor
    temperatures: torch.Tensor
    seeds: torch.Tensor


@dataclass(slots=True)
class OpenChannel:
    """One channel in use. Apart from `last_alive`, used by the device thread only.

    end: of the host's interface, or of the device's where steps run without the host. shares_blocks: the drafter
    mirrors our block tables (`metadata_source: reuse`). missed_at: the last step that waited for drafts in vain. forms:
    launches over the end's entries; they hold its memory.
    """

    end: TargetChannel | DeviceTargetEnd
    drafter_id: str
    hidden_layers: tuple[int, ...]
    shares_blocks: bool
    last_alive: float
    missed_at: int = -(1 << 63)
    forms: Forms = field(default_factory=Forms)
    _places: OrderedDict[int, dict[tuple[str, int], int]] = field(default_factory=OrderedDict)

    def rows_of(self, seq: int) -> dict[tuple[str, int], int] | None:
        """Row of each placement in step `seq`, or None when that step is forgotten or was never published here."""
        return self._places.get(seq)

    @property
    def host_end(self) -> TargetChannel:
        """The end, where steps run through the host."""
        assert self.end.kind not in DEVICE_KINDS
        return cast(TargetChannel, self.end)

    @property
    def device_end(self) -> DeviceTargetEnd:
        """The end, where steps run without the host."""
        return cast(DeviceTargetEnd, self.end)

    def remember(self, seq: int, places: dict[tuple[str, int], int]) -> None:
        """Step `seq` was published, with these rows."""
        self._places[seq] = places
        while len(self._places) > self.end.spec.depth:
            self._places.popitem(last=False)

    def publish(self, record: StepRecord, captured: torch.Tensor | None) -> None:
        """Write and publish the step's ring entry. A channel that cannot take it costs drafts, never the step."""
        if self.end.closed:
            return
        try:
            self._write(record, captured)
        except ChannelError as error:
            _log.warning("step %d not published to drafter %s: %s", record.seq, self.drafter_id, error)
            return
        self.remember(record.seq, record.places)

    def _write(self, record: StepRecord, captured: torch.Tensor | None) -> None:
        batch = record.batch
        metadata = batch.metadata
        entry = self.host_end.begin(record.seq, len(batch.rows), batch.num_tokens)
        if entry.hidden is not None and captured is not None:
            entry.hidden.copy_(captured)
        entry.positions.copy_(batch.positions)
        entry.input_ids.copy_(batch.input_ids)
        entry.query_start_loc.copy_(metadata.query_start_loc)
        entry.seq_lens.copy_(metadata.seq_lens)
        entry.seats.copy_(batch.seats)
        entry.num_sampled.copy_(record.num_sampled)
        entry.num_rejected.copy_(record.num_rejected)
        entry.anchors.copy_(record.anchors)
        entry.next_prompt_tokens.copy_(batch.next_prompt_tokens)
        seats = batch.seats.clamp(min=0).to(torch.int64)
        entry.temperatures.copy_(record.temperatures[seats])
        entry.seeds.copy_(record.seeds[seats])
        entry.slot_mapping.copy_(metadata.slot_mapping)
        entry.block_tables.copy_(metadata.block_tables)
        self.host_end.publish(record.seq)


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """What every channel of this target has in common. num_blocks counts the null block too.

    device: on which steps run without the host, so that channels are of the device's interface; None: of the host's.
    """

    instance_id: str
    kinds: tuple[str, ...]
    depth: int
    max_channels: int
    heartbeat_deadline_s: float
    lease_s: float
    max_rows: int
    max_tokens: int
    num_layers: int
    hidden_size: int
    hidden_dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    max_blocks_per_row: int
    block_size: int
    num_blocks: int
    device: torch.device | None = None
    num_ranks: int = 1


class TargetChannels:
    """Owner of the open channels. Safe between threads."""

    def __init__(self, settings: ChannelSettings) -> None:
        self._settings = settings
        self._host_id = host_id()
        # Device execution takes the host's kinds too, by copies at the edges.
        self._kinds = kinds_of(settings.kinds, None) if settings.device is None else settings.kinds
        self._attaching = threading.Lock()  # one Attach at a time; taken before _lock
        self._lock = threading.Lock()
        self._open: dict[str, OpenChannel] = {}
        self._retired: list[OpenChannel] = []
        self._numbers = itertools.count(1)
        self._closed = threading.Event()
        self._reaper = threading.Thread(target=self._reap, name="channel-reaper", daemon=True)
        self._reaper.start()

    def attach(self, request: AttachRequest) -> Attached:
        """Export a channel. InvalidRequest, ChannelError or CapacityError say why not."""
        settings = self._settings
        self._check(request)
        kind = choose_kind(
            request.kinds, request.host_id, self._host_id, self._kinds, settings.device, request.device_uuid
        )
        number = next(self._numbers)
        spec = ChannelSpec(
            channel_id=f"{settings.instance_id}/{request.drafter_id}",
            epoch=number,
            depth=settings.depth,
            max_rows=settings.max_rows,
            max_tokens=settings.max_tokens,
            max_draft_len=request.max_draft_len,
            hidden_width=len(request.hidden_layers) * settings.hidden_size,
            hidden_dtype=settings.hidden_dtype,
            vocab_size=settings.vocab_size,
            max_blocks_per_row=settings.max_blocks_per_row,
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            draft_probs=request.draft_probs,
        )
        with self._attaching:
            with self._lock:
                others = sum(channel.drafter_id != request.drafter_id for channel in self._open.values())
                if others + len(self._retired) >= settings.max_channels:
                    raise CapacityError(f"{settings.max_channels} channels are open or still closing")
                self._retire(spec.channel_id)
            # Not under the lock that every step takes: this may be gigabytes.
            end = self._make_end(spec, kind)
            with self._lock:
                if self._closed.is_set():
                    end.close()
                    raise CapacityError("the target is stopping")
                self._open[spec.channel_id] = OpenChannel(
                    end,
                    request.drafter_id,
                    request.hidden_layers,
                    shares_blocks=request.metadata_source == "reuse",
                    last_alive=time.monotonic(),
                )
        _log.info("channel %s epoch %d (%s) opened", spec.channel_id, spec.epoch, kind)
        return Attached(
            channel=end.describe(),
            target_instance_id=settings.instance_id,
            dtype=str(settings.hidden_dtype).removeprefix("torch."),
            hidden_size=settings.hidden_size,
            max_model_len=settings.max_model_len,
        )

    def detach(self, channel_id: str, epoch: int) -> None:
        """Take the channel out of use, if it is that epoch's."""
        with self._lock:
            channel = self._open.get(channel_id)
            if channel is not None and channel.end.spec.epoch == epoch:
                self._retire(channel_id)

    def find(self, channel_id: str, epoch: int) -> OpenChannel | None:
        """The channel in use under that name and epoch."""
        with self._lock:
            channel = self._open.get(channel_id)
        return channel if channel is not None and channel.end.spec.epoch == epoch else None

    def in_use(self) -> list[OpenChannel]:
        """The channels in use."""
        with self._lock:
            return list(self._open.values())

    def exchange_end(self, channel_id: str, epoch: int) -> BytesTargetEnd:
        """The end of a `bytes` channel, for its Exchange stream. ChannelError when there is no such channel."""
        channel = self.find(channel_id, epoch)
        end = channel.end if channel is not None else None
        if isinstance(end, HostEdges):
            end = end.host
        if not isinstance(end, BytesTargetEnd):
            raise ChannelError(f"channel_id: no bytes channel {channel_id!r} of epoch {epoch}")
        return end

    def close_retired(self) -> None:
        """Free what is out of use. By the device thread, between commands."""
        if not self._retired:
            return
        with self._lock:
            retired, self._retired = self._retired, []
        for channel in retired:
            channel.end.close()
            channel.forms.clear()
            _log.info("channel %s epoch %d closed", channel.end.spec.channel_id, channel.end.spec.epoch)

    def close(self) -> None:
        """Close everything. Only once the device thread has ended."""
        self._closed.set()
        self._reaper.join()
        with self._lock:
            for channel_id in list(self._open):
                self._retire(channel_id)
        self.close_retired()

    def _retire(self, channel_id: str) -> None:
        channel = self._open.pop(channel_id, None)
        if channel is not None:
            self._retired.append(channel)

    def _reap(self) -> None:
        interval_s = min(1.0, self._settings.lease_s / 4)
        while not self._closed.wait(interval_s):
            now = time.monotonic()
            with self._lock:
                for channel_id, channel in list(self._open.items()):
                    if channel.end.peer_alive():
                        channel.last_alive = now
                    elif now - channel.last_alive > self._settings.lease_s:
                        _log.info("drafter %s: lease ran out", channel.drafter_id)
                        self._retire(channel_id)

    def _make_end(
        self, spec: ChannelSpec, kind: str
    ) -> ShmTargetChannel | BytesTargetEnd | CudaIpcTargetEnd | HostEdges:
        settings = self._settings
        if settings.device is not None and kind in DEVICE_KINDS:
            return open_device_channel(spec, kind, settings.device, settings.heartbeat_deadline_s, settings.lease_s)
        end = open_target_channel(spec, kind, settings.heartbeat_deadline_s, settings.lease_s)
        return end if settings.device is None else HostEdges(end, settings.device)

    def _check(self, request: AttachRequest) -> None:
        settings = self._settings
        if not 1 <= len(request.drafter_id) <= MAX_DRAFTER_ID_LEN or not request.drafter_id.isprintable():
            raise InvalidRequest("drafter_id", f"must be 1..{MAX_DRAFTER_ID_LEN} printable characters")
        if not 1 <= request.max_draft_len <= MAX_DRAFT_LEN:
            raise InvalidRequest("max_draft_len", f"must be in 1..{MAX_DRAFT_LEN}, got {request.max_draft_len}")
        if len(request.hidden_layers) > settings.num_layers:
            raise InvalidRequest("hidden_layers", f"more than the model's {settings.num_layers} layers")
        for layer in request.hidden_layers:
            if layer >= settings.num_layers:
                raise InvalidRequest("hidden_layers", f"layer {layer} is not below {settings.num_layers}")
        if request.vocab_size > settings.vocab_size:
            raise InvalidRequest("vocab_size", f"{request.vocab_size} is above the target's {settings.vocab_size}")
        if request.metadata_source not in ("", "build", "reuse"):
            raise InvalidRequest("metadata_source", f"must be build or reuse, got {request.metadata_source!r}")
        if request.metadata_source == "reuse":
            # Each rank has its own order of tokens, and none of them the drafter's: there is nothing to mirror.
            if settings.num_ranks > 1:
                raise InvalidRequest(
                    "metadata_source", f"reuse needs a target of one rank, this one has {settings.num_ranks}; use build"
                )
            if request.block_size != settings.block_size:
                raise InvalidRequest(
                    "block_size", f"reuse needs the target's {settings.block_size}, got {request.block_size}"
                )
            # Block ids are the target's, so a smaller cache would be written past its end.
            if request.num_blocks < settings.num_blocks - 1:
                raise InvalidRequest(
                    "num_blocks", f"reuse needs the target's {settings.num_blocks - 1}, got {request.num_blocks}"
                )
