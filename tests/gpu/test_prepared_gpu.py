"""Prepared launches on a GPU: bit for bit what ordinary ones do, two forms in turn, in a graph's capture too.

`-k small` leaves out what is about time, and goes to the sanitizers.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from kernels.forms import Form, Forms
from kernels.kernel_set import KernelSet, kernel_set
from tests.kernels.triton.form_cases import CASES, FormCase, form_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed"),
]

DEVICE = "cuda"
LAUNCHES = 40


@pytest.fixture(scope="module")
def triton() -> KernelSet:
    return kernel_set("triton")


def assert_same(got: FormCase, expected: FormCase, index: int) -> None:
    for place, (one, other) in enumerate(zip(got.tensors(), expected.tensors(), strict=True)):
        assert torch.equal(one, other), f"launch {index}, tensor {place}"


def forms_of(kernels: KernelSet, case: FormCase) -> list[Form]:
    """Both forms, each with its first launch."""
    forms = Forms()
    for index in (0, 1):
        case.put(index)
        forms.keep(form_of(index), getattr(kernels.prepare, case.name)(*case.arguments(index)))
    found = [forms.get(0), forms.get(1)]
    assert None not in found, f"{case.name} was not prepared"
    return [form for form in found if form is not None]


@pytest.mark.parametrize("title", CASES, ids=lambda title: f"small {title}")
def test_later_launches_equal_ordinary_ones(triton: KernelSet, title: str) -> None:
    case, ordinary = CASES[title](DEVICE), CASES[title](DEVICE)
    forms = forms_of(triton, case)
    kernel = getattr(triton, case.name)
    for index in (0, 1):  # what both go on from: the forms' first launches have been
        ordinary.put(index)
        kernel(*ordinary.arguments(index))
    assert_same(case, ordinary, 1)
    for index in range(2, LAUNCHES):
        case.put(index)
        ordinary.put(index)
        forms[form_of(index)](*case.numbers(index))
        kernel(*ordinary.arguments(index))
        assert_same(case, ordinary, index)


@pytest.mark.parametrize("title", CASES, ids=lambda title: f"small {title}")
def test_later_launches_are_captured(triton: KernelSet, title: str) -> None:
    """On the stream that captures; replayed, they have the effects of ordinary ones."""
    case, ordinary = CASES[title](DEVICE), CASES[title](DEVICE)
    forms = forms_of(triton, case)
    kernel = getattr(triton, case.name)
    for index in (0, 1):  # what both go on from
        ordinary.put(index)
        kernel(*ordinary.arguments(index))
    torch.cuda.synchronize()
    graphs = {index: torch.cuda.CUDAGraph() for index in (7, 8)}
    for index, graph in graphs.items():
        with torch.cuda.graph(graph):
            forms[form_of(index)](*case.numbers(index))
    assert_same(case, ordinary, 1)  # capturing runs nothing
    for index in (7, 8, 8, 7):
        case.put(index)
        ordinary.put(index)
        graphs[index].replay()
        kernel(*ordinary.arguments(index))
        assert_same(case, ordinary, index)


def test_launches_on_another_stream(triton: KernelSet) -> None:
    """The stream is asked for at each launch."""
    title = "write_ring_entry"
    case, ordinary = CASES[title](DEVICE), CASES[title](DEVICE)
    forms = forms_of(triton, case)
    for index in (0, 1):
        ordinary.put(index)
        triton.write_ring_entry(*ordinary.arguments(index))
    case.put(4)
    ordinary.put(4)
    triton.write_ring_entry(*ordinary.arguments(4))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        forms[form_of(4)](*case.numbers(4))
    behind = torch.cuda.Event()
    behind.record(stream)
    assert not behind.query(), "the launch went past the work before it"
    stream.synchronize()
    assert_same(case, ordinary, 4)
