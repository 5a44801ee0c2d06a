"""How is one linear layer run fastest?

On a CPU in fp32: with the weight reordered once into oneDNN's blocked layout, which at few rows reads memory three to
five times faster than the plain layout and gives a row the same bits whatever rows stand beside it. Everywhere else:
torch's own linear.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

# Up to this many input features oneDNN sums a lone row in the same order as a row among others; beyond, it splits the
# sum of a lone row, so such a row is run as two equal ones. Costs nothing: reading the weight is what takes the time.
SINGLE_ROW_MAX_FEATURES = 1024


class PackedLinear:
    """y = x @ weight.T + bias, for inference: no gradient reaches the weight.

    weight: [out_features, in_features]; bias: [out_features] or None. On a CPU in fp32 the given weight is not kept,
    unless the caller does.
    """

    __slots__ = ("_packed", "_twin_rows", "_weight", "bias", "in_features", "out_features")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._packed: torch.Tensor | None = None
        self._weight: torch.Tensor | None = None
        if can_pack(weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        else:
            self._weight = weight
        self._twin_rows = self._packed is not None and self.in_features > SINGLE_ROW_MAX_FEATURES

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
            return linear(x, self._weight, self.bias)  # type: ignore[arg-type]
        if self._twin_rows and x.shape[0] == 1:
            return self._run_packed(x.expand(2, -1).contiguous())[:1]
        return self._run_packed(x)

    def _run_packed(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN's blocked layout is the one to use: fp32 on a CPU, in a torch built with oneDNN."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
