"""Noise word for word, draws token for token, and the filters' choice of tokens."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.reference import philox as plain_philox
from kernels.reference import sampling as plain_sampling
from kernels.triton import philox, sampling
from kernels.triton.philox import DRAFT, TARGET
from tests.kernels.triton.device import DEVICE, MANY, ON_GPU, call, generator, there

SEEDS = torch.tensor([-1, 0, 3 << 40, 12345, -(2**63), 2**63 - 1])
POSITIONS = torch.tensor([(5 << 32) | 9, 0, 7, 2**40, 3, 1])


@pytest.mark.parametrize("num", [0, 1, 2, 5, 1001, 4099])
def test_words_and_uniforms_are_the_references_bit_for_bit(num: int) -> None:
    seeds, positions = there(SEEDS, POSITIONS)
    words = philox.random_words(seeds, positions, 2, num)
    assert torch.equal(words.cpu(), plain_philox.random_words(SEEDS, POSITIONS, 2, num))
    uniform = philox.uniform(seeds, positions, 1, num)
    assert torch.equal(uniform.cpu(), plain_philox.uniform(SEEDS, POSITIONS, 1, num))


def test_gumbel_noise_is_the_references_to_a_few_roundings() -> None:
    seeds, positions = there(SEEDS, POSITIONS)
    got = sampling.gumbel_noise(seeds, positions, DRAFT, 50_000 if ON_GPU else 9000)
    expected = plain_sampling.gumbel_noise(SEEDS, POSITIONS, DRAFT, got.shape[1])
    torch.testing.assert_close(got.cpu(), expected, rtol=2e-6, atol=1e-6)
    assert got.isfinite().all()


@pytest.mark.parametrize("vocab", [1, 3, 64, 997, 5000, 9001])
def test_draws_equal_the_references(vocab: int) -> None:
    """Vocabularies of one chunk and of several; greedy rows among others; rows that are filtered; far-apart logits."""
    noise = generator(vocab)
    logits = torch.randn((9, vocab), generator=noise) * torch.tensor([1.0, 5, 30, 1, 1, 1, 1, 1, 1])[:, None]
    logits[4] = torch.where(torch.rand(vocab, generator=noise) < 0.9, -math.inf, logits[4])
    logits[4, vocab // 2] = 1.0
    logits[5] = -math.inf
    logits[5, -1] = -1e4
    temperature = torch.tensor([1.0, 0.7, 1.3, 0.0, 1.0, 1.0, 1e-40, 2.0, 0.0])
    seeds, positions = torch.arange(9) * 77 - 300, torch.arange(9) << 33
    expected = plain_sampling.gumbel_sample(logits, temperature, seeds, positions, TARGET)
    got = call(sampling.gumbel_sample, *there(logits, temperature, seeds, positions), TARGET)
    assert got.tolist() == expected.tolist()
    assert got[5] == vocab - 1
    # Alone, and from rows that are not next to each other.
    (wide,) = there(torch.cat((logits, logits), dim=1))
    one = there(temperature[2:3], seeds[2:3], positions[2:3])
    alone = call(sampling.gumbel_sample, wide[2:3, :vocab], *one, TARGET)
    assert alone[0] == expected[2]


def test_of_equal_logits_the_first_wins() -> None:
    (logits,) = there(torch.zeros((2, 6000)))
    zeros = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    logits[0, :4500] = -1
    tokens = sampling.gumbel_sample(logits, torch.zeros(2, device=DEVICE), zeros, zeros, TARGET)
    assert tokens.tolist() == [4500, 0]


def test_a_draw_of_no_rows() -> None:
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    logits = torch.zeros((0, 5), device=DEVICE)
    assert sampling.gumbel_sample(logits, nothing.float(), nothing, nothing, TARGET).shape == (0,)
    assert sampling.filter_logits(logits, nothing.float(), nothing, nothing.float(), nothing.float()).shape == (0, 5)


ROWS = [
    (temperature, top_k, top_p, min_p)
    for temperature in (0.0, 0.5, 1.7)
    for top_k, top_p, min_p in (
        *((0, 1.0, 0.0), (1, 1.0, 0.0), (5, 1.0, 0.0), (13, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.93, 0.0)),
        *((0, 0.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.03), (0, 1.0, 1.0), (5, 0.7, 0.0), (7, 0.93, 0.1), (2, 0.011, 0.4)),
    )
]


@pytest.fixture(params=[1000, 0], ids=["few", "many"])
def few_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to how many rows are few."""
    monkeypatch.setattr(sampling, "FEW_ROWS", request.param)


def filtered(logits: torch.Tensor, rows: list[tuple[float, int, float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(kernel's, reference's) filtered logits."""
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    arguments = (logits, temperature, top_k.to(torch.int32), top_p, min_p)
    return sampling.filter_logits(*there(*arguments)).cpu(), plain_sampling.filter_logits(*arguments)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("vocab", [13, 1])
def test_filters_keep_what_the_reference_keeps(vocab: int) -> None:
    logits = torch.randn((len(ROWS), vocab), generator=generator(3)) * 2
    got, expected = filtered(logits, ROWS)
    assert got.tolist() == expected.tolist()


@pytest.mark.usefixtures("few_rows")
def test_filters_keep_ties_and_live_with_what_is_excluded_already() -> None:
    logits = torch.tensor(
        [[1.0, 3.0, 2.0, 2.0], [-math.inf, 3.0, -math.inf, 2.0], [5.0, 5.0, 5.0, 5.0], [30.0, 31.0, -math.inf, 30.999]]
    )
    rows = [(1.0, 2, 1.0, 0.0), (1.0, 0, 0.999, 0.0), (1.0, 2, 0.3, 0.0), (1e-38, 2, 0.9, 0.1)]
    got, expected = filtered(logits, rows)
    assert got.tolist() == expected.tolist()
    assert got[0].tolist() == [-math.inf, 3.0, 2.0, 2.0]
    # Tokens that tie with the k-th do not dilute the k's mass: 0.6 of two thirds of four equals is two of them.
    tied = torch.tensor([[2.0, 1.0, 1.0, 1.0]])
    got, expected = filtered(tied, [(1.0, 2, 0.7, 0.0)])
    assert got.tolist() == expected.tolist()


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("seed", range(MANY // 2))
def test_filters_over_a_larger_vocabulary(seed: int) -> None:
    """Several blocks of the vocabulary. Sums in another order may end a token sooner or later, no more."""
    vocab = 9001
    noise = generator(seed)
    logits = torch.randn((3, vocab), generator=noise) * torch.tensor([0.1, 1.0, 4.0])[:, None]
    got, expected = filtered(logits, [(1.0, 0, 0.95, 0.0), (0.8, 2000, 0.9, 0.0), (1.2, 50, 1.0, 0.001)])
    for row in range(3):
        ours, theirs = got[row] > -math.inf, expected[row] > -math.inf
        assert int((ours ^ theirs).sum()) <= 2
        assert torch.equal(got[row][ours], logits[row][ours])


FILTERED_ROWS = [
    (1.0, 0, 0.95, 0.0),
    (0.8, 300, 0.9, 0.0),
    (1.2, 50, 1.0, 0.001),
    (0.0, 5, 0.5, 0.5),
    (1.0, 4000, 1.0, 0.0),
]


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("vocab", [2047, 2048, 2049, 6200])
def test_a_filtered_row_does_not_depend_on_the_rows_beside_it(vocab: int) -> None:
    """Chunks that end with the vocabulary, one before and one behind it; values that come several times."""
    logits = (torch.randn((len(FILTERED_ROWS), vocab), generator=generator(vocab)) * 8).round() / 4
    logits[:, 100:200] = -math.inf
    together, expected = filtered(logits, FILTERED_ROWS)
    assert torch.equal(together, expected)
    for row, settings in enumerate(FILTERED_ROWS):
        alone, _ = filtered(logits[row : row + 1], [settings])
        assert torch.equal(alone[0], together[row])


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("top_p", [1 - 2**-24, 1 - 2**-22])
def test_a_share_that_rounding_may_keep_out_of_reach_keeps_everything(top_p: float) -> None:
    logits = torch.randn((2, 5000), generator=generator(4)) * 0.01
    logits[1, 5:] = -math.inf
    got, _ = filtered(logits, [(1.0, 0, top_p, 0.0), (1.0, 4, top_p, 0.0)])
    assert int((got[0] == logits[0]).sum()) >= 4998
    assert torch.equal(got[1].topk(4).values, logits[1].topk(4).values)
    assert int((got[1] > -math.inf).sum()) == 4


def test_what_is_no_number_is_filtered_alike_by_few_and_by_many(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, math.nan, 0.0, math.nan]] * 3)
    rows = [(1.0, 5, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.1)]
    kept = []
    for few in (1000, 0):
        monkeypatch.setattr(sampling, "FEW_ROWS", few)
        got, _ = filtered(logits, rows)
        kept.append(got.nan_to_num(nan=99.0).tolist())
    assert kept[0] == kept[1]
