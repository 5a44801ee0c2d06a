"""How does a private MPS daemon never outlive the command that wanted it, whichever way that ends?

`python mps_guard.py` starts NVIDIA's Multi-Process Service with folders of its own under the temporary directory, says
`ready DIRECTORY` or `failed REASON` in one line, and waits for the end of its standard input: the supervisor closes the
pipe, or the kernel does when it is killed. Then the daemon is told to quit, and killed if it does not. The standard
library alone. No setting of any device is touched.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
START_S = 20.0
QUIT_S = 15.0
# After which the daemon ends clients that are still there. The services are gone before, or are being killed.
CLIENTS_S = 5


def environment(directory: Path) -> dict[str, str]:
    """What makes a process a client of the daemon in `directory`."""
    return {"CUDA_MPS_PIPE_DIRECTORY": str(directory / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(directory / "log")}


def main() -> None:
    """Start, wait, stop. The exit status says nothing."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    directory = Path(tempfile.mkdtemp(prefix="outrider-mps-"))
    try:
        reason = _start(directory)
        print(f"failed {reason}" if reason else f"ready {directory}", flush=True)
        if not reason:
            sys.stdin.buffer.read()
    finally:
        _stop(directory)
        shutil.rmtree(directory, ignore_errors=True)


def _start(directory: Path) -> str:
    """Start the daemon; why not, where it does not start."""
    for path in environment(directory).values():
        Path(path).mkdir()
    errors = directory / "errors"
    try:
        # It goes on in the background with whatever streams it is given, so it gets none of ours.
        with errors.open("wb") as stream:
            _run(directory, ["-d"], START_S, stderr=stream)
        _run(directory, [], START_S, command="get_server_list")
    except FileNotFoundError:
        return f"{CONTROL} is not installed"
    except subprocess.TimeoutExpired:
        return f"{CONTROL} did not answer within {START_S:.0f} s"
    except subprocess.CalledProcessError as error:
        said = " ".join(errors.read_text(errors="replace").split())
        return f"{CONTROL} ended with status {error.returncode}{f': {said}' if said else ''}"
    except OSError as error:
        return f"{CONTROL} cannot be run: {error.strerror}"
    return ""


def _stop(directory: Path) -> None:
    try:
        pid = int((directory / "pipe" / f"{CONTROL}.pid").read_text())
    except (OSError, ValueError):
        return  # it never ran
    try:
        _run(directory, [], QUIT_S, command=f"quit -t {CLIENTS_S}")
    except (OSError, subprocess.SubprocessError):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _run(
    directory: Path, arguments: list[str], timeout_s: float, command: str = "", stderr: object = subprocess.DEVNULL
) -> None:
    subprocess.run(
        [CONTROL, *arguments],
        input=f"{command}\n".encode(),
        stdout=subprocess.DEVNULL,
        stderr=stderr,  # type: ignore[call-overload]  # a file or a constant
        env={**os.environ, **environment(directory)},
        timeout=timeout_s,
        check=True,
    )


if __name__ == "__main__":
    main()
