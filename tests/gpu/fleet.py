"""Which stacks do the GPU tests run, and how are they all started at once?

A stack takes most of its time to load and compile, so all that the selected tests need are started side by side, on
one GPU under one MPS daemon, and used in turn. OUTRIDER_TEST_DEVICE=cpu runs the same tests without a GPU, to try the
tests themselves; cuda:1 takes another GPU, and OUTRIDER_TEST_DRAFTER_DEVICE gives the drafters one of their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared_gpu import has_gpu
from tests.end_to_end.stack import Stack, running_stack
from tests.end_to_end.variants import Models

DEVICE = os.environ.get("OUTRIDER_TEST_DEVICE", "cuda")
DRAFTER_DEVICE = os.environ.get("OUTRIDER_TEST_DRAFTER_DEVICE", DEVICE)
NEEDS_GPU = pytest.mark.skipif(DEVICE != "cpu" and not has_gpu(), reason="no NVIDIA GPU on this machine")
GPU_INDEX = None if DEVICE == "cpu" else int(DEVICE.partition(":")[2] or 0)


@dataclass(frozen=True, slots=True)
class StackChoice:
    """Settings over those of `sections`. draft: the drafter's checkpoint under the models root. Tiny model, fp32."""

    draft: str = "eagle3"
    method: str = "eagle3"
    both: Mapping[str, Any] = field(default_factory=dict)
    target: Mapping[str, Any] = field(default_factory=dict)
    drafter: Mapping[str, Any] = field(default_factory=dict)
    gateway: Mapping[str, Any] = field(default_factory=dict)


CHUNKED = {"max_step_tokens": 12}
STACKS: dict[str, StackChoice] = {
    "lockstep": StackChoice(),
    "run-ahead-chunked": StackChoice(gateway={"depth": 3, **CHUNKED}),
    "reuse": StackChoice(drafter={"metadata_source": "reuse"}, gateway={"depth": 2}),
    "eager": StackChoice(both={"cuda_graphs": False}, gateway={"depth": 3}),
    "draft-model": StackChoice("noisy", "draft_model", gateway={"depth": 2}),
    # Over NCCL where there are two GPUs; on one, over gloo, whose collectives wait for the device.
    "ranks": StackChoice(target={"pcp_size": 2, "execution": "device"}, gateway={"depth": 3, **CHUNKED}),
    "host": StackChoice(both={"execution": "host"}, gateway={"depth": 2}),
    "starved": StackChoice(
        target={"num_blocks": 40, "block_size": 4, "check_integrity": True},
        drafter={"block_size": 4},
        gateway={"depth": 3},
    ),
}


def device_section(device: str = DEVICE, execution: str | None = None) -> dict[str, Any]:
    """A service's settings to run on `device`."""
    if device == "cpu":
        return {}
    attention = "torch" if execution == "host" else "triton"
    return {"device": device, "attention": attention, "channel_kinds": ["shm"] if execution == "host" else ["cuda_ipc"]}


def sections(choice: StackChoice, models: Models) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The config sections of target, drafter and gateway."""
    execution = choice.both.get("execution")
    both = choice.both if DEVICE != "cpu" else {}
    # A late draft is dropped, which is right but not what is looked at here: several stacks share the machine.
    gateway = {"step_deadline_ms": 20_000, **choice.gateway}
    drafter = {"method": choice.method, "checkpoint": str(models.root / choice.draft), "max_draft_len": 7}
    own = {"execution": "device", "attention": "reference"} if DEVICE == "cpu" and execution != "host" else {}
    return (
        {**own, **device_section(DEVICE, execution), **both, **choice.target},
        {**device_section(DRAFTER_DEVICE, execution), **both, **drafter, **choice.drafter},
        gateway,
    )


class Fleet:
    """The stacks of one test session, started together. Owns them."""

    def __init__(self, names: list[str], models: Models, root: Path) -> None:
        self._contexts = ExitStack()
        self._pool = ThreadPoolExecutor(max(1, len(names)))
        self._stacks: dict[str, Future[Stack]] = {
            name: self._pool.submit(self._start, STACKS[name], models, root / name) for name in names
        }

    def __getitem__(self, name: str) -> Stack:
        return self._stacks[name].result()

    def _start(self, choice: StackChoice, models: Models, directory: Path) -> Stack:
        target, drafter, gateway = sections(choice, models)
        context = running_stack(directory, models.target, target, drafter, gateway)
        stack = context.__enter__()
        self._contexts.push(context)
        return stack

    def close(self) -> None:
        """End all of them."""
        self._pool.shutdown(wait=True)
        self._contexts.close()
