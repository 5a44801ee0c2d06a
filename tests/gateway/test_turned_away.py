"""What are clients told that come to a full queue?"""

from __future__ import annotations

import pytest

from gateway.turned_away import TurnedAway


def test_each_is_told_a_place_of_its_own_up_to_the_length_of_the_queue() -> None:
    line = TurnedAway()
    line.ended(40.0)
    told = [line.come_back_s(num_running=4, num_waiting=2, now=100.0) for _ in range(5)]
    assert told == [10.0, 20.0, 30.0, 30.0, 30.0]


def test_places_that_have_come_free_are_told_of_no_more() -> None:
    line = TurnedAway()
    line.ended(8.0)
    assert [line.come_back_s(1, 5, now) for now in (0.0, 4.0, 20.0)] == [8.0, 12.0, 8.0]


def test_the_time_is_between_a_second_and_a_minute() -> None:
    line = TurnedAway()
    assert line.come_back_s(1, 0, 5.0) == 1.0  # nothing is known yet
    line.ended(0.01)
    assert line.come_back_s(64, 9, 9.0) == 1.0
    slow = TurnedAway()
    slow.ended(600.0)
    assert slow.come_back_s(1, 256, 0.0) == 60.0


def test_requests_that_end_sooner_shorten_it() -> None:
    line = TurnedAway()
    line.ended(60.0)
    for _ in range(50):
        line.ended(10.0)
    assert line.come_back_s(1, 9, 0.0) == pytest.approx(10.0, abs=0.5)
