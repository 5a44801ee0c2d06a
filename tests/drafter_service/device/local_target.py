"""How does a target that works through the host fill a device channel? For tests on a CPU: by its views, at once."""

from __future__ import annotations

from dataclasses import fields

import torch

from engine.channel.interface import ReplyEntry, RingEntry
from engine.channel.local import LocalChannel

_BY_TOKEN = ("hidden", "positions", "input_ids", "slot_mapping")


class LocalAsHost:
    """TargetChannel over the target's end of a LocalChannel. poison: `begin` fills the entry with garbage."""

    def __init__(self, channel: LocalChannel, poison: bool = True) -> None:
        self._end = channel.target
        self.spec, self.kind = channel.target.spec, channel.target.kind
        self.poison = poison
        self._sizes = (0, 0)

    def begin(self, seq: int, num_rows: int, num_tokens: int) -> RingEntry:
        header, entry = self._end.ring(seq)
        header[0] = 0
        self._sizes = (num_rows, num_tokens)
        values: dict[str, torch.Tensor | None] = {}
        for field in fields(entry)[3:]:
            tensor = getattr(entry, field.name)
            if tensor is not None:
                if self.poison:
                    tensor.view(torch.uint8).fill_(0xA5)
                    if tensor.is_floating_point():
                        tensor.fill_(float("nan"))
                size = num_tokens if field.name in _BY_TOKEN else num_rows
                tensor = tensor[: size + (field.name == "query_start_loc")]
            values[field.name] = tensor
        return RingEntry(seq, num_rows, num_tokens, **values)  # type: ignore[arg-type]

    def publish(self, seq: int) -> None:
        header, _ = self._end.ring(seq)
        header[:4] = torch.tensor([seq, self.spec.epoch, *self._sizes])
        self._end.publish(seq)

    def take_reply(self, seq: int, deadline_s: float) -> ReplyEntry | None:
        reply = self._end.reply(seq)
        found, epoch, num_rows, _ = reply.header[:4].tolist()
        if found != seq or epoch != self.spec.epoch:
            return None
        has_probs = None if reply.has_probs is None else reply.has_probs[:num_rows]
        probs = None if reply.probs is None else reply.probs[:num_rows]
        return ReplyEntry(seq, num_rows, reply.tokens[:num_rows].clone(), probs, has_probs)

    def peer_alive(self) -> bool:
        return self._end.peer_alive()

    @property
    def closed(self) -> bool:
        return self._end.closed

    def close(self) -> None:
        self._end.close()
