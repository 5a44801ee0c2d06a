"""Who owns a shared memory object, and what happens to it when its owner dies?

A file under /dev/shm, mapped. The exporter creates it, holds an exclusive flock on it for as long as it lives, and
unlinks it on close, at interpreter exit, or never when it is killed: then the kernel drops the lock with the process,
and whoever opens the next channel on the machine finds the file unlocked and removes it (`reap`). A lock knows no
process ids, so this holds across containers that share /dev/shm; the pid is in the name for people only. Python's
multiprocessing.shared_memory is not used: before 3.13 its resource tracker unlinks the object when a process that
merely attached it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import weakref
from pathlib import Path

from engine.channel.host import SHM_DIR
from engine.errors import ChannelError

PREFIX = "outrider-"
CREATE_TRIES = 16


class ExportedMemory:
    """A memory object that this process made and must free. All bytes are 0 at first."""

    def __init__(self, num_bytes: int, shm_dir: Path = SHM_DIR) -> None:
        """Raises ChannelError when there is no /dev/shm or it has not num_bytes left."""
        if not shm_dir.is_dir():
            raise ChannelError(f"kind: shm needs {shm_dir}, which this machine does not have; use bytes")
        self.path, self._fd = _create_locked(shm_dir)
        self._free = weakref.finalize(self, _free, self.path, self._fd, os.getpid())
        try:
            # Allocates now: without it a full /dev/shm would show as SIGBUS at the first write.
            os.posix_fallocate(self._fd, 0, num_bytes)
            self.buffer = mmap.mmap(self._fd, num_bytes)
        except OSError as error:
            self.close()
            left = os.statvfs(shm_dir)
            raise ChannelError(
                f"kind: shm needs {num_bytes} bytes of {shm_dir}, {left.f_bavail * left.f_frsize} are free ({error})"
            ) from error

    @property
    def name(self) -> str:
        """What another process opens it by."""
        return self.path.name

    def close(self) -> None:
        """Unlink. The mapping lives until the last tensor made of it is gone. Idempotent."""
        self._free()


def attach_memory(name: str, num_bytes: int, shm_dir: Path = SHM_DIR) -> mmap.mmap:
    """Map another process's object; the caller's only duty is to drop it. ChannelError: not there, not ours, or of
    another size.
    """
    if not name.startswith(PREFIX) or "/" in name:
        raise ChannelError(f"handle: {name!r} is not the name of a channel's memory")
    try:
        fd = os.open(shm_dir / name, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        raise ChannelError(f"handle: cannot open {shm_dir / name}: {error.strerror}") from error
    try:
        if (size := os.fstat(fd).st_size) != num_bytes:
            raise ChannelError(f"handle: {name} has {size} bytes, the description says {num_bytes}")
        return mmap.mmap(fd, num_bytes)
    finally:
        os.close(fd)


def reap(shm_dir: Path = SHM_DIR) -> list[str]:
    """Remove the objects whose owners have died; returns their names. Objects of other users are left alone."""
    reaped: list[str] = []
    for path in sorted(shm_dir.glob(f"{PREFIX}*")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            reaped.append(path.name)
        except (BlockingIOError, FileNotFoundError):
            continue  # its owner lives, or another process was quicker
        finally:
            os.close(fd)
    return reaped


def _create_locked(shm_dir: Path) -> tuple[Path, int]:
    """A new file, locked by this process.

    A reaper that comes between the two takes it for a dead process's and unlinks it: that shows in its link count, and
    another name is tried.
    """
    for _ in range(CREATE_TRIES):
        path = shm_dir / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return path, fd
        os.close(fd)
    raise ChannelError(f"kind: shm cannot keep a new object in {shm_dir}: another process removes it each time")


def _free(path: Path, fd: int, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child runs this at its exit too, and owns nothing
    path.unlink(missing_ok=True)
    os.close(fd)
