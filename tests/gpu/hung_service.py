"""A real service whose GPU hangs in a kernel: `python -m tests.gpu.hung_service SERVICE FLAG --config FILE`.

Behind the first launch of a step after the file FLAG is there comes a kernel that never ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

# Of the GPU's clock: longer than anybody waits.
FOR_EVER = 1 << 60
LAUNCHES = {
    "target": ("target_service.device.local_forward", "LocalStepForward", "uniform"),
    "drafter": ("drafter_service.device.eagle3", "Eagle3Program", "follow"),
}


def hang_when(flag: Path, owner: Any, name: str) -> None:
    """Let the method enqueue the kernel behind what it enqueues itself, once `flag` is there."""
    method: Callable[..., Any] = getattr(owner, name)

    def hanging(*arguments: Any, **options: Any) -> Any:
        result = method(*arguments, **options)
        if flag.exists():
            flag.unlink()
            torch.cuda._sleep(FOR_EVER)
            print("the GPU hangs from here on", flush=True)
        return result

    setattr(owner, name, hanging)


def main() -> int:
    service, flag, *arguments = sys.argv[1:]
    module, owner, method = LAUNCHES[service]
    hang_when(Path(flag), getattr(import_module(module), owner), method)
    status: int = import_module(f"{service}_service.__main__").main(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
