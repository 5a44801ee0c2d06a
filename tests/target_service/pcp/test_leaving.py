"""The ranks leave their group at the same time, none waits for it without a bound, and failed ones end at once.

Over NCCL a rank that leaves waits for the others to leave too. gloo does not, so these groups are scripted.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from engine.errors import ConfigError
from target_service.assembly import build_target
from target_service.config import TargetConfig
from target_service.pcp import ranks as ranks_module
from target_service.pcp.group import TorchGroup
from target_service.pcp.ranks import Ranks
from tests.processes import ProcessGroup
from tests.target_service.pcp.test_faults import SHM

DEADLINE_S = 20.0


class Peer:
    """The other rank's process: it ends once rank 0 leaves with it, or is killed."""

    stdin = None

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.met = threading.Event()
        self.gone = threading.Event()
        self.killed = False

    def poll(self) -> int | None:
        return 0 if self.gone.is_set() else None

    def wait(self, timeout: float = DEADLINE_S) -> int:
        if not (self.killed or self.met.wait(timeout)):
            raise subprocess.TimeoutExpired("peer", timeout)
        self.gone.set()
        return 0

    def kill(self) -> None:
        self.killed = True
        self.gone.set()


class Group:
    """Rank 0's end of the group. ends: whether it comes to an end when the peer has left too."""

    def __init__(self, peer: Peer, ends: bool) -> None:
        self._peer, self._ends = peer, ends
        self.left = threading.Event()
        self.over = threading.Event()

    def close(self) -> bool:
        self.left.set()
        if self._ends:
            self._peer.met.set()
            assert self._peer.gone.wait(DEADLINE_S)
        else:
            self.over.wait(DEADLINE_S)
        return True


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def ranks(peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(Ranks, "_start", lambda *arguments: peer)
    monkeypatch.setattr(ranks_module, "HANG_S", 1000.0)
    monkeypatch.setattr(ranks_module, "REST_S", 0.3)
    monkeypatch.setattr(ranks_module, "CLOSE_S", 0.3)
    found = Ranks(TargetConfig.model_validate({"pcp_size": 2}), tmp_path, 64)
    yield found
    found.close()


def join(ranks: Ranks, group: Group) -> None:
    ranks._group = cast(TorchGroup, group)


def test_rank_0_leaves_with_the_others(ranks: Ranks, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when they are gone: they wait for it."""
    monkeypatch.setattr(ranks_module, "CLOSE_S", DEADLINE_S)
    group, order = Group(peer, ends=True), list[bool]()
    join(ranks, group)

    def let_go() -> bool:
        order.append(ranks.board.closed and not group.left.is_set())
        return True

    ranks.before_leaving(let_go)
    began = time.monotonic()
    ranks.close()
    assert time.monotonic() - began < DEADLINE_S / 2
    assert order == [True]  # nobody holds graphs of a group that is being left, and no order comes any more
    assert group.left.is_set()
    assert not peer.killed
    ranks.close()
    assert len(order) == 1


def test_a_group_that_cannot_be_left_holds_nobody_up(
    ranks: Ranks, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    group = Group(peer, ends=False)
    join(ranks, group)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        ranks.close()
    assert time.monotonic() - began < 5
    assert peer.killed
    assert group.left.is_set()
    assert "the group of 2 ranks was not left within 0.3 s" in caplog.text
    group.over.set()


@pytest.mark.parametrize("lost", [False, True])
def test_a_group_that_may_still_be_used_is_not_left(ranks: Ranks, peer: Peer, lost: bool) -> None:
    group = Group(peer, ends=True)
    join(ranks, group)
    ranks.before_leaving(lambda: lost)
    if lost:
        ranks._lose("rank 1 is gone")
        assert not (SHM / ranks._exported.name).exists()  # whatever becomes of this process
    ranks.close()
    assert not group.left.is_set()
    assert peer.killed


def test_a_target_that_is_refused_late_lets_its_ranks_go(tiny_dir: Path) -> None:
    """They have joined when the channels' kinds are looked at."""
    settings: dict[str, Any] = {"pcp_size": 2, "threads": 1, "num_blocks": 16, "channel_kinds": ["cuda_ipc"]}
    with pytest.raises(ConfigError, match="channel_kinds"):
        build_target(TargetConfig.model_validate(settings), "tiny", tiny_dir)
    assert not list(SHM.glob(f"outrider-{os.getpid()}-*"))


# A process whose way by the interpreter's end is blocked, as by a group that was not left.
BLOCKED = """
import atexit, sys, threading
atexit.register(threading.Event().wait, 60)

def fail(*arguments, **named):
    {fails}
"""

FOLLOWER = (
    BLOCKED
    + """
import target_service.pcp.__main__ as rank
from target_service.config import TargetConfig
from target_service.pcp.settings import RankArguments
from engine.errors import ModelError, RanksLost
rank.tie_to_parent = lambda *arguments: None
rank.serve = fail
print("still here", end="")
told = RankArguments(rank=1, config=TargetConfig(), model_directory="", board_name="", order_bytes=1, board_depth=2,
                     port=1, parent_pid=1)
sys.exit(rank.main([told.model_dump_json()]))
"""
)


@pytest.mark.parametrize(
    ("fails", "status"),
    [
        ("raise MemoryError('no room')", 1),
        ("raise ModelError('no such layer')", 2),
        ("raise RanksLost('rank 0 is gone')", 3),
        ("return False", 0),
    ],
)
def test_a_rank_that_fails_ends_at_once(processes: ProcessGroup, fails: str, status: int) -> None:
    process = processes.python("-c", FOLLOWER.format(fails=fails))
    assert process.wait(30) == status, process.output
    assert "still here" in process.output
    assert fails == "return False" or fails.split("'")[1] in process.output


SERVICE = (
    BLOCKED
    + """
from types import SimpleNamespace
import target_service.__main__ as service
from engine.ending import end_now
from engine.errors import ConfigError

class Server(SimpleNamespace):
    lost = ""
    address = ""
    def start(self): pass
    def stop(self): pass

closed = []
target = SimpleNamespace(engine=SimpleNamespace(), close=lambda: print("closed", end=""))
service.build_target = lambda *arguments: target
service.fetch_model = lambda name: name
service.warm_up = fail
service.TargetServer = lambda *arguments, **named: Server()
service._what_it_is = lambda *arguments: ""
service.StopSignal = lambda: SimpleNamespace(wait=lambda seconds: True, ask=lambda: None)
sys.exit(service.main(sys.argv[1:], end=end_now))
"""
)


@pytest.mark.parametrize(
    ("fails", "status"),
    [("return None", 0), ("raise ConfigError('target.device', 'too small')", 2), ("raise ValueError('a bug')", 1)],
)
def test_a_service_with_ranks_ends_at_once(processes: ProcessGroup, tmp_path: Path, fails: str, status: int) -> None:
    config = tmp_path / "target.yaml"
    config.write_text("model: tiny\ntarget: {pcp_size: 2}\n", encoding="utf-8")
    process = processes.python("-c", SERVICE.format(fails=fails), "--config", str(config))
    assert process.wait(30) == status, process.output
    assert ("closed" in process.output) == (status != 0)  # else it is the server's
