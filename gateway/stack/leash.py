"""How does a service process never outlive the supervisor that started it, not even one that is killed with -9?

`python leash.py PARENT_PID COMMAND...` asks the kernel for SIGKILL at the parent's death (Linux: `prctl(2)`,
PR_SET_PDEATHSIG, which lasts over exec), makes sure that the parent is still there, and becomes COMMAND. The standard
library alone, so that it costs a few milliseconds. The signal reaches this one process; a service with children ties
them to itself. On systems without prctl the command runs all the same: a supervisor that ends in any other way than
by SIGKILL stops it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Become the command. Raises OSError when the command cannot be run."""
    parent, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:  # it died before the kernel knew
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
