"""Waiting on a word: woken by a change, bounded in time, with futex and with polling."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest

from engine.channel.futex import Futex


@pytest.mark.parametrize("use_syscall", [True, False], ids=["futex", "polling"])
def test_wait_ends_with_the_change(use_syscall: bool) -> None:
    futex, word = Futex(use_syscall), ctypes.c_uint32(4)
    waits = threading.Event()
    ended: list[float] = []

    def wait() -> None:
        waits.set()
        while word.value == 4:
            futex.wait(word, 4, 30.0)
        ended.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    assert waits.wait(10)
    changed = time.monotonic()
    word.value = 5
    futex.wake(word)
    thread.join(10)
    assert not thread.is_alive()
    assert ended[0] - changed < 5


@pytest.mark.parametrize("use_syscall", [True, False], ids=["futex", "polling"])
def test_wait_ends_with_its_time(use_syscall: bool) -> None:
    futex, word = Futex(use_syscall), ctypes.c_uint32(4)
    start = time.monotonic()
    futex.wait(word, 4, 0.05)
    assert 0.04 < time.monotonic() - start < 5


@pytest.mark.parametrize("use_syscall", [True, False], ids=["futex", "polling"])
def test_a_word_that_differs_already_is_not_waited_for(use_syscall: bool) -> None:
    start = time.monotonic()
    Futex(use_syscall).wait(ctypes.c_uint32(4), 3, 30.0)
    Futex(use_syscall).wait(ctypes.c_uint32(4), 4, 0.0)
    assert time.monotonic() - start < 5


def test_the_fence_of_weakly_ordered_machines_returns() -> None:
    futex = Futex()
    futex.ordered_stores = False
    futex.fence()
