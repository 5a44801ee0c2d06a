"""Which form of each kernel runs on a device?

One frozen value holds the chosen functions: plain torch on a CPU, Triton on a GPU. Both forms of a kernel have one
name, one signature and one result, so whoever holds the set does not know which one it calls. Triton is imported only
where it is chosen. The Triton forms never wait for the host and can all be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from kernels.reference.take_entry import EntryTensors, TakenLayout, TakenRows
from kernels.reference.verify import Verdict


class RmsNormResidual(Protocol):
    """`norm.rms_norm_residual`."""

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out_total: Tensor | None = None, /
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class KernelSet:
    """A device's kernels. Each is called with positional arguments, in the order that `kernels.reference` documents.

    name: `reference` or `triton`.
    """

    name: str
    # Between the matrix products of a layer.
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rms_norm_residual: RmsNormResidual
    silu_mul: Callable[[Tensor], Tensor]
    rotary_angles: Callable[[Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor]]
    apply_rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    rope_kv_write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    # What a step is prepared with, and moves on.
    compute_slot_mapping: Callable[[Tensor, Tensor, Tensor, int, int, Tensor], None]
    fill_metadata: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[int], int, Tensor, Tensor, Tensor, Tensor], None
    ]
    prepare_prefill_inputs: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    advance_draft_step: Callable[[Tensor, Tensor, Tensor, Tensor, int, int, Tensor | None], None]
    prepare_target_inputs: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None
    ]
    commit_verdict: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    # A step of the target that was launched ahead of the verdicts.
    take_drafts: Callable[..., None]
    commit_rows: Callable[..., None]
    write_ring_entry: Callable[..., None]
    # A step of the drafter, from the ring entry to the reply.
    take_entry: Callable[
        [EntryTensors, Tensor, Tensor, int, int, int, int, int, Tensor, Tensor, Tensor, TakenRows, TakenLayout | None],
        None,
    ]
    append_anchors: Callable[[TakenRows, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    head_inputs: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
    finish_reply: Callable[[Tensor, int, int, int, Tensor, TakenRows, Tensor, Tensor, Tensor, Tensor | None], None]
    # From logits to tokens.
    argmax: Callable[[Tensor, Tensor | None, Tensor, Tensor], None]
    apply_penalties: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    apply_bias: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    filter_logits: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    gumbel_noise: Callable[[Tensor, Tensor, int, int], Tensor]
    gumbel_sample: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
    uniform: Callable[[Tensor, Tensor, int, int], Tensor]
    verify_greedy: Callable[[Tensor, Tensor, Tensor], Verdict]
    verify: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Verdict]


_MODULES = {
    "rms_norm": "norm",
    "rms_norm_residual": "norm",
    "silu_mul": "activation",
    "rotary_angles": "rope",
    "apply_rope": "rope",
    "write_kv": "kv_write",
    "rope_kv_write": "rope_kv_write",
    "compute_slot_mapping": "slot_mapping",
    "fill_metadata": "metadata_fill",
    "prepare_prefill_inputs": "prefill_inputs",
    "advance_draft_step": "advance",
    "prepare_target_inputs": "target_inputs",
    "commit_verdict": "target_inputs",
    "take_drafts": "take_drafts",
    "commit_rows": "commit_rows",
    "write_ring_entry": "ring_entry",
    "take_entry": "take_entry",
    "append_anchors": "append_anchors",
    "head_inputs": "head_inputs",
    "finish_reply": "finish_reply",
    "argmax": "argmax",
    "apply_penalties": "sampling",
    "apply_bias": "sampling",
    "filter_logits": "sampling",
    "gumbel_noise": "sampling",
    "gumbel_sample": "sampling",
    "uniform": "philox",
    "verify_greedy": "verify",
    "verify": "verify",
}


def kernels_for(device: torch.device | str) -> KernelSet:
    """The kernels for tensors on `device`: Triton's on CUDA, the references everywhere else.

    Raises ModuleNotFoundError on a CUDA device where Triton is not installed.
    """
    return kernel_set("triton" if torch.device(device).type == "cuda" else "reference")


def kernel_set(name: str) -> KernelSet:
    """The set called `reference` or `triton`. Triton's runs on CPU tensors under its interpreter only."""
    return KernelSet(
        name,
        **{
            function: getattr(import_module(f"kernels.{name}.{module}"), function)
            for function, module in _MODULES.items()
        },
    )
