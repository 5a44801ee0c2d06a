"""One end of a `cuda_ipc` channel as a process of its own, on a simulated device or a GPU.

`python -m tests.engine.channel.device_peer DEVICE answer|mute DESCRIPTION | DEVICE target`; DEVICE: `simulated` or as
torch names it.
"""

from __future__ import annotations

import sys
import threading

import torch

from engine.channel.cuda_ipc import CudaIpcDrafterEnd, CudaIpcTargetEnd
from engine.channel.stream_driver import StreamDriver
from engine.cuda.device import CudaDevice
from tests.engine.channel.device_steps import Counts, CudaRunner, Runner, drafter_step, write_entry
from tests.engine.channel.entries import SPEC, decode, encode
from tests.engine.channel.simulated import SimulatedDriver

PATIENCE_S = 60.0
HEARTBEAT_S = 1.0
NUM_STEPS = 60
AHEAD = 3


def make_driver(device: str) -> tuple[StreamDriver, Runner]:
    if device == "simulated":
        simulated = SimulatedDriver()
        return simulated, simulated
    torch.cuda.set_device(device)
    driver = CudaDevice(torch.device(device))
    return driver, CudaRunner(driver.device)


def answer(device: str, word: str) -> None:
    """Check and answer NUM_STEPS steps, up to AHEAD of them enqueued ahead of the first that is not done."""
    driver, runner = make_driver(device)
    end = CudaIpcDrafterEnd(decode(word), driver, HEARTBEAT_S)
    print("attached", flush=True)
    counts = Counts(driver.device)
    for seq in range(1, NUM_STEPS + 1):
        drafter_step(end, runner, seq, counts, PATIENCE_S)
        if seq % AHEAD == 0:
            runner.synchronize(PATIENCE_S)
        if end.closed:
            break
    runner.synchronize(PATIENCE_S)
    print(f"read absent={counts.absent.item()} wrong={counts.wrong.item()}", flush=True)
    end.close()
    print(f"ended {end.wait_closed(PATIENCE_S)}", flush=True)


def mute(device: str, word: str) -> None:
    """Attach, and never answer."""
    driver, _ = make_driver(device)
    end = CudaIpcDrafterEnd(decode(word), driver, HEARTBEAT_S)
    print("attached", flush=True)
    threading.Event().wait(PATIENCE_S * 5)
    end.close()


def target(device: str) -> None:
    """Publish step 1, and stand still until killed."""
    driver, runner = make_driver(device)
    end = CudaIpcTargetEnd(SPEC, driver, HEARTBEAT_S, PATIENCE_S)
    header, entry = end.ring(1)
    runner.run(lambda: write_entry(header, entry, SPEC, 1))
    end.publish(1)
    runner.synchronize()
    print(f"channel {encode(end.describe())}", flush=True)
    threading.Event().wait(PATIENCE_S * 5)
    end.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case [device, "answer", word]:
            answer(device, word)
        case [device, "mute", word]:
            mute(device, word)
        case [device, "target"]:
            target(device)
        case arguments:
            raise SystemExit(f"cannot do {arguments}")
