"""How do a step's raw logits become verdicts, when nothing may be read back on the way?

The parameters of every seat live on the host and travel with each step's plan, by row. On the device there is only what
is too big for that: which tokens came before (for penalties) and the logit biases, by seat, made when the first request
comes that has such. The same order and the same arithmetic as `verification`, so that a request gets the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.kernel_set import KernelSet
from kernels.reference.sampling import SamplingTensors, counts_with_drafts
from kernels.reference.verify import Verdict
from target_service.acceptance import SyntheticAcceptance
from target_service.device.plan_buffer import HostPlan, to_device
from target_service.messages import SamplingSettings

_NUMBERS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "match_only",
)


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """What the rows of a step that sample need beside argmax. `weighs`: some may weigh drafts by their probability.
    `plain`: they need nothing.
    """

    random: bool = False
    filtered: bool = False
    penalised: bool = False
    biased: bool = False
    weighs: bool = False

    @property
    def plain(self) -> bool:
        return not (self.random or self.penalised or self.biased)


# As bits, so that a step's rows are merged by `|`.
_RANDOM, _FILTERED, _PENALISED, _BIASED, _WEIGHS = 1, 2, 4, 8, 16
_NEEDS = tuple(
    SamplingNeeds(*(bool(bits & bit) for bit in (_RANDOM, _FILTERED, _PENALISED, _BIASED, _WEIGHS)))
    for bits in range(32)
)


def _needs_of(settings: SamplingSettings) -> int:
    bits = 0
    if settings.temperature > 0:
        bits |= _RANDOM
        if settings.top_k > 0 or settings.top_p < 1 or settings.min_p > 0:
            bits |= _FILTERED
        if not settings.seeded:
            bits |= _WEIGHS
    if settings.has_penalties:
        bits |= _PENALISED
    if settings.logit_bias:
        bits |= _BIASED
    return bits


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of a step on the device: R rows (those that do not sample have no logits), N logit rows, K drafts.

    seats: [R] int32, -1 where the row does not run. logit_starts: [R + 1] int32. owners: [N] int64, the row of each
    logit row. drafts: [R, K] int64. start_positions: [R] int64. sampling: [R], with match_only and seeds.
    draft_probs: [R, K, V] and has_probs: [R], or None.
    """

    seats: torch.Tensor
    logit_starts: torch.Tensor
    owners: torch.Tensor
    drafts: torch.Tensor
    start_positions: torch.Tensor
    sampling: SamplingTensors
    draft_probs: torch.Tensor | None
    has_probs: torch.Tensor | None


class DeviceSampling:
    """Owner of the sampling state of every seat. Used by one thread; nothing here waits for the device."""

    def __init__(
        self,
        num_seats: int,
        vocab_size: int,
        device: torch.device,
        kernels: KernelSet,
        synthetic: SyntheticAcceptance | None,
    ) -> None:
        self._num_seats = num_seats
        self._vocab_size = vocab_size
        self._device = device
        self._kernels = kernels
        self._synthetic = synthetic
        self._seeds = np.zeros(num_seats, dtype=np.int64)
        self._numbers = {
            "temperature": np.zeros(num_seats, dtype=np.float32),
            "top_k": np.zeros(num_seats, dtype=np.int32),
            "top_p": np.ones(num_seats, dtype=np.float32),
            "min_p": np.zeros(num_seats, dtype=np.float32),
            "repetition_penalty": np.ones(num_seats, dtype=np.float32),
            "presence_penalty": np.zeros(num_seats, dtype=np.float32),
            "frequency_penalty": np.zeros(num_seats, dtype=np.float32),
            "match_only": np.zeros(num_seats, dtype=np.bool_),
        }
        self._needs = [0] * num_seats
        self._prompt_mask: torch.Tensor | None = None
        self._output_counts: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None

    def place(self, seat: int, settings: SamplingSettings, token_ids: Sequence[int], prompt_len: int) -> None:
        """Take over a seat. Tokens from prompt_len on were generated in earlier epochs and count as output."""
        bits = _needs_of(settings)
        needs, before = _NEEDS[bits], _NEEDS[self._needs[seat]]
        self._needs[seat] = bits
        self._seeds[seat] = settings.seed
        for name, numbers in self._numbers.items():
            if name == "match_only":
                numbers[seat] = settings.seeded
            elif name == "top_k":
                numbers[seat] = min(settings.top_k, self._vocab_size)
            else:
                numbers[seat] = getattr(settings, name)
        if needs.penalised:
            prompt_mask, output_counts = self._histories()
            prompt_mask[seat].zero_().index_fill_(0, self._ids(token_ids[:prompt_len]), True)
            output_counts[seat].zero_()
            if len(token_ids) > prompt_len:
                output = self._ids(token_ids[prompt_len:])
                output_counts[seat].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        if needs.biased or before.biased:
            bias = self._biases()[seat].zero_()
            if settings.logit_bias:
                values = np.array([value for _, value in settings.logit_bias], dtype=np.float32)
                tokens = self._ids([token for token, _ in settings.logit_bias])
                bias.index_add_(0, tokens, to_device(values, self._device))

    def needs(self, seats: Iterable[int]) -> SamplingNeeds:
        """What rows of these seats need together."""
        bits = 0
        for seat in seats:
            bits |= self._needs[seat]
        return _NEEDS[bits]

    def fill(self, plan: HostPlan, seats: np.ndarray, needs: SamplingNeeds) -> None:
        """Write the rows' parameters into a plan. seats: [R], -1: none (gets some seat's, which is never read)."""
        num_rows = seats.shape[0]
        self._seeds.take(seats, out=plan.rows["seeds"][:num_rows], mode="clip")
        self._numbers["temperature"].take(seats, out=plan.rows["temperature"][:num_rows], mode="clip")
        if not needs.plain:
            for name in _NUMBERS[1:]:
                self._numbers[name].take(seats, out=plan.rows[name][:num_rows], mode="clip")

    def verdict(self, logits: torch.Tensor, rows: SampledRows, needs: SamplingNeeds) -> Verdict:
        """Process the raw logits ([N, V] float32, left as they are) and apply the accept rule."""
        kernels, sampling = self._kernels, rows.sampling
        if not needs.plain:
            logits = self._process(logits, rows, needs)
        if needs.random:
            verdict = kernels.verify(
                logits,
                rows.logit_starts,
                rows.drafts,
                sampling.temperature,
                sampling.seeds,
                rows.start_positions,
                sampling.match_only,
                rows.draft_probs,
                rows.has_probs,
            )
        else:
            verdict = kernels.verify_greedy(logits, rows.logit_starts, rows.drafts)
        if self._synthetic is not None:
            verdict = self._synthetic.apply(verdict, rows.drafts, sampling.seeds, rows.start_positions)
        return verdict

    def count_output(self, seats: torch.Tensor, tokens: torch.Tensor, num_sampled: torch.Tensor) -> None:
        """Enqueue: the rows have committed their first num_sampled tokens. seats: [R] int32; tokens: [R, W] int64."""
        _, output_counts = self._histories()
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        counted = (columns < num_sampled[:, None]) & (seats >= 0)[:, None]
        cells = seats.clamp(min=0).to(torch.int64)[:, None] * self._vocab_size + tokens.clamp(min=0)
        output_counts.view(-1).index_add_(0, cells.view(-1), counted.to(torch.int32).view(-1))

    def _process(self, logits: torch.Tensor, rows: SampledRows, needs: SamplingNeeds) -> torch.Tensor:
        sampling = rows.sampling.select(rows.owners)
        seats = rows.seats.clamp(min=0).to(torch.int64)
        owner_seats = seats[rows.owners]
        if needs.penalised:
            prompt_mask, output_counts = self._histories()
            logits = self._kernels.apply_penalties(
                logits,
                prompt_mask[owner_seats],
                counts_with_drafts(output_counts[seats], rows.drafts, rows.logit_starts, logits.shape[0]),
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            )
        if needs.biased:
            logits = logits + self._biases()[owner_seats]
        if needs.filtered:
            logits = self._kernels.filter_logits(
                logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
            )
        return logits

    def _ids(self, token_ids: Sequence[int]) -> torch.Tensor:
        return to_device(np.array(token_ids, dtype=np.int64), self._device)

    def _histories(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._prompt_mask is None or self._output_counts is None:
            shape = (self._num_seats, self._vocab_size)
            self._prompt_mask = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._prompt_mask, self._output_counts

    def _biases(self) -> torch.Tensor:
        if self._bias is None:
            shape = (self._num_seats, self._vocab_size)
            self._bias = torch.zeros(shape, dtype=torch.float32, device=self._device)
        return self._bias


def take_draft_probs(
    probs: torch.Tensor, places: torch.Tensor, width: int, has_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities that a step's drafts were drawn with: copies, since what is looked at must be what is used. A
    row whose numbers cannot be probabilities has none.

    probs: [max_rows, D, V], of the reply; places: [R] int32, rows in it; has_probs: [R] bool. Returns [R, width, V] and
    [R] bool.
    """
    taken = probs[:, :width].index_select(0, places.clamp(min=0).to(torch.int64))
    if taken.shape[1] < width:
        taken = torch.nn.functional.pad(taken, (0, 0, 0, width - taken.shape[1]))
    # A negative or NaN "probability" could bring up a token that the target's own filters leave out.
    lowest, highest = taken.flatten(1).aminmax(dim=1)
    return taken, has_probs & (lowest >= 0) & (highest < float("inf"))
