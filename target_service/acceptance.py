"""How is a drafter of a given quality stood in for, where only speed is measured?

`accept: synthetic:<mean>` replaces how many drafts a row accepts by a draw, so that a verify step gives `mean` tokens
on average, the target's own included. Everything else, and all of its cost, stays. **The output means nothing then**:
accepted drafts are given out whatever the model makes of them. For benchmarks with weights that are not trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.reference.philox import ACCEPT
from kernels.reference.verify import Verdict


def chance_for(mean: float, num_drafts: int) -> float:
    """With which chance must each draft be accepted, so that num_drafts of them and the target's own token make `mean`
    tokens on average? 1 where even that is not enough.
    """
    if mean - 1 >= num_drafts:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**count for count in range(1, num_drafts + 1)) < mean - 1:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """chances: [K + 1] float32, by how many drafts a row has. uniform: the philox kernel, as the device has it."""

    chances: torch.Tensor
    uniform: Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]

    @classmethod
    def of_mean(
        cls,
        mean: float,
        max_drafts: int,
        device: torch.device,
        uniform: Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor],
    ) -> SyntheticAcceptance:
        """Of a mean in 1 .. max_drafts + 1; ValueError when it is outside."""
        if not 1 <= mean <= max_drafts + 1:
            raise ValueError(f"a mean of {mean:g} tokens is not possible with up to {max_drafts} drafts")
        chances = [chance_for(mean, count) for count in range(max_drafts + 1)]
        return cls(torch.tensor(chances, dtype=torch.float32, device=device), uniform)

    def apply(
        self, verdict: Verdict, drafts: torch.Tensor, seeds: torch.Tensor, start_positions: torch.Tensor
    ) -> Verdict:
        """A verdict on the same rows with another number of accepted drafts, drawn by (seed, position); the target's
        own token is one that it chose. drafts: [S, K] int64, -1 absent; seeds, start_positions: [S] int64.
        """
        width = drafts.shape[1]
        if width == 0:
            return verdict
        present = (drafts >= 0).to(torch.int64).cumprod(dim=1)
        chances = self.chances[present.sum(dim=1)]
        drawn = self.uniform(seeds, start_positions, ACCEPT, width) < chances[:, None]
        accepted = (drawn.to(torch.int64) * present).cumprod(dim=1).sum(dim=1)
        own = verdict.tokens.gather(1, torch.minimum(accepted, verdict.num_accepted.to(torch.int64))[:, None])
        columns = torch.arange(width + 1, device=drafts.device)
        padded = torch.cat([drafts, torch.full_like(drafts[:, :1], -1)], dim=1)
        tokens = torch.where(columns < accepted[:, None], padded, torch.where(columns == accepted[:, None], own, -1))
        samples = verdict.num_sampled > 0
        accepted = torch.where(samples, accepted, 0).to(torch.int32)
        return Verdict(
            torch.where(samples[:, None], tokens, -1), torch.where(samples, accepted + 1, 0).to(torch.int32), accepted
        )
