"""Which directory holds the model that the config names?

A directory is itself. Any other name is for `python -m engine.fetch`, run as a process of its own: the gateway never
loads what that needs. Its progress goes to stderr, its answer is the last line of its stdout.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gateway.errors import ConfigError


def model_directory(name: str) -> Path:
    """Blocks until the model is there; a first download may take minutes, and shows progress. Raises ConfigError."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    done = subprocess.run(
        [sys.executable, "-m", "engine.fetch", name], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise ConfigError("model", f"{name}: could not be fetched (exit status {done.returncode}); see above")
    return Path(lines[-1])
