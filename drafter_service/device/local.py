"""How does a drafter run in the process of its target, without RPCs? For measuring what the split costs, and for tests.

The caller's thread and current stream do everything; both ends of a `local` channel (or an attached device channel)
are given to it.
"""

from __future__ import annotations

from drafter_service.channels import AttachedChannel, ChannelLink
from drafter_service.device.making import make_device_steps
from drafter_service.device.program import DrafterProgram
from drafter_service.messages import Admission, StepReport, StepRequest
from drafter_service.residency import Residents
from drafter_service.speculator import Speculator
from engine.channel.device import DeviceDrafterEnd
from engine.device_deadline import DeviceDeadline
from engine.errors import CapacityError

SLICE_S = 0.05


class LocalDrafter:
    """A speculator and its device execution, for one channel. Used by one thread. `close` it."""

    def __init__(self, speculator: Speculator, program: DrafterProgram, num_seats: int, max_wait_s: float) -> None:
        self.speculator = speculator
        self.program = program
        self.residents = Residents(num_seats)
        any_time = DeviceDeadline(None, lambda _: None)  # whoever calls waits, and sees it
        self.steps = make_device_steps(program, speculator.needs, self.residents, max_wait_s, lambda: None, any_time)
        self.reports: list[StepReport] = []
        self._link: ChannelLink | None = None

    def attach(self, end: DeviceDrafterEnd, max_model_len: int) -> None:
        """Draft through this channel. max_model_len: the target's. ChannelError: it cannot be drafted for."""
        self.speculator.check_channel(end.spec)
        self.steps.check_channel(end.spec)
        self._link = ChannelLink(0, AttachedChannel(end, "local", "local", max_model_len, end.close))

    def admit(self, admission: Admission) -> int:
        """Place a request. Returns its cached_len. CapacityError: no seat, or no block."""
        resident = self.residents.add(admission, stream_id=0)
        if resident is None:
            raise CapacityError("no seat is free")
        try:
            return self.speculator.admit(resident)
        except CapacityError:
            self.residents.remove(resident)
            raise

    def release(self, request_id: str) -> None:
        """Forget a request, if it is there."""
        resident = self.residents.get(request_id)
        if resident is not None:
            self.speculator.release(resident)
            self.residents.remove(resident)

    def launch(self, plan: StepRequest) -> None:
        """Enqueue a plan on the current stream, waiting only where too many steps are under way. Its report is appended
        to `reports` by a later call of `launch` or `collect`.
        """
        assert self._link is not None, "attach first"
        self.steps.collect()
        while not self.steps.launch(self._link, plan, self.reports.append, SLICE_S):
            self.steps.collect()

    def collect(self, all_of_them: bool = False) -> None:
        """Take in the steps that are done; all_of_them: wait until none is under way."""
        self.steps.collect()
        while all_of_them and self.steps.num_under_way:
            self.steps.wait(SLICE_S)
            self.steps.collect()

    def close(self) -> None:
        """Close the channel, and end the waiting thread."""
        if self._link is not None:
            self._link.attached.detach()
        self.steps.close()
