"""Nothing on the way from a plan to a launched step reads the device: no value, no count, no copy to the host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from target_service.messages import SamplingSettings
from tests.target_service.device.bench import DEVICE, Bench, Planner, Request, outputs_without_drafts
from tests.target_service.device.local_drafter import LocalDrafter
from tests.target_service.device.test_equality import SETTINGS, known_of

ROOT = Path(__file__).resolve().parents[3]
# What makes the host wait for a GPU. `to` and `copy_` do so only without non_blocking, `__getitem__` with a mask.
READS = ["item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu", "nonzero"]
# The references may: the Triton kernels in their place do not. So may what stands for a GPU's attention.
ALLOWED = (str(ROOT / "kernels" / "reference"), str(ROOT / "kernels" / "attention"), str(ROOT / "tests"))
OURS = (str(ROOT / "target_service"), str(ROOT / "engine"), str(ROOT / "kernels"))


def reader() -> str | None:
    """The innermost file of ours on the stack, when it may not read."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(ALLOWED):
            return None
        if name.startswith(OURS):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@contextmanager
def no_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Note every read of a tensor by the code under test."""
    found: list[str] = []
    with monkeypatch.context() as patched:
        for name in READS:

            def watched(tensor: torch.Tensor, *arguments: Any, _name: str = name, **named: Any) -> Any:
                where = reader()
                if where is not None:
                    found.append(f"{_name} at {where}")
                return originals[_name](tensor, *arguments, **named)

            patched.setattr(torch.Tensor, name, watched)

        index = torch.Tensor.__getitem__

        def indexed(tensor: torch.Tensor, key: Any) -> Any:
            keys = key if isinstance(key, tuple) else (key,)
            where = reader()
            if where is not None and any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in keys):
                found.append(f"mask at {where}")
            return index(tensor, key)

        patched.setattr(torch.Tensor, "__getitem__", indexed)
        repeat = torch.repeat_interleave

        def repeated(*arguments: Any, **named: Any) -> Any:
            where = reader()
            if named.get("output_size") is None and where is not None:
                found.append(f"repeat_interleave at {where}")
            return repeat(*arguments, **named)

        patched.setattr(torch, "repeat_interleave", repeated)
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("error")  # torch's own watch, over what it knows to wait
        try:
            yield found
        finally:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")


originals = {name: getattr(torch.Tensor, name) for name in READS}


@pytest.mark.parametrize("graphs", [True, False])
def test_a_launch_reads_nothing(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    requests = [
        Request(f"r{index}", list(range(20 + index, 33 + index)), 8, SamplingSettings(**settings), draft_len=3)
        for index, settings in enumerate([*SETTINGS, {"temperature": 1.0, "seed": 4, "num_logprobs": 2}])
    ]
    expected = outputs_without_drafts(Bench(tiny_dir, "host"), requests)
    bench = Bench(tiny_dir, cuda_graphs=graphs)
    assert bench.local is not None
    drafter = LocalDrafter(bench.local, known_of(requests, expected))
    planner = Planner(bench, 4, chunk=6)
    with no_reads(monkeypatch) as found:
        for request in requests:
            planner.place(request)
    assert not found
    while any(not request.done for request in requests):
        active = [request for request in requests if planner.can_plan(request)]
        if active and len(planner.under_way) < planner.depth:
            with no_reads(monkeypatch) as found:
                step = planner.launch(active)
            assert not found
            drafter.answer(step, drafter.look(step))
        else:
            planner.take()
    planner.drain()


def test_the_watcher_sees_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Code that stands in our tree and reads in every way."""
    source = (
        "def reads(t, torch):\n"
        "    t[0].item(); t.tolist(); bool(t[0]); int(t[0]); t.numpy(); t.cpu(); t.nonzero(); t[t > 0]\n"
        "    torch.repeat_interleave(t, t)\n"
    )
    space: dict[str, Any] = {}
    exec(compile(source, str(ROOT / "target_service" / "device" / "made_up.py"), "exec"), space)
    with no_reads(monkeypatch) as found:
        space["reads"](torch.tensor([1, 2]), torch)
    assert {text.split(" at ")[0] for text in found} >= {
        *("item", "tolist", "__bool__", "__int__", "numpy", "cpu", "nonzero", "mask", "repeat_interleave")
    }
