"""How is the device side of a drafter put together?"""

from __future__ import annotations

from collections.abc import Callable

from drafter_service.device.completion import Completions
from drafter_service.device.draft_model import DraftModelProgram
from drafter_service.device.eagle3 import Eagle3Program
from drafter_service.device.program import DeviceOptions, DrafterProgram
from drafter_service.device.steps import DeviceSteps
from drafter_service.draft_model import DraftModelSpeculator
from drafter_service.eagle3.speculator import Eagle3Speculator
from drafter_service.residency import Residents
from drafter_service.speculator import ChannelNeeds, Speculator
from engine.errors import ConfigError
from kernels.kernel_set import KernelSet, kernels_for


def make_program(speculator: Speculator, options: DeviceOptions, kernels: KernelSet | None = None) -> DrafterProgram:
    """What the speculator does on its device. kernels: None, those of the device.

    ConfigError: it has no device form.
    """
    if isinstance(speculator, Eagle3Speculator):
        return Eagle3Program(speculator, kernels or kernels_for(speculator.device), options)
    if isinstance(speculator, DraftModelSpeculator):
        return DraftModelProgram(speculator, kernels or kernels_for(speculator.decoder.device), options)
    raise ConfigError("drafter.execution", f"method {speculator.method} runs on the host: use `auto` or `host`")


def make_device_steps(
    program: DrafterProgram, needs: ChannelNeeds, residents: Residents, max_wait_s: float, on_done: Callable[[], None]
) -> DeviceSteps:
    """The runner of a program's steps, ready. on_done: called from another thread when steps are to be collected."""
    completions = Completions(on_done)
    steps = DeviceSteps(program, needs, residents, max_wait_s, completions, kernels_for(program.device))
    steps.warm_up()
    completions.start()
    return steps
