"""Does Triton's launcher get the same of a prepared launch as of an ordinary one? No GPU is needed: kernels are
compiled for one, and a stand-in of the launcher notes what it is called with.

    python -m tests.kernels.triton.prepare_all
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton

from kernels.forms import Forms
from kernels.kernel_set import kernel_set
from tests.kernels.triton.compile_all import Hopper
from tests.kernels.triton.form_cases import CASES, form_of

LAUNCHES = 14
# Grid, stream, function and options of the kernel; behind them come the hooks' arguments, then the kernel's.
HEAD, REST = 6, 9


class Driver(Hopper):
    """Loads nothing, and launches into `calls`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.utils = SimpleNamespace(
            load_binary=lambda name, binary, shared, device: ("module", name, 1, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 1 << 18},
            unload_module=lambda handle: None,
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: self.calls.append(arguments)


def same(prepared: tuple[Any, ...], ordinary: tuple[Any, ...]) -> bool:
    """An ordinary launch has tensors for addresses; empty ones are not read, wherever they are."""
    if prepared[:HEAD] != ordinary[:HEAD] or len(prepared) != len(ordinary):
        return False
    for got, expected in zip(prepared[REST:], ordinary[REST:], strict=True):
        if isinstance(expected, torch.Tensor):
            if expected.numel() and got != expected.data_ptr():
                return False
        elif got != expected:
            return False
    return True


def main() -> None:
    driver = Driver()
    triton.runtime.driver.set_active(driver)
    kernels = kernel_set("triton")
    for title, make in CASES.items():
        case, forms = make("cpu"), Forms()
        for index in range(LAUNCHES):
            case.put(index)
            arguments = case.arguments(index)
            form = forms.get(form_of(index))
            if form is None:
                forms.keep(form_of(index), getattr(kernels.prepare, case.name)(*arguments))
                continue
            del driver.calls[:]
            form(*case.numbers(index))
            getattr(kernels, case.name)(*arguments)
            prepared, ordinary = driver.calls
            assert same(prepared, ordinary), (title, index, prepared, ordinary)
        assert len(forms) == 2, title
        print(f"{title}: as ordinary launches")


if __name__ == "__main__":
    main()
