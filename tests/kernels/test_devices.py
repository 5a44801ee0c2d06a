"""The reference kernels on another device give what they give on the CPU, bit for bit where they are integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import layout
from kernels.attention.interface import AttentionMetadata
from kernels.attention.torch_backend import TorchAttention
from kernels.reference.advance import advance_draft_step
from kernels.reference.attention import paged_attention
from kernels.reference.kv_write import write_kv
from kernels.reference.philox import TARGET, random_words, uniform
from kernels.reference.prefill_inputs import prepare_prefill_inputs
from kernels.reference.sampling import (
    apply_bias,
    apply_penalties,
    counts_with_drafts,
    filter_logits,
    gumbel_sample,
)
from kernels.reference.slot_mapping import compute_slot_mapping
from kernels.reference.target_inputs import commit_verdict, prepare_target_inputs
from kernels.reference.verify import verify, verify_greedy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

STARTS = torch.tensor([0, 3, 3, 8, 9], dtype=torch.int32)
TABLES = torch.tensor([[7, 3, 9, 5], [0, 0, 0, 0], [1, 2, 4, 6], [8, 10, 11, 12]], dtype=torch.int32)
CONTEXT = np.array([4, 0, 9, 2], np.int32)
LENS = np.array([3, 0, 5, 1], np.int32)


def metadata_kernels(device: str) -> list[torch.Tensor]:
    def there(*values: torch.Tensor) -> list[torch.Tensor]:
        return [value.clone().to(device) for value in values]

    starts, tables, positions, ids = there(
        STARTS, TABLES, torch.from_numpy(layout.make_positions(CONTEXT, LENS)), torch.arange(9) + 50
    )
    slots = torch.empty(12, dtype=torch.int64, device=device)
    compute_slot_mapping(positions, starts, tables, 4, 13, slots)

    rejected, anchors, following = there(
        torch.tensor([0, 0, 2, 0], dtype=torch.int32), torch.tensor([-1, -1, 91, 92]), torch.tensor([33, -1, -1, -1])
    )
    shifted = torch.empty(12, dtype=torch.int64, device=device)
    last = torch.empty(4, dtype=torch.int32, device=device)
    prepare_prefill_inputs(ids, starts, rejected, anchors, following, shifted, last)

    step_positions, step_lens, step_slots = there(
        torch.tensor([6, 0, 11, 2]), torch.tensor([7, 0, 12, 3], dtype=torch.int32), torch.tensor([5, -1, 3, 2])
    )
    for _ in range(2):
        advance_draft_step(step_positions, step_lens, step_slots, tables, 4, 13, None)

    context_lens, seat_anchors, seats, drafts, is_prompt, lens, sampled = there(
        torch.tensor([9, 4, 2, 77], dtype=torch.int32),
        torch.arange(4) + 70,
        torch.tensor([1, -1, 0, 2], dtype=torch.int32),
        torch.tensor([[-1, -1], [-1, -1], [5, -1], [-1, -1]]),
        torch.tensor([True, False, False, False]),
        torch.from_numpy(LENS.copy()),
        torch.tensor([0, 0, 3, 1], dtype=torch.int32),
    )
    input_ids, input_positions = torch.empty((2, 12), dtype=torch.int64, device=device)
    prepare_target_inputs(
        context_lens, seat_anchors, seats, ids, starts, drafts, starts, is_prompt, input_ids, input_positions
    )
    commit_verdict(context_lens, seat_anchors, seats, lens, rejected, sampled, anchors)
    metadata = [slots, shifted, last, step_positions, step_lens, step_slots]
    return [*metadata, input_ids, input_positions, context_lens, seat_anchors]


def sampling_kernels(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn((9, 997), generator=generator) * 3).to(device)
    probs = torch.softmax(torch.randn((4, 2, 997), generator=generator), dim=-1).to(device)
    rows = torch.arange(9, device=device)
    starts = torch.tensor([0, 3, 3, 6, 9], dtype=torch.int32, device=device)
    drafts = torch.randint(0, 997, (4, 2), generator=generator).to(device)
    temperatures = torch.tensor([0.0, 1.0, 0.7, 1.3], device=device)
    some = torch.tensor([True, False, True, False], device=device)
    counts = counts_with_drafts(torch.zeros((4, 997), dtype=torch.int32, device=device), drafts, starts)
    ones = torch.ones(9, device=device)
    processed = apply_penalties(logits, counts > 1, counts, ones * 1.2, ones * 0.1, ones * 0.2)
    processed = apply_bias(processed, rows, rows * 3, ones)
    processed = filter_logits(processed, ones * 0.8, (ones * 40).to(torch.int32), ones * 0.9, ones * 0.01)
    verdict = verify(processed, starts, drafts, temperatures, rows[:4] - 2, rows[:4], ~some, probs, some)
    greedy = verify_greedy(logits, starts, drafts)
    drawn = gumbel_sample(processed, ones, rows * 77 - 5, rows, TARGET)
    words = random_words(rows * 77 - 5, rows << 33, TARGET, 1001)
    return [
        counts,
        processed > -torch.inf,
        verdict.tokens,
        verdict.num_sampled,
        verdict.num_accepted,
        greedy.tokens,
        drawn,
        words,
        uniform(rows, rows, TARGET, 9),
    ]


def attention(device: str, dtype: torch.dtype, window: int | None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    q = torch.randn((9, 4, 16), generator=generator).to(device, dtype)
    k, v = torch.randn((2, 9, 2, 16), generator=generator).to(device, dtype)
    k_cache, v_cache = torch.randn((2, 13, 4, 2, 16), generator=generator).to(device, dtype)
    seq_lens = np.where(LENS > 0, CONTEXT + LENS, 0).astype(np.int32)
    slots = layout.make_slot_mapping(TABLES.numpy(), layout.make_positions(CONTEXT, LENS), STARTS.numpy(), 4, 99, 9)
    metadata = AttentionMetadata(
        query_start_loc=STARTS.to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        block_tables=TABLES.to(device),
        slot_mapping=torch.from_numpy(slots).to(device),
        max_query_len=5,
        max_seq_len=14,
        query_start_loc_np=STARTS.numpy(),
        seq_lens_np=seq_lens,
    )
    plain_k, plain_v = k_cache.clone(), v_cache.clone()
    write_kv(k, v, metadata.slot_mapping, plain_k, plain_v)
    expected = paged_attention(
        q, plain_k, plain_v, metadata.query_start_loc, metadata.seq_lens, metadata.block_tables, 0.25, window
    )
    got = TorchAttention(4, 2, 16, 0.25, window).plan(metadata).run(q, k, v, k_cache, v_cache)
    assert torch.equal(k_cache, plain_k)
    assert torch.equal(v_cache, plain_v)
    return [expected, got]


def test_metadata_kernels_on_a_gpu() -> None:
    for there, here in zip(metadata_kernels("cuda"), metadata_kernels("cpu"), strict=True):
        assert torch.equal(there.cpu(), here)


def test_sampling_kernels_on_a_gpu() -> None:
    for there, here in zip(sampling_kernels("cuda"), sampling_kernels("cpu"), strict=True):
        assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_on_a_gpu(dtype: torch.dtype, window: int | None) -> None:
    here = attention("cpu", dtype, window)[0].float()
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}[dtype]
    for there in attention("cuda", dtype, window):
        torch.testing.assert_close(there.cpu().float(), here, rtol=tolerance, atol=tolerance)
