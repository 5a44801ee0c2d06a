"""How is a channel's memory seen as tensors? Regions over one run of bytes, entries at full size over regions."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.channel.device import ReplyViews
from engine.channel.interface import ChannelSpec, RingEntry
from engine.channel.layout import REPLY_HEADER, RING_HEADER, ChannelLayout, entry_shapes


def region_tensors(memory: torch.Tensor, layout: ChannelLayout) -> dict[str, torch.Tensor]:
    """Every region of the layout as a view of `memory` [num_bytes] uint8, on any device."""
    # Ordinary tensors, whatever mode the caller is in: one made in inference mode can only be written in it.
    with torch.inference_mode(False):
        return {
            region.name: memory[region.offset : region.offset + region.num_bytes].view(region.dtype).view(region.shape)
            for region in layout.regions
        }


class EntryViews:
    """The entries of a channel at full size, made once. Holds the memory alive."""

    def __init__(self, spec: ChannelSpec, regions: Mapping[str, torch.Tensor]) -> None:
        self._spec = spec
        fields = {name: name.removeprefix("ring.") for name in entry_shapes(spec, 0, 0)}
        with torch.inference_mode(False):
            self._headers = [regions[RING_HEADER][index] for index in range(spec.depth)]
            self._parts = [
                {field: regions[name][index] for name, field in fields.items()} for index in range(spec.depth)
            ]
            self._hidden = [parts.pop("hidden", None) for parts in self._parts]
            self._replies = [
                ReplyViews(
                    header=regions[REPLY_HEADER][index],
                    tokens=regions["reply.tokens"][index],
                    probs=regions["reply.probs"][index] if spec.draft_probs else None,
                    has_probs=regions["reply.has_probs"][index] if spec.draft_probs else None,
                )
                for index in range(spec.depth)
            ]

    def ring(self, seq: int) -> tuple[torch.Tensor, RingEntry]:
        """Header and tensors of the ring entry of step `seq`."""
        spec = self._spec
        index = seq % spec.depth
        entry = RingEntry(seq, spec.max_rows, spec.max_tokens, self._hidden[index], **self._parts[index])
        return self._headers[index], entry

    def reply(self, seq: int) -> ReplyViews:
        """The reply entry of step `seq`."""
        return self._replies[seq % self._spec.depth]
