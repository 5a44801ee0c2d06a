"""Does a target of two ranks on GPUs run ahead, offer device memory to drafters, and end when a rank is lost?

A rank that is killed in the middle of a step leaves rank 0's stream in a collective that nothing ends.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.end_to_end.variants import Models
from tests.gpu.fleet import DEVICE, NEEDS_GPU, device_section
from tests.processes import ProcessGroup
from tests.target_service.conftest import EXECUTIONS, write_config
from tests.target_service.pcp.test_launched_faults import lose_a_rank

pytestmark = [NEEDS_GPU, pytest.mark.slow, pytest.mark.timeout(400)]

READY_S = 300.0  # kernels may have to be compiled


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_lost_rank_ends_the_target(
    tmp_path: Path, models: Models, processes: ProcessGroup, number: signal.Signals
) -> None:
    section = EXECUTIONS["device"] if DEVICE == "cpu" else {**device_section(), "execution": "device"}
    config = write_config(tmp_path / "target.yaml", models.target, pcp_size=2, drain_s=1, **section)
    process = processes.python("-m", "target_service", "--config", str(config))
    ready = process.wait_for_line(r"target ready on (\S+) .*execution=device channels=(\S+)", READY_S)
    assert ready.group(2) == ("shm,bytes" if DEVICE == "cpu" else "cuda_ipc")
    lose_a_rank(process, ready.group(1), number)
