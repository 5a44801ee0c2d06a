"""How does the target tell a drafter where the channel's memory is?

Plain values that mirror `ChannelDescriptor` and `RegionDescriptor` of protos/common.proto field by field, for the
services' codecs to translate: the engine itself knows no protobuf.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RegionDescription:
    """One region of shared memory.

    kind `shm`: handle is the name of the object under /dev/shm; `bytes`: empty, entries travel in RPCs; `cuda_ipc`: a
    64-byte handle. offset: bytes into the object. shape: the first dimension is the channel's depth (control page: 512
    words). dtype: numpy-style name. device_uuid: empty on the CPU.
    """

    name: str
    kind: str
    handle: bytes
    offset: int
    shape: tuple[int, ...]
    dtype: str
    device_uuid: str


@dataclass(frozen=True, slots=True)
class ChannelDescription:
    """A channel as its exporter describes it. The dtype of hidden states is the region `ring.hidden`'s."""

    channel_id: str
    epoch: int
    kind: str
    control: RegionDescription
    regions: tuple[RegionDescription, ...]
    depth: int
    max_rows: int
    max_tokens: int
    max_draft_len: int
    hidden_width: int
    vocab_size: int
    max_blocks_per_row: int
    block_size: int
    num_blocks: int
    draft_probs: bool
