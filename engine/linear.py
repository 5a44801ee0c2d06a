"""How is one linear layer run fastest?

On a CPU in fp32: with the weight reordered once into oneDNN's blocked layout, which at few rows reads memory three to
five times faster than the plain layout and gives a row the same bits whatever rows stand beside it. On a GPU in
bfloat16 with few rows: by the kernel that was measured to be the fastest for the shape
(`kernels.triton.linear_choice`). Everywhere else: torch's own linear.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from kernels.kernel_set import kernels_for

if TYPE_CHECKING:
    from kernels.triton.linear import SkinnyTiling

# Up to this many input features oneDNN sums a lone row in the same order as a row among others; beyond, it splits the
# sum of a lone row, so such a row is run as two equal ones. Costs nothing: reading the weight is what takes the time.
SINGLE_ROW_MAX_FEATURES = 1024


class PackedLinear:
    """y = x @ weight.T + bias, for inference: no gradient reaches the weight. Used by one stream of work at a time.

    weight: [out_features, in_features]; bias: [out_features] or None. On a CPU in fp32 the given weight is not kept,
    unless the caller does.
    """

    __slots__ = ("_kernels", "_packed", "_skinny", "_twin_rows", "_weight", "bias", "in_features", "out_features")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._kernels = kernels_for(weight.device)
        self._packed: torch.Tensor | None = None
        self._weight: torch.Tensor | None = None
        self._skinny: _SkinnyForms | None = None
        if can_pack(weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        else:
            self._weight = weight
            self.choose()
        self._twin_rows = self._packed is not None and self.in_features > SINGLE_ROW_MAX_FEATURES

    def choose(self) -> None:
        """Choose the kernels for this weight by what is measured now (`kernels.triton.linear_choice`)."""
        weight = self._weight
        if weight is not None and weight.is_cuda and weight.dtype == torch.bfloat16 and weight.is_contiguous():
            self._skinny = _SkinnyForms(weight, self.bias)

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features]; where the layer is packed, a plain copy made for the asking."""
        if self._packed is not None:
            return self._packed.to_dense()
        assert self._weight is not None  # one of the two always is
        return self._weight

    @property
    def packed(self) -> bool:
        return self._packed is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, in_features], of the weight's dtype. Returns [N, out_features]."""
        if self._packed is None:
            if self._skinny is not None and (tiling := self._skinny.tiling(x.shape[0], False)) is not None:
                return self._skinny.run(x, tiling, False, None)
            return linear(x, self._weight, self.bias)  # type: ignore[arg-type]
        if self._twin_rows and x.shape[0] == 1:
            return self._run_packed(x.expand(2, -1).contiguous())[:1]
        return self._run_packed(x)

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, where the layer's output is [gate, up]. Returns [N, out_features / 2]."""
        if self._skinny is not None and (tiling := self._skinny.tiling(x.shape[0], True)) is not None:
            return self._skinny.run(x, tiling, True, None)
        return self._kernels.silu_mul(self(x))

    def float32(self, x: torch.Tensor) -> torch.Tensor:
        """The product as float32: on a GPU not rounded to the weight's dtype in between, and in one pass."""
        if self._skinny is not None and (tiling := self._skinny.tiling(x.shape[0], False)) is not None:
            return self._skinny.run(x, tiling, False, torch.float32)
        if x.is_cuda and x.dtype != torch.float32 and self.bias is None:
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return self(x).to(torch.float32)

    def _run_packed(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


class _SkinnyForms:
    """A weight's tilings by number of rows, and the counters that their programs meet at."""

    __slots__ = ("_bias", "_counters", "_steps", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        # Only on a GPU: Triton is an optional dependency.
        from kernels.triton.linear import num_counters
        from kernels.triton.linear_choice import choose_tiling

        self._weight = weight
        self._bias = bias
        size_out, size_in = weight.shape
        self._steps = {gated: choose_tiling(size_out, size_in, gated) for gated in (False, True)}
        needed = [
            num_counters(size_out, gated, tiling)
            for gated, steps in self._steps.items()
            for _, tiling in steps
            if tiling is not None
        ]
        self._counters = torch.zeros(max(needed, default=0), dtype=torch.int32, device=weight.device)

    def tiling(self, num_rows: int, gated: bool) -> SkinnyTiling | None:
        """What runs `num_rows` rows; None: torch's own product."""
        for most_rows, tiling in self._steps[gated]:
            if num_rows <= most_rows:
                return tiling
        return None

    def run(self, x: torch.Tensor, tiling: SkinnyTiling, gated: bool, out_dtype: torch.dtype | None) -> torch.Tensor:
        from kernels.triton.linear import skinny_linear

        return skinny_linear(x, self._weight, self._bias, tiling, self._counters, gated, out_dtype)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN's blocked layout is the one to use: fp32 on a CPU, in a torch built with oneDNN."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
