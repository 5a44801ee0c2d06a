"""Which layers share one kind of KV cache?

Layers of one group see the same block table, slots and attention plan; a step builds metadata once a group, not once
a layer. Full attention and sliding windows here; recurrent state and pooled sparse caches are further kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

KVKind = Literal["full", "sliding"]


class HasWindows(Protocol):
    """What grouping reads of a model config: each layer's window in tokens, None for full attention."""

    @property
    def windows(self) -> Sequence[int | None]: ...


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers (0-based, ascending) of one kind. window: tokens each query sees, itself included; None for `full`."""

    name: str
    kind: KVKind
    layers: tuple[int, ...]
    window: int | None


def group_layers(config: HasWindows) -> tuple[KVGroup, ...]:
    """The config's KV groups, ordered by their first layer. Every layer is in exactly one."""
    layers_by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(config.windows):
        layers_by_window.setdefault(window, []).append(layer)
    return tuple(
        KVGroup(
            name="full" if window is None else f"sliding_{window}",
            kind="full" if window is None else "sliding",
            layers=tuple(layers),
            window=window,
        )
        for window, layers in layers_by_window.items()
    )
