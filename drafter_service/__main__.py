"""How is a drafter started? `python -m drafter_service --config FILE [--model DIR]`."""

from __future__ import annotations

import argparse
import logging
import os
import sys

import torch

from drafter_service.assembly import make_device_program, make_info, make_speculator
from drafter_service.config import DrafterConfig
from drafter_service.server import DrafterServer
from engine.config_file import load_model_name, load_section
from engine.ending import end_now
from engine.errors import OutriderError
from engine.stop_signal import StopSignal

WATCH_S = 0.5  # how often the main thread looks whether the device thread still lives


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status: 0 after a clean stop, 2 on a bad config or model, 1 when
    the device thread failed.
    """
    parser = argparse.ArgumentParser(prog="drafter_service", description="Outrider's drafter service.")
    parser.add_argument("--config", required=True, help="the config file (YAML)")
    parser.add_argument("--model", help="the target's model directory; overrides the file's `model:`")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stop = StopSignal()
    try:
        config = load_section(options.config, "drafter", DrafterConfig)
        model = load_model_name(options.config, options.model) if config.method == "eagle3" else None
        speculator = make_speculator(config, model)
        program = make_device_program(config, speculator)
        server = DrafterServer(config, make_info(config, speculator), speculator, program)
    except OutriderError as error:
        print(f"drafter_service: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        print(f"drafter_service: drafter.num_blocks: does not fit beside the model: {reason}", file=sys.stderr)
        return 2
    server.start()
    execution = "host" if program is None else "device"
    print(
        f"drafter ready on {server.address} method={config.method} draft_len<={config.max_draft_len} "
        f"device={config.device} dtype={config.dtype} execution={execution}",
        flush=True,
    )
    while not stop.wait(WATCH_S) and not server.failed.is_set():
        pass
    if server.device_error is not None:
        # Whatever is left to give back would go through the same broken context, and may hang in it.
        print(f"drafter_service: the GPU failed: {server.device_error}", file=sys.stderr, flush=True)
        os._exit(1)
    server.stop()
    return 1 if server.failed.is_set() else 0


if __name__ == "__main__":
    # Not by way of the interpreter's end, for which a successor would wait: with torch it takes half a second, and with
    # what a failure has left over it may take for ever.
    end_now(main())
