"""Are seats handed out once, layers grouped right, and KV caches zeroed and of the stated shape?"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from engine.errors import IntegrityError
from engine.kv_cache import KVCache
from engine.kv_group import KVGroup, group_layers
from engine.seats import SeatAllocator


def test_the_lowest_free_seat_is_handed_out_and_none_when_full() -> None:
    seats = SeatAllocator(3)
    assert [seats.acquire() for _ in range(4)] == [0, 1, 2, None]
    seats.release(2)
    seats.release(0)
    assert seats.num_free == 2
    assert seats.acquire() == 0


@pytest.mark.parametrize("seat", [0, 1, 7])
def test_releasing_a_seat_that_is_not_taken_is_refused(seat: int) -> None:
    seats = SeatAllocator(2)
    seats.acquire()
    seats.release(0)
    with pytest.raises(IntegrityError, match=f"seat {seat} is not taken"):
        seats.release(seat)


def test_an_allocator_has_seats() -> None:
    with pytest.raises(ValueError, match="num_seats"):
        SeatAllocator(0)


@dataclass(frozen=True)
class Windows:
    windows: tuple[int | None, ...]


def test_layers_of_one_window_form_a_group() -> None:
    assert group_layers(Windows((None, None))) == (KVGroup("full", "full", (0, 1), None),)
    assert group_layers(Windows((8, None, 8))) == (
        KVGroup("sliding_8", "sliding", (0, 2), 8),
        KVGroup("full", "full", (1,), None),
    )


def test_cache_is_zeroed_contiguous_and_separate_by_layer() -> None:
    cache = KVCache(5, 4, num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.float16)
    assert cache.k(0).shape == (5, 4, 2, 8)
    assert cache.v(2).dtype == torch.float16
    cache.k(1).fill_(1.0)
    for layer in range(3):
        assert cache.v(layer).eq(0).all()
        assert cache.k(layer).is_contiguous()
        assert bool(cache.k(layer).any()) == (layer == 1)
    assert KVCache.bytes_per_block(4, 3, 2, 8, torch.float16) * 5 == 2 * 3 * cache.k(0).nbytes
