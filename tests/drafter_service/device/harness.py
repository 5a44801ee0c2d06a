"""How does a test run the device execution of a drafter behind a fake target, on a CPU?

One thread; the target's entry is there before the plan is launched, as a local channel does not wait. Steps are done
when the test says so (`HeldCompletions`), so that the host's truth lags as it does on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drafter_service.channels import AttachedChannel, ChannelLink
from drafter_service.device.completion import Completions, Pending
from drafter_service.device.making import make_program
from drafter_service.device.program import DeviceOptions
from drafter_service.device.steps import DeviceSteps
from drafter_service.messages import Admission, RowRequest, StepReport, StepRequest
from drafter_service.residency import Resident, Residents
from drafter_service.speculator import Speculator
from kernels.kernel_set import kernels_for
from tests.drafter_service.fake_target import FakeRequest, FakeTarget

ALL_SIZES = DeviceOptions(graph_rows=(1, 2, 4, 8, 16, 32, 64), shadow=True)


class HeldCompletions(Completions):
    """Steps are done when `release` is called."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.held: list[Pending] = []

    def add(self, step: Pending) -> None:
        self.held.append(step)

    def release(self, num: int) -> None:
        """The next `num` steps are done."""
        assert num <= len(self.held)
        del self.held[:num]
        with self._changed:
            self._num_done += num


class DeviceHarness:
    """A fake target on a local channel, and a speculator's device execution."""

    def __init__(self, target: FakeTarget, speculator: Speculator, options: DeviceOptions = ALL_SIZES) -> None:
        assert target.local is not None
        self.target = target
        self.speculator = speculator
        self.residents = Residents(speculator.settings.num_seats)  # type: ignore[attr-defined]
        self.completions = HeldCompletions()
        self.program = make_program(speculator, options)
        self.program.warm_up()
        kernels = kernels_for(self.program.device)
        self.steps = DeviceSteps(self.program, speculator.needs, self.residents, 5.0, self.completions, kernels)
        self.steps.warm_up()
        speculator.check_channel(target.spec)
        self.steps.check_channel(target.spec)
        end = target.local.drafter
        self.link = ChannelLink(1, AttachedChannel(end, "fake:1", "instance", target.max_len, end.close))
        self.reports: list[StepReport] = []
        # Bounds as a gateway plans by: the context of each request, with its rows under way.
        self.ahead: dict[str, list[int]] = {}

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_total_len: int | None = None,
        temperature: float = 0.0,
        seeded: bool = False,
    ) -> FakeRequest:
        request = self.target.add(request_id, prompt, temperature)
        self.admit(request, False, max_total_len, seeded)
        return request

    def admit(
        self,
        request: FakeRequest,
        mid_stream: bool,
        max_total_len: int | None = None,
        seeded: bool = False,
        epoch: int = 1,
    ) -> int:
        """Place a request on the drafter. Returns cached_len."""
        self.release(request.request_id)
        resident = self.residents.add(
            Admission(
                request_id=request.request_id,
                epoch=epoch,
                token_ids=tuple(request.tokens),
                prompt_len=request.prompt_len,
                max_total_len=max_total_len or self.target.max_len,
                channel_id=self.target.spec.channel_id,
                mid_stream=mid_stream,
                seeded=seeded,
                temperature=request.temperature,
            ),
            stream_id=1,
        )
        assert resident is not None
        return self.speculator.admit(resident)

    def release(self, request_id: str) -> None:
        """Take a request off the drafter, if it is there."""
        present = self.residents.get(request_id)
        if present is not None:
            self.speculator.release(present)
            self.residents.remove(present)

    def remove(self, request_id: str) -> None:
        self.target.remove(request_id)
        self.release(request_id)

    def resident(self, request_id: str) -> Resident:
        resident = self.residents.get(request_id)
        assert resident is not None
        return resident

    def launch(
        self,
        draft_len: int | Mapping[str, int],
        only: Sequence[FakeRequest] | None = None,
        chunk: int = 64,
        publish: bool = True,
        surplus: int = 0,
    ) -> StepRequest:
        """One step of the target, its plan launched, its drafts handed to the next step. surplus: by how much the
        plan's context lengths are above the truth.
        """
        requests = list(self.target.requests.values()) if only is None else list(only)
        rows = self.target.plan_rows(requests, chunk)
        lens = [draft_len if isinstance(draft_len, int) else draft_len.get(r.request_id, 0) for r in requests]
        plan_rows = tuple(
            RowRequest(row.request.request_id, 1, wanted, row.request.context_len + surplus, len(row.query))
            for row, wanted in zip(rows, lens, strict=True)
        )
        spec = self.target.spec
        plan = StepRequest(self.target.seq + 1, spec.channel_id, spec.epoch, plan_rows, 1000)
        self.target.step(rows, publish)
        self.follow(plan)
        reply = self.target.channel.take_reply(plan.seq, 0.0)
        assert reply is not None
        assert reply.num_rows == len(requests)
        for request, tokens in zip(requests, reply.tokens.tolist(), strict=True):
            kept = [token for token in tokens if token >= 0]
            assert tokens[: len(kept)] == kept, "a row's drafts end at its first -1"
            request.drafts = kept
        return plan

    def follow(self, plan: StepRequest) -> None:
        assert self.steps.launch(self.link, plan, self.reports.append, 0.0)

    def settle(self, num: int | None = None) -> None:
        """The next steps under way are done, all of them by default, and taken in."""
        self.completions.release(len(self.completions.held) if num is None else num)
        self.steps.collect()

    def step(
        self,
        draft_len: int | Mapping[str, int],
        only: Sequence[FakeRequest] | None = None,
        chunk: int = 64,
        publish: bool = True,
    ) -> StepReport:
        """One step, taken in at once."""
        self.launch(draft_len, only, chunk, publish)
        self.settle()
        return self.reports[-1]

    def run(self, num_steps: int, draft_len: int, chunk: int = 64) -> None:
        for _ in range(num_steps):
            self.step(draft_len, chunk=chunk)

    def close(self) -> None:
        self.target.close()
