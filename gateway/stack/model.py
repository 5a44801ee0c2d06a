"""Where is the model that the config names? The engine's fetcher knows, in a process of its own: it may need torch."""

from __future__ import annotations

import asyncio
import os
import sys

from gateway.errors import ConfigError
from gateway.stack.process import leashed
from gateway.stack.settings import service_environment


async def fetch_model(name: str) -> str:
    """The local directory of model `name`, downloaded and converted where need be; progress goes to our stderr.

    Raises ConfigError (its own message is on stderr by then). Cancelling it ends the download.
    """
    process = await asyncio.create_subprocess_exec(
        *leashed([sys.executable, "-m", "engine.fetch", name]),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **service_environment("fetch")},
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = output.decode("utf-8", "replace").splitlines()
    if process.returncode != 0 or not lines:
        raise ConfigError("model", f"{name} could not be fetched (exit status {process.returncode})")
    return lines[-1]
