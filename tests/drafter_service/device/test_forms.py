"""Steps whose kernels are launched again from what the first launch bound: the same drafts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from drafter_service.eagle3.speculator import Eagle3Speculator
from kernels.kernel_set import KernelSet, kernels_for
from tests.drafter_service.device import harness as device_harness
from tests.drafter_service.device.harness import DeviceHarness
from tests.drafter_service.device.test_eagle3_device import drafts_of
from tests.kernels.replayed import Counts, replayed


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """From here on, of the kernels of all device steps."""
    found = Counts()

    def make(device: torch.device | str) -> KernelSet:
        return replayed(kernels_for(device), found)

    monkeypatch.setattr(device_harness, "kernels_for", make)
    return found


@pytest.mark.parametrize("source", ["build", "reuse"])
def test_a_head_drafts_the_same(
    make_eagle3: Callable[..., Eagle3Speculator],
    make_device: Callable[..., DeviceHarness],
    request: pytest.FixtureRequest,
    source: str,
) -> None:
    options = {"metadata_source": source, "prefix_caching": source == "build"}
    expected = make_device(make_eagle3(**options), lookahead=8)
    drafts = drafts_of(expected, 14)
    counts: Counts = request.getfixturevalue("counts")
    harness = make_device(make_eagle3(**options), lookahead=8)
    assert drafts_of(harness, 14) == drafts
    assert [report.num_drafted for report in harness.reports] == [report.num_drafted for report in expected.reports]
    assert counts.launched["take_entry"] > 2
    assert counts.launched["finish_reply"] > 8
    assert counts.made["finish_reply"] == harness.target.spec.depth + 1  # and one of warming up
