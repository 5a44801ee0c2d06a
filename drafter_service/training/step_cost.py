"""What does a verify step cost on this machine, compared with a plain decoding step?

Times the target's forward of one row with 1 and with 1 + k tokens and the head's k draft steps, through the same paged
attention that the services use, and turns acceptance into an expected speed-up. RPCs and scheduling are not in it: the
measurement against a running stack has them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training.target_view import TargetView
from kernels.attention.interface import AttentionMetadata
from kernels.attention.torch_backend import TorchAttention
from kernels.reference.kv_write import write_kv

_BLOCK_SIZE = 16
_CONTEXT = 192


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds, medians. plain: one token. verify: 1 + draft_len tokens, with logits. draft: all of draft_len drafts."""

    draft_len: int
    plain: float
    verify: float
    draft: float

    def speedup(self, mean_accepted_len: float) -> float:
        """Tokens per second over those of plain decoding, one stream."""
        return mean_accepted_len * self.plain / (self.verify + self.draft)


@torch.inference_mode()
def measure_step_cost(head: Eagle3Head, target: TargetView, draft_len: int, repeats: int = 9) -> StepCost:
    """On the device that target and head are on; the head may be packed."""
    decoder, device = target.decoder, target.decoder.device
    config = decoder.config
    num_blocks = (_CONTEXT + 2 * draft_len + 2) // _BLOCK_SIZE + 2
    cache = decoder.make_kv_cache(num_blocks, _BLOCK_SIZE)
    backends = [
        TorchAttention(config.num_heads, config.num_kv_heads, config.head_dim, config.attention_scale, group.window)
        for group in decoder.groups
    ]
    layers = target.hidden_layers

    def forward(query_len: int) -> None:
        metadata = _metadata(query_len, device)
        plans = [backend.plan(metadata) for backend in backends]
        ids = torch.arange(query_len, device=device) + 3
        positions = torch.arange(query_len, device=device) + _CONTEXT
        output = decoder.forward(ids, positions, plans, cache, layers if query_len > 1 else ())
        decoder.logits(output.hidden).argmax(-1).tolist()

    own = head.config
    head_backend = TorchAttention(own.num_heads, own.num_kv_heads, own.head_dim, own.head_dim**-0.5)
    head_shape = (num_blocks, _BLOCK_SIZE, own.num_kv_heads, own.head_dim)
    k_cache = torch.zeros(head_shape, dtype=head.norm.weight.dtype, device=device)
    v_cache = torch.zeros_like(k_cache)

    def draft() -> None:
        """As the service does it: the KV of all tokens, attention for the last one, then one token a draft step."""
        captured = torch.randn((draft_len + 1, own.num_captured * own.target_hidden_size), device=device)
        hidden = head.fuse(captured.to(head.norm.weight.dtype))
        positions = torch.arange(draft_len + 1, device=device) + _CONTEXT
        ids = torch.arange(draft_len + 1, device=device) + 3
        for step in range(draft_len):
            q, k, v, residual = head.project(ids, hidden, positions)
            if step == 0:
                write_kv(k, v, positions + _BLOCK_SIZE, k_cache, v_cache)
            plan = head_backend.plan(_metadata(1, device, _CONTEXT + draft_len + step))
            output = head.finish(plan.run(q[-1:], k[-1:], v[-1:], k_cache, v_cache), residual[-1:])
            ids = head.target_ids(head.logits(output).argmax(-1))
            hidden, positions = head.next_hidden(output), positions[-1:] + 1

    return StepCost(
        draft_len,
        _median(lambda: forward(1), repeats),
        _median(lambda: forward(1 + draft_len), repeats),
        _median(draft, repeats),
    )


def _metadata(query_len: int, device: torch.device, context_len: int = _CONTEXT) -> AttentionMetadata:
    """One row with context_len tokens before it, in blocks 1, 2, ..."""
    seq_len = context_len + query_len
    num_blocks = -(-seq_len // _BLOCK_SIZE)
    starts, lens = np.array([0, query_len], dtype=np.int32), np.array([seq_len], dtype=np.int32)
    return AttentionMetadata(
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(lens).to(device),
        block_tables=torch.arange(1, num_blocks + 1, dtype=torch.int32, device=device)[None],
        slot_mapping=torch.arange(query_len, device=device) + context_len + _BLOCK_SIZE,
        max_query_len=query_len,
        max_seq_len=seq_len,
        query_start_loc_np=starts,
        seq_lens_np=lens,
    )


def _median(run: Callable[[], None], repeats: int) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
