"""Which sizes does a speculator with a KV cache work in?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drafter_service.speculator import MetadataSource

DraftSampling = Literal["greedy", "probabilistic"]


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Sizes and switches of a drafter that keeps KV.

    num_seats: rows a step can have here. max_tokens: tokens a step can have. num_blocks: blocks that requests can hold
    at once in `build`; in `reuse` block ids are the target's, and this is how many of them there is room for.
    max_len: positions, None: the model's own. block_size: tokens a block holds.
    """

    num_seats: int
    max_tokens: int
    max_draft_len: int
    block_size: int
    num_blocks: int
    max_len: int | None = None
    attention: str = "torch"
    metadata_source: MetadataSource = "build"
    draft_sampling: DraftSampling = "greedy"
    prefix_caching: bool = True
