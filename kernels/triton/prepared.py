"""How is a Triton kernel launched without binding its arguments anew each time?

A kernel that Triton compiled for one set of arguments serves every other that it would specialise in the same way:
pointers of the same alignment, the same constants, and numbers that it does not look into. So a prepared launch keeps
the compiled kernel and the addresses of its tensors, which Triton's launcher takes as plain integers without asking the
driver, and puts a few numbers in. Those must be `do_not_specialize`: of any other, Triton may have made a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# Where an integer argument's type ends, as Triton chose it from the first number.
_LIMITS = {"i32": 1 << 31, "i64": 1 << 63}


# By which Triton specialises addresses.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and what it is launched with. arguments: by position, tensors and numbers. options: by name, constants
    of the kernel and options of Triton's. varying: numbers among the arguments that differ from launch to launch.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    varying: tuple[str, ...]

    def run(self) -> Any:
        """Launch it as Triton does. Returns the compiled kernel."""
        return self.kernel[self.grid](*self.arguments, **self.options)


Launcher = Callable[[Launch], None]


def launch(once: Launch) -> None:
    """Launch it, once."""
    once.run()


def prepare(function: Callable[..., None], arguments: tuple[Any, ...]) -> Prepared | None:
    """Call a function that launches one kernel, through its keyword argument `launcher`, and return that kernel's later
    launches. None: there are none, as in Triton's interpreter.

    TypeError: a varying number may be specialised; nothing was launched.
    """
    found: list[Prepared | None] = []
    function(*arguments, launcher=lambda first: found.append(prepared(first)))
    return found[0] if found else None


def prepared(first: Launch) -> Prepared | None:
    """Launch it, and return the later launches: see `prepare`."""
    if not isinstance(first.kernel, JITFunction):
        first.run()
        return None
    places = _places(first.kernel, first.varying)
    compiled = first.run()
    arguments = _bound(first)
    return None if compiled is None or arguments is None else Prepared(first, compiled, places, arguments)


class Prepared:
    """Launches of one form, on the device that was current when it was prepared. Works inside a graph's capture too.

    Holds the tensors, so their addresses stay theirs. Used by one thread.
    """

    def __init__(self, first: Launch, compiled: Any, places: Sequence[int], arguments: list[Any]) -> None:
        """compiled: what the first launch returned. places: of the varying numbers among the arguments, which are
        those of all parameters.
        """
        types = compiled.src.signature
        self.first = first
        self._compiled = compiled
        self._numbers = [(place, _LIMITS[types[name]]) for place, name in zip(places, first.varying, strict=True)]
        self._arguments = arguments
        self._run, self._function, self._metadata = compiled.run, compiled.function, compiled.packed_metadata
        self._device, self._current_stream = _current()

    def __call__(self, grid: tuple[int, int], *numbers: int) -> None:
        """Enqueue a launch on the current stream. numbers: the varying ones, in their order."""
        arguments, fits = self._arguments, True
        for (place, limit), number in zip(self._numbers, numbers, strict=True):
            arguments[place] = number
            fits = fits and -limit <= number < limit
        runtime = knobs.runtime
        if fits and not _is_set(runtime.launch_enter_hook) and not _is_set(runtime.launch_exit_hook):
            stream = self._current_stream(self._device)
            self._run(grid[0], grid[1], 1, stream, self._function, self._metadata, None, None, None, *arguments)
        else:
            self._as_triton_does(grid, numbers)

    def _as_triton_does(self, grid: tuple[int, int], numbers: tuple[int, ...]) -> None:
        """For a number that needs a wider type, and for hooks, which want to know what is launched."""
        arguments = list(self.first.arguments)
        for (place, _), number in zip(self._numbers, numbers, strict=True):
            arguments[place] = number
        replace(self.first, grid=grid, arguments=tuple(arguments)).run()


def _current() -> tuple[int, Callable[[int], int]]:
    """The current device, and what tells a device's current stream."""
    return driver.active.get_current_device(), driver.active.get_current_stream


def _places(kernel: Any, varying: Sequence[str]) -> list[int]:
    """Where the kernel has the varying numbers."""
    params = {param.name: param for param in kernel.params}
    for name in varying:
        if name not in params or params[name].is_constexpr or not params[name].do_not_specialize:
            raise TypeError(f"{kernel.__name__}: {name} varies between launches, and is not do_not_specialize")
    names = list(params)
    return [names.index(name) for name in varying]


def _bound(first: Launch) -> list[Any] | None:
    """Every parameter's argument in the kernel's order, constants too: the launcher skips those. Tensors as addresses.

    None: Triton took an empty tensor for one at address 0, and may not treat what begins where it does in that way.
    """
    bound: list[Any] = []
    for place, param in enumerate(first.kernel.params):
        if place < len(first.arguments):
            value = first.arguments[place]
        else:
            value = first.options.get(param.name, param.default)
        if isinstance(value, torch.Tensor):
            address = _address(value)
            if address != value.data_ptr() and address % _ALIGNMENT and not param.do_not_specialize:
                return None
            value = address
        bound.append(value)
    return bound


def _address(tensor: torch.Tensor) -> int:
    """Where it begins. An empty one's `data_ptr` is 0; in a later launch it may have elements."""
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()


def _is_set(hook: Any) -> bool:
    """Whether anybody is called: newer versions have a chain of calls, which may be empty."""
    return hook is not None and bool(getattr(hook, "calls", True))
