"""Which requests are resident, where do they stand, and what do they hold?

A session is one request's placement: its seat, its blocks, its tokens, how far its KV is committed. Everything that a
request holds is freed in one place, `Sessions.release`.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import IntegrityError, InvalidRequest
from engine.request_blocks import RequestBlocks
from engine.seats import SeatAllocator
from target_service.messages import (
    Admission,
    AdmissionReply,
    AdmissionStatus,
    Capacity,
    RowRequest,
    SamplingSettings,
)

StepKey = tuple[str, int, int]  # channel_id, channel epoch, seq


@dataclass(slots=True)
class Session:
    """One resident request. Changed by the device thread only.

    tokens: prompt and everything sampled so far; the last one is the anchor once the prompt has run.
    num_admitted: how many tokens came with the admission; positions below it run as prompt.
    context_len: tokens whose KV is committed. At the first row the gateway may set it back below the prefix hit.
    last_step: the last step that was run with a row of it that samples; drafts of any other step do not follow its
    anchor.
    rows_ahead: rows of steps that were launched and have not come back (device execution; always 0 where a step is
    done when it returns); ahead_len, ahead_samples: their query tokens, and how many of them sample (each gives a
    token, unless the request is full before). resident: it still holds its seat and blocks.
    """

    request_id: str
    epoch: int
    stream_id: int
    seat: int
    tokens: list[int]
    num_admitted: int
    prompt_len: int
    max_total_len: int
    sampling: SamplingSettings
    context_len: int
    started: bool = False
    last_step: StepKey | None = None
    rows_ahead: int = 0
    ahead_len: int = 0
    ahead_samples: int = 0
    resident: bool = True

    @property
    def launched_len(self) -> int:
        """context_len once all that was launched has come back: exact in the prompt and while nothing is under way,
        else at most so. The last token's KV is never written.
        """
        bound = self.context_len + self.ahead_len
        return self.max_total_len - 1 if self.ahead_len and bound >= self.max_total_len else bound

    @property
    def in_prompt(self) -> bool:
        """Whether the next row runs admitted tokens rather than the anchor and drafts."""
        return self.launched_len < self.num_admitted

    def row_launched(self, query_len: int, samples: bool) -> None:
        """A row of it is under way."""
        self.rows_ahead += 1
        self.ahead_len += query_len
        self.ahead_samples += samples

    def row_back(self, query_len: int, samples: bool) -> None:
        """A row of it is under way no longer."""
        self.rows_ahead -= 1
        self.ahead_len -= query_len
        self.ahead_samples -= samples

    def overtaken(self, row: RowRequest) -> bool:
        """Whether a row planned ahead has nothing to run: the request is at its length limit, or still before the
        chunk that the row follows.
        """
        if self.in_prompt:
            return self.started and row.context_len > self.launched_len
        return len(self.tokens) + self.ahead_samples >= self.max_total_len

    @property
    def max_drafts(self) -> int:
        """How many drafts a decode row may verify so that the request never grows past max_total_len."""
        return max(0, self.max_total_len - len(self.tokens) - 1)


class Sessions:
    """Owner of the seats and blocks of all resident requests. Used by one thread."""

    def __init__(self, seats: SeatAllocator, blocks: RequestBlocks) -> None:
        self.blocks = blocks
        self._seats = seats
        self._by_id: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def capacity(self) -> Capacity:
        """What is free now."""
        return Capacity(self._seats.num_free, self.blocks.pool.num_free)

    def admit(self, stream_id: int, admission: Admission) -> AdmissionReply:
        """Place a request. An older epoch of it gives way; InvalidRequest when this or a newer one is resident."""
        resident = self._by_id.get(admission.request_id)
        if resident is not None:
            if resident.epoch >= admission.epoch:
                raise InvalidRequest("epoch", f"{admission.epoch} is not above the resident epoch {resident.epoch}")
            self._free(resident)
        seat = self._seats.acquire()
        if seat is None:
            return AdmissionReply(
                admission.request_id,
                admission.epoch,
                AdmissionStatus.NO_SEAT,
                self.capacity,
                detail="every seat is taken",
            )
        tokens = list(admission.token_ids)
        cached_len = self.blocks.adopt(seat, tokens)
        self._by_id[admission.request_id] = Session(
            request_id=admission.request_id,
            epoch=admission.epoch,
            stream_id=stream_id,
            seat=seat,
            tokens=tokens,
            num_admitted=len(tokens),
            prompt_len=admission.prompt_len,
            max_total_len=admission.max_total_len,
            sampling=admission.sampling,
            context_len=cached_len,
        )
        return AdmissionReply(admission.request_id, admission.epoch, AdmissionStatus.OK, self.capacity, cached_len)

    def find(self, request_id: str, epoch: int, stream_id: int) -> Session | None:
        """The placement, or None when it is not resident: another epoch, or another gateway's."""
        session = self._by_id.get(request_id)
        if session is None or session.epoch != epoch or session.stream_id != stream_id:
            return None
        return session

    def check_row(self, name: str, row: RowRequest, session: Session, planned_ahead: bool = False) -> None:
        """InvalidRequest unless the row continues the session where it stands. Changes nothing.

        planned_ahead: what became of the rows before it was not known to whoever planned it, so its context_len is an
        upper bound and it may be `overtaken`.
        """
        if session.started:
            stands = session.launched_len
            if planned_ahead and stands < row.context_len < session.max_total_len:
                if session.overtaken(row):
                    return
            elif row.context_len != stands:
                raise InvalidRequest(f"{name}.context_len", f"{row.context_len}, but {stands} tokens are committed")
        elif row.context_len > session.context_len:
            raise InvalidRequest(
                f"{name}.context_len", f"{row.context_len} is past the {session.context_len} cached tokens"
            )
        end = row.context_len + row.query_len
        if row.context_len < session.num_admitted:
            if row.verify_len > 0:
                raise InvalidRequest(f"{name}.verify_len", "a prompt chunk verifies no drafts")
            if end > session.num_admitted:
                raise InvalidRequest(
                    f"{name}.query_len", f"{row.query_len} runs past the {session.num_admitted} tokens admitted"
                )
            if row.samples != (end == session.num_admitted):
                raise InvalidRequest(f"{name}.samples", "must be true for the last chunk of a prompt, and for no other")
        else:
            if row.query_len != 1 + row.verify_len:
                raise InvalidRequest(f"{name}.query_len", f"{row.query_len} is not 1 + verify_len ({row.verify_len})")
            if not row.samples:
                raise InvalidRequest(f"{name}.samples", "must be true once the prompt has run")
            if len(session.tokens) >= session.max_total_len and not planned_ahead:
                raise InvalidRequest(f"{name}.context_len", f"max_total_len {session.max_total_len} is reached")

    def start(self, session: Session, context_len: int) -> None:
        """The session's first row: begin at context_len, and give back what the prefix hit holds past it."""
        session.started = True
        if context_len < session.context_len:
            session.context_len = context_len
            self.blocks.trim(session.seat, context_len)

    def release(self, request_id: str, epoch: int, stream_id: int) -> bool:
        """Free the placement. False, and nothing done, when it is not resident: see `find`."""
        session = self.find(request_id, epoch, stream_id)
        if session is None:
            return False
        self._free(session)
        return True

    def release_stream(self, stream_id: int) -> int:
        """Free everything a gateway's stream placed; returns how many requests that were."""
        sessions = [session for session in self._by_id.values() if session.stream_id == stream_id]
        for session in sessions:
            self._free(session)
        return len(sessions)

    def holds(self, stream_id: int) -> bool:
        """Whether a gateway's stream has anything here. Any thread may ask: the list is made in one go."""
        return any(session.stream_id == stream_id for session in list(self._by_id.values()))

    def check_integrity(self) -> None:
        """IntegrityError unless seats, blocks and sessions agree."""
        self.blocks.check_integrity()
        held = {session.seat for session in self._by_id.values()}
        if len(held) != len(self._by_id) or len(held) + self._seats.num_free != self.blocks.num_seats:
            raise IntegrityError(f"{len(self._by_id)} requests on {len(held)} seats, {self._seats.num_free} free")
        for seat in range(self.blocks.num_seats):
            if seat not in held and self.blocks.blocks(seat):
                raise IntegrityError(f"seat {seat} is free and holds blocks")
        for session in self._by_id.values():
            if session.started and session.context_len > self.blocks.capacity(session.seat):
                raise IntegrityError(f"request {session.request_id} has committed more tokens than it has blocks for")

    def _free(self, session: Session) -> None:
        """Give back what it holds, at once, also where rows of it are still under way: those run before anything that
        is launched from now on, so whoever gets the seat or the blocks next writes after them.
        """
        session.resident = False
        del self._by_id[session.request_id]
        self.blocks.release(session.seat)
        self._seats.release(session.seat)
