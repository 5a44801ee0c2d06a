"""A service with nothing in it: gRPC health on a port, and the manners its arguments ask for.

    python dummy_service.py ADDRESS [--fail] [--refuse] [--slow] [--deaf] [--child PIDFILE] [--crash-file FILE]

--fail: print and exit 3 before being ready. --refuse: as a service whose config is wrong. --slow: never be ready, and
ignore SIGTERM. --deaf: ignore SIGTERM. --child: start a process that sleeps, in our group.
--crash-file: exit 7 as soon as that file is there (and remove it).
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--refuse", action="store_true")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--child", type=Path)
    parser.add_argument("--crash-file", type=Path)
    arguments = parser.parse_args()
    print("hello from stdout", flush=True)
    print("hello from stderr \U0001f642", file=sys.stderr, flush=True)
    if arguments.fail:
        print("config.key: is wrong", flush=True)
        return 3
    if arguments.refuse:
        print("target_service: target.num_bloks: unknown key", file=sys.stderr, flush=True)
        print("a library's goodbye", file=sys.stderr, flush=True)
        return 2
    if arguments.slow:
        signal.signal(signal.SIGTERM, lambda *_: None)
        print("loading", flush=True)
        while True:
            signal.pause()
    if arguments.child is not None:
        child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
        arguments.child.write_text(str(child.pid))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, (lambda *_: None) if arguments.deaf else (lambda *_: stop.set()))
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(arguments.address)
    server.start()
    print("ready", flush=True)
    while not stop.wait(0.02):
        if arguments.crash_file is not None and arguments.crash_file.exists():
            arguments.crash_file.unlink()
            return 7
    print("goodbye", flush=True)
    server.stop(None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
