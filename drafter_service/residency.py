"""Which requests does the drafter know, and what does it know of each?

A request is resident from its admission to its release, on one seat. Its tokens are those committed so far, kept up to
date from the ring entries. One owner, the device thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from drafter_service.messages import Admission, StepRequest
from engine.seats import SeatAllocator


class Warmth(Enum):
    """Whether a resident request can be drafted for."""

    WARM = auto()  # its state is complete, or will be after its next row
    COLD = auto()  # something is missing that only a new admission brings
    OFF = auto()  # not any more, and a new admission would not help: past the drafter's length, or late in `reuse`


@dataclass(slots=True)
class Resident:
    """One resident request. Changed by the device thread only.

    tokens: committed tokens from position 0, the anchor included; while the prompt is being run, all of the prompt.
    """

    request_id: str
    epoch: int
    seat: int
    stream_id: int
    channel_id: str
    tokens: list[int]
    max_total_len: int
    mid_stream: bool
    seeded: bool
    temperature: float = 0.0
    warmth: Warmth = Warmth.WARM

    def observe(self, context_len: int, accepted_ids: Sequence[int], anchor: int) -> bool:
        """Take over a row's outcome: the committed ids from position context_len, then the anchor (-1: none sampled).

        False when tokens between those known and context_len are missing; nothing is taken over then.
        """
        if context_len > len(self.tokens):
            return False
        if anchor >= 0:
            del self.tokens[context_len:]
            self.tokens.extend(accepted_ids)
            self.tokens.append(anchor)
        return True


class Residents:
    """Owner of all resident requests and of the seats."""

    def __init__(self, num_seats: int) -> None:
        self._seats = SeatAllocator(num_seats)
        self._by_id: dict[str, Resident] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_free_seats(self) -> int:
        """Seats that admissions could take now."""
        return self._seats.num_free

    def get(self, request_id: str) -> Resident | None:
        """The resident request, of whatever epoch."""
        return self._by_id.get(request_id)

    def find(self, request_id: str, epoch: int, channel_id: str) -> Resident | None:
        """The resident request if it is this very placement."""
        resident = self._by_id.get(request_id)
        if resident is None or resident.epoch != epoch or resident.channel_id != channel_id:
            return None
        return resident

    def add(self, admission: Admission, stream_id: int) -> Resident | None:
        """Seat a request that is not resident. None: no seat."""
        seat = self._seats.acquire()
        if seat is None:
            return None
        resident = Resident(
            request_id=admission.request_id,
            epoch=admission.epoch,
            seat=seat,
            stream_id=stream_id,
            channel_id=admission.channel_id,
            tokens=list(admission.token_ids),
            max_total_len=admission.max_total_len,
            mid_stream=admission.mid_stream,
            seeded=admission.seeded,
            temperature=admission.temperature,
        )
        self._by_id[admission.request_id] = resident
        return resident

    def remove(self, resident: Resident) -> None:
        """Take the request off its seat."""
        del self._by_id[resident.request_id]
        self._seats.release(resident.seat)

    def cold(self, plan: StepRequest) -> tuple[str, ...]:
        """Requests of the plan that the gateway wants drafts for and that only a new admission brings back."""
        cold = []
        for row in plan.rows:
            resident = self.find(row.request_id, row.epoch, plan.channel_id)
            unknown = resident is None and row.draft_len > 0
            if unknown or (resident is not None and resident.warmth is Warmth.COLD):
                cold.append(row.request_id)
        return tuple(cold)

    def of_stream(self, stream_id: int) -> list[Resident]:
        """The requests that a gateway's stream admitted."""
        return [resident for resident in self._by_id.values() if resident.stream_id == stream_id]

    def holds(self, stream_id: int) -> bool:
        """Whether a gateway's stream has anything here. Any thread may ask: the list is made in one go."""
        return any(resident.stream_id == stream_id for resident in list(self._by_id.values()))

    def of_channel(self, channel_ids: Iterable[str]) -> list[Resident]:
        """The requests whose rows come through one of these channels."""
        wanted = set(channel_ids)
        return [resident for resident in self._by_id.values() if resident.channel_id in wanted]
