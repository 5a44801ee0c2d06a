"""Which launches may be prepared, and what does Triton's launcher get of a later one? The compiled kernel is a fake."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton import language as tl
from triton.runtime.jit import JITFunction

from kernels.forms import Forms
from kernels.triton import prepared as module
from kernels.triton.prepared import Launch, Prepared, launch, prepare, prepared

NUMBERS = ("seq", "num_rows")
OTHER_WAY, DIRECTLY = "as Triton does", "directly"


def _kernel(
    out_ptr: Any, seq: Any, num_rows: Any, width: Any, empty_ptr: Any, BLOCK: tl.constexpr, LAST: tl.constexpr = 7
) -> None:
    tl.store(out_ptr + tl.arange(0, BLOCK), seq + num_rows + width + LAST)


class Compiled:
    """What a launch returns. types: of the kernel's parameters, as Triton has made them."""

    function, packed_metadata = 4711, (1, 1, 0)

    def __init__(self, launches: list[tuple[Any, ...]], types: dict[str, str]) -> None:
        self._launches = launches
        self.src = SimpleNamespace(signature=types)

    def run(self, *arguments: Any) -> None:
        self._launches.append((DIRECTLY, *arguments))


class Kernel(JITFunction):  # type: ignore[misc]
    """Notes launches instead of making them."""

    def __init__(self, do_not_specialize: tuple[str, ...] = (*NUMBERS, "empty_ptr"), wide: bool = False) -> None:
        super().__init__(_kernel, do_not_specialize=list(do_not_specialize))
        self.launches: list[tuple[Any, ...]] = []
        number = "i64" if wide else "i32"
        self.types = {"out_ptr": "*i64", "seq": number, "num_rows": number, "width": "i32", "empty_ptr": "*i32"}

    def run(self, *arguments: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Compiled:
        self.launches.append((OTHER_WAY, grid, *arguments, options))
        return Compiled(self.launches, self.types)


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current stream, which may change."""
    current = [99]
    monkeypatch.setattr(module, "_current", lambda: (3, lambda device: current[0] + device))
    return current


OUT, STARTS = torch.zeros(16, dtype=torch.int64), torch.zeros(9, dtype=torch.int32)


def of(kernel: Any, empty: torch.Tensor = STARTS[3:]) -> Launch:
    return Launch(kernel, (2,), (OUT, 7, 1, 5, empty), {"BLOCK": 16, "num_warps": 1}, NUMBERS)


def prepared_of(kernel: Kernel) -> Prepared:
    form = prepared(of(kernel))
    assert form is not None
    return form


def test_the_first_launch_is_an_ordinary_one_and_the_later_ones_bind_nothing(streams: list[int]) -> None:
    kernel = Kernel()
    form = prepared_of(kernel)
    options = {"BLOCK": 16, "num_warps": 1}
    assert kernel.launches == [(OTHER_WAY, (2,), OUT, 7, 1, 5, *kernel.launches[0][6:7], options)]
    del kernel.launches[:]
    form((4, 1), 16, 3)
    streams[0] = 500
    form((1, 6), 1, 0)
    rest = (5, STARTS.data_ptr() + 12, 16, 7)  # constants are there, where the kernel has them, and defaults
    assert kernel.launches == [
        (DIRECTLY, 4, 1, 1, 102, 4711, (1, 1, 0), None, None, None, OUT.data_ptr(), 16, 3, *rest),
        (DIRECTLY, 1, 6, 1, 503, 4711, (1, 1, 0), None, None, None, OUT.data_ptr(), 1, 0, *rest),
    ]


def test_an_empty_tensor_has_its_place_all_the_same() -> None:
    """In a later launch it may have elements: `data_ptr` would be 0."""
    kernel = Kernel()
    form = prepared(of(kernel, STARTS[9:]))
    assert form is not None
    assert STARTS[9:].data_ptr() == 0
    form((4, 1), 16, 3)
    assert kernel.launches[-1][-3] == STARTS.data_ptr() + 36
    # Where the kernel was compiled for address 0, that is one of those which 16 divides.
    specialised = Kernel(NUMBERS)
    assert prepared(of(specialised, STARTS[9:])) is None
    assert len(specialised.launches) == 1
    assert prepared(of(specialised, STARTS[4:4])) is not None


@pytest.mark.parametrize("names", [("num_rows",), ("seq",), ()])
def test_a_number_that_may_be_a_constant_is_refused_before_anything_runs(names: tuple[str, ...]) -> None:
    kernel = Kernel(names)
    with pytest.raises(TypeError, match=r"_kernel: (seq|num_rows) varies .* not do_not_specialize"):
        prepared(of(kernel))
    for wrong in ("BLOCK", "no_such"):
        with pytest.raises(TypeError, match=f"_kernel: {wrong} varies"):
            prepared(replace(of(Kernel()), varying=(wrong,)))
    assert kernel.launches == []


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 2**40])
def test_a_number_too_large_for_its_type_goes_the_ordinary_way(number: int) -> None:
    kernel = Kernel()
    form = prepared_of(kernel)
    form((4, 1), number, 3)
    options = {"BLOCK": 16, "num_warps": 1}
    assert kernel.launches[-1] == (OTHER_WAY, (4, 1), OUT, number, 3, 5, *kernel.launches[-1][6:7], options)
    form((4, 1), 2**31 - 1, -(2**31))
    assert kernel.launches[-1][0] == DIRECTLY
    wide = Kernel(wide=True)
    prepared_of(wide)((4, 1), number, 3)
    assert wide.launches[-1][0] == DIRECTLY


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_told_of_every_launch(hook: str) -> None:
    kernel = Kernel()
    form = prepared_of(kernel)
    chain, listen = getattr(knobs.runtime, hook), print
    chain.add(listen)
    try:
        form((4, 1), 16, 3)
        assert kernel.launches[-1][0] == OTHER_WAY
    finally:
        chain.remove(listen)
    form((4, 1), 16, 3)
    assert kernel.launches[-1][0] == DIRECTLY


def test_numbers_are_counted() -> None:
    form = prepared_of(Kernel())
    with pytest.raises(ValueError, match="zip"):
        form((4, 1), 16)


def test_the_interpreter_has_no_forms() -> None:
    calls: list[Any] = []

    class Interpreted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: calls.append((grid, arguments, options))

    assert prepared(of(Interpreted())) is None
    assert len(calls) == 1


def test_a_function_is_prepared_with_the_kernel_that_it_launches() -> None:
    kernel = Kernel()

    def function(num_rows: int, *, launcher: module.Launcher = launch) -> None:
        if num_rows:
            launcher(of(kernel))

    function(1)
    assert len(kernel.launches) == 1
    assert isinstance(prepare(function, (1,)), Prepared)
    assert len(kernel.launches) == 2
    assert prepare(function, (0,)) is None
    assert len(kernel.launches) == 2


def test_forms_used_last_are_kept() -> None:
    forms, made = Forms(2), [lambda: None, lambda: None, lambda: None]
    forms.keep("a", made[0])
    forms.keep("b", made[1])
    assert forms.get("a") is made[0]
    forms.keep("c", made[2])
    forms.keep("none", None)
    assert forms.get("b") is None
    assert forms.get("none") is None
    assert (forms.get("a"), forms.get("c"), len(forms)) == (made[0], made[2], 2)
    forms.clear()
    assert forms.get("a") is None
