"""Two signals in a row, and a service with many threads: it stops all the same."""

from __future__ import annotations

import signal

from tests.processes import ProcessGroup

SCRIPT = """
import threading
from engine.stop_signal import StopSignal

stop = StopSignal()
for _ in range(10):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print("waiting", flush=True)
while not stop.wait(0.1):
    pass
print("stopped", flush=True)
"""
NUM_PROCESSES = 12  # of those that wait for a threading.Event, one in three never ends


def test_two_signals_in_a_row_end_the_wait(processes: ProcessGroup) -> None:
    waiting = [processes.python("-c", SCRIPT) for _ in range(NUM_PROCESSES)]
    for process in waiting:
        process.wait_for_line("^waiting")
    for process in waiting:
        process.popen.send_signal(signal.SIGINT)
        process.popen.send_signal(signal.SIGTERM)
    for process in waiting:
        process.wait()
    # Not the exit status: the second signal may find the interpreter on its way out, where signals do again what they
    # do by default. That the wait ended is what each process says itself.
    assert [process.output for process in waiting] == ["waiting\nstopped\n"] * NUM_PROCESSES


def test_asked_from_within(processes: ProcessGroup) -> None:
    code = (
        "from engine.stop_signal import StopSignal\n"
        "stop = StopSignal()\n"
        "assert not stop.wait(0.01)\n"
        "stop.ask()\n"
        "stop.ask()\n"
        "assert stop.wait(10)\n"
    )
    process = processes.python("-c", code)
    assert (process.wait(), process.output) == (0, "")
