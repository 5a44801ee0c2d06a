"""What the tests themselves stand on: ports that stay reserved, processes that end with their test, and tests that stay
together where several processes share them out.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from tests.ports import ReservedPort
from tests.processes import ROOT, ProcessGroup
from tests.sharing_out import ONE_BY_ONE, group_of


def test_a_reserved_port_can_be_served_on_again_and_again(reserve_port: type[ReservedPort]) -> None:
    """By the two kinds of server that the services use, over restarts, and by nobody who asks for any free port."""
    reserved = reserve_port()
    for _ in range(2):
        server = grpc.server(futures.ThreadPoolExecutor(1))
        assert server.add_insecure_port(reserved.address) == reserved.port
        server.start()
        server.stop(None).wait()

    async def serve() -> None:
        server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", reserved.port)
        server.close()
        await server.wait_closed()

    asyncio.run(serve())
    others = [reserve_port().port for _ in range(50)]
    assert reserved.port not in others
    assert len(set(others)) == len(others)


def test_processes_end_with_their_group_even_when_they_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.processes.STOP_GRACE_S", 0.5)
    group = ProcessGroup(tmp_path)
    code = (
        "import signal, subprocess, sys, threading\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait(60)'])\n"
        "print('pids', child.pid, flush=True)\n"
        "threading.Event().wait(60)"
    )
    process = group.python("-c", code)
    child = int(process.wait_for_line(r"pids (\d+)")[1])
    group.close()
    assert process.wait() == -signal.SIGKILL
    end = time.monotonic() + 5  # nobody waits for a child of another process: it has its signal, and ends when it runs
    while running(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not running(child)


def test_tests_that_share_something_are_one_group() -> None:
    at = "tests/target_service/test_"
    groups = [
        {f"{at}greedy.py::test_a[host]", f"{at}faults.py::test_b[host-3]", f"{at}ring.py::test_c[host-a]"},
        {f"{at}greedy.py::test_a[device]", f"{at}faults.py::test_b[device-3]"},
        {f"{at}greedy.py::test_without", f"{at}greedy.py::test_of[hosts]"},
        {"tests/end_to_end/test_greedy.py::test_a[ngram-1]", "tests/end_to_end/test_sampling.py::test_b[eagle3]"},
        {"tests/engine/test_fetch.py::test_a", "tests/engine/test_fetch.py::test_b[host]"},
        *({f"{path}::test_{number}"} for path in ONE_BY_ONE for number in range(2)),
    ]
    names = [{group_of(test) for test in group} for group in groups]
    assert all(len(found) == 1 for found in names)
    assert len(set.union(*names)) == len(groups)


def test_files_whose_tests_are_shared_out_one_by_one_have_no_fixture_for_all_of_them() -> None:
    for path in ONE_BY_ONE:
        assert 'scope="module"' not in (ROOT / path).read_text(), path


def running(pid: int) -> bool:
    """Whether the process is there and not merely waiting to be collected."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def test_waiting_for_a_line_fails_with_what_was_printed(processes: ProcessGroup) -> None:
    process = processes.python("-c", "import os; print('hello', os.environ['EXTRA'])", env={"EXTRA": "there"})
    assert process.wait_for_line("hello (.*)")[1] == "there"
    with pytest.raises(AssertionError, match=r"the process ended. Output:\nhello there"):
        process.wait_for_line("never", deadline_s=30)
    assert process.wait() == 0
    assert process.log_path.read_text() == process.output == "hello there\n"
    assert os.getpgid(os.getpid()) != process.pid
