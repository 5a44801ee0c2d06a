"""How is a gateway started? `python -m gateway --config FILE [--model DIR]`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

# Read once, when gRPC is first imported. Its newer event engine costs a Python process some 15 to 40 % per message,
# and more at the slow end (measured with 1.85); where a version knows the names no more they change nothing.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

import prometheus_client

from gateway.app import GatewayApp, load_served
from gateway.config import load_config
from gateway.errors import ConfigError
from gateway.model_directory import model_directory


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status: 0 after a clean stop, 2 on a bad config or model."""
    parser = argparse.ArgumentParser(prog="gateway", description="Outrider's gateway.")
    parser.add_argument("--config", required=True, help="the config file (YAML)")
    parser.add_argument("--model", help="model directory; overrides the file's `model:`")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Its news of a normal start come under this name, and read like trouble.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    # They are a second series for each counter, and tell nobody anything.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    try:
        loaded = load_config(options.config, options.model)
        app = GatewayApp(loaded.gateway, load_served(loaded, model_directory(loaded.model)))
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(app.run(_ready))
    except ConfigError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2
    return 0


def _ready(rest: str, grpc: str) -> None:
    print(f"gateway ready on http://{rest} grpc={grpc}", flush=True)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: 10 to 30 % less time per message."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


if __name__ == "__main__":
    sys.exit(main())
