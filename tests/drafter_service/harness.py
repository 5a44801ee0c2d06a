"""How does a test run a speculator behind a target, step by step, over a real channel?

What the gateway and the device thread do in lockstep, in one thread: run the rows, let the drafter follow, hand its
drafts to the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from drafter_service.channels import AttachedChannel, ChannelLink
from drafter_service.messages import Admission, RowRequest, StepReport, StepRequest
from drafter_service.residency import Resident, Residents
from drafter_service.speculator import DraftBatch, DraftProposal, Speculator
from drafter_service.steps import StepRunner
from engine.channel.opening import attach_drafter_channel
from tests.drafter_service.fake_target import FakeRequest, FakeTarget


class Recorder:
    """A speculator that remembers what the one it wraps was asked and what it proposed."""

    def __init__(self, inner: Speculator) -> None:
        self.inner = inner
        self.batches: list[DraftBatch] = []
        self.proposals: list[DraftProposal] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def propose(self, batch: DraftBatch) -> DraftProposal:
        proposal = self.inner.propose(batch)
        self.batches.append(batch)
        self.proposals.append(proposal)
        return proposal


class Harness:
    """A fake target and a speculator, in lockstep."""

    def __init__(self, target: FakeTarget, speculator: Speculator, num_seats: int = 16) -> None:
        self.target = target
        self.speculator = speculator
        self.recorder = Recorder(speculator)
        self.residents = Residents(num_seats)
        self.runner = StepRunner(self.recorder, self.residents, max_wait_s=5.0)  # type: ignore[arg-type]
        self.channel = attach_drafter_channel(target.describe())
        speculator.check_channel(self.channel.spec)
        attached = AttachedChannel(self.channel, "fake:1", "instance", target.max_len, self.channel.close)
        self.link = ChannelLink(1, attached)
        self.reports: list[StepReport] = []

    def close(self) -> None:
        self.channel.close()
        self.target.close()

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_total_len: int | None = None,
        temperature: float = 0.0,
        seeded: bool = False,
    ) -> FakeRequest:
        request = self.target.add(request_id, prompt, temperature)
        self.admit(request, mid_stream=False, max_total_len=max_total_len, seeded=seeded)
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
        present = self.residents.get(request.request_id)
        if present is not None:
            self.speculator.release(present)
            self.residents.remove(present)
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
            ),
            stream_id=1,
        )
        assert resident is not None
        return self.speculator.admit(resident)

    def resident(self, request_id: str) -> Resident:
        resident = self.residents.get(request_id)
        assert resident is not None
        return resident

    def remove(self, request_id: str) -> None:
        self.target.remove(request_id)
        resident = self.residents.get(request_id)
        if resident is not None:
            self.speculator.release(resident)
            self.residents.remove(resident)

    def step(
        self,
        draft_len: int | Mapping[str, int],
        only: Sequence[FakeRequest] | None = None,
        chunk: int = 64,
        publish: bool = True,
    ) -> StepReport | None:
        """One step of the requests. publish False: the drafter misses it."""
        requests = list(self.target.requests.values()) if only is None else list(only)
        rows = self.target.plan_rows(requests, chunk)
        seq = self.target.step(rows, publish)
        lens = [draft_len if isinstance(draft_len, int) else draft_len.get(r.request_id, 0) for r in requests]
        plan = StepRequest(
            seq=seq,
            channel_id=self.target.spec.channel_id,
            channel_epoch=self.target.spec.epoch,
            rows=tuple(RowRequest(r.request_id, 1, length) for r, length in zip(requests, lens, strict=True)),
            deadline_ms=1000,
        )
        if not publish:
            return None
        report = self.follow(plan)
        reply = self.target.channel.take_reply(seq, 1.0)
        assert reply is not None
        assert reply.num_rows == len(requests)
        for request, tokens in zip(requests, reply.tokens.tolist(), strict=True):
            request.drafts = [token for token in tokens if token >= 0]
        return report

    def follow(self, plan: StepRequest, later_plans: int = 0) -> StepReport:
        pending = self.runner.begin(plan)
        report = self.runner.try_step(self.link, pending, later_plans, slice_s=5.0)
        assert report is not None
        self.reports.append(report)
        return report

    def run(self, num_steps: int, draft_len: int, chunk: int = 64) -> None:
        for _ in range(num_steps):
            self.step(draft_len, chunk=chunk)


def prompt_of(length: int, seed: int) -> list[int]:
    """A reproducible prompt of ids that are no special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 512, (length,), generator=generator).tolist()
