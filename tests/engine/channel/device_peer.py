"""One end of a `cuda_ipc` channel as a process of its own, on a simulated device or a GPU.

`python -m tests.engine.channel.device_peer DEVICE MODE ...`; DEVICE: `simulated`, or as torch names it.

    answer DESCRIPTION   attach; check and answer NUM_STEPS steps; detach
    mute DESCRIPTION     attach, and never answer
    follow DESCRIPTION   attach; follow step 1, wait for step 2, and read step 1 again when that wait has ended
    target               open a channel, publish step 1, and stand still until killed
    lead DTYPE           open a channel, lead NUM_STEPS steps, close it, and say what memory is left
    lead-twice DTYPE     wait for a drafter that gets killed, then lead another over a new channel as above
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import torch

from engine.channel.control import DrafterState, Word
from engine.channel.cuda_ipc import CudaIpcDrafterEnd, CudaIpcTargetEnd
from engine.channel.layout import DTYPES
from engine.channel.stream_driver import StreamDriver
from engine.cuda.device import CudaDevice
from tests.engine.channel.device_steps import Counts, CudaRunner, Runner, drafter_step, target_step, write_entry
from tests.engine.channel.entries import SPEC, decode, encode, tensors_of
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


def say(line: str) -> None:
    print(line, flush=True)


def free_bytes(driver: StreamDriver) -> int:
    """Memory free on the whole device, with nothing of ours cached; 0 on a simulated one."""
    gc.collect()
    if driver.device.type != "cuda":
        return 0
    torch.cuda.synchronize(driver.device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(driver.device)[0]


def answer(device: str, word: str) -> None:
    """Up to AHEAD steps are enqueued ahead of the first that is not done."""
    driver, runner = make_driver(device)
    end = CudaIpcDrafterEnd(decode(word), driver, HEARTBEAT_S)
    say("attached")
    counts = Counts(driver.device)
    for seq in range(1, NUM_STEPS + 1):
        drafter_step(end, runner, seq, counts, PATIENCE_S)
        if seq % AHEAD == 0:
            runner.synchronize(PATIENCE_S)
        if end.closed:
            break
    runner.synchronize(PATIENCE_S)
    say(f"read absent={counts.absent.item()} wrong={counts.wrong.item()}")
    end.close()
    say(f"ended {end.wait_closed(PATIENCE_S)}")


def mute(device: str, word: str) -> None:
    driver, _ = make_driver(device)
    end = CudaIpcDrafterEnd(decode(word), driver, HEARTBEAT_S)
    say("attached")
    threading.Event().wait(PATIENCE_S * 5)
    end.close()


def follow(device: str, word: str) -> None:
    driver, runner = make_driver(device)
    end = CudaIpcDrafterEnd(decode(word), driver, HEARTBEAT_S)
    counts = Counts(driver.device)
    drafter_step(end, runner, 1, counts, PATIENCE_S)
    runner.synchronize(PATIENCE_S)
    say(f"followed absent={counts.absent.item()} wrong={counts.wrong.item()}")
    drafter_step(end, runner, 2, counts, PATIENCE_S)
    start = time.monotonic()
    runner.synchronize(PATIENCE_S)
    say(f"released after {time.monotonic() - start:.2f} s absent={counts.absent.item()}")
    header, entry = end.ring(1)
    runner.run(partial(counts.note, header, tensors_of(entry), end.spec, 1))
    runner.synchronize(PATIENCE_S)
    say(f"again absent={counts.absent.item()} wrong={counts.wrong.item()}")
    del header, entry
    end.close()
    say(f"ended {end.wait_closed(PATIENCE_S)}")


def target(device: str) -> None:
    driver, runner = make_driver(device)
    end = CudaIpcTargetEnd(SPEC, driver, HEARTBEAT_S, PATIENCE_S)
    header, entry = end.ring(1)
    runner.run(lambda: write_entry(header, entry, SPEC, 1))
    end.publish(1)
    runner.synchronize()
    say(f"channel {encode(end.describe())}")
    threading.Event().wait(PATIENCE_S * 5)
    end.close()


def lead(device: str, dtype: str, killed_first: bool) -> None:
    driver, runner = make_driver(device)
    spec = replace(SPEC, hidden_dtype=DTYPES[dtype])
    warm_up(driver, runner)  # whatever CUDA loads at first use is no leak
    before = free_bytes(driver)
    if killed_first:
        end = CudaIpcTargetEnd(spec, driver, HEARTBEAT_S, PATIENCE_S)
        say(f"channel {encode(end.describe())}")
        wait_attached(end)
        counts = Counts(driver.device)
        for seq in (1, 2):
            target_step(end, runner, seq, counts, PATIENCE_S)
        say("waiting")
        start = time.monotonic()
        runner.synchronize(PATIENCE_S)
        say(f"released after {time.monotonic() - start:.2f} s absent={counts.absent.item()}")
        end.close()
        say(f"first ended {end.wait_closed(PATIENCE_S)}")
        spec = replace(spec, epoch=spec.epoch + 1)
    end = CudaIpcTargetEnd(spec, driver, HEARTBEAT_S, PATIENCE_S)
    say(f"next channel {encode(end.describe())}")
    wait_attached(end)
    counts = Counts(driver.device)
    for seq in range(1, NUM_STEPS + 1):
        target_step(end, runner, seq, counts, PATIENCE_S)
    end.wait_reply(NUM_STEPS, PATIENCE_S)
    runner.synchronize(PATIENCE_S)
    say(f"read absent={counts.absent.item()} wrong={counts.wrong.item()}")
    end.close()
    say(f"ended {end.wait_closed(PATIENCE_S)}")
    del end
    say(f"leaked {max(0, before - free_bytes(driver))}")


def warm_up(driver: StreamDriver, runner: Runner) -> None:
    """Open a channel nobody comes to, run a step over it, and close it again."""
    end = CudaIpcTargetEnd(replace(SPEC, channel_id="warm-up"), driver, HEARTBEAT_S, 0.0)
    target_step(end, runner, 1, Counts(driver.device), 0.0)
    target_step(end, runner, 2, Counts(driver.device), 0.0)
    runner.synchronize(PATIENCE_S)
    end.close()
    end.wait_closed(PATIENCE_S)


def wait_attached(end: CudaIpcTargetEnd) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while end._control.get(Word.DRAFTER_STATE) == DrafterState.ABSENT:
        assert time.monotonic() < deadline, "no drafter came"
        time.sleep(0.005)  # in the services, Attach's answer and the plans say it


if __name__ == "__main__":
    match sys.argv[1:]:
        case [device, "answer", word]:
            answer(device, word)
        case [device, "mute", word]:
            mute(device, word)
        case [device, "follow", word]:
            follow(device, word)
        case [device, "target"]:
            target(device)
        case [device, "lead", dtype]:
            lead(device, dtype, killed_first=False)
        case [device, "lead-twice", dtype]:
            lead(device, dtype, killed_first=True)
        case arguments:
            raise SystemExit(f"cannot do {arguments}")
