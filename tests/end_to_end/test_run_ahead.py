"""What do users see when a service dies, or clients leave, while plans run ahead? The same as in lockstep."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.end_to_end import test_faults
from tests.end_to_end.stack import Stack, running_stack
from tests.end_to_end.variants import Models

test_drafter_killed_and_restarted = test_faults.test_drafter_killed_and_restarted
test_drafter_restarted_within_one_stream = test_faults.test_drafter_restarted_within_one_stream
test_target_killed_and_restarted = test_faults.test_target_killed_and_restarted
test_five_hundred_mixed_requests_leave_nothing = test_faults.test_five_hundred_mixed_requests_leave_nothing
test_clean_stop = test_faults.test_clean_stop


@pytest.fixture(
    scope="module", params=[("eagle3", 2), ("draft_model", 3)], ids=["eagle3-depth-2", "draft_model-depth-3"]
)
def stack(request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    method, depth = request.param
    draft = {"draft_model": "noisy", "eagle3": "eagle3"}[method]
    drafter = {"method": method, "checkpoint": str(models.root / draft), "max_draft_len": 4}
    gateway = {
        "depth": depth,
        "target_wait_s": test_faults.TARGET_WAIT_S,
        "step_deadline_ms": 300,
        "reconnect_max_s": 0.05,
    }
    target = {"check_integrity": True, "num_blocks": 120, "block_size": 4}  # scarce: five hundred requests preempt
    with running_stack(tmp_path_factory.mktemp(method), models.target, target, drafter, gateway) as running:
        yield running
