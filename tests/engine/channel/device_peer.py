"""One end of a `cuda_ipc` channel as a process of its own, on a simulated device or a GPU.

`python -m tests.engine.channel.device_peer DEVICE MODE ...`; DEVICE: `simulated`, or as torch names it. DESCRIPTION:
the word that `target` and `lead` print, or `@PATH` of a file that will have it.

    answer DESCRIPTION   attach; check and answer NUM_STEPS steps; detach
    mute DESCRIPTION     attach, and never answer
    follow DESCRIPTION   attach; follow step 1, wait for step 2, and read step 1 again when that wait has ended
    target               open a channel, publish step 1, and stand still until killed
    lead DTYPE           open a channel, lead NUM_STEPS steps, close it, and say what is still held of the device
    lead-twice DTYPE     wait for a drafter that gets killed, then lead another over a new channel as above

What it prints in lines with a `#` is for people: the time (one clock for all processes), and what was done. A process
that stands still for long prints the stacks of its threads, whoever holds the interpreter.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from engine.channel.control import ControlPage, DrafterState, Word
from engine.channel.cuda_ipc import CudaIpcDrafterEnd, CudaIpcTargetEnd
from engine.channel.description import ChannelDescription
from engine.channel.interface import ChannelSpec
from engine.channel.layout import DTYPES
from engine.channel.stream_driver import StreamDriver
from engine.cuda.device import CudaDevice
from tests.engine.channel.device_steps import (
    POLL_S,
    Counts,
    CudaRunner,
    Runner,
    drafter_step,
    target_step,
    write_entry,
)
from tests.engine.channel.entries import SPEC, decode, encode, tensors_of
from tests.engine.channel.simulated import SimulatedDriver

PATIENCE_S = 60.0
# Of a wait for a peer that gets killed: its death must end it long before.
DEAD_S = 4.0
HEARTBEAT_S = 1.0
STACKS_AFTER_S = float(os.environ.get("OUTRIDER_TEST_STACKS_AFTER_S", "60"))
NUM_STEPS = 60
AHEAD = 3


def make_driver(device: str) -> tuple[StreamDriver, Runner]:
    if device == "simulated":
        simulated = SimulatedDriver()
        return simulated, simulated
    torch.cuda.set_device(device)
    driver = CudaDevice(torch.device(device))
    # As in the services: the default stream waits for other libraries' streams, and they for it.
    torch.cuda.set_stream(torch.cuda.Stream(driver.device))
    return driver, CudaRunner(driver.device)


def say(line: str) -> None:
    print(line, flush=True)


def note(what: str) -> None:
    """For people: when what was done."""
    say(f"# {time.monotonic():.3f} {what}")


def description_of(word: str) -> ChannelDescription:
    """Of a word, or of the file that will have it."""
    if not word.startswith("@"):
        return decode(word)
    path = Path(word[1:])
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.002)  # a file wakes nobody
    return decode(path.read_text())


def held_of(driver: StreamDriver) -> int:
    """How many allocations, mappings and pages of a GPU this process has, a moment later; of a simulated one, 0."""
    gc.collect()
    if not isinstance(driver, CudaDevice):
        return 0
    end = time.monotonic() + DEAD_S
    while driver.held and time.monotonic() < end:
        time.sleep(POLL_S)  # another thread gives them back
    return len(driver.held)


def synchronize(driver: StreamDriver, runner: Runner, end: CudaIpcTargetEnd | CudaIpcDrafterEnd) -> None:
    """Wait for the stream while another thread tells how the words of the page change. TimeoutError, with a word on
    whether a store by the device helps where the host's did not.
    """
    done = threading.Event()
    words = (Word.TARGET_SEQ, Word.DRAFTER_SEQ, Word.TARGET_WAITS, Word.DRAFTER_WAITS, Word.DRAFTER_STATE)

    def watch() -> None:
        seen: tuple[int, ...] = ()
        while not done.wait(0.02):
            found = tuple(end._control.low(word) for word in words)
            if found != seen:
                note(" ".join(f"{word.name.lower()}={value}" for word, value in zip(words, found, strict=True)))
            seen = found

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        runner.synchronize(1.5 * DEAD_S)
    except TimeoutError:
        note(f"not done; peer alive: {end.peer_alive()}; the device itself stores the word now, by another stream")
        faulthandler.dump_traceback()
        if driver.device.type == "cuda":
            other = torch.cuda.Stream(driver.device)
            driver.write_values(other.cuda_stream, end._page, ((ControlPage.offset(end._awaited), 1 << 20),))
            with suppress(TimeoutError):
                runner.synchronize(1.0)
                note("and that helped")
        raise
    finally:
        done.set()
        thread.join()


def answer(device: str, word: str) -> None:
    """Up to AHEAD steps are enqueued ahead of the first that is not done."""
    driver, runner = make_driver(device)
    note("device is there")
    end = CudaIpcDrafterEnd(description_of(word), driver, HEARTBEAT_S)
    say("attached")
    note("attached")
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
    del end
    say(f"held {held_of(driver)}")


def mute(device: str, word: str) -> None:
    driver, _ = make_driver(device)
    note("device is there")
    end = CudaIpcDrafterEnd(description_of(word), driver, HEARTBEAT_S)
    say("attached")
    threading.Event().wait(PATIENCE_S * 5)
    end.close()


def follow(device: str, word: str) -> None:
    driver, runner = make_driver(device)
    end = CudaIpcDrafterEnd(description_of(word), driver, HEARTBEAT_S)
    counts = Counts(driver.device)
    drafter_step(end, runner, 1, counts, PATIENCE_S)
    runner.synchronize(PATIENCE_S)
    say(f"followed absent={counts.absent.item()} wrong={counts.wrong.item()}")
    drafter_step(end, runner, 2, counts, DEAD_S)
    note("enqueued step 2")
    say("waiting")
    start = time.monotonic()
    synchronize(driver, runner, end)
    say(f"released after {time.monotonic() - start:.2f} s absent={counts.absent.item()}")
    note("released")
    header, entry = end.ring(1)
    runner.run(partial(counts.note, header, tensors_of(entry), end.spec, 1))
    runner.synchronize(PATIENCE_S)
    say(f"again absent={counts.absent.item()} wrong={counts.wrong.item()}")
    note("read the dead target's memory")
    del header, entry
    end.close()
    note("close returned")
    say(f"ended {end.wait_closed(PATIENCE_S)}")
    note("let go")
    del end
    say(f"held {held_of(driver)}")


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
    note("device is there")
    spec = replace(SPEC, hidden_dtype=DTYPES[dtype])
    warm_up(driver, runner, spec)
    note("warmed up")
    if killed_first:
        lead_one_that_dies(driver, runner, spec)
        spec = replace(spec, epoch=spec.epoch + 1)
    end = CudaIpcTargetEnd(spec, driver, HEARTBEAT_S, PATIENCE_S)
    say(f"next channel {encode(end.describe())}")
    wait_attached(end)
    note("the drafter has attached")
    counts = Counts(driver.device)
    for seq in range(1, NUM_STEPS + 1):
        target_step(end, runner, seq, counts, PATIENCE_S)
    end.wait_reply(NUM_STEPS, PATIENCE_S)
    note("enqueued all steps")
    synchronize(driver, runner, end)
    say(f"read absent={counts.absent.item()} wrong={counts.wrong.item()}")
    end.close()
    say(f"ended {end.wait_closed(PATIENCE_S)}")
    del end
    say(f"held {held_of(driver)}")


def lead_one_that_dies(driver: StreamDriver, runner: Runner, spec: ChannelSpec) -> None:
    end = CudaIpcTargetEnd(spec, driver, HEARTBEAT_S, PATIENCE_S)
    say(f"channel {encode(end.describe())}")
    wait_attached(end)
    note("the drafter has attached")
    counts = Counts(driver.device)
    target_step(end, runner, 1, counts, DEAD_S)
    note("enqueued step 1")
    target_step(end, runner, 2, counts, DEAD_S)
    note("enqueued step 2")
    say("waiting")
    start = time.monotonic()
    synchronize(driver, runner, end)
    say(f"released after {time.monotonic() - start:.2f} s absent={counts.absent.item()}")
    note("released")
    start = time.monotonic()
    for seq in range(3, 3 + NUM_STEPS):
        target_step(end, runner, seq, counts, DEAD_S)
    note("enqueued more steps for the dead")
    runner.synchronize(PATIENCE_S)
    say(f"went on for {time.monotonic() - start:.2f} s absent={counts.absent.item()}")
    end.close()
    note("close returned")
    say(f"first ended {end.wait_closed(PATIENCE_S)}")
    note("let go")


def warm_up(driver: StreamDriver, runner: Runner, spec: ChannelSpec) -> None:
    """Open a channel nobody comes to, run steps over it, and close it again. A kernel that is loaded at its first use
    waits for every stream of the process, and so for as long as one of them waits for a peer.
    """
    end = CudaIpcTargetEnd(replace(spec, channel_id="warm-up"), driver, HEARTBEAT_S, 0.0)
    counts = Counts(driver.device)
    for seq in range(1, spec.depth + 2):
        target_step(end, runner, seq, counts, 0.0)
    counts.absent.item()
    runner.synchronize(PATIENCE_S)
    end.close()
    end.wait_closed(PATIENCE_S)


def wait_attached(end: CudaIpcTargetEnd) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while end._control.get(Word.DRAFTER_STATE) == DrafterState.ABSENT:
        assert time.monotonic() < deadline, "no drafter came"
        time.sleep(0.002)  # in the services, Attach's answer and the plans say it


if __name__ == "__main__":
    faulthandler.dump_traceback_later(STACKS_AFTER_S)
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
