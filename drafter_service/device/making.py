"""How is the device side of a drafter put together?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drafter_service.device.completion import Completions
from drafter_service.device.draft_model import DraftModelProgram
from drafter_service.device.eagle3 import Eagle3Program
from drafter_service.device.program import DeviceOptions, DrafterProgram
from drafter_service.device.steps import DeviceSteps
from drafter_service.draft_model import DraftModelSpeculator
from drafter_service.eagle3.speculator import Eagle3Speculator
from drafter_service.residency import Residents
from drafter_service.speculator import ChannelNeeds, Speculator
from engine.device_deadline import DeviceDeadline
from engine.errors import ConfigError
from kernels.attention.interface import AttentionBackend
from kernels.kernel_set import KernelSet, kernels_for


def make_program(speculator: Speculator, options: DeviceOptions, kernels: KernelSet | None = None) -> DrafterProgram:
    """What the speculator does on its device. kernels: None, those of the device.

    ConfigError: it has no device form.
    """
    reason = why_not_on_device(speculator)
    if reason is not None:
        raise ConfigError("drafter.execution", f"`device` cannot be had: {reason}")
    if isinstance(speculator, Eagle3Speculator):
        return Eagle3Program(speculator, kernels or kernels_for(speculator.device), options)
    assert isinstance(speculator, DraftModelSpeculator), "no other has a device form"
    return DraftModelProgram(speculator, kernels or kernels_for(speculator.decoder.device), options)


def why_not_on_device(speculator: Speculator) -> str | None:
    """Why its steps can only run through the host, None where they need not."""
    attentions: Sequence[AttentionBackend]
    if isinstance(speculator, Eagle3Speculator):
        attentions = [speculator.attention]
    elif isinstance(speculator, DraftModelSpeculator):
        attentions = speculator.attentions
    else:
        return f"method {speculator.method} reads tokens on the host"
    for attention in attentions:
        if attention.needs_host_lens:
            return f"attention {attention.name!r} needs the rows' lengths on the host"
    return None


def make_device_steps(
    program: DrafterProgram,
    needs: ChannelNeeds,
    residents: Residents,
    max_wait_s: float,
    on_done: Callable[[], None],
    deadline: DeviceDeadline,
) -> DeviceSteps:
    """The runner of a program's steps, ready. on_done: called from another thread when steps are to be collected.
    deadline: of each step.
    """
    completions = Completions(on_done, deadline)
    steps = DeviceSteps(program, needs, residents, max_wait_s, completions, kernels_for(program.device))
    steps.warm_up()
    completions.start()
    return steps
