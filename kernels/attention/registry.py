"""Which attention backend does a name mean?"""

from __future__ import annotations

from importlib.util import find_spec

from kernels.attention.interface import AttentionBackend
from kernels.attention.torch_backend import TorchAttention

BACKENDS = ("torch", "triton")


def available_backends() -> tuple[str, ...]:
    """The backends whose libraries are installed here. Nothing is imported to find out."""
    return tuple(name for name in BACKENDS if name != "triton" or find_spec("triton") is not None)


def make_attention(
    name: str, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, window: int | None
) -> AttentionBackend:
    """A backend for layers of one shape and one window.

    Raises ValueError on a name that is not in BACKENDS, and on one whose library is not installed.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention: no backend is called {name!r}; known: {', '.join(BACKENDS)}")
    if name not in available_backends():
        raise ValueError(f"attention: backend {name!r} needs the package {name!r}, which is not installed")
    if name == "triton":
        # Only where it is asked for: Triton is an optional dependency, and slow to import.
        from kernels.attention.triton_backend import TritonAttention

        return TritonAttention(num_heads, num_kv_heads, head_dim, scale, window)
    return TorchAttention(num_heads, num_kv_heads, head_dim, scale, window)
