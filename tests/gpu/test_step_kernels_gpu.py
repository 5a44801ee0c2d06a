"""The Triton kernels that prepare a step and turn its logits into tokens, on a GPU, against their references.

Sizes are odd, outputs are poisoned. `-k small` picks a subset that ends soon under compute-sanitizer.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from engine.graphs import GraphCache
from kernels import layout
from kernels.kernel_set import KernelSet
from kernels.reference.argmax import make_scratch
from tests.gpu.comparing import DEVICE, DTYPES, ints, junk, longs, near, poisoned, random, same

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed"),
]


# Rows: a chunk of 140 tokens, nothing, a verify row, a decode row, another verify row at the length limit.
STARTS = (0, 140, 140, 145, 146, 151)
LENS = (140, 0, 5, 1, 5)
CONTEXT = (300, 0, 9, 16, 4091)


def metadata_calls(kernels: KernelSet) -> list[torch.Tensor]:
    """Everything that the metadata kernels write, from the same inputs."""
    rows, tokens, width, limit = len(LENS), STARTS[-1], 257, 4094
    starts, seats = ints(*STARTS), ints(3, -1, 0, 2, 1)
    generator = torch.Generator().manual_seed(5)
    tables = (torch.randperm(rows * width, generator=generator).view(rows, width) + 1).to(DEVICE, torch.int32)
    positions = torch.from_numpy(layout.make_positions(np.array(CONTEXT), np.array(LENS))).to(DEVICE)
    ids = torch.arange(tokens, device=DEVICE) + 50
    slots = junk(tokens + 7)
    kernels.compute_slot_mapping(positions, starts, tables, 16, limit, slots)

    shifted, last = junk(tokens + 7), junk(rows, dtype=torch.int32)
    following, anchors = longs(33, -1, -1, -1, -1), longs(-1, -1, 91, 92, 93)
    kernels.prepare_prefill_inputs(ids, starts, ints(0, 0, 2, 0, 4), anchors, following, shifted, last)

    step_positions, step_lens, step_slots = longs(6, 0, 4092, 15, 2), ints(7, 0, 4093, 16, 3), longs(5, -1, 3, 2, 1)
    for active in (None, torch.tensor([True, True, True, False, True], device=DEVICE), None):
        kernels.advance_draft_step(step_positions, step_lens, step_slots, tables, 16, limit, active)

    context_lens, seat_anchors = ints(9, 4091, 16, 300), longs(70, 71, 72, 73)
    drafts = longs(*range(1, 21)).view(rows, 4) - 2
    is_prompt = torch.tensor([True, False, False, False, False], device=DEVICE)
    input_ids, input_positions = junk(tokens + 7), junk(tokens + 7)
    kernels.prepare_target_inputs(
        context_lens, seat_anchors, seats, ids, starts, drafts, starts, is_prompt, input_ids, input_positions
    )
    kernels.commit_verdict(
        context_lens, seat_anchors, seats, ints(*LENS), ints(0, 0, 2, 0, 4), ints(0, 0, 3, 1, 1), anchors
    )

    groups, padded_rows = 2, rows + 3
    out_starts, out_lens = junk(padded_rows + 1, dtype=torch.int32), junk(groups, padded_rows, dtype=torch.int32)
    out_tables, out_slots = junk(groups, padded_rows, width, dtype=torch.int32), junk(groups, tokens + 7)
    seq_lens = ints(*(context + length for context, length in zip(CONTEXT, LENS, strict=True)))
    kernels.fill_metadata(
        *(seats, starts, seq_lens, positions, torch.stack((tables, tables + 7)), [16, 32], limit),
        *(out_starts, out_lens, out_tables, out_slots),
    )
    state = [step_positions, step_lens, step_slots, context_lens, seat_anchors]
    return [slots, shifted, last, *state, input_ids, input_positions, out_starts, out_lens, out_tables, out_slots]


def test_small_metadata(triton: KernelSet, plain: KernelSet) -> None:
    for got, expected in zip(metadata_calls(triton), metadata_calls(plain), strict=True):
        same(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "vocab"),
    [(2, 5003), (9, 9001), (1, 128256), (64, 128256), (5, 49152)],
    ids=["small", "small in turns", "llama", "many rows", "smollm2"],
)
def test_argmax(triton: KernelSet, plain: KernelSet, rows: int, vocab: int, dtype: torch.dtype) -> None:
    """In bfloat16 equals are many. Often, for the programs of a row meet in another order each time."""
    logits = random(rows, vocab + 8, dtype=dtype)[:, :vocab]
    logits[0, vocab // 2 :] = torch.nan
    if rows > 1:
        logits[-1] = -torch.inf
    ids = torch.randperm(vocab, device=DEVICE)
    scratch, expected = make_scratch(rows, DEVICE), torch.empty(rows, dtype=torch.int64)
    plain.argmax(logits.cpu(), None, scratch.cpu(), expected)
    for _ in range(20):
        columns, chosen = junk(rows), junk(rows)
        triton.argmax(logits, None, scratch, columns)
        triton.argmax(logits, ids, scratch, chosen)
        same(columns.cpu(), expected)
        same(chosen.cpu(), ids.cpu()[expected])
        assert not scratch.any()


def test_argmax_in_graphs_that_share_their_scratch(triton: KernelSet) -> None:
    """As the steps of a drafter do: of several sizes, one after the other, with what they read renewed between runs."""
    scratch, graphs = make_scratch(64, DEVICE), GraphCache(DEVICE, 8)
    logits, out = torch.empty((64, 128256), device=DEVICE), junk(64)
    generator = torch.Generator(DEVICE).manual_seed(1)
    for _ in range(10):
        logits.normal_(generator=generator)
        for rows in (64, 9, 1):
            first = 64 - rows
            for _ in range(2):
                out[first:] = -1
                graphs.run(rows, partial(triton.argmax, logits[first:], None, scratch, out[first:]))
                same(out, logits.argmax(dim=1))
    assert graphs.counts.replays > 50
    assert not scratch.any()


@pytest.mark.parametrize("vocab", [997, 49152, 128256], ids=["small", "smollm2", "llama"])
def test_noise_and_sampling(triton: KernelSet, plain: KernelSet, vocab: int) -> None:
    rows = torch.arange(7, device=DEVICE)
    seeds, positions = rows * 77 - 300, rows << 33
    logits = random(7, vocab, scale=3.0)
    logits[4, : vocab // 2] = -torch.inf
    temperature = torch.tensor([1.0, 0.7, 1.3, 0.0, 1.0, 2.0, 1e-3], device=DEVICE)
    same(triton.uniform(seeds, positions, 1, 1003), plain.uniform(seeds, positions, 1, 1003))
    near(triton.gumbel_noise(seeds, positions, 2, vocab), plain.gumbel_noise(seeds, positions, 2, vocab), 2e-6)
    with poisoned():
        drawn = triton.gumbel_sample(logits, temperature, seeds, positions, 3)
    same(drawn, plain.gumbel_sample(logits, temperature, seeds, positions, 3))
    top_k, one = ints(50, 0, 7, 1, 0, 300, 3), torch.ones(7, device=DEVICE)
    top_p, min_p = one * 0.93, torch.tensor([0, 0.05, 0, 0, 0, 0.001, 0], device=DEVICE)
    for copies in (1, 8):  # few rows, and many
        arguments = (logits, temperature, top_k, top_p, min_p)
        many = tuple(argument.repeat(copies, *[1] * (argument.dim() - 1)) for argument in arguments)
        with poisoned():
            got = triton.filter_logits(*many)
        expected = plain.filter_logits(*many)
        # Sums in another order may end a token sooner or later, no more.
        assert int(((got > -torch.inf) != (expected > -torch.inf)).sum(dim=1).max()) <= 2
        kept = got > -torch.inf
        same(got[kept], many[0][kept])


@pytest.mark.parametrize(("vocab", "width"), [(70, 3), (49152, 4), (128256, 3)], ids=["small", "smollm2", "llama"])
def test_verification(triton: KernelSet, plain: KernelSet, vocab: int, width: int) -> None:
    """Greedy, match and weighed rows, ragged and empty."""
    lens = [width + 1, 1, 0, width, width + 1, width + 1]
    starts = ints(0, *np.cumsum(lens).tolist())
    generator = torch.Generator().manual_seed(vocab)
    drafts = torch.randint(-1, 6, (len(lens), width), generator=generator).to(DEVICE)
    logits = random(sum(lens), vocab)
    for row, length in enumerate(lens):
        for column in range(min(length, width)):
            draft = int(drafts[row, column])
            if draft >= 0 and (row + column) % 4:
                logits[int(starts[row]) + column, draft] += 12
    probs = torch.softmax(random(len(lens), width, vocab, scale=2.0), dim=-1)
    rows = torch.arange(len(lens), device=DEVICE)
    temperature = torch.tensor([1.0, 0.5, 1.0, 0.0, 2.0, 1.0], device=DEVICE)
    match_only = torch.tensor([False, True, False, False, False, True], device=DEVICE)
    has_probs = torch.tensor([True, True, True, True, False, True], device=DEVICE)
    with poisoned():
        same(triton.verify_greedy(logits, starts, drafts), plain.verify_greedy(logits, starts, drafts))
    arguments = (logits, starts, drafts, temperature, rows * 17 - 40, rows + (40 << 31), match_only)
    for given, has in ((None, None), (probs, None), (probs, has_probs)):
        with poisoned():
            got = triton.verify(*arguments, given, has)
        same(got, plain.verify(*arguments, given, has))
