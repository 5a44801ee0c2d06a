"""Can two processes share memory? They can when they run on one boot of one machine and see the same /dev/shm."""

from __future__ import annotations

import os
import platform
from pathlib import Path

SHM_DIR = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id(shm_dir: Path = SHM_DIR) -> str:
    """Equal in two processes exactly when they can map each other's shared memory objects by name.

    Made of the kernel's boot id and of the identity (device and inode) of the /dev/shm mounted here: two containers
    of one machine have the same boot id, but usually a /dev/shm each; where they share the mount, they share its
    identity too. Where there is no /dev/shm the id names this process alone, so that no two ever agree.
    """
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node()
    try:
        mount = shm_dir.stat()
    except FileNotFoundError:
        return f"{boot}/none-{os.getpid()}"
    return f"{boot}/{mount.st_dev:x}:{mount.st_ino:x}"
