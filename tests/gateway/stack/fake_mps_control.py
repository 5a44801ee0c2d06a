"""Stands in for nvidia-cuda-mps-control: a daemon that does nothing, in the mode that FAKE_MPS names.

work: as the real one. fail: does not start. hang: starts and never answers. deaf: answers all but `quit`.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

mode = os.environ["FAKE_MPS"]
pid_file = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]) / "nvidia-cuda-mps-control.pid"
assert Path(os.environ["CUDA_MPS_LOG_DIRECTORY"]).is_dir()
if sys.argv[1:] == ["-d"]:
    if mode == "fail":
        sys.exit("cannot talk to the driver")
    daemon = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "import time; time.sleep(300)"], start_new_session=True
    )
    pid_file.write_text(str(daemon.pid))
    Path(os.environ["FAKE_MPS_PID"]).write_text(str(daemon.pid))
    sys.exit(0)
command = sys.stdin.readline().split()
if mode == "hang" or (mode == "deaf" and command[0] == "quit"):
    time.sleep(300)
if command[0] == "quit":
    os.kill(int(pid_file.read_text()), 15)
