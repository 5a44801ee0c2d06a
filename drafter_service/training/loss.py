"""How far is the head from the target, over all draft steps of a batch?

Cross-entropy to the target's distribution over the draft vocabulary, weighted by the probability that the target
gives that vocabulary at all, discounted by draft step. A step whose earlier drafts were wrong is never used by a
service; it counts for `dead_weight`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training import fused
from drafter_service.training.target_view import ChainStarts, SoftTargets, proposed_tokens
from drafter_service.training.unroll import draft_logits, unroll


@dataclass(frozen=True, slots=True)
class LossOptions:
    """num_steps: draft steps unrolled. step_decay: weight of each step relative to the one before."""

    num_steps: int = 5
    step_decay: float = 0.85
    dead_weight: float = 0.3


@dataclass(frozen=True, slots=True)
class LossOutput:
    """loss: scalar with gradient. step_losses: [S] mean cross-entropy of each step, detached.

    alive: [S + 1] float32, chains whose first s drafts were all accepted (the first: all of them); tried: [S] chains
    that had s drafts accepted and a further token to propose. All summed over the batch, on the device.
    """

    loss: torch.Tensor
    step_losses: torch.Tensor
    alive: torch.Tensor
    tried: torch.Tensor


def unrolled_loss(
    head: Eagle3Head,
    captured: torch.Tensor,
    token_ids: torch.Tensor,
    chains: ChainStarts,
    targets: SoftTargets,
    options: LossOptions,
) -> LossOutput:
    """captured: [B * L, A * H], as the head takes them; token_ids: [B, L]; chains of at least options.num_steps
    steps.
    """
    # A chain that is not valid in step 0 is padding: nothing here depends on how many there are, nor asks the device.
    alive = chains.valid[:, 0]
    num_chains = alive.sum().clamp(min=1)
    total = captured.new_zeros((), dtype=torch.float32)
    step_losses, alive_counts, tried_counts = [], [alive.sum()], []
    for step, output in enumerate(unroll(head, head.fuse(captured), token_ids, options.num_steps)):
        valid = chains.valid[:, step]
        rows = chains.rows[:, step]
        logits = draft_logits(head, output.index_select(0, chains.starts))
        cross_entropy, best = fused.soft_cross_entropy(logits, targets.probs, rows)
        usable = valid & alive
        weight = torch.where(usable, 1.0, options.dead_weight) * valid * targets.mass[rows]
        total = total + options.step_decay**step * (cross_entropy * weight).sum() / num_chains
        with torch.no_grad():
            counted = valid * targets.mass[rows]
            step_losses.append((cross_entropy * counted).sum() / counted.sum().clamp(min=1e-6))
            tried_counts.append(usable.sum())
            alive = usable & (head.target_ids(best) == proposed_tokens(token_ids, chains.starts, step))
            alive_counts.append(alive.sum())
    return LossOutput(
        total, torch.stack(step_losses).detach(), torch.stack(alive_counts).float(), torch.stack(tried_counts).float()
    )
