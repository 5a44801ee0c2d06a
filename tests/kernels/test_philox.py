"""Noise: the generator's published known answers, and that a value depends on its key and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.reference import philox
from kernels.reference.sampling import gumbel_noise

ONES = 0xFFFFFFFF


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


# Random123's kat_vectors, philox4x32 with 10 rounds; the third's inputs are digits of pi.
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = words(*counter)
    k0, k1 = words(*key)
    assert tuple(word.item() for word in philox.philox4x32((c0, c1, c2, c3), (k0, k1))) == answer


def test_words_are_those_of_the_counter_described() -> None:
    """Index, position and stream sit in the counter, the seed in the key; a seed is a bit pattern: all ones is -1."""
    seed, position, stream = -1, (5 << 32) | 9, 2
    got = philox.random_words(torch.tensor([seed]), torch.tensor([position]), stream, 10)[0].tolist()
    expected: list[int] = []
    for index in range(3):
        c0, c1, c2, c3 = words(index, 9, 5, stream)
        k0, k1 = words(ONES, ONES)
        expected += [int(word) for word in philox.philox4x32((c0, c1, c2, c3), (k0, k1))]
    assert got == expected[:10]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 3), st.integers(1, 33))
def test_noise_depends_on_its_key_alone(seed: int, position: int, stream: int, num: int) -> None:
    alone = philox.uniform(torch.tensor([seed]), torch.tensor([position]), stream, num)
    seeds = torch.tensor([3, seed, 4, seed])
    positions = torch.tensor([position, position, 0, position])
    crowd = philox.uniform(seeds, positions, stream, num + 7)
    assert torch.equal(crowd[1, :num], alone[0])
    assert torch.equal(crowd[3], crowd[1])
    assert not torch.equal(crowd[0, :num], alone[0]) or num == 0 or seed == 3
    assert float(crowd.min()) > 0
    assert float(crowd.max()) < 1


def test_streams_seeds_and_positions_differ() -> None:
    one, zero = torch.tensor([1]), torch.tensor([0])
    draws = [philox.uniform(one, zero, stream, 8) for stream in range(4)]
    draws += [philox.uniform(zero, zero, 0, 8), philox.uniform(one, one, 0, 8), philox.uniform(one, one << 32, 0, 8)]
    draws += [philox.uniform(one << 32, zero, 0, 8)]
    for i, first in enumerate(draws):
        assert all(not torch.equal(first, second) for second in draws[i + 1 :])


def test_the_ends_of_the_interval_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(philox, "random_words", lambda *_: torch.tensor([[0, ONES]]))
    nothing = torch.zeros(1, dtype=torch.int64)
    low, high = philox.uniform(nothing, nothing, 0, 2)[0].tolist()
    assert low == 2.0**-33
    assert high == 1.0 - 2.0**-24
    noise = gumbel_noise(nothing, nothing, 0, 2)[0].tolist()
    assert all(math.isfinite(value) for value in noise)
    assert noise[0] > 22
    assert noise[1] > -3


def test_uniform_and_gumbel_have_their_moments() -> None:
    positions = torch.arange(64)
    uniform = philox.uniform(torch.full((64,), 11), positions, philox.DRAFT, 4096).double()
    assert abs(float(uniform.mean()) - 0.5) < 0.002
    assert abs(float(uniform.var()) - 1 / 12) < 0.001
    noise = gumbel_noise(torch.full((64,), 11), positions, philox.TARGET, 4096).double()
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
