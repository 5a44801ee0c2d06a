"""When is a bug in one step a matter of that step alone, and when is the device lost?

An error that CUDA reports asynchronously (a bad address in a kernel) ends the context: every call from then on fails.
Nothing can be served any more, so the process has to end, and whoever supervises it starts another.
"""

from __future__ import annotations

import torch


class DeviceLost(Exception):
    """The CUDA context is broken; detail says by what."""


def raise_if_device_lost(error: BaseException) -> None:
    """DeviceLost when the device can do nothing more after `error`; else returns."""
    if not isinstance(error, RuntimeError) or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as broken:
        raise DeviceLost(str(broken).splitlines()[0]) from error
