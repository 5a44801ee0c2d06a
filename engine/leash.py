"""How does a process that another one started never outlive it, not even when that one is killed with -9?

On Linux the kernel sends SIGKILL at the parent's death (`prctl(2)`, PR_SET_PDEATHSIG). Elsewhere, and where the thread
that started it is long gone, the end of a pipe tells: the parent holds the writing end for as long as it lives.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1


def tie_to_parent(parent_pid: int, pipe: int, exit_status: int) -> None:
    """End this process with its parent: by SIGKILL, or with `exit_status` once `pipe` (a file descriptor) ends. Nothing
    else may read from it afterwards.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the kernel knew
        os._exit(exit_status)
    threading.Thread(target=_wait_for_end, args=(pipe, exit_status), name="leash", daemon=True).start()


def _wait_for_end(pipe: int, exit_status: int) -> None:
    while os.read(pipe, 1):  # not by a file object, whose lock this thread would hold at the interpreter's end
        pass
    os._exit(exit_status)
