"""Which attention backend does a name mean?

torch       plain torch; fast on a CPU, needs the rows' lengths on the host
triton      for GPUs; reads every length on the device, so steps may run ahead of the host and be captured
flashinfer  for GPUs; plans on the host once a step, needs the rows' lengths there
reference   the references themselves; needs no host lengths: tests of what runs ahead, on a CPU
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from kernels.attention.interface import AttentionBackend
from kernels.attention.reference_backend import ReferenceAttention
from kernels.attention.torch_backend import TorchAttention

BACKENDS = ("torch", "triton", "flashinfer", "reference")
# What a backend imports that may not be installed.
_LIBRARIES = {"triton": "triton", "flashinfer": "flashinfer"}


def available_backends() -> tuple[str, ...]:
    """The backends whose libraries are installed here. Nothing is imported to find out."""
    return tuple(name for name in BACKENDS if name not in _LIBRARIES or find_spec(_LIBRARIES[name]) is not None)


def make_attention(
    name: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    window: int | None,
    device: torch.device | None = None,
) -> AttentionBackend:
    """A backend for layers of one shape and one window. device: where they run; None, who asks sees to it.

    Raises ValueError on a name that is not in BACKENDS, on one whose library is not installed or that does not run on
    the device, and on a shape that the backend cannot run.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention: no backend is called {name!r}; known: {', '.join(BACKENDS)}")
    if name not in available_backends():
        raise ValueError(f"attention: backend {name!r} needs the package {_LIBRARIES[name]!r}, which is not installed")
    # Triton's interpreter, which the tests of its kernels switch on, runs on a CPU.
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if name in _LIBRARIES and device is not None and device.type != "cuda" and not interpreted:
        raise ValueError(f"attention: backend {name!r} runs on a GPU, not on {device}")
    # Imported only where they are asked for: optional dependencies, and slow to import.
    if name == "triton":
        from kernels.attention.triton_backend import TritonAttention

        return TritonAttention(num_heads, num_kv_heads, head_dim, scale, window)
    if name == "flashinfer":
        from kernels.attention.flashinfer_backend import FlashInferAttention

        return FlashInferAttention(num_heads, num_kv_heads, head_dim, scale, window)
    if name == "reference":
        return ReferenceAttention(num_heads, num_kv_heads, head_dim, scale, window)
    return TorchAttention(num_heads, num_kv_heads, head_dim, scale, window)
