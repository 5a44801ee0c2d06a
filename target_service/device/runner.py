"""How does a step run when nothing of it is read back before the next one is launched?

`launch` puts a whole step on the device's current stream and returns: drafts are awaited, taken and checked there,
lengths and anchors are read from per-seat state there, and the verdicts are on their way to the host when it returns.
`complete`, once the device has come past them, is the host's side: tokens, lengths, shared blocks, the reply. The host
launches from bounds and completes in the order of the launches.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.channel.device import DeviceTargetEnd
from engine.cuda.copying import Copy, prepare_copy
from engine.errors import RanksLost
from kernels.kernel_set import KernelSet
from kernels.reference.commit_rows import CONTEXT_LEN, MISSED, NUM_DRAFTED, NUM_SAMPLED, RAN, TOKENS
from kernels.reference.sampling import SamplingTensors
from target_service.channels import OpenChannel
from target_service.device.buffers import StepMemory, StepShape
from target_service.device.forward import StepForward, StepOutput
from target_service.device.frame import StepFrame
from target_service.device.host_edges import HostEdges
from target_service.device.logprobs import StepLogprobs
from target_service.device.marks import BEGAN, ENDED, FORWARDED, WAITED, Marks
from target_service.device.packing import Launch, Packer
from target_service.device.plan_buffer import HostPlan
from target_service.device.publishing import publish_step
from target_service.device.rows import look_ahead, plan_rows, wants_drafts
from target_service.device.sampling import DeviceSampling, SampledRows, take_draft_probs
from target_service.device.taking import Taking
from target_service.device.warming import Warming
from target_service.failures import raise_if_device_lost
from target_service.flights import Flight, FlightRow, Landing
from target_service.messages import RankLoad, RowStatus, RowVerdict, StepReply, StepRequest, StepTimes
from target_service.pcp.laps import Lap
from target_service.sessions import Session, Sessions

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Slot:
    """What one step under way has for itself. verdicts: host memory that its table is copied to, by `copy_back`."""

    plan: HostPlan
    verdicts: torch.Tensor
    copy_back: Copy
    marks: Marks


@dataclass(slots=True)
class Results:
    """What `complete` reads of a step. num_rows, table_width: of the table, padded rows included. loads, lap: see
    StepOutput.
    """

    slot: Slot
    num_rows: int
    table_width: int
    logprobs: StepLogprobs | None
    launch_ms: float
    loads: tuple[RankLoad, ...]
    lap: Lap | None


@dataclass(frozen=True, slots=True)
class RunLimits:
    """max_model_len: tokens of a request. max_in_flight: steps that may be launched and not completed."""

    vocab_size: int
    max_model_len: int
    max_in_flight: int


class DeviceRunner:
    """Owner of the per-seat device state and of everything that a step needs on the device. Used by one thread, always
    under the same current stream.

    max_in_flight: see RunLimits. make_landing: how one learns that a step is done; tests delay it.
    """

    def __init__(
        self,
        sessions: Sessions,
        forward: StepForward,
        frame: StepFrame,
        memory: StepMemory,
        sampling: DeviceSampling,
        kernels: KernelSet,
        limits: RunLimits,
    ) -> None:
        """frame: around every forward, which `forward` has too for what it captures. memory: theirs and this one's."""
        buffers, plans, device = memory.buffers, memory.plans, memory.plans.device
        self.forward = forward
        self.max_in_flight = limits.max_in_flight
        self.make_landing: Callable[[Marks], Landing] = lambda marks: marks
        self._sessions = sessions
        self._frame = frame
        self._buffers = buffers
        self._plans = plans
        self._tables = memory.tables
        self._sampling = sampling
        self._packer = Packer(memory, sampling, forward.padding)
        self._kernels = kernels
        self._device = device
        self._max_model_len = limits.max_model_len
        pinned = device.type == "cuda"
        self._warm: set[tuple[tuple[int, ...], int]] = set()
        self._idle_jobs: Iterator[Callable[[], None]] | None = None
        self._taking = Taking(kernels, buffers, plans, limits.vocab_size)
        self._warming = Warming(forward, frame, buffers, plans, kernels, self._taking.once)
        self._slots: list[Slot] = []
        for plan in plans.host:
            verdicts = torch.zeros(buffers.table.shape[0], dtype=torch.int64, pin_memory=pinned)
            self._slots.append(Slot(plan, verdicts, prepare_copy(verdicts, buffers.table), Marks(device)))

    def place(self, session: Session) -> None:
        """Set up the state of a request just admitted. Enqueues; waits for nothing."""
        self._sampling.place(session.seat, session.sampling, session.tokens, session.prompt_len)

    def launch(
        self,
        step: StepRequest,
        placements: Sequence[Session | None],
        channel: OpenChannel | None,
        deadline_s: float,
        settle: Callable[[], None],
    ) -> Flight:
        """Put a checked step on the device. placements: each row's session, None where it is not resident. settle:
        completes the steps under way; used only where a row would starve.
        """
        began = time.perf_counter()
        end = channel.device_end if channel is not None and not channel.end.closed else None
        step_key = (step.channel_id, step.channel_epoch, step.drafts_from_seq)
        wanted = step.drafts_from_seq > 0 and any(
            wants_drafts(row, session, step_key) for row, session in zip(step.rows, placements, strict=True)
        )
        places = channel.rows_of(step.drafts_from_seq) if wanted and channel is not None and end is not None else None
        rows = plan_rows(step, placements, self._sessions, places is not None, settle)
        if channel is not None and channel.shares_blocks:
            look_ahead(rows, self._sessions.blocks, channel.end.spec.max_draft_len, self._max_model_len)
        slot = self._slots.pop()
        try:
            hidden_layers = channel.hidden_layers if channel is not None and end is not None else ()
            waits = False
            launch = self._packer.pack(slot.plan, step, rows, end, places)
            self._plans.upload(slot.plan)
            self._tables.apply(launch.changes)
            slot.marks.set(BEGAN)
            if launch.reply is not None and end is not None and channel is not None:
                # Plans sent before the gateway can have heard of a reply that did not come: one deadline for them all.
                waits = step.seq - channel.missed_at > step.ahead
                self._await_drafts(step, channel, end, deadline_s if waits else 0.0)
            slot.marks.set(WAITED)
            results = self._run(launch, hidden_layers, channel, slot)
            flight = Flight(
                step,
                rows,
                self.make_landing(slot.marks),
                channel,
                wanted=launch.reply is not None,
                waited=waits,
                lost=wanted and places is None,
                results=results,
            )
        except BaseException as error:
            if not isinstance(error, RanksLost):  # then the stream may stand for ever, and the process ends
                self._quiesce()  # what was enqueued may still read the slot's memory
            self._slots.append(slot)
            self._tables.forget(session.seat for session in placements if session is not None)
            raise
        self._note_launch(flight, step)
        results.launch_ms = (time.perf_counter() - began) * 1e3
        return flight

    def complete(self, flight: Flight) -> StepReply:
        """The host's side of a step that the device has done. In the order of the launches."""
        results: Results = flight.results
        table: list[list[int]] = (
            results.slot.verdicts[: results.num_rows * results.table_width]
            .view(results.num_rows, results.table_width)
            .tolist()
        )
        missed = flight.lost or (flight.wanted and bool(table) and table[0][MISSED] != 0)
        if missed and flight.waited and flight.channel is not None:
            flight.channel.missed_at = max(flight.channel.missed_at, flight.step.seq)
            flight.channel.device_end.release_waits()
        verdicts = tuple(
            self._complete_row(row, table[index], index, results.logprobs) for index, row in enumerate(flight.rows)
        )
        marks = results.slot.marks
        times = StepTimes(
            wait_ms=marks.between(BEGAN, WAITED),
            forward_ms=marks.between(WAITED, FORWARDED),
            verify_ms=marks.between(FORWARDED, ENDED),
            total_ms=marks.between(BEGAN, ENDED),
            launch_ms=results.launch_ms,
            collective_ms=results.lap.take_ms() if results.lap is not None else 0.0,
        )
        return StepReply(flight.step.seq, verdicts, self._sessions.capacity, times, missed, results.loads)

    def forget(self, flight: Flight) -> None:
        """The flight is over, completed or not: what it had for itself is free again. Idempotent."""
        if flight.results is not None:
            self._slots.append(flight.results.slot)
            flight.results = None

    def warm_up_jobs(
        self, hidden_layers: tuple[int, ...], query_lens: Sequence[int], channel: OpenChannel | None = None
    ) -> Iterator[Callable[[], None]]:
        """What would be slow the first time, in pieces: see `warming`. To be called while nothing is under way."""
        return self._warming.jobs(self._plans.blank, hidden_layers, query_lens, channel)

    def idle(self, channels: Sequence[OpenChannel]) -> bool:
        """Do one piece of what steps over these channels would find slow the first time. False: there is nothing."""
        if self._device.type != "cuda":
            return False
        if self._idle_jobs is None:
            for channel in channels:
                longest = min(channel.end.spec.max_draft_len, self._buffers.sizes.max_drafts) + 1
                key = (channel.hidden_layers, longest)
                if key not in self._warm and not channel.end.closed:
                    self._warm.add(key)
                    self._idle_jobs = self.warm_up_jobs(channel.hidden_layers, range(1, longest + 1), channel)
                    break
            else:
                return False
        job = next(self._idle_jobs, None)
        if job is None:
            self._idle_jobs = None
        else:
            try:
                job()
            except RanksLost:
                raise
            except Exception as error:  # it only was to save time
                raise_if_device_lost(error)
                self._idle_jobs = None
                _log.warning("warming up for a drafter ended: %s: %s", type(error).__name__, error)
        return True

    # Launching.

    def _run(self, launch: Launch, hidden_layers: tuple[int, ...], channel: OpenChannel | None, slot: Slot) -> Results:
        """Enqueue everything from the drafts on."""
        shape, batch, end = launch.shape, launch.batch, launch.end
        entry = end.ring(launch.step.seq) if end is not None else None
        self._taking.step(launch, channel, entry[0] if entry is not None else None)
        greedy = launch.needs.plain and launch.logprobs is None
        graphs = self.forward.graphs.counts
        replays = graphs.replays
        if batch is None:
            output = self.forward.uniform(shape, hidden_layers, greedy, launch.context_lens)
        else:
            output = self.forward.ragged(shape, batch, hidden_layers)
        slot.marks.set(FORWARDED)
        if batch is not None or not greedy:
            self._verify(launch, output)
        if launch.needs.penalised:
            self._sampling.count_output(shape.seats, shape.table[:, TOKENS:], shape.num_sampled)
        logprobs = None
        if launch.logprobs is not None and launch.logprob_where is not None and output.logits is not None:
            logprobs = StepLogprobs(launch.logprobs, output.logits, shape.packed, *launch.logprob_where)
        if channel is not None and end is not None and entry is not None:
            starts = self._starts(shape) if batch is None else batch.starts
            channel.forms.renew(graphs.evictions)  # some are of hidden states in a graph that may be gone
            comes_again = output.captured is None or graphs.replays > replays
            publish_step(self._kernels, launch, channel, entry, starts, self._plans, output.captured, comes_again)
        slot.copy_back(shape.packed.shape[0])
        slot.marks.set(ENDED)
        return Results(slot, shape.num_rows, shape.table.shape[1], logprobs, 0.0, output.loads, output.lap)

    @staticmethod
    def _await_drafts(step: StepRequest, channel: OpenChannel, end: DeviceTargetEnd, deadline_s: float) -> None:
        if isinstance(end, HostEdges):
            if not end.take(step.drafts_from_seq, deadline_s) and deadline_s:
                channel.missed_at = step.seq
        elif deadline_s:  # else the reply's tag tells at once whether it is there
            end.wait_reply(step.drafts_from_seq, deadline_s)

    def _quiesce(self) -> None:
        if self._device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # a lost device: whoever handles the first error finds out
                torch.cuda.current_stream(self._device).synchronize()

    def _verify(self, launch: Launch, output: StepOutput) -> None:
        """Verdicts of a step whose graph, if it has one, ended at the logits; committed."""
        shape, num_rows = launch.shape, launch.shape.num_rows
        fields = self._plans.first(num_rows)
        if output.logits is None:
            self._frame.commit(shape, shape.table[:, TOKENS:], self._nothing(num_rows))
            return
        batch = launch.batch
        if batch is None:
            starts = self._starts(shape)
            owners = self._buffers.uniform_owners(num_rows, shape.query_stride)
        else:
            starts = self._plans.rows["logit_starts"][: num_rows + 1]
            owners = self._owners(starts, output.logits.shape[0]) if not launch.needs.plain else starts
        draft_probs, has_probs = self._draft_probs(launch)
        sampling = SamplingTensors(
            temperature=fields["temperature"],
            top_k=fields["top_k"],
            top_p=fields["top_p"],
            min_p=fields["min_p"],
            seeds=fields["seeds"],
            match_only=fields["match_only"],
            repetition_penalty=fields["repetition_penalty"],
            presence_penalty=fields["presence_penalty"],
            frequency_penalty=fields["frequency_penalty"],
        )
        verdict = self._sampling.verdict(
            output.logits,
            SampledRows(
                shape.seats, starts, owners, shape.drafts, shape.start_positions, sampling, draft_probs, has_probs
            ),
            launch.needs,
        )
        self._frame.commit(shape, verdict.tokens, verdict.num_sampled)

    def _draft_probs(self, launch: Launch) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What `take_draft_probs` gives, where the step's drafts may have to be weighed."""
        shape, reply, width = launch.shape, launch.reply, launch.shape.drafts.shape[1]
        if not launch.wants_probs or width == 0 or reply is None or reply.probs is None:
            return None, None
        return take_draft_probs(reply.probs, self._plans.first(shape.num_rows)["places"], width, shape.has_probs)

    def _note_launch(self, flight: Flight, step: StepRequest) -> None:
        """From here on the host counts the step as under way."""
        step_key = (step.channel_id, step.channel_epoch, step.seq)
        for row in flight.rows:
            if row.session is not None and row.query_len:
                row.session.row_launched(row.query_len, row.num_logits > 0)
                if row.num_logits:
                    row.session.last_step = step_key

    def _starts(self, shape: StepShape) -> torch.Tensor:
        return self._buffers.uniform_starts(shape.num_rows, shape.query_stride)

    def _owners(self, starts: torch.Tensor, num_logits: int) -> torch.Tensor:
        lens = starts[1:] - starts[:-1]
        rows = torch.arange(lens.shape[0], device=lens.device)
        return torch.repeat_interleave(rows, lens, output_size=num_logits)

    def _nothing(self, num_rows: int) -> torch.Tensor:
        return torch.zeros(num_rows, dtype=torch.int32, device=self._device)

    # Completing.

    def _complete_row(
        self, row: FlightRow, numbers: list[int], index: int, logprobs: StepLogprobs | None
    ) -> RowVerdict:
        """One row's verdict; its session moves on."""
        request, session = row.request, row.session
        if session is None:
            return RowVerdict(request.request_id, request.epoch, row.status)
        if not row.query_len:
            return RowVerdict(request.request_id, request.epoch, row.status, context_len=session.context_len)
        session.row_back(row.query_len, row.num_logits > 0)
        if not numbers[RAN]:  # the steps before it have given the request all the tokens it may have
            return RowVerdict(request.request_id, request.epoch, RowStatus.SKIPPED, context_len=session.context_len)
        num_sampled = numbers[NUM_SAMPLED]
        tokens = numbers[TOKENS : TOKENS + num_sampled]
        session.context_len = numbers[CONTEXT_LEN]
        session.tokens.extend(tokens)
        if session.resident:
            self._sessions.blocks.register_written(session.seat, session.tokens, session.context_len)
        return RowVerdict(
            request.request_id,
            request.epoch,
            RowStatus.OK,
            tuple(tokens),
            max(0, num_sampled - 1),
            numbers[NUM_DRAFTED],
            session.context_len,
            logprobs.of_row(index, num_sampled) if logprobs is not None and num_sampled else (),
        )
