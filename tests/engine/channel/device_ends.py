"""Both ends of a cuda_ipc channel on simulated devices, and how their tests wait."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from engine.channel.cuda_ipc import CudaIpcDrafterEnd, CudaIpcTargetEnd
from engine.channel.host import SHM_DIR
from tests.engine.channel.device_peer import HEARTBEAT_S
from tests.engine.channel.entries import spec_with
from tests.engine.channel.simulated import SimulatedDriver

# Far longer than any deadline: a stream that is not released fails the test.
PATIENCE_S = 60.0
NOTICED_S = 10.0


class Ends:
    """A target's end with its device, and drafter's ends in the same process on devices of their own."""

    def __init__(self, **changes: object) -> None:
        self.device = SimulatedDriver()
        self.target = CudaIpcTargetEnd(spec_with(**changes), self.device, HEARTBEAT_S, PATIENCE_S)
        self.drafter_device = SimulatedDriver()
        self._drafters: list[CudaIpcDrafterEnd] = []

    def attach(self) -> CudaIpcDrafterEnd:
        drafter = CudaIpcDrafterEnd(self.target.describe(), self.drafter_device, HEARTBEAT_S)
        self._drafters.append(drafter)
        return drafter

    def memory_file(self) -> Path:
        return SHM_DIR / self.target.describe().regions[0].handle.decode()

    def page_file(self) -> Path:
        return SHM_DIR / self.target.describe().control.handle.decode()

    def close(self) -> None:
        for end in (*self._drafters, self.target):
            end.close()
        for end in (*self._drafters, self.target):
            assert end.wait_closed(PATIENCE_S)
        assert self.device.stream.faults == self.drafter_device.stream.faults == []


def hold_up(device: SimulatedDriver, until: threading.Event) -> None:
    """Enqueue work that takes until then."""

    def wait() -> None:
        until.wait(PATIENCE_S)

    device.run(wait)


def released_after_s(device: SimulatedDriver) -> float:
    start = time.monotonic()
    device.synchronize(PATIENCE_S)
    return time.monotonic() - start


def until(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + NOTICED_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)  # another thread's work, which signals nothing
