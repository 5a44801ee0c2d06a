"""What is wrong with a config file, before anything of it is started?

Each service alone knows its section; its config module, run as a program, says in a tenth of a second what is wrong
with one, without loading torch.
"""

from __future__ import annotations

import asyncio
import os
import sys

from gateway.errors import ConfigError
from gateway.stack.process import leashed
from gateway.stack.settings import StackSettings, service_environment

DEADLINE_S = 20.0
WRONG = 2  # a checker's exit status when its last line says what is wrong with the section


async def check_sections(settings: StackSettings) -> None:
    """Raises ConfigError naming the key of a wrong value in the target's or the drafter's section.

    A check that cannot be made is none: the service makes it again when it starts, and its words are shown then.
    """
    services = ["target"] if settings.drafter is None else ["target", "drafter"]
    for complaint in await asyncio.gather(*(_complaint(name, settings) for name in services)):
        if complaint:
            key, _, detail = complaint.partition(": ")
            raise ConfigError(key, detail)


async def _complaint(name: str, settings: StackSettings) -> str:
    """What is wrong with the section, empty when nothing is."""
    process = await asyncio.create_subprocess_exec(
        *leashed([sys.executable, "-m", f"{name}_service.config", str(settings.path)]),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **service_environment(name)},
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            _, said = await process.communicate()
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = said.decode("utf-8", "replace").splitlines()
    return lines[-1] if process.returncode == WRONG and lines else ""
