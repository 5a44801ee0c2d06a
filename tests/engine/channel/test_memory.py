"""Shared memory objects: gone when their owner closes, exits or dies; never while it lives."""

from __future__ import annotations

import fcntl
import gc
import os
from pathlib import Path

import pytest

from engine.channel import host_id, reap
from engine.channel.host import SHM_DIR
from engine.channel.memory import ExportedMemory, attach_memory
from engine.errors import ChannelError
from tests.processes import ProcessGroup


def test_close_unlinks_and_leaves_the_mapping_readable() -> None:
    memory = ExportedMemory(8192)
    mapped = attach_memory(memory.name, 8192)
    memory.buffer[5000] = 7
    assert memory.path.exists()
    memory.close()
    memory.close()
    assert not memory.path.exists()
    assert mapped[5000] == memory.buffer[5000] == 7


def test_an_owner_that_forgets_to_close_leaks_nothing() -> None:
    memory = ExportedMemory(4096)
    path = memory.path
    del memory
    gc.collect()
    assert not path.exists()


def test_a_process_that_ends_without_closing_leaks_nothing(processes: ProcessGroup) -> None:
    code = "from engine.channel.memory import ExportedMemory; memory = ExportedMemory(4096); print(memory.name)"
    process = processes.python("-c", code)
    name = process.wait_for_line("outrider-.*")[0]
    assert process.wait() == 0
    assert not (SHM_DIR / name).exists()


def test_reap_takes_the_dead_and_leaves_the_living(processes: ProcessGroup, tmp_path: Path) -> None:
    code = (
        "import sys, threading; from pathlib import Path; from engine.channel.memory import ExportedMemory\n"
        f"memory = ExportedMemory(4096, Path({str(tmp_path)!r})); print(memory.name, flush=True)\n"
        "threading.Event().wait(60)"
    )
    dead, living = processes.python("-c", code), processes.python("-c", code)
    dead_name, living_name = (process.wait_for_line("outrider-.*")[0] for process in (dead, living))
    own = ExportedMemory(4096, tmp_path)
    other = tmp_path / "not-ours"
    other.touch()
    assert reap(tmp_path) == []
    dead.kill()
    assert (tmp_path / dead_name).exists()
    assert reap(tmp_path) == [dead_name]
    assert sorted(path.name for path in tmp_path.glob("outrider-*")) == sorted([living_name, own.name])
    assert other.exists()
    own.close()


def test_a_forked_child_frees_nothing_of_its_parent(processes: ProcessGroup) -> None:
    code = (
        "import os; from engine.channel.memory import ExportedMemory\n"
        "memory = ExportedMemory(4096)\n"
        "if (child := os.fork()) == 0:\n    memory.close(); os._exit(0)\n"
        "os.waitpid(child, 0); print('kept', memory.path.exists())"
    )
    assert processes.python("-c", code).wait_for_line("kept (.*)")[1] == "True"


def test_a_reaper_between_creation_and_lock_costs_a_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of the first try finds the file unlinked already; the object made next is the one kept."""
    real_flock = fcntl.flock
    seen: list[int] = []

    def reaped_first(fd: int, operation: int) -> None:
        if not seen:
            Path(f"/proc/self/fd/{fd}").readlink().unlink()
        seen.append(fd)
        real_flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", reaped_first)
    memory = ExportedMemory(4096)
    assert len(seen) == 2
    assert memory.path.exists()
    memory.close()


def test_more_than_shared_memory_holds_is_refused_with_the_figures(tmp_path: Path) -> None:
    own = f"outrider-{os.getpid()}-*"
    before = set(SHM_DIR.glob(own))
    free = os.statvfs(SHM_DIR).f_blocks * os.statvfs(SHM_DIR).f_frsize
    with pytest.raises(ChannelError, match=f"^kind: shm needs {2 * free} bytes"):
        ExportedMemory(2 * free)
    assert set(SHM_DIR.glob(own)) == before
    with pytest.raises(ChannelError, match="use bytes"):
        ExportedMemory(4096, tmp_path / "missing")


@pytest.mark.parametrize("name", ["", "../etc/passwd", "outrider-../../etc/passwd", "psm_1234", "outrider-gone"])
def test_only_names_of_channels_that_exist_can_be_attached(name: str) -> None:
    with pytest.raises(ChannelError, match="^handle: "):
        attach_memory(name, 4096)


def test_a_size_other_than_described_is_refused() -> None:
    memory = ExportedMemory(4096)
    with pytest.raises(ChannelError, match="has 4096 bytes"):
        attach_memory(memory.name, 8192)
    memory.close()


def test_host_id_is_the_mount_not_the_process(processes: ProcessGroup, tmp_path: Path) -> None:
    process = processes.python("-c", "from engine.channel import host_id; print('id', host_id())")
    assert process.wait_for_line("id (.*)")[1] == host_id()
    assert host_id(tmp_path) != host_id()
    assert host_id(tmp_path / "missing").endswith(f"none-{os.getpid()}")
