"""How do log probabilities get to the host with a step's verdicts?

Where they are wanted is known at the launch, which tokens they are of is not: all logit rows of the request's row are
looked at, on the device, and the host takes as many as there are tokens when the step comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from target_service.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Whose are wanted. firsts: by plan row, where its entries begin; num_best: how many of the best tokens, by plan
    row. most: the largest of num_best. logit_rows: [M] int64; cells: [M] int64, where in the step's table (as one run)
    the token of each stands.
    """

    firsts: dict[int, int]
    num_best: dict[int, int]
    most: int
    logit_rows: np.ndarray
    cells: np.ndarray


def wanted_rows(
    rows: Sequence[tuple[int, int, int, int]], table_width: int, first_token_column: int
) -> LogprobRows | None:
    """rows: (plan row, first logit row, num_logits, num_logprobs) of every row that samples. None: nobody wants any."""
    firsts: dict[int, int] = {}
    num_best: dict[int, int] = {}
    logit_rows: list[int] = []
    cells: list[int] = []
    for row, first, num_logits, num_logprobs in rows:
        if num_logprobs < 0:
            continue
        firsts[row] = len(logit_rows)
        num_best[row] = num_logprobs
        logit_rows.extend(range(first, first + num_logits))
        begin = row * table_width + first_token_column
        cells.extend(range(begin, begin + num_logits))
    if not firsts:
        return None
    return LogprobRows(
        firsts, num_best, max(num_best.values()), np.array(logit_rows, np.int64), np.array(cells, np.int64)
    )


class StepLogprobs:
    """The log probabilities of one step: computed and copied by the stream, read once the step has come back."""

    def __init__(
        self, rows: LogprobRows, logits: torch.Tensor, packed: torch.Tensor, where: torch.Tensor, cells: torch.Tensor
    ) -> None:
        """logits: [N, V] float32, unprocessed; packed: the step's table; where, cells: of `rows`, on the device."""
        logprobs = torch.log_softmax(logits.index_select(0, where), dim=-1)
        tokens = packed.index_select(0, cells).clamp(min=0)
        self._rows = rows
        self._chosen = _to_host(logprobs.gather(1, tokens[:, None])[:, 0])
        self._best: tuple[torch.Tensor, torch.Tensor] | None = None
        if rows.most > 0:
            best = logprobs.topk(min(rows.most, logprobs.shape[1]), dim=-1)
            self._best = (_to_host(best.indices), _to_host(best.values))

    def of_row(self, row: int, num_tokens: int) -> tuple[TokenLogprobs, ...]:
        """Of a plan row's first num_tokens tokens; empty where it wants none."""
        first = self._rows.firsts.get(row)
        if first is None:
            return ()
        chosen = self._chosen[first : first + num_tokens].tolist()
        num_best = self._rows.num_best[row]
        if num_best <= 0 or self._best is None:
            return tuple(TokenLogprobs(value) for value in chosen)
        ids, values = (part[first : first + num_tokens, :num_best].tolist() for part in self._best)
        return tuple(
            TokenLogprobs(value, tuple(best_ids), tuple(best_values))
            for value, best_ids, best_values in zip(chosen, ids, values, strict=True)
        )


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that the stream makes, into memory that nobody reads before the step has come back."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
