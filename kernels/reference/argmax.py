"""Which token of each row has the greatest logit?"""

from __future__ import annotations

import torch


def make_scratch(num_rows: int, device: torch.device | str) -> torch.Tensor:
    """[num_rows, 2] int64, zeros: what `argmax` meets at on a device. Of one stream of work at a time; whoever captures
    graphs makes it once, and keeps it as long as the graphs.
    """
    return torch.zeros((num_rows, 2), dtype=torch.int64, device=device)


def argmax(logits: torch.Tensor, ids: torch.Tensor | None, scratch: torch.Tensor, out: torch.Tensor) -> None:
    """out[n] = the column of row n's greatest logit, or where ids are given the id of that column.

    Of equal logits the first one wins; 0.0 and -0.0 are equal; NaN is greater than everything, and the first NaN wins.
    logits: [N, V] float32, bfloat16 or float16, V > 0; rows may be strided. ids: [V] int64 or None. scratch:
    `make_scratch` of N rows or more, zeros, and zeros again afterwards. out: [N] int64, contiguous.
    """
    if ids is None:
        torch.argmax(logits, dim=-1, out=out)
    else:
        torch.index_select(ids, 0, logits.argmax(dim=-1), out=out)
