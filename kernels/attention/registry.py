"""Which attention backend does a name mean?"""

from __future__ import annotations

from kernels.attention.interface import AttentionBackend
from kernels.attention.torch_backend import TorchAttention

BACKENDS = ("torch",)


def make_attention(
    name: str, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, window: int | None
) -> AttentionBackend:
    """A backend for layers of one shape and one window. Raises ValueError on a name that is not in BACKENDS."""
    if name != "torch":
        raise ValueError(f"attention: no backend is called {name!r}; known: {', '.join(BACKENDS)}")
    return TorchAttention(num_heads, num_kv_heads, head_dim, scale, window)
