"""How are the ranks of a target started, watched and ended?

Rank 0, the service, starts the others as processes, waits until they have loaded, and makes the group with them. From
then on a thread looks at them: one that has ended or whose heartbeat has stopped ends them all, since a group that has
lost a rank is of no use and its collectives would wait. The service then says NOT_SERVING and ends; whoever supervises
it starts the target anew as a whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.channel.memory import reap
from engine.errors import ConfigError, RanksLost
from target_service.config import TargetConfig
from target_service.pcp.board import Board, ExportedBoard, RankState
from target_service.pcp.group import Backend, TorchGroup, choose_backend, rendezvous
from target_service.pcp.settings import (
    CLOSE_S,
    HANG_S,
    JOIN_TIMEOUT_S,
    NOTICE_S,
    REST_S,
    STARVED_S,
    WATCH_S,
    RankArguments,
)

_log = logging.getLogger(__name__)

LOOK_S = 0.25


class Ranks:
    """Owner of the other ranks' processes, of the board, and of this rank's end of the group."""

    def __init__(self, config: TargetConfig, directory: Path, order_bytes: int, board_depth: int = 2) -> None:
        """Start the processes; they load the model while the caller does. ConfigError where the backend cannot be."""
        self._config = config
        self._first_device = torch.device(config.device)
        try:
            self._backend = choose_backend(config.pcp_backend, self._first_device, config.pcp_size)
        except ValueError as error:
            raise ConfigError("target.pcp_backend", str(error)) from error
        reap()
        self._exported = ExportedBoard(config.pcp_size, order_bytes, board_depth)
        self._store = rendezvous(config.pcp_size, JOIN_TIMEOUT_S)
        self._group: TorchGroup | None = None
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._noticed = threading.Event()
        self._on_lost: Callable[[], object] | None = None
        self._let_go: Callable[[], bool] = lambda: True
        self._closing = threading.Event()
        self._processes = [self._start(rank, directory) for rank in range(1, config.pcp_size)]
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watcher.start()

    @property
    def board(self) -> Board:
        """Where orders go."""
        return self._exported.board

    @property
    def lost(self) -> bool:
        """Whether a rank is gone, and with it the target."""
        return self._reason is not None

    @property
    def backend(self) -> Backend:
        """Of the collectives."""
        return self._backend

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1, 2, ..."""
        return tuple(process.pid for process in self._processes)

    def join(self, device: torch.device, timeout_s: float) -> TorchGroup:
        """Wait until all have loaded, then make the group. timeout_s: of every collective. RanksLost when one ends
        first, or takes too long.
        """
        self._wait_all(RankState.LOADED, self._config.pcp_start_timeout_s)
        self.board.start_joining()
        try:
            self._group = TorchGroup(
                0,
                self._config.pcp_size,
                self._backend,
                self._store.port,
                device,
                JOIN_TIMEOUT_S,
                timeout_s,
            )
        except RuntimeError as error:  # torch.distributed's, of all sorts
            raise RanksLost(self._reason or f"the ranks did not meet: {str(error).partition(chr(10))[0]}") from error
        self._wait_all(RankState.JOINED, JOIN_TIMEOUT_S)
        _log.info("%d ranks over %s: processes %s", self._config.pcp_size, self._backend, self.pids)
        return self._group

    def watch(self, on_lost: Callable[[], object]) -> None:
        """Have `on_lost` called, once, from another thread, when a rank is lost: at once if one is already."""
        with self._lock:
            self._on_lost = on_lost
            lost = self.lost
        if lost:
            on_lost()

    def loss_behind(self, error: Exception) -> str | None:
        """The loss of a rank, in words, where it is what a step failed with `error` for: the library between the ranks
        has long ones for it, and none of who is lost. None: no rank is lost.
        """
        if not isinstance(error, RuntimeError):  # gloo's have no class of their own
            return None
        self._noticed.wait(NOTICE_S)
        return self._reason

    def before_leaving(self, let_go: Callable[[], bool]) -> None:
        """Have `let_go` called before this rank leaves the group: what could still use it goes. False: that cannot be,
        and the group is left to the process's end.
        """
        self._let_go = let_go

    def close(self) -> None:
        """End the other ranks, leave the group with them, and free the board. Only once no step runs any more. A group
        that cannot be left is left to the process's end, which must not be the interpreter's. Idempotent.
        """
        self._closing.set()
        self._watcher.join()
        self._exported.close()
        # Ranks that are still loading do not look at the board yet.
        patience_s = CLOSE_S if self._group is not None and not self.lost else 0.0
        leaving = self._start_leaving()
        end = time.monotonic() + patience_s
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        self._kill()
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        if leaving is not None:
            leaving.join(REST_S)
            if leaving.is_alive():
                _log.warning("the group of %d ranks was not left within %g s", self._config.pcp_size, REST_S)

    def _start_leaving(self) -> threading.Thread | None:
        """Leave the group, beside the others, who do so now and each of whom waits for all. None: there is no group to
        be left in good order.
        """
        group, self._group = self._group, None
        if group is None or self.lost or not self._let_go():
            return None
        leaving = threading.Thread(target=group.close, name="group-leave", daemon=True)
        leaving.start()
        return leaving

    def _start(self, rank: int, directory: Path) -> subprocess.Popen[bytes]:
        told = RankArguments(
            rank=rank,
            config=self._config,
            model_directory=str(directory),
            board_name=self._exported.name,
            order_bytes=self._exported.order_bytes,
            board_depth=self._exported.depth,
            port=self._store.port,
            parent_pid=os.getpid(),
        )
        # The pipe says nothing: that it ends tells the rank that we have.
        return subprocess.Popen(
            [sys.executable, "-m", "target_service.pcp", told.model_dump_json()], stdin=subprocess.PIPE
        )

    def _wait_all(self, state: RankState, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not self.board.wait_all(state, LOOK_S):
            if self._reason is not None:
                raise RanksLost(self._reason)
            if time.monotonic() > end:
                raise RanksLost(f"not all ranks were {state.name.lower()} within {timeout_s:g} s")

    def _watch(self) -> None:
        looked = time.monotonic()
        signs = [_Signs(process.pid) for process in self._processes]
        while not self._closing.wait(WATCH_S):
            now = time.monotonic()
            if now - looked > STARVED_S:  # we stood still, as everybody may have
                for sign in signs:
                    sign.last_s = now
            looked = now
            reason = self._find_loss(now, signs)
            if reason is not None:
                self._lose(reason)
                return

    def _find_loss(self, now: float, signs: list[_Signs]) -> str | None:
        for rank, process in enumerate(self._processes, start=1):
            status = process.poll()
            if status is not None:
                return f"rank {rank} (process {process.pid}) has ended: {_status_text(status)}"
        for rank, sign in enumerate(signs, start=1):
            sign.look(now, self.board.last_beat_s(rank))
            # While they load, a library may keep a whole process waiting.
            if self._group is not None and now - sign.last_s > HANG_S:
                return f"rank {rank} (process {sign.pid}) hangs: no heartbeat and no work for {HANG_S} s"
        return None

    def _lose(self, reason: str) -> None:
        _log.error("%s; ending the target", reason)
        with self._lock:
            self._reason = reason
            on_lost = self._on_lost
        self._noticed.set()
        self._kill()  # who waits for them in a collective is let go by it
        self._exported.close()  # now: a device that waits for them may keep us from ever coming to `close`
        if on_lost is not None:
            on_lost()

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()


class _Signs:
    """When did a process last show that it does not hang? By its heartbeat; or by computing, since a compiler may hold
    up its other threads for seconds. One that computes for ever is found by the timeout of a collective.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.last_s = time.monotonic()
        self._ticks = -1

    def look(self, now: float, beat_s: float) -> None:
        ticks = _cpu_ticks(self.pid)
        if ticks != self._ticks:
            self._ticks, self.last_s = ticks, now
        self.last_s = max(self.last_s, beat_s)


def _cpu_ticks(pid: int) -> int:
    """Processor time of a process, in the kernel's ticks; 0 where that cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])  # utime, stime: the 14th and 15th of proc(5), two of them before the ")"


def _status_text(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
