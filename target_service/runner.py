"""How does one step run on the device?

Take drafts, reserve blocks, forward, verify, commit, publish to the drafter: in this order, by one thread, which owns
every tensor here. What a step may contain was checked before (`checks`, `Sessions.check_row`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from engine.decoder import Decoder
from kernels.reference.target_inputs import commit_verdict
from target_service.acceptance import SyntheticAcceptance
from target_service.batch import SeatState, StepBatch, StepRow, build_batch
from target_service.channels import OpenChannel, StepRecord
from target_service.drafts import StepDrafts, take_drafts
from target_service.flights import Flight
from target_service.forward import BatchForward, StepOutput
from target_service.messages import RowStatus, RowVerdict, StepReply, StepRequest, StepTimes, TokenLogprobs
from target_service.sessions import Session, Sessions
from target_service.verification import SeatSampling, VerifyRows, token_logprobs


class StepRunner:
    """Owner of the per-seat device state; runs the model through `forward`. Used by one thread."""

    def __init__(
        self,
        decoder: Decoder,
        forward: BatchForward,
        sessions: Sessions,
        max_model_len: int,
        trim_absent_drafts: bool,
        synthetic: SyntheticAcceptance | None = None,
    ) -> None:
        num_seats = sessions.blocks.num_seats
        self._decoder = decoder
        self._forward = forward
        self._sessions = sessions
        self._max_model_len = max_model_len
        self._trim_absent_drafts = trim_absent_drafts
        self._device = decoder.device
        self._vocab_size = decoder.config.vocab_size
        self._state = SeatState.empty(num_seats, self._device)
        self._sampling = SeatSampling(num_seats, self._vocab_size, self._device, synthetic)

    @torch.inference_mode()
    def place(self, session: Session) -> None:
        """Set up the per-seat state of a request just admitted."""
        self._state.context_lens[session.seat] = session.context_len
        self._state.anchors[session.seat] = -1
        self._sampling.place(session.seat, session.sampling, session.tokens, session.prompt_len)

    @property
    def max_in_flight(self) -> int:
        """A step is done when it returns."""
        return 1

    def complete(self, flight: Flight) -> StepReply:
        """Nothing of it flies."""
        raise NotImplementedError("steps are done when they return")

    def forget(self, flight: Flight) -> None:
        """Nothing of it flies."""

    def idle(self, channels: Sequence[OpenChannel]) -> bool:
        """There is nothing to do ahead."""
        return False

    def launch(
        self,
        step: StepRequest,
        placements: Sequence[Session | None],
        channel: OpenChannel | None,
        deadline_s: float,
        settle: Callable[[], None],
    ) -> StepReply:
        """`run`: there is never anything under way."""
        return self.run(step, placements, channel, deadline_s)

    @torch.inference_mode()
    def run(
        self,
        step: StepRequest,
        sessions: Sequence[Session | None],
        channel: OpenChannel | None,
        deadline_s: float,
    ) -> StepReply:
        """Run a checked step. sessions: each row's placement, None where it is not resident."""
        began = time.perf_counter()
        drafts = take_drafts(step, sessions, channel, self._vocab_size, deadline_s)
        waited = time.perf_counter()
        rows = self._reserve(step, sessions, drafts)
        if channel is not None and channel.shares_blocks:
            self._look_ahead(step, rows, channel.end.spec.max_draft_len)
        batch = build_batch(rows, self._state, self._sessions.blocks, self._max_model_len, self._device)
        hidden_layers = channel.hidden_layers if channel is not None else ()
        started = time.perf_counter()
        output = self._forward.run(batch, hidden_layers) if batch.num_tokens else StepOutput(None, None)
        logits = None if output.logit_hidden is None else self._decoder.logits(output.logit_hidden)
        forwarded = time.perf_counter()
        tokens, record = self._verify(step, batch, logits, drafts)
        if channel is not None:
            channel.publish(record, output.captured)
        verdicts = self._commit(step, batch, logits, tokens)
        ended = time.perf_counter()
        times = StepTimes(
            wait_ms=(waited - began) * 1e3,
            forward_ms=(forwarded - started) * 1e3,
            verify_ms=(ended - forwarded) * 1e3,
            total_ms=(ended - began) * 1e3,
            collective_ms=self._forward.take_collective_ms(),
        )
        return StepReply(step.seq, verdicts, self._sessions.capacity, times, drafts.missed, output.loads)

    def _reserve(
        self, step: StepRequest, sessions: Sequence[Session | None], drafts: StepDrafts
    ) -> tuple[StepRow, ...]:
        """Decide how much each row runs, and get its blocks. Drafts, its own or others', give way before a row
        starves.
        """
        blocks = self._sessions.blocks
        for row, session in zip(step.rows, sessions, strict=True):
            if session is not None and not session.started:
                self._sessions.start(session, row.context_len)
                self._state.context_lens[session.seat] = session.context_len
        overtaken = {
            session.seat
            for row, session in zip(step.rows, sessions, strict=True)
            if session is not None and session.overtaken(row)
        }
        starved = self._reserve_least(step, sessions, overtaken)
        rows: list[StepRow] = []
        for row, session, row_drafts in zip(step.rows, sessions, drafts.tokens, strict=True):
            if session is None:
                rows.append(StepRow(None, RowStatus.UNKNOWN))
                continue
            if session.seat in overtaken:
                rows.append(StepRow(session, RowStatus.SKIPPED))
                continue
            if session.seat in starved:
                rows.append(StepRow(session, RowStatus.STARVED))
                continue
            if session.in_prompt:
                rows.append(StepRow(session, RowStatus.OK, row.query_len, 1 if row.samples else 0, is_prompt=True))
                continue
            num_drafts = len(row_drafts) if self._trim_absent_drafts else min(row.verify_len, session.max_drafts)
            least = session.context_len + 1
            if not blocks.reserve(session.seat, least + num_drafts):
                num_drafts = min(num_drafts, blocks.capacity(session.seat) - least)
            query_len = 1 + num_drafts
            rows.append(StepRow(session, RowStatus.OK, query_len, query_len, row_drafts[:num_drafts]))
        return tuple(rows)

    def _reserve_least(self, step: StepRequest, sessions: Sequence[Session | None], overtaken: set[int]) -> set[int]:
        """Get every row the blocks without which it cannot run: for its chunk, or for its anchor. Returns the seats
        that got none.
        """
        blocks = self._sessions.blocks
        least = {
            session.seat: session.context_len + (row.query_len if session.in_prompt else 1)
            for row, session in zip(step.rows, sessions, strict=True)
            if session is not None and session.seat not in overtaken
        }
        short = {seat for seat, length in least.items() if not blocks.reserve(seat, length)}
        if not short:
            return short
        for seat, length in least.items():  # blocks that were for drafts of earlier steps
            blocks.trim(seat, length)
        return {seat for seat in least if seat in short and not blocks.reserve(seat, least[seat])}

    def _look_ahead(self, step: StepRequest, rows: Sequence[StepRow], max_draft_len: int) -> None:
        """Under `reuse` the drafter writes its drafts' KV by our tables: give each row the blocks for them where there
        are any left. Without, the row's drafts end where its blocks do.
        """
        for request, row in zip(step.rows, rows, strict=True):
            if row.session is not None and row.runs and request.draft_len:
                length = row.session.context_len + row.query_len + min(request.draft_len, max_draft_len)
                self._sessions.blocks.reserve(row.session.seat, min(length, self._max_model_len))

    def _verify(
        self, step: StepRequest, batch: StepBatch, logits: torch.Tensor | None, drafts: StepDrafts
    ) -> tuple[dict[int, list[int]], StepRecord]:
        """Tokens of each row that samples, and the step as the drafter needs it; moves the per-seat state on."""
        num_rows = len(batch.rows)
        num_sampled = torch.zeros(num_rows, dtype=torch.int32, device=self._device)
        num_rejected = torch.zeros(num_rows, dtype=torch.int32, device=self._device)
        anchors = torch.full((num_rows,), -1, dtype=torch.int64, device=self._device)
        tokens: dict[int, list[int]] = {}
        sampling = [index for index, row in enumerate(batch.rows) if row.num_logits > 0]
        if logits is not None:
            where = torch.tensor(sampling, dtype=torch.int64, device=self._device)
            verdict = self._sampling.verdict(logits, self._verify_rows(batch, sampling, where, drafts))
            last = verdict.tokens.gather(1, (verdict.num_sampled.to(torch.int64) - 1)[:, None])[:, 0]
            num_sampled[where] = verdict.num_sampled
            anchors[where] = last
            is_decode = torch.tensor([not batch.rows[index].is_prompt for index in sampling], device=self._device)
            rejected = batch.query_lens[where] - 1 - verdict.num_accepted
            num_rejected[where] = torch.where(is_decode, rejected, 0)
            for index, row_tokens, count in zip(
                sampling, verdict.tokens.tolist(), verdict.num_sampled.tolist(), strict=True
            ):
                tokens[index] = row_tokens[:count]
        commit_verdict(
            self._state.context_lens,
            self._state.anchors,
            batch.seats,
            batch.query_lens,
            num_rejected,
            num_sampled,
            anchors,
        )
        record = StepRecord(
            seq=step.seq,
            places={(row.request_id, row.epoch): index for index, row in enumerate(step.rows)},
            batch=batch,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            anchors=anchors,
            temperatures=self._sampling.tensors.temperature,
            seeds=self._sampling.tensors.seeds,
        )
        return tokens, record

    def _verify_rows(
        self, batch: StepBatch, sampling: list[int], where: torch.Tensor, drafts: StepDrafts
    ) -> VerifyRows:
        cu_logits = [0]
        positions: list[int] = []
        seats: list[int] = []
        for index in sampling:
            row = batch.rows[index]
            assert row.session is not None
            cu_logits.append(cu_logits[-1] + row.num_logits)
            positions.append(row.session.context_len + row.query_len - row.num_logits + 1)
            seats.append(row.session.seat)
        draft_probs, has_probs = drafts.probs_of(sampling, batch.draft_tokens.shape[1], self._device)
        return VerifyRows(
            seats=torch.tensor(seats, dtype=torch.int64, device=self._device),
            seats_np=tuple(seats),
            cu_logits=torch.tensor(cu_logits, dtype=torch.int32, device=self._device),
            draft_tokens=batch.draft_tokens[where],
            start_positions=torch.tensor(positions, dtype=torch.int64, device=self._device),
            draft_probs=draft_probs,
            has_probs=has_probs,
        )

    def _commit(
        self, step: StepRequest, batch: StepBatch, logits: torch.Tensor | None, tokens: dict[int, list[int]]
    ) -> tuple[RowVerdict, ...]:
        """The host's side of the verdict: lengths, tokens, penalties' counts, shared blocks, log probabilities."""
        step_key = (step.channel_id, step.channel_epoch, step.seq)
        verdicts: list[RowVerdict] = []
        first_logit = 0
        for index, (request, row) in enumerate(zip(step.rows, batch.rows, strict=True)):
            session = row.session
            if session is None or not row.runs:
                context_len = session.context_len if session is not None else 0
                verdicts.append(RowVerdict(request.request_id, request.epoch, row.status, context_len=context_len))
                continue
            sampled = tokens.get(index, [])
            num_accepted = max(0, len(sampled) - 1)
            session.context_len += row.query_len if row.is_prompt else 1 + num_accepted
            logprobs: tuple[TokenLogprobs, ...] = ()
            if sampled:
                session.tokens.extend(sampled)
                session.last_step = step_key
                self._sampling.count_output(session.seat, sampled)
                if session.sampling.num_logprobs >= 0 and logits is not None:
                    rows = logits[first_logit : first_logit + len(sampled)]
                    logprobs = token_logprobs(rows, sampled, session.sampling.num_logprobs)
            self._sessions.blocks.register_written(session.seat, session.tokens, session.context_len)
            first_logit += row.num_logits
            verdicts.append(
                RowVerdict(
                    request.request_id,
                    request.epoch,
                    RowStatus.OK,
                    tuple(sampled),
                    num_accepted,
                    len(row.drafts),
                    session.context_len,
                    logprobs,
                )
            )
        return tuple(verdicts)
