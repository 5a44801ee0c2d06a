"""Where does each request's draft KV begin, how far does it reach, and where is there room for more?

A request followed from its first token has draft KV from position 0. One that is met later (admitted mid-stream, or
after a step was missed) starts over at the first row it sees: its draft positions count from there, which RoPE, being
relative, does not mind. So drafting never reaches over a hole. With `reuse` the slots are the target's, positions
cannot shift, and such a request is not drafted for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from drafter_service.residency import Resident, Warmth
from drafter_service.settings import CacheSettings
from drafter_service.speculator import DraftRow
from engine.block_pool import BlockPool
from engine.channel.interface import RingEntry
from engine.errors import CapacityError
from engine.request_blocks import RequestBlocks


@dataclass(slots=True)
class _SeatState:
    """start: target position of draft position 0. computed: target positions [start, computed) have true draft KV.

    begun: whether `start` is known; where it is not, it is the first row's, and until that has run, an upper bound.
    planned: whether a row of it has been planned on a device (`bound`).
    """

    start: int = 0
    computed: int = 0
    begun: bool = True
    planned: bool = False


@dataclass(frozen=True, slots=True)
class ResidentDraft:
    """A row that will run. start: target position of its draft position 0. draft_len: tokens to draft, >= 0."""

    row: DraftRow
    start: int
    draft_len: int


@dataclass(slots=True)
class Placements:
    """Owner of the draft blocks (none in `reuse`) and of each seat's extent. max_len: draft positions."""

    settings: CacheSettings
    max_len: int
    device: torch.device
    max_blocks: int = field(init=False)
    _blocks: RequestBlocks | None = field(init=False)
    _seats: dict[int, _SeatState] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        settings = self.settings
        self.max_blocks = -(-self.max_len // settings.block_size)
        self._blocks = None
        if settings.metadata_source == "build":
            # shift 1: the KV at position p is of the hidden state of p and the token at p + 1.
            pool = BlockPool(settings.num_blocks + 1, settings.block_size, settings.prefix_caching, shift=1)
            self._blocks = RequestBlocks(pool, settings.num_seats, self.max_len, self.device)

    @property
    def num_free_blocks(self) -> int:
        """Free or evictable blocks; 0 in `reuse`, where they are the target's."""
        return 0 if self._blocks is None else self._blocks.pool.num_free

    def seat_tables(self) -> torch.Tensor:
        """Block tables by seat [num_seats, max_blocks] int32, up to date."""
        assert self._blocks is not None, "`reuse` has no tables of its own"
        return self._blocks.sync()

    def extent(self, resident: Resident) -> tuple[int, int]:
        """Target positions [from, to) of a resident request that have true draft KV."""
        state = self._seats[resident.seat]
        return state.start, state.computed

    def admit(self, resident: Resident) -> int:
        """Seat a request. Returns cached_len. CapacityError: not even one block is free."""
        if self._blocks is not None and self._blocks.pool.num_free == 0:
            raise CapacityError("no draft block is free")
        state = self._seats[resident.seat] = _SeatState(begun=not resident.mid_stream)
        if resident.mid_stream:
            if self._blocks is None:
                resident.warmth = Warmth.OFF
        elif len(resident.tokens) > self.max_len:
            resident.warmth = Warmth.OFF
            return len(resident.tokens) - 1  # it takes nothing from the target's hit
        elif self._blocks is not None:
            state.computed = self._blocks.adopt(resident.seat, resident.tokens)
        return state.computed

    def release(self, resident: Resident) -> None:
        """Free a request's blocks. Idempotent."""
        if self._seats.pop(resident.seat, None) is not None and self._blocks is not None:
            self._blocks.release(resident.seat)

    def place(self, row: DraftRow, entry: RingEntry) -> ResidentDraft | None:
        """Find room for a row and for its drafts. None: the row does not run here."""
        resident = row.resident
        if resident.warmth is not Warmth.WARM:
            return None
        state = self._seats[resident.seat]
        if not self._continue(row, state):
            return None
        end = row.context_len + row.query_len - state.start
        if end > self.max_len or (self._blocks is not None and end > self._usable_len()):
            self._stop(resident, Warmth.OFF)
            return None
        room = self._room(row, state, entry)
        if room < end:
            self._stop(resident, Warmth.COLD)
            return None
        # The last draft's own KV is never written: k drafts take k - 1 positions past the committed ones.
        draft_len = min(row.draft_len, room - (row.committed_len - state.start) + 1)
        return ResidentDraft(row, state.start, max(draft_len, 0))

    def commit(self, placed: ResidentDraft) -> None:
        """The row's draft KV is written, up to its committed length."""
        row = placed.row
        state = self._seats[row.resident.seat]
        state.computed = row.committed_len
        if self._blocks is not None and state.start == 0:
            self._blocks.register_written(row.resident.seat, row.resident.tokens, row.committed_len)

    # Where the device runs ahead of the host: bounds before a step, the truth after it.

    @property
    def blocks(self) -> RequestBlocks | None:
        """The draft blocks; None in `reuse`."""
        return self._blocks

    def first_state(self, resident: Resident) -> tuple[int, int]:
        """What the device begins the resident's seat with: start (-1: where its first row does) and computed."""
        state = self._seats[resident.seat]
        return (state.start if state.begun else -1), state.computed

    def bound(self, resident: Resident, context_len: int, query_len: int, draft_len: int) -> int:
        """Make room for a row of at most these lengths. Returns the draft positions it may use; 0: it does not run.

        In `reuse` the target's tables say how many.
        """
        if resident.warmth is not Warmth.WARM:
            return 0
        state = self._seats[resident.seat]
        if not state.begun and not state.planned:
            state.start = context_len
        state.planned = True
        if self._blocks is None:
            return self.max_len
        end = min(context_len + query_len - state.start, self.max_len, self._usable_len())
        wanted = min(end + max(draft_len - 1, 0), self.max_len)
        if not self._blocks.reserve(resident.seat, wanted) and not self._blocks.reserve(resident.seat, end):
            self._stop(resident, Warmth.COLD)
            return 0
        return min(self._blocks.capacity(resident.seat), self.max_len)

    def followed(self, resident: Resident, start: int, committed_len: int) -> None:
        """A step has run a row of the resident: its draft KV covers target positions [start, committed_len)."""
        state = self._seats[resident.seat]
        state.start, state.computed, state.begun = start, committed_len, True
        if self._blocks is not None and start == 0 and resident.warmth is Warmth.WARM:
            self._blocks.register_written(resident.seat, resident.tokens, committed_len)

    def not_followed(self, resident: Resident, too_long: bool) -> None:
        """A step could not run a row of the resident: there was a hole, or no room for it."""
        never = too_long or self._blocks is None
        self._stop(resident, Warmth.OFF if never else Warmth.COLD)

    def usable(self, length: int) -> bool:
        """Whether so many draft positions could ever be held."""
        return length <= min(self.max_len, self._usable_len())

    def check_integrity(self) -> None:
        """IntegrityError when blocks don't add up."""
        if self._blocks is not None:
            self._blocks.check_integrity()

    def _continue(self, row: DraftRow, state: _SeatState) -> bool:
        """Make the row follow on what is there, by starting over where it does not. False: impossible."""
        follows = state.start <= row.context_len <= state.computed
        if self._blocks is None:
            if not follows:
                self._stop(row.resident, Warmth.OFF)
            return follows
        seat = row.resident.seat
        if not follows:
            self._blocks.release(seat)
            state.start, state.begun = row.context_len, True
        # A row that starts inside a prefix hit (the target's was shorter) writes the same KV into those blocks again.
        return True

    def _room(self, row: DraftRow, state: _SeatState, entry: RingEntry) -> int:
        """Draft positions there is a slot for, at least for the row's tokens and at most also for its drafts."""
        end = row.context_len + row.query_len - state.start
        wanted = max(end, min(row.committed_len - state.start + row.draft_len - 1, self.max_len))
        if self._blocks is None:
            table = entry.block_tables[row.index]
            absent = torch.nonzero(table == 0)
            held = int(absent[0]) if absent.shape[0] else table.shape[0]
            return min(held * self.settings.block_size, self.max_len)
        blocks, seat = self._blocks, row.resident.seat
        for length in (wanted, end):
            if blocks.reserve(seat, length):
                break
        return min(blocks.capacity(seat), self.max_len)

    def _usable_len(self) -> int:
        """Longest extent that all blocks together could hold."""
        return self.settings.num_blocks * self.settings.block_size

    def _stop(self, resident: Resident, warmth: Warmth) -> None:
        resident.warmth = warmth
        if self._blocks is not None:
            self._blocks.release(resident.seat)
