"""How is a target started? `python -m target_service --config FILE [--model DIR]`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable

from engine.config_file import load_model_name, load_section
from engine.ending import end_now
from engine.errors import OutriderError
from engine.fetch import fetch_model
from engine.stop_signal import StopSignal
from target_service.assembly import Target, build_target, warm_up
from target_service.config import TargetConfig
from target_service.server import TargetServer

_log = logging.getLogger(__name__)

WATCH_S = 0.25  # how late a signal may be noticed
FAILED_STOP_S = 3.0  # for a clean stop after a failure, which may have left a thread inside the device
DEVICE_LOST = 3  # exit status
SYNTHETIC_WARNING = (
    "drafts are accepted by chance, so what this target gives out is not the model's. Only for benchmarks."
)


def main(
    arguments: list[str] | None = None,
    on_failure: Callable[[], object] = lambda: None,
    end: Callable[[int], object] = lambda status: None,
) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status: 0 after a clean stop, 1 when a bug or a lost rank ended
    the service, 2 on a bad config or model. A lost device ends the process at once, with 3. on_failure: called, from
    any thread, before a stop after a failure.

    end: called with the status when all is done: it is to end the process.
    """
    parser = argparse.ArgumentParser(prog="target_service", description="Outrider's target service.")
    parser.add_argument("--config", required=True, help="the config file (YAML)")
    parser.add_argument("--model", help="model directory; overrides the file's `model:`")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stop, failed = StopSignal(), threading.Event()

    def fail() -> None:
        failed.set()
        on_failure()
        stop.ask()

    target: Target | None = None
    try:
        config = load_section(options.config, "target", TargetConfig)
        model_name = load_model_name(options.config, options.model)
        target = build_target(config, model_name, fetch_model(model_name))
        if config.accept != "exact":
            print(f"WARNING: target.accept is {config.accept}: {SYNTHETIC_WARNING}", file=sys.stderr, flush=True)
        server = TargetServer(config, target, on_failure=fail)
        warm_up(target.engine, (1, config.max_verify_len + 1), lambda line: print(f"target: {line}", flush=True))
    except OutriderError as error:
        if target is not None:
            target.close()
        print(f"target_service: {error}", file=sys.stderr)
        status = 1 if failed.is_set() else 2
        end(status)
        return status
    except Exception:  # a bug, or no memory: ranks must not be left alone with it
        _log.exception("the service cannot start")
        with contextlib.suppress(OutriderError, RuntimeError):  # the first error is what counts
            if target is not None:
                target.close()
        end(1)
        raise
    server.start()
    print(f"target ready on {server.address} {_what_it_is(target, config, model_name)}", flush=True)
    while not stop.wait(WATCH_S):
        pass
    if server.lost:
        # Nothing of the device can be let go in good order any more, and trying to may hang.
        print(f"target_service: the device is lost: {server.lost}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(DEVICE_LOST)
    try:
        server.stop()
    except Exception:  # a bug: what was not ended is, with this process
        _log.exception("the service did not stop in good order")
        end(1)
        raise
    status = 1 if failed.is_set() else 0
    end(status)
    return status


def _what_it_is(target: Target, config: TargetConfig, model_name: str) -> str:
    engine = target.engine
    return (
        f"model={model_name} blocks={target.info.num_blocks} device={engine.device} dtype={config.dtype} "
        f"attention={config.attention} execution={engine.execution} channels={','.join(target.kinds)}"
    )


def end_soon() -> None:
    """End this process with status 1 whatever its threads are stuck in, after some time for a clean stop."""
    last = threading.Timer(FAILED_STOP_S, os._exit, (1,))
    last.daemon = True
    last.start()


if __name__ == "__main__":
    # Not by way of the interpreter's end, for which a successor would wait: with torch it takes half a second, and a
    # group that has lost a rank may hold it up for ever.
    sys.exit(main(on_failure=end_soon, end=end_now))
