"""What the tests themselves stand on: ports that stay reserved, processes that end with their test."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from tests.ports import ReservedPort
from tests.processes import ProcessGroup


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
    assert not running(child)


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
