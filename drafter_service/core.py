"""What does the drafter do for each command?

Everything but the RPCs and the thread: commands in, events out. One call carries out one command, or, for a plan whose
ring entry is not there yet, says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from drafter_service.channels import AttachOutcome, ChannelLinks
from drafter_service.device.steps import DeviceSteps
from drafter_service.messages import (
    Admission,
    AdmissionReply,
    AdmissionStatus,
    Capacity,
    ChannelReply,
    Event,
    FaultReply,
    Hello,
    OpenChannel,
    ReleaseReply,
    ReleaseRequest,
    ServiceInfo,
    StepReport,
    StepRequest,
    Unreadable,
)
from drafter_service.residency import Resident, Residents
from drafter_service.speculator import Speculator
from drafter_service.steps import PendingStep, StepRunner
from drafter_service.streams import GatewayStream, StreamCommand, StreamEnded
from engine.errors import CapacityError, ChannelError, InvalidRequest, OutriderError, ProtocolError

_log = logging.getLogger(__name__)

MAX_ROWS = 4096
MAX_SEQ = (1 << 63) - 1  # channels keep it as int64


class DrafterCore:
    """Owner of the residents, the channels and the speculator. Used by the device thread only.

    start_attach: starts attaching to a target for a stream (gateway id, address) and returns at once; the outcome comes
    back as an AttachOutcome command of that stream. make_device_steps: makes the runner of device channels for the
    residents, or None where drafting runs on the host.
    """

    def __init__(
        self,
        info: ServiceInfo,
        speculator: Speculator,
        num_seats: int,
        max_wait_s: float,
        start_attach: Callable[[GatewayStream, str], None],
        make_device_steps: Callable[[Residents], DeviceSteps] | None = None,
    ) -> None:
        self.info = info
        self.residents = Residents(num_seats)
        self.links = ChannelLinks()
        self.speculator = speculator
        self._steps = StepRunner(speculator, self.residents, max_wait_s)
        self._device_steps = None if make_device_steps is None else make_device_steps(self.residents)
        self._start_attach = start_attach
        self._pending: dict[int, PendingStep] = {}

    def run(self, stream: GatewayStream, command: StreamCommand, later_plans: int, slice_s: float) -> bool:
        """Carry out a command. False: it is a plan whose entry is not there yet, or, on a device channel, one too many
        under way; nothing has changed, ask again.

        later_plans: plans of the same channel that wait behind it. slice_s: how long to wait for the entry now.
        """
        try:
            event = self._answer(stream, command, later_plans, slice_s)
        except OutriderError as error:
            event = self._fault(command, error)
        pending = self._pending.get(stream.stream_id)
        if pending is not None and pending.plan is command:
            return False
        if event is not None:
            stream.outbox.put(event)
        return True

    def collect(self) -> None:
        """Take in the steps of device channels that are done, and report them. Raises what the device failed with."""
        if self._device_steps is not None:
            self._device_steps.collect()

    def check_integrity(self) -> None:
        """IntegrityError when blocks or seats don't add up."""
        self.speculator.check_integrity()

    def close(self) -> None:
        """Give up every request and channel."""
        self.links.drop_all()
        if self._device_steps is not None:
            self._device_steps.close()

    def _answer(self, stream: GatewayStream, command: StreamCommand, later_plans: int, slice_s: float) -> Event | None:
        if isinstance(command, StreamEnded):
            self._end_stream(stream)
            return None
        if isinstance(command, AttachOutcome):
            return self._attached(stream, command)
        if isinstance(command, Hello):
            stream.gateway_id = command.gateway_id
            return self.info
        if isinstance(command, Unreadable):
            raise command.error
        if stream.gateway_id is None:
            raise ProtocolError("hello: must be the first command of a stream")
        match command:
            case OpenChannel():
                return self._open(stream, command)
            case Admission():
                return self._admit(stream, command)
            case ReleaseRequest():
                return self._release(stream, command)
            case StepRequest():
                return self._step(stream, command, later_plans, slice_s)

    def _fault(self, command: StreamCommand, error: OutriderError) -> FaultReply:
        seq = command.seq if isinstance(command, (StepRequest, Unreadable)) else 0
        named = command.request_id if isinstance(command, (Admission, ReleaseRequest, Unreadable)) else ""
        return FaultReply(error.kind, str(error), seq, named)

    # Channels.

    def _open(self, stream: GatewayStream, command: OpenChannel) -> ChannelReply | None:
        if not command.target_address:
            return ChannelReply(command.target_address, ok=False, detail="target_address: must be HOST:PORT")
        self._start_attach(stream, command.target_address)
        return None

    def _attached(self, stream: GatewayStream, outcome: AttachOutcome) -> ChannelReply | None:
        attached = outcome.attached
        if stream.ended:  # while attaching was under way: nobody would ever give the channel back
            if attached is not None:
                attached.detach()
            return None
        if attached is None:
            return ChannelReply(outcome.target_address, ok=False, detail=outcome.detail)
        spec = attached.channel.spec
        try:
            self.speculator.check_channel(spec)
            if attached.device_channel is not None:
                if self._device_steps is None:
                    raise ChannelError(
                        f"drafter.execution: a {attached.channel.kind} channel needs execution `device`, and this "
                        f"drafter ({self.info.method}) runs on the host"
                    )
                self._device_steps.check_channel(spec)
            if spec.max_tokens > self.speculator.needs.max_tokens > 0:
                raise ChannelError(
                    f"drafter.max_step_tokens: {self.speculator.needs.max_tokens} is less than the target's "
                    f"{spec.max_tokens}"
                )
        except ChannelError as error:
            attached.detach()
            return ChannelReply(outcome.target_address, ok=False, detail=str(error))
        replaced = self.links.add(stream.stream_id, attached)
        # What came through the old channel comes through no other: the gateway admits its requests anew.
        for resident in self.residents.of_channel(replaced):
            self._drop(resident)
        return ChannelReply(
            target_address=outcome.target_address,
            ok=True,
            channel_id=spec.channel_id,
            channel_epoch=spec.epoch,
            kind=attached.channel.kind,
            target_instance_id=attached.target_instance_id,
        )

    def _end_stream(self, stream: GatewayStream) -> None:
        self._pending.pop(stream.stream_id, None)
        for resident in self.residents.of_stream(stream.stream_id):
            self._drop(resident)
        self.links.drop_stream(stream.stream_id)
        stream.ended = True
        stream.outbox.close()
        _log.info("stream %d ended; %d requests remain", stream.stream_id, len(self.residents))

    # Requests.

    def _admit(self, stream: GatewayStream, admission: Admission) -> AdmissionReply:
        try:
            self._check(stream, admission)
            cached_len = self._seat(stream, admission)
        except InvalidRequest as error:
            return self._refusal(admission, AdmissionStatus.INVALID, error.field, error.detail)
        except CapacityError as error:
            return self._refusal(admission, AdmissionStatus.NO_SEAT, "", str(error))
        return AdmissionReply(
            admission.request_id, admission.epoch, AdmissionStatus.OK, self._capacity(), cached_len=cached_len
        )

    def _check(self, stream: GatewayStream, admission: Admission) -> None:
        num_tokens = len(admission.token_ids)
        if not admission.request_id:
            raise InvalidRequest("request_id", "must not be empty")
        link = self.links.get(admission.channel_id, stream.stream_id)
        if link is None:
            raise InvalidRequest("channel_id", f"this stream has no channel {admission.channel_id!r}")
        if num_tokens == 0:
            raise InvalidRequest("token_ids", "must not be empty")
        vocab_size = link.attached.channel.spec.vocab_size
        if max(admission.token_ids) >= vocab_size:
            raise InvalidRequest("token_ids", f"an id outside the target's vocabulary of {vocab_size}")
        if not 0 < admission.prompt_len <= num_tokens:
            raise InvalidRequest("prompt_len", f"must be in 1..{num_tokens}, got {admission.prompt_len}")
        if admission.max_total_len < num_tokens:
            raise InvalidRequest("max_total_len", f"must be at least {num_tokens}, got {admission.max_total_len}")
        present = self.residents.get(admission.request_id)
        if present is None:
            return
        if present.stream_id != stream.stream_id:
            raise InvalidRequest("request_id", "belongs to another stream")
        if admission.epoch < present.epoch:
            raise InvalidRequest("epoch", f"{admission.epoch} is older than the resident {present.epoch}")

    def _seat(self, stream: GatewayStream, admission: Admission) -> int:
        present = self.residents.get(admission.request_id)
        if present is not None:  # a new placement, or the same one after it had gone cold
            self._drop(present)
        resident = self.residents.add(admission, stream.stream_id)
        if resident is None:
            raise CapacityError("no seat is free")
        try:
            return self.speculator.admit(resident)
        except CapacityError:
            self.residents.remove(resident)
            raise

    def _refusal(self, admission: Admission, status: AdmissionStatus, field: str, detail: str) -> AdmissionReply:
        return AdmissionReply(
            admission.request_id, admission.epoch, status, self._capacity(), field=field, detail=detail
        )

    def _release(self, stream: GatewayStream, release: ReleaseRequest) -> ReleaseReply:
        resident = self.residents.get(release.request_id)
        if resident is not None and resident.stream_id == stream.stream_id and resident.epoch <= release.epoch:
            self._drop(resident)
        return ReleaseReply(release.request_id, release.epoch, self._capacity())

    def _drop(self, resident: Resident) -> None:
        self.speculator.release(resident)
        self.residents.remove(resident)

    # Steps.

    def _step(self, stream: GatewayStream, plan: StepRequest, later_plans: int, slice_s: float) -> StepReport | None:
        pending = self._pending.pop(stream.stream_id, None)
        if pending is None or pending.plan is not plan:
            _check_plan(plan)
            pending = self._steps.begin(plan)
        link = self.links.find(plan.channel_id, plan.channel_epoch, stream.stream_id)
        if link is None:
            raise ChannelError(
                f"channel_id: this stream has no channel {plan.channel_id!r} of epoch {plan.channel_epoch}"
            )
        if link.attached.device_channel is not None and self._device_steps is not None:
            if not self._device_steps.launch(link, plan, lambda report: self._report(stream, report), slice_s):
                self._pending[stream.stream_id] = pending
            return None
        report = self._steps.try_step(link, pending, later_plans, slice_s)
        if report is None:
            self._pending[stream.stream_id] = pending
            return None
        return replace(report, capacity=self._capacity())

    def _report(self, stream: GatewayStream, report: StepReport) -> None:
        """A step of a device channel is done."""
        if not stream.ended:
            stream.outbox.put(replace(report, capacity=self._capacity()))

    def _capacity(self) -> Capacity:
        return Capacity(self.residents.num_free_seats, self.speculator.num_free_blocks)


def _check_plan(plan: StepRequest) -> None:
    if not 1 <= plan.seq <= MAX_SEQ:
        raise ProtocolError(f"seq: must be in 1..{MAX_SEQ}, got {plan.seq}")
    if len(plan.rows) > MAX_ROWS:
        raise ProtocolError(f"rows: {len(plan.rows)} in one plan, at most {MAX_ROWS}")
    if len({row.request_id for row in plan.rows}) != len(plan.rows):
        raise ProtocolError("rows: a request has more than one row")
