"""How do gradients move the head's weights?

AdamW for everything, or Muon for the matrices inside (Jordan et al. 2024: momentum, made orthogonal by a few
Newton-Schulz iterations, scaled as Moonlight does so that AdamW's learning rates fit) and AdamW for the rest. The
step's own state is tensors on the device, the learning rate too, so that a recorded step can be replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

_BETAS, _EPS = (0.9, 0.95), 1e-8
_MOMENTUM = 0.95
_MUON_SCALE = 0.2
# Coefficients of Jordan et al.: singular values end up near 1, quickly rather than exactly.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class HeadOptimizer:
    """Owns the optimiser's state of a head's parameters and changes them in place.

    muon: matrices other than `lm_head` and the embedding by Muon. weight_decay: of all matrices.
    """

    def __init__(self, head: nn.Module, weight_decay: float, clip: float, muon: bool) -> None:
        self.parameters: list[torch.Tensor] = [p for p in head.parameters() if p.requires_grad]
        names = [name for name, parameter in head.named_parameters() if parameter.requires_grad]
        self._weight_decay, self._clip = weight_decay, clip
        self._by_muon = [
            muon and parameter.dim() == 2 and not name.startswith("lm_head")
            for name, parameter in zip(names, self.parameters, strict=True)
        ]
        self._first = [torch.zeros_like(parameter) for parameter in self.parameters]
        self._second = [
            torch.zeros((), device=parameter.device) if by_muon else torch.zeros_like(parameter)
            for parameter, by_muon in zip(self.parameters, self._by_muon, strict=True)
        ]
        self._steps = torch.zeros((), device=self.parameters[0].device)

    @torch.no_grad()
    def step(self, gradients: list[torch.Tensor], rate: torch.Tensor) -> None:
        """gradients: float32, one for each of `parameters`, overwritten. rate: scalar on the device."""
        norms = torch._foreach_norm(gradients)
        scale = (self._clip / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale)
        self._steps += 1
        decayed = [parameter for parameter in self.parameters if parameter.dim() > 1]
        torch._foreach_mul_(decayed, 1 - rate * self._weight_decay)
        chosen = [index for index, by_muon in enumerate(self._by_muon) if not by_muon]
        if chosen:
            self._adam(chosen, gradients, rate)
        for index, by_muon in enumerate(self._by_muon):
            if by_muon:
                momentum = self._first[index]
                momentum.lerp_(gradients[index], 1 - _MOMENTUM)
                update = orthogonal(gradients[index].lerp(momentum, _MOMENTUM))
                self.parameters[index].sub_(update * (rate * _MUON_SCALE * max(update.shape) ** 0.5))

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"first": self._first, "second": self._second, "steps": self._steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take `state` over, in place."""
        for own, given in zip(self._first, state["first"], strict=True):
            own.copy_(given)
        for own, given in zip(self._second, state["second"], strict=True):
            own.copy_(given)
        self._steps.copy_(state["steps"])

    def _adam(self, chosen: Sequence[int], gradients: Sequence[torch.Tensor], rate: torch.Tensor) -> None:
        taken = [gradients[index] for index in chosen]
        first, second = [self._first[index] for index in chosen], [self._second[index] for index in chosen]
        torch._foreach_lerp_(first, taken, 1 - _BETAS[0])
        torch._foreach_mul_(second, _BETAS[1])
        torch._foreach_addcmul_(second, taken, taken, 1 - _BETAS[1])
        divisors = torch._foreach_sqrt(second)
        torch._foreach_div_(divisors, (1 - _BETAS[1] ** self._steps).sqrt())
        torch._foreach_add_(divisors, _EPS)
        updates = torch._foreach_div(first, divisors)
        torch._foreach_mul_(updates, rate / (1 - _BETAS[0] ** self._steps))
        torch._foreach_sub_([self.parameters[index] for index in chosen], updates)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with orthogonal rows (or columns, whichever are fewer), roughly. [M, N] float32."""
    a, b, c = _NEWTON_SCHULZ
    x = matrix.to(torch.bfloat16) if matrix.is_cuda else matrix
    if tall := x.shape[0] > x.shape[1]:
        x = x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    near: torch.Tensor = (x.T if tall else x).to(matrix.dtype)
    return near
