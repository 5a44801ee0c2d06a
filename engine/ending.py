"""How does a process end that must not come to the interpreter's end?

That end destroys whatever is left: a process group that was not left, graphs with its collectives in them. Libraries
may wait there for peers and devices that never come back, and nobody would end the wait. What is written is written
first; what has to be freed for others (shared memory) the caller has freed, since nothing else runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import NoReturn


def end_now(status: int) -> NoReturn:
    """End this process with `status`, at once and from whatever thread, with everything said that was to be said."""
    try:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
                stream.flush()
    finally:
        os._exit(status)
