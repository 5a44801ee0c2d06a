"""From logits to a token: penalties, bias, filters, and the draw, each against a plain sentence of what it does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.reference.philox import DRAFT, TARGET
from kernels.reference.sampling import (
    SamplingTensors,
    apply_bias,
    apply_penalties,
    counts_with_drafts,
    filter_logits,
    gumbel_sample,
)


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 1.0]])
    prompt = torch.tensor([[True, True, False, False, False]])
    counts = torch.tensor([[0, 0, 1, 3, 0]], dtype=torch.int32)
    got = apply_penalties(logits, prompt, counts, torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([0.25]))
    assert got.tolist() == [[1.0, -4.0, 1.0 - 0.25 - 0.5, -4.0 - 0.75 - 0.5, 1.0]]
    assert logits.tolist() == [[2.0, -2.0, 2.0, -2.0, 1.0]]


def test_penalties_that_are_off_change_nothing() -> None:
    off = SamplingTensors.greedy(3)
    logits = torch.randn(3, 11)
    counts = torch.ones((3, 11), dtype=torch.int32)
    got = apply_penalties(
        logits, counts > 0, counts, off.repetition_penalty, off.presence_penalty, off.frequency_penalty
    )
    assert torch.equal(got, logits)


def test_drafts_count_as_output_from_the_row_after_them() -> None:
    committed = torch.tensor([[1, 0, 0], [0, 0, 2]], dtype=torch.int32)
    drafts = torch.tensor([[1, 1], [0, -1]])
    counts = counts_with_drafts(committed, drafts, torch.tensor([0, 3, 5], dtype=torch.int32))
    assert counts.tolist() == [[1, 0, 0], [1, 1, 0], [1, 2, 0], [0, 0, 2], [1, 0, 2]]
    none = counts_with_drafts(committed, drafts[:, :0], torch.tensor([0, 1, 1], dtype=torch.int32))
    assert none.tolist() == [[1, 0, 0]]


def test_bias_adds_up_and_leaves_the_rest() -> None:
    logits = torch.zeros(2, 3)
    got = apply_bias(logits, torch.tensor([0, 0, 1]), torch.tensor([2, 2, 0]), torch.tensor([1.0, 2.0, -5.0]))
    assert got.tolist() == [[0, 0, 3], [-5, 0, 0]]
    assert logits.abs().sum() == 0


def kept_by_words(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Which tokens the filters keep, said token by token in double precision. Logits are distinct."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if temperature == 0:
        return set(order)
    if 0 < top_k < len(order):
        order = order[:top_k]
    weights = [math.exp((logits[token] - logits[order[0]]) / temperature) for token in order]
    kept: set[int] = set()
    before = 0.0
    for token, weight in zip(order, weights, strict=True):
        share = weight / sum(weights)
        # The best token always stays; the next ones while the mass before them is short of top_p.
        if not kept or (before < top_p and weight >= min_p * weights[0]):
            kept.add(token)
        before += share
    return kept


ROW = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    st.sampled_from([0, 1, 2, 5, 12, 13, 50]),
    st.sampled_from([1.0, 0.93, 0.5, 0.011, 0.0]),
    st.sampled_from([0.0, 0.03, 0.4, 1.0]),
)


@given(st.lists(ROW, min_size=1, max_size=5), st.integers(0, 10_000))
def test_filters_keep_what_the_words_keep(rows: list[tuple[float, int, float, float]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((len(rows), 13), generator=generator) * 2
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    got = filter_logits(logits, temperature, top_k.to(torch.int32), top_p, min_p)
    for row, (row_temperature, k, p, m) in enumerate(rows):
        kept = kept_by_words(logits[row].tolist(), row_temperature, k, p, m)
        expected = [value if token in kept else -math.inf for token, value in enumerate(logits[row].tolist())]
        assert got[row].tolist() == expected


@pytest.mark.parametrize(
    ("spread", "top_k", "top_p"),
    [(0.1, 0, 0.95), (0.1, 2000, 1.0), (0.1, 2000, 0.9), (0.1, 7, 0.9), (9.0, 0, 0.9), (9.0, 2000, 0.9)],
)
def test_filters_over_a_large_vocabulary(spread: float, top_k: int, top_p: float) -> None:
    """Flat rows, whose answer lies beyond the tokens looked at first, and peaked ones, side by side."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.stack(
        (torch.randperm(5000, generator=generator) / 5000 * spread, torch.randperm(5000, generator=generator) / 100)
    )
    both = torch.ones(2)
    got = filter_logits(logits, both, both.to(torch.int32) * top_k, both * top_p, both * 0)
    for row in range(2):
        kept = set(torch.nonzero(got[row] > -math.inf)[:, 0].tolist())
        expected = kept_by_words(logits[row].tolist(), 1.0, top_k, top_p, 0.0)
        # Sums in single precision end within a token or two of sums in double precision.
        assert len(kept ^ expected) <= 2
        assert torch.equal(got[row][list(kept)], logits[row][list(kept)])


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([[30.0, 31.0, -math.inf, 30.999]])
    tiny = torch.full((1,), 1e-40)
    one = torch.ones(1, dtype=torch.int64)
    filtered = filter_logits(logits, tiny, one.to(torch.int32) * 2, torch.full((1,), 0.9), torch.full((1,), 0.1))
    assert gumbel_sample(filtered, tiny, one, one, TARGET).tolist() == [1]


def test_filters_keep_ties_with_the_last_token() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0]])
    one = torch.ones(1)
    got = filter_logits(logits, one, torch.tensor([2], dtype=torch.int32), one, torch.zeros(1))
    assert got.tolist() == [[-math.inf, 3.0, 2.0, 2.0]]


def test_filter_works_on_logits_that_are_filtered_already() -> None:
    logits = torch.tensor([[-math.inf, 3.0, -math.inf, 2.0]])
    got = filter_logits(
        logits, torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.full((1,), 0.999), torch.zeros(1)
    )
    assert got.tolist() == logits.tolist()


def test_a_draw_follows_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0])
    trials = 40_000
    # Logits at temperature 2 are twice the log of the distribution wanted.
    logits = (2 * probs.log()).expand(trials, 5)
    tokens = gumbel_sample(
        logits, torch.full((trials,), 2.0), torch.arange(trials) * 7919, torch.arange(trials), TARGET
    )
    share = torch.bincount(tokens, minlength=5) / trials
    assert float((share - probs).abs().sum()) / 2 < 0.01
    assert share[4] == 0


def test_greedy_rows_take_the_best_token_and_a_row_is_the_same_in_a_crowd() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn((6, 301), generator=generator)
    temperature = torch.tensor([0.0, 1.0, 0.7, 0.0, 1.3, 1.0])
    seeds, positions = torch.tensor([9, 9, -4, 9, 2**62, 9]), torch.tensor([3, 3, 8, 3, 0, 3])
    crowd = gumbel_sample(logits, temperature, seeds, positions, TARGET)
    assert crowd[0] == logits[0].argmax()
    for row in range(6):
        one = slice(row, row + 1)
        assert gumbel_sample(logits[one], temperature[one], seeds[one], positions[one], TARGET)[0] == crowd[row]
    assert not torch.equal(gumbel_sample(logits, temperature, seeds, positions, DRAFT), crowd)


def test_a_drawn_token_is_never_a_filtered_one() -> None:
    logits = torch.full((50, 97), -math.inf)
    logits[:, 13] = -1e4
    tokens = gumbel_sample(logits, torch.ones(50), torch.arange(50), torch.arange(50), TARGET)
    assert tokens.tolist() == [13] * 50


def test_select_takes_rows() -> None:
    state = SamplingTensors.greedy(4)
    state.temperature.copy_(torch.arange(4.0))
    state.seeds.copy_(torch.arange(4) * 10)
    chosen = state.select(torch.tensor([3, 1, 1]))
    assert chosen.temperature.tolist() == [3, 1, 1]
    assert chosen.seeds.tolist() == [30, 10, 10]
    assert chosen.top_p.tolist() == [1, 1, 1]
