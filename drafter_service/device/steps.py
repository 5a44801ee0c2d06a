"""What does the drafter do for one plan, on a device channel?

Everything is enqueued when the plan comes, before its ring entry exists: wait for the entry, take it over, follow it,
draft, publish the reply, copy the outcome to the host. What the host has to know of it (tokens, prefixes to share,
requests that went cold) it learns when the step is done, in the order of the steps. A step whose entry never came runs
all the same, on no rows, and its reply holds no drafts.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from drafter_service.channels import ChannelLink
from drafter_service.device.completion import Completions
from drafter_service.device.marks import ASKED, BEGUN, DONE, PREFILLED
from drafter_service.device.plan_buffers import ReportLayout, StepBuffers
from drafter_service.device.program import DrafterProgram
from drafter_service.messages import DraftTimes, StepReport, StepRequest
from drafter_service.residency import Resident, Residents, Warmth
from drafter_service.speculator import ChannelNeeds
from engine.channel.device import DeviceDrafterEnd, ReplyViews
from engine.channel.interface import ChannelSpec, RingEntry
from engine.channel.local import LocalChannel
from engine.errors import ChannelError, IntegrityError, ProtocolError
from kernels.kernel_set import KernelSet
from kernels.reference import take_entry as take
from kernels.reference.take_entry import EntryTensors

_log = logging.getLogger(__name__)

MAX_UNDER_WAY = 8
MAX_CHANGES = 1 << 16
MAX_LEN = 1 << 30  # of anything, so that sums of lengths stay within int32
CLOSE_S = 10.0

Report = Callable[[StepReport], None]

_NOTHING = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class HostTimes:
    """What steps cost the host, in seconds, and how many there were. after_prefill: of `launch`, what comes behind."""

    steps: int = 0
    launch_s: float = 0.0
    after_prefill_s: float = 0.0
    complete_s: float = 0.0


@dataclass(slots=True)
class StepUnderWay:
    """A step that was enqueued, and what the device still works on. rows: the residents followed, by row of the entry.

    complete: all of it was enqueued; where the channel was closed between two calls, it has no outcome.
    """

    plan: StepRequest
    buffers: StepBuffers
    report: Report
    started: float
    header: torch.Tensor
    entry: RingEntry
    reply: ReplyViews
    rows: tuple[Resident | None, ...] = ()
    metadata_builds: int = 0
    metadata_launches: int = 0
    complete: bool = False

    def wait(self) -> None:
        """See completion.Pending."""
        self.buffers.marks.wait()


class DeviceSteps:
    """Runs plans. `launch`, `collect` and `close` belong to one thread, on one stream; `completions` waits in another.

    max_wait_s: the longest wait for an entry. on_done: called from another thread when there is something to collect.
    """

    def __init__(
        self,
        program: DrafterProgram,
        needs: ChannelNeeds,
        residents: Residents,
        max_wait_s: float,
        completions: Completions,
        kernels: KernelSet,
    ) -> None:
        self._program = program
        self._residents = residents
        self._max_wait_s = max_wait_s
        self._completions = completions
        self._kernels = kernels
        self._needs = needs
        self.host_times = HostTimes()
        on_gpu = program.device.type == "cuda"
        self._on_gpu = on_gpu
        num_changes = min(program.tables.device.numel(), MAX_CHANGES)
        layout = ReportLayout(program.max_rows, program.max_tokens)
        self._free = [StepBuffers(layout, num_changes, program.device) for _ in range(MAX_UNDER_WAY)]
        words = take.PLAN_FIELDS * program.max_rows + 2 * num_changes
        self._plan = torch.zeros(words, dtype=torch.int32, device=program.device)
        self._seat_state = torch.zeros((2, program.max_rows), dtype=torch.int32, device=program.device)
        # Whose state and table the device has for each seat.
        self._owners: list[Resident | None] = [None] * program.max_rows
        self._under_way: deque[StepUnderWay] = deque()

    @property
    def num_under_way(self) -> int:
        """Steps enqueued and not collected."""
        return len(self._under_way)

    def check_channel(self, spec: ChannelSpec) -> None:
        """ChannelError when this channel's steps do not fit."""
        if spec.max_rows > self._program.max_rows:
            raise ChannelError(
                f"drafter.num_seats: {self._program.max_rows} is less than the {spec.max_rows} rows of a step"
            )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile the kernels around the program's own, on a channel of one row that nobody uses."""
        program, needs = self._program, self._needs
        for draft_probs in sorted({False, needs.draft_probs}):
            spec = ChannelSpec(
                *("warm-up", 1, 1, 1, 1, program.max_draft_len, 0, torch.float32, max(needs.vocab_size, 1)),
                *(1, 1, 1, draft_probs),
            )
            end = LocalChannel(spec, program.device).drafter
            header, entry = end.ring(1)
            reply, taken = end.reply(1), program.taken.sized(1, 1)
            layout = None if program.layout is None else program.layout.sized(1, 1)
            plan = torch.full((take.PLAN_FIELDS, 1), -1, dtype=torch.int32, device=program.device)
            changes = self._plan[:0].view(2, 0)
            self._kernels.take_entry(
                *(_entry_tensors(header, entry), plan, changes, 1, 1, 1, spec.vocab_size, program.max_len),
                *(self._seat_state, program.tables.device, reply.header, taken, layout),
            )
            self._kernels.finish_reply(
                *(header, 1, 1, 1, program.drafts, taken, self._seat_state, reply.header),
                *(reply.tokens, reply.has_probs),
            )
        if self._on_gpu:
            torch.cuda.synchronize(program.device)  # steps run on another stream

    @torch.inference_mode()
    def launch(self, link: ChannelLink, plan: StepRequest, report: Report, slice_s: float) -> bool:
        """Enqueue a plan. False: as many steps are under way as there can be; ask again. report: called when done.

        ChannelError: the channel is closed. ProtocolError: the plan is larger than the channel.
        """
        end = link.attached.device_channel
        assert end is not None, "plans of a host channel are waited for (drafter_service/steps.py)"
        if len(plan.rows) > end.spec.max_rows:
            raise ProtocolError(f"rows: {len(plan.rows)} in one plan, the channel has {end.spec.max_rows}")
        if not self._free:
            self._completions.wait(slice_s)
            return False
        started = time.perf_counter()
        header, entry = end.ring(plan.seq)
        reply = end.reply(plan.seq)
        step = StepUnderWay(plan, self._free.pop(), report, started, header, entry, reply)
        try:
            self._enqueue(link, end, step)
        except ChannelError as error:  # closed between two calls; what the device was to hear of seats may not come
            _log.info("step %d of channel %s: %s", plan.seq, plan.channel_id, error)
            for resident in filter(None, step.rows):
                self._owners[resident.seat] = None
                self._program.tables.forget(resident.seat)
        step.buffers.marks.set(DONE)
        self._under_way.append(step)
        self._completions.add(step)
        self.host_times.launch_s += time.perf_counter() - started
        self.host_times.steps += 1
        return True

    def collect(self) -> None:
        """Take in the outcome of every step that is done, and report it. Raises what the device failed with;
        IntegrityError when the metadata differ from their yardstick (`metadata_shadow`).
        """
        for _ in range(self._completions.take_done()):
            step = self._under_way.popleft()
            started = time.perf_counter()
            done = self._finished(step)
            self._free.append(step.buffers)
            self.host_times.complete_s += time.perf_counter() - started
            step.report(done)

    def wait(self, deadline_s: float) -> None:
        """Until there is something to collect, or the deadline has passed."""
        self._completions.wait(deadline_s)

    def close(self) -> None:
        """End the waiting thread. The channels must be closed before, so that the device waits for nobody."""
        self._completions.close(CLOSE_S)

    # Before a step.

    def _enqueue(self, link: ChannelLink, end: DeviceDrafterEnd, step: StepUnderWay) -> None:
        program, spec, plan, buffers = self._program, end.spec, step.plan, step.buffers
        header, entry, reply = step.header, step.entry, step.reply
        num_rows = len(plan.rows)
        bounds = self._bound_rows(link, plan, buffers.fields(num_rows), reply.probs is not None)
        step.rows = bounds.rows
        max_tokens = min(sum(row.query_len for row in plan.rows), spec.max_tokens, program.max_tokens)
        follows = max_tokens > 0 and any(resident is not None for resident in bounds.rows)
        max_query_len = min(max((row.query_len for row in plan.rows), default=0), max_tokens)
        shape = program.shape(num_rows, max_tokens, max_query_len, bounds.draft_len, bounds.drawn)

        words = buffers.put_changes(num_rows, bounds.changed, bounds.blocks)
        if words.shape[0] > self._plan.shape[0]:
            self._plan = torch.zeros(2 * words.shape[0], dtype=torch.int32, device=program.device)
        sent, fields = self._plan[: words.shape[0]], take.PLAN_FIELDS * num_rows
        sent.copy_(words, non_blocking=True)
        taken = program.rows_of(shape)
        layout = None if program.layout is None else program.layout.sized(shape.padded_rows, shape.padded_tokens)
        program.catch_up(bounds.fresh)

        marks = buffers.marks
        marks.set(ASKED)
        end.wait_entry(plan.seq, self._max_wait_s)
        marks.set(BEGUN)
        builds, launches = program.counts.builds, program.counts.launches
        if follows:
            program.read_entry(shape, entry)
        self._kernels.take_entry(
            _entry_tensors(header, entry),
            sent[:fields].view(take.PLAN_FIELDS, num_rows),
            sent[fields:].view(2, -1),
            plan.seq,
            spec.epoch,
            max_tokens,
            spec.vocab_size,
            program.max_len,
            self._seat_state,
            program.tables.device,
            reply.header,
            taken,
            layout,
        )
        if follows:
            program.follow(taken, shape, reply, spec.vocab_size, marks)
        else:
            marks.set(PREFILLED)
        self._kernels.finish_reply(
            header,
            plan.seq,
            spec.epoch,
            num_rows,
            program.drafts,
            taken,
            self._seat_state,
            reply.header,
            reply.tokens,
            reply.has_probs,
        )
        end.publish_reply(plan.seq)
        back = buffers.report_for(max_tokens)
        back.copy_(program.report[: back.shape[0]], non_blocking=True)
        step.metadata_builds = program.counts.builds - builds
        step.metadata_launches = program.counts.launches - launches
        step.complete = True
        self.host_times.after_prefill_s += time.perf_counter() - marks.host_time(PREFILLED)

    def _bound_rows(self, link: ChannelLink, plan: StepRequest, fields: np.ndarray, with_probs: bool) -> _Bounds:
        """Make room for the plan's rows and write their fields."""
        program = self._program
        max_drafts = min(program.max_draft_len, link.attached.channel.spec.max_draft_len)
        rows: list[Resident | None] = []
        fresh: list[tuple[Resident, int]] = []
        changes: list[tuple[np.ndarray, np.ndarray]] = []
        longest, drawn = 0, False
        fields.fill(0)
        fields[take.SEAT] = -1
        for index, row in enumerate(plan.rows):
            rows.append(None)
            resident = self._residents.find(row.request_id, row.epoch, plan.channel_id)
            if resident is None or resident.warmth is not Warmth.WARM:
                continue
            draft_len = min(row.draft_len, max_drafts)
            context_len, query_len = min(row.context_len, MAX_LEN), min(row.query_len, MAX_LEN)
            capacity = program.bound(resident, context_len, query_len, draft_len)
            if capacity <= 0:
                continue
            rows[index] = resident
            seat = resident.seat
            is_fresh = self._owners[seat] is not resident
            start, computed = program.first_state(resident, context_len) if is_fresh else (0, 0)
            draws = with_probs and program.draws(resident)
            max_total_len = min(resident.max_total_len, link.attached.max_model_len, MAX_LEN)
            fields[:, index] = (
                *(seat, query_len, capacity, max_total_len, draft_len),
                *(is_fresh, start, computed, draws),
            )
            changed = program.tables.changes(seat, is_fresh)
            if changed is not None:
                changes.append(changed)
            if is_fresh:
                self._owners[seat] = resident
                fresh.append((resident, context_len))
            longest, drawn = max(longest, draft_len), drawn or draws
        where = np.concatenate([part for part, _ in changes]) if changes else _NOTHING
        blocks = np.concatenate([part for _, part in changes]) if changes else _NOTHING
        return _Bounds(tuple(rows), tuple(fresh), longest, drawn, where, blocks)

    # After a step.

    def _finished(self, step: StepUnderWay) -> StepReport:
        plan, num_drafted, missed = step.plan, 0, not step.complete
        records = step.buffers.records(len(plan.rows)) if step.complete else []
        for resident, record in zip(step.rows, records, strict=False):
            if resident is None:
                continue
            status = record[take.STATUS]
            missed = missed or status == take.ABSENT
            if status == take.RAN:
                num_drafted += record[take.NUM_DRAFTS]
            # One that was released meanwhile, or placed anew, has nothing left that could be true of this row.
            if self._residents.get(resident.request_id) is resident:
                self._take_in(step, resident, record)
        if step.complete and step.buffers.mismatches:
            raise IntegrityError(f"metadata: {step.buffers.mismatches} elements differ from their own builder's")
        return StepReport(
            seq=plan.seq,
            channel_id=plan.channel_id,
            missed=missed,
            cold_request_ids=self._residents.cold(plan),
            num_drafted=num_drafted,
            metadata_builds=step.metadata_builds,
            metadata_launches=step.metadata_launches,
            times=_times(step),
        )

    def _take_in(self, step: StepUnderWay, resident: Resident, record: list[int]) -> None:
        """What became of a row."""
        status, context_len, query_len = record[take.STATUS], record[take.CONTEXT_LEN], record[take.NUM_QUERIES]
        start = record[take.FIRST_POSITION]
        if status == take.RAN:
            num_kept = query_len - record[take.NUM_REJECTED]
            accepted = step.buffers.ids(record[take.QUERY_START], num_kept)
            resident.observe(context_len, accepted, record[take.ANCHOR])
            self._program.followed(resident, start, context_len + num_kept)
        elif status == take.HOLE:
            self._program.not_followed(resident, None)
        elif status in (take.TOO_LONG, take.NO_ROOM):
            self._program.not_followed(resident, context_len + query_len - start)
        elif status == take.WRONG:
            seq, channel_id = step.plan.seq, step.plan.channel_id
            _log.warning("step %d of channel %s: a row's numbers make no sense; not followed", seq, channel_id)


def _times(step: StepUnderWay) -> DraftTimes:
    """As the device took them, but for the whole, which is the host's."""
    total_ms = (time.perf_counter() - step.started) * 1e3
    if not step.complete:
        return DraftTimes(total_ms=total_ms)
    marks = step.buffers.marks
    waited, prefill, draft = (marks.between(point, point + 1) for point in (ASKED, BEGUN, PREFILLED))
    return DraftTimes(waited, prefill, draft, total_ms)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """A plan's rows, before the step. rows: the residents followed. fresh: those whose seat the device does not know
    yet, with the context length of their row. draft_len: the longest. changed, blocks: of the block tables.
    """

    rows: tuple[Resident | None, ...]
    fresh: tuple[tuple[Resident, int], ...]
    draft_len: int
    drawn: bool
    changed: np.ndarray
    blocks: np.ndarray


def _entry_tensors(header: torch.Tensor, entry: RingEntry) -> EntryTensors:
    return EntryTensors(
        header=header,
        positions=entry.positions,
        input_ids=entry.input_ids,
        query_start_loc=entry.query_start_loc,
        seq_lens=entry.seq_lens,
        num_rejected=entry.num_rejected,
        anchors=entry.anchors,
        next_prompt_tokens=entry.next_prompt_tokens,
        temperatures=entry.temperatures,
        seeds=entry.seeds,
        slot_mapping=entry.slot_mapping,
        block_tables=entry.block_tables,
    )
