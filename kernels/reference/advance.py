"""How does the state of a draft step become the state of the next one, without the host?

Called once between two draft steps, inside the captured graph on a GPU. Host twin: `layout.advance_draft_step`; K
calls of either give what `layout` recomputes from scratch.
"""

from __future__ import annotations

import torch

from kernels.layout import PAD_SLOT
from kernels.reference.slot_mapping import slots_of


def advance_draft_step(
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    max_len: int,
    active: torch.Tensor | None,
) -> None:
    """Move every live row one token on, in place: position + 1, seq_len + 1, the slot of the new position.

    A row is live while its seq_len is > 0, its next position is < max_len and, where `active` is given, active[row].
    A row that is not live ends, and stays ended: seq_len 0, slot PAD_SLOT, position unchanged (a legal index for
    RoPE). So a padded row stays padded, a row whose draft_len is reached stops, and one at the length limit never
    writes its last live slot again.

    positions: [R] int64; seq_lens: [R] int32; slots: [R] int64; block_tables: [R, B] int32; active: [R] bool or None.
    """
    live = (seq_lens > 0) & (positions + 1 < max_len)
    if active is not None:
        live = live & active
    positions.add_(live.to(positions.dtype))
    seq_lens.copy_(torch.where(live, seq_lens + 1, 0))
    rows = torch.arange(positions.shape[0], device=positions.device)
    slots.copy_(torch.where(live, slots_of(block_tables, rows, positions, block_size, max_len), PAD_SLOT))
