"""How does a thread sleep until another process changes a word in shared memory?

Linux's futex, called through ctypes (futex(2); the shared form, without FUTEX_PRIVATE_FLAG): the kernel compares the
word and puts the caller to sleep in one atomic act, and a wake costs one system call. Elsewhere, polling with growing
pauses.

Memory order. Both ends write through plain 8-byte aligned stores (ctypes and torch copies), and the protocol needs two
orders: data before tag before counter at the writer, and counter before tag before data before tag again at the
reader. x86 keeps stores in order among stores and loads in order among loads (the C library ends the streaming stores
of a large copy with a fence of its own), and neither the interpreter nor a C call between two of them lets a compiler
move one over the other, so nothing more is needed there. On machines of weaker order, such as aarch64, `fence` must
stand between the steps: it makes a futex wake call on a word nobody waits for, whose kernel path holds a full memory
barrier (futex_hb_waiters_pending, kernel/futex/futex.h).
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time

FUTEX_WAIT = 0
FUTEX_WAKE = 1
WAKE_ALL = 2**31 - 1
SYSCALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
# Polling fallback: short enough that a hop costs little beside a step, long enough to leave the other end its core.
FIRST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 2e-3


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """Sleeping and waking on 32-bit words. One per process is enough; it holds no state of any word."""

    def __init__(self, use_syscall: bool = True) -> None:
        machine = platform.machine()
        self.ordered_stores = machine in ("x86_64", "AMD64", "i686")
        self._number = SYSCALL_NUMBERS.get(machine) if use_syscall and sys.platform == "linux" else None
        # CDLL (not PyDLL): the interpreter lock is released while a thread sleeps.
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._nobody = ctypes.c_uint32(0)

    def wait(self, word: ctypes.c_uint32, value: int, timeout_s: float) -> None:
        """Sleep while `word` holds `value`, until woken or until timeout_s passed; may return early for no reason.

        Callers look at the word again: nothing is returned because nothing but the word itself is true.
        """
        if timeout_s <= 0:
            return
        if self._number is None:
            self._poll(word, value, timeout_s)
            return
        whole = int(timeout_s)
        timeout = _Timespec(whole, int((timeout_s - whole) * 1e9))
        # EAGAIN (the word differs already), EINTR and ETIMEDOUT all mean: look again.
        self._libc.syscall(
            ctypes.c_long(self._number),
            ctypes.byref(word),
            ctypes.c_int(FUTEX_WAIT),
            ctypes.c_uint32(value),
            ctypes.byref(timeout),
            None,
            ctypes.c_int(0),
        )

    def wake(self, word: ctypes.c_uint32) -> None:
        """Wake everyone who sleeps on `word`, in any process."""
        if self._number is None:
            return
        self._libc.syscall(
            ctypes.c_long(self._number),
            ctypes.byref(word),
            ctypes.c_int(FUTEX_WAKE),
            ctypes.c_int(WAKE_ALL),
            None,
            None,
            ctypes.c_int(0),
        )

    def fence(self) -> None:
        """A full memory barrier where the machine needs one between two plain stores or two plain loads."""
        if not self.ordered_stores:
            self.wake(self._nobody)

    @staticmethod
    def _poll(word: ctypes.c_uint32, value: int, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        pause = FIRST_PAUSE_S
        while word.value == value and (left := end - time.monotonic()) > 0:
            time.sleep(min(pause, left))  # the only way to wait for another process's store without futex
            pause = min(2 * pause, LONGEST_PAUSE_S)
