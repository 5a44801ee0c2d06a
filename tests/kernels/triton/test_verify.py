"""The accept rule: the reference's verdict, token for token, in all three cases and mixed."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import verify as plain
from kernels.reference.verify import Verdict
from kernels.triton import verify as kernel
from kernels.triton.philox import DRAFT
from kernels.triton.sampling import gumbel_sample
from tests.kernels.triton.device import DEVICE, MANY, ON_GPU, call, generator, there


def assert_same(got: Verdict, expected: Verdict) -> None:
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert got.num_sampled.tolist() == expected.num_sampled.tolist()
    assert got.num_accepted.tolist() == expected.num_accepted.tolist()
    assert got.tokens.dtype == expected.tokens.dtype
    assert got.num_sampled.dtype == got.num_accepted.dtype == torch.int32


def make_rows(
    seed: int, vocab: int, width: int, lens: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits, cu_logits, drafts, draft_probs): a target that likes the drafts often enough to accept some."""
    noise = generator(seed)
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    drafts = torch.randint(-1, min(vocab, 6), (len(lens), width), generator=noise)
    logits = torch.randn((int(starts[-1]), vocab), generator=noise)
    for row, length in enumerate(lens):
        for column in range(min(length, width)):
            if drafts[row, column] >= 0 and torch.rand(1, generator=noise) < 0.8:
                logits[starts[row] + column, drafts[row, column]] += 5 if vocab < 100 else 9
    probs = torch.softmax(torch.randn((len(lens), width, vocab), generator=noise) * 2, dim=-1)
    return logits, starts, drafts, probs


@pytest.mark.parametrize(("vocab", "width"), [(8, 3), (1, 1), (5000, 2), (33, 0), (70, 7)])
def test_greedy(vocab: int, width: int) -> None:
    logits, starts, drafts, _ = make_rows(1, vocab, width, [width + 1, 1, 0, max(1, width), width + 1])
    expected = plain.verify_greedy(logits, starts, drafts)
    assert_same(kernel.verify_greedy(*there(logits, starts, drafts)), expected)


def test_greedy_of_no_rows_and_of_rows_without_logits() -> None:
    empty = torch.zeros((0, 8), device=DEVICE)
    none = kernel.verify_greedy(
        empty, torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros((0, 3), dtype=torch.int64, device=DEVICE)
    )
    assert none.tokens.shape == (0, 4)
    unsampled = kernel.verify_greedy(
        empty, torch.zeros(3, dtype=torch.int32, device=DEVICE), torch.zeros((2, 3), dtype=torch.int64, device=DEVICE)
    )
    assert unsampled.tokens.tolist() == [[-1] * 4] * 2
    assert unsampled.num_sampled.tolist() == unsampled.num_accepted.tolist() == [0, 0]


@pytest.mark.parametrize("probs_for", ["none", "all", "some"])
@pytest.mark.parametrize(("vocab", "width"), [(8, 3), (1, 1), (5000, 2), (33, 0)])
@pytest.mark.parametrize("seed", range(MANY // 2))
def test_mixed_rows(seed: int, vocab: int, width: int, probs_for: str) -> None:
    """Greedy, match and weighed rows, ragged and empty, in one batch."""
    lens = [width + 1, 1, 0, max(1, width), width + 1, width + 1, width + 1]
    logits, starts, drafts, probs = make_rows(seed + 5, vocab, width, lens)
    rows = torch.arange(len(lens))
    temperatures = torch.tensor([1.0, 0.5, 1.0, 0.0, 2.0, 1.0, 1.0])
    match_only = torch.tensor([False, True, False, False, False, True, False])
    seeds, positions = rows * 17 - 40 + seed, rows + (40 << 31)
    has_probs = None
    if probs_for == "some":
        has_probs = torch.tensor([True, True, True, True, False, True, True])
        # Of rows whose probabilities are not to be read.
        probs[4] = torch.nan
    given = None if probs_for == "none" else probs
    arguments = (logits, starts, drafts, temperatures, seeds, positions, match_only)
    expected = plain.verify(*arguments, given, has_probs)
    probs_there, has_there = (None if value is None else value.to(DEVICE) for value in (given, has_probs))
    got = call(kernel.verify, *there(*arguments), probs_there, has_there)
    assert_same(got, expected)


def test_probabilities_of_a_wider_buffer_and_drafts_of_one() -> None:
    """A reply entry's rows are wider than the step's: strides are honoured."""
    logits, starts, drafts, probs = make_rows(3, 12, 4, [3, 3, 3])
    drafts, probs = drafts[:, :2].clamp(min=0), probs[:, :2]
    rows = torch.arange(3)
    some = (torch.ones(3), rows, rows, rows < 0)
    expected = plain.verify(logits, starts, drafts, *some, probs, None)
    wide_drafts, wide_probs = torch.full((3, 5), -9, device=DEVICE), torch.full((3, 4, 20), torch.nan, device=DEVICE)
    wide_drafts[:, :2], wide_probs[:, :2, :12] = drafts.to(DEVICE), probs.to(DEVICE)
    got = call(kernel.verify, *there(logits, starts), wide_drafts[:, :2], *there(*some), wide_probs[:, :2, :12], None)
    assert_same(got, expected)


@pytest.mark.parametrize("second", [1, 4500])
def test_an_empty_residual_falls_back_to_the_target(second: int) -> None:
    """Draft probabilities that cover the target's leave no positive part; a refused draft is token 0 or `second`."""
    num, vocab = (400 if ON_GPU else 20), second + 3
    logits = torch.full((2 * num, vocab), -torch.inf)
    logits[:, [0, second]] = 0
    probs = torch.zeros((num, 1, vocab))
    probs[:, 0, [0, second]] = 0.75
    rows = torch.arange(num)
    arguments = (
        *(logits, torch.arange(0, 2 * num + 1, 2, dtype=torch.int32), torch.zeros((num, 1), dtype=torch.int64)),
        *(torch.ones(num), rows, rows, rows < 0),
    )
    expected = call(plain.verify, *arguments, probs, None)
    assert_same(call(kernel.verify, *there(*arguments), probs.to(DEVICE), None), expected)
    assert 0 < int(expected.num_accepted.sum()) < num
    assert set(expected.tokens[:, 0].tolist()) == {0, second}


@pytest.mark.skipif(not ON_GPU, reason="65,536 rows take hours under Triton's interpreter")
def test_rejection_leaves_the_targets_distribution() -> None:
    trials = 65_536
    target = torch.tensor([0.30, 0.20, 0.15, 0.10, 0.10, 0.05, 0.05, 0.05], device=DEVICE)
    draft = torch.tensor([0.05, 0.05, 0.05, 0.10, 0.10, 0.15, 0.20, 0.30], device=DEVICE)
    seeds = torch.arange(trials, device=DEVICE) * 104_729
    positions = torch.arange(trials, device=DEVICE) % 977
    one = torch.ones(trials, device=DEVICE)
    drafts = gumbel_sample(draft.log().expand(trials, 8).contiguous(), one, seeds, positions, DRAFT)
    verdict = kernel.verify(
        target.log().expand(2 * trials, 8).contiguous(),
        torch.arange(0, 2 * trials + 1, 2, dtype=torch.int32, device=DEVICE),
        drafts[:, None],
        one,
        seeds,
        positions,
        seeds < 0,
        draft.expand(trials, 1, 8).contiguous(),
        None,
    )
    share = torch.bincount(verdict.tokens[:, 0], minlength=8) / trials
    assert float((share - target).abs().sum()) / 2 < 0.008
    assert 0.47 < verdict.num_accepted.double().mean().item() < 0.53
