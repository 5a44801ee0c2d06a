"""Which regions does a channel's memory have, and where does each lie?

Everything follows from the ChannelSpec, so both ends compute the layout and the drafter holds the exporter's
description against its own. One object holds all: the control page first, then the regions, each aligned to 64 bytes
(a cache line; also what vectorised GPU copies want) and each of shape [depth, ...]. Entry `seq` is index `seq %
depth` of every region.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.channel.description import ChannelDescription, RegionDescription
from engine.channel.interface import ChannelSpec
from engine.errors import ChannelError

ALIGNMENT = 64
CONTROL_BYTES = 4096
# A header is [seq, epoch, num_rows, num_tokens, 0...] and as wide as a cache line. seq 0: no valid entry.
HEADER_WORDS = 8
SEQ, EPOCH, NUM_ROWS, NUM_TOKENS = range(4)
MAX_CHANNEL_BYTES = 1 << 40
MAX_ID_BYTES = 255

RING_HEADER = "ring.header"
REPLY_HEADER = "reply.header"

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.bool: "bool",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
HIDDEN_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Region:
    """One array of the channel. shape: [depth, ...]; offset: bytes into the memory object, a multiple of ALIGNMENT."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Size without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ChannelLayout:
    """All regions, in the order they lie in memory, and the size of the whole object in bytes."""

    regions: tuple[Region, ...]
    num_bytes: int

    def region(self, name: str) -> Region:
        """The region called `name`; KeyError when the channel has none of that name."""
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(name)


def entry_shapes(spec: ChannelSpec, num_rows: int, num_tokens: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of each tensor of a ring entry of that size, by region name; RingEntry says what they hold."""
    rows, tokens = num_rows, num_tokens
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "ring.positions": (torch.int64, (tokens,)),
        "ring.input_ids": (torch.int64, (tokens,)),
        "ring.query_start_loc": (torch.int32, (rows + 1,)),
        "ring.seq_lens": (torch.int32, (rows,)),
        "ring.seats": (torch.int32, (rows,)),
        "ring.num_sampled": (torch.int32, (rows,)),
        "ring.num_rejected": (torch.int32, (rows,)),
        "ring.anchors": (torch.int64, (rows,)),
        "ring.next_prompt_tokens": (torch.int64, (rows,)),
        "ring.temperatures": (torch.float32, (rows,)),
        "ring.seeds": (torch.int64, (rows,)),
        "ring.slot_mapping": (torch.int64, (tokens,)),
        "ring.block_tables": (torch.int32, (rows, spec.max_blocks_per_row)),
    }
    if spec.hidden_width:
        shapes["ring.hidden"] = (spec.hidden_dtype, (tokens, spec.hidden_width))
    return shapes


def reply_shapes(spec: ChannelSpec, num_rows: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of each tensor of a reply entry of that many rows, by region name."""
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "reply.tokens": (torch.int64, (num_rows, spec.max_draft_len)),
    }
    if spec.draft_probs:
        shapes["reply.probs"] = (torch.float32, (num_rows, spec.max_draft_len, spec.vocab_size))
        shapes["reply.has_probs"] = (torch.bool, (num_rows,))
    return shapes


def check_spec(spec: ChannelSpec) -> None:
    """Refuse sizes that no channel can have. ChannelError names the field."""
    if not spec.channel_id or len(spec.channel_id.encode()) > MAX_ID_BYTES:
        raise ChannelError(f"channel_id: must have 1 to {MAX_ID_BYTES} bytes, got {spec.channel_id[:40]!r}")
    for field in ("depth", "max_rows", "max_tokens", "max_draft_len", "vocab_size", "max_blocks_per_row", "num_blocks"):
        if (value := getattr(spec, field)) < 1:
            raise ChannelError(f"{field}: must be at least 1, got {value}")
    if not 1 <= spec.epoch < 1 << 32:
        raise ChannelError(f"epoch: must be from 1 to 2**32 - 1, got {spec.epoch}")
    if spec.hidden_width < 0:
        raise ChannelError(f"hidden_width: must not be negative, got {spec.hidden_width}")
    if spec.hidden_dtype not in HIDDEN_DTYPES:
        raise ChannelError(f"hidden_dtype: must be float32, float16 or bfloat16, got {spec.hidden_dtype}")
    if spec.block_size < 1 or spec.block_size & (spec.block_size - 1):
        raise ChannelError(f"block_size: must be a power of two, got {spec.block_size}")


def plan_layout(spec: ChannelSpec) -> ChannelLayout:
    """Lay the regions out one behind the other.

    ChannelError: a field of the spec is impossible, or all of it too big.
    """
    check_spec(spec)
    header = (torch.int64, (HEADER_WORDS,))
    entries = {
        RING_HEADER: header,
        REPLY_HEADER: header,
        **entry_shapes(spec, spec.max_rows, spec.max_tokens),
        **reply_shapes(spec, spec.max_rows),
    }
    offset = CONTROL_BYTES
    regions: list[Region] = []
    for name, (dtype, shape) in entries.items():
        region = Region(name, dtype, (spec.depth, *shape), offset)
        regions.append(region)
        offset += -(-region.num_bytes // ALIGNMENT) * ALIGNMENT
    if offset > MAX_CHANNEL_BYTES:
        largest = max(regions, key=lambda region: region.num_bytes)
        raise ChannelError(f"{largest.name}: the channel would take {offset} bytes, {largest.num_bytes} of them here")
    return ChannelLayout(tuple(regions), offset)


def describe_layout(
    spec: ChannelSpec, kind: str, handle: bytes, device_handle: bytes | None = None, device_uuid: str = ""
) -> ChannelDescription:
    """The description of a channel of that spec. handle: the memory object's name, empty for `bytes`.

    device_handle, device_uuid: of the regions, where they lie on a device (`cuda_ipc`); handle is the control page's.
    """
    device_handle = handle if device_handle is None else device_handle
    regions = tuple(
        RegionDescription(
            region.name, kind, device_handle, region.offset, region.shape, DTYPE_NAMES[region.dtype], device_uuid
        )
        for region in plan_layout(spec).regions
    )
    control = RegionDescription("control", kind, handle, 0, (CONTROL_BYTES // 8,), "int64", "")
    return ChannelDescription(
        channel_id=spec.channel_id,
        epoch=spec.epoch,
        kind=kind,
        control=control,
        regions=regions,
        depth=spec.depth,
        max_rows=spec.max_rows,
        max_tokens=spec.max_tokens,
        max_draft_len=spec.max_draft_len,
        hidden_width=spec.hidden_width,
        vocab_size=spec.vocab_size,
        max_blocks_per_row=spec.max_blocks_per_row,
        block_size=spec.block_size,
        num_blocks=spec.num_blocks,
        draft_probs=spec.draft_probs,
    )


def spec_of(description: ChannelDescription) -> ChannelSpec:
    """The spec behind a description. ChannelError names the field or region that does not agree with it.

    Where there are no hidden states their dtype is not in the description either, and float32 stands for it.
    """
    hidden_dtype = torch.float32
    for region in description.regions:
        if region.name == "ring.hidden":
            if region.dtype not in DTYPES:
                raise ChannelError(f"regions[ring.hidden].dtype: {region.dtype!r} is not known")
            hidden_dtype = DTYPES[region.dtype]
    spec = ChannelSpec(
        channel_id=description.channel_id,
        epoch=description.epoch,
        depth=description.depth,
        max_rows=description.max_rows,
        max_tokens=description.max_tokens,
        max_draft_len=description.max_draft_len,
        hidden_width=description.hidden_width,
        hidden_dtype=hidden_dtype,
        vocab_size=description.vocab_size,
        max_blocks_per_row=description.max_blocks_per_row,
        block_size=description.block_size,
        num_blocks=description.num_blocks,
        draft_probs=description.draft_probs,
    )
    expected = describe_layout(spec, description.kind, description.control.handle, *_device_of(description))
    if description.control != expected.control:
        raise ChannelError(f"control: {description.control} is not {expected.control}")
    given = {region.name: region for region in description.regions}
    for region in expected.regions:
        if region.name not in given:
            raise ChannelError(f"regions[{region.name}]: missing")
        if given[region.name] != region:
            raise ChannelError(f"regions[{region.name}]: {given[region.name]} is not {region}")
    if unknown := sorted(set(given) - {region.name for region in expected.regions}):
        raise ChannelError(f"regions[{unknown[0]}]: not known")
    return spec


def _device_of(description: ChannelDescription) -> tuple[bytes | None, str]:
    """Handle and UUID of the one device allocation that holds all regions; nothing where they lie on the host."""
    if description.kind != "cuda_ipc" or not description.regions:
        return None, ""
    return description.regions[0].handle, description.regions[0].device_uuid
