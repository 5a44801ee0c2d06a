"""How do a step's raw logits become verdicts and log probabilities?

Per seat: the sampling parameters as tensors, and, for requests with penalties, which tokens came before. Per step:
penalties (drafts counted as the rows after them see them), bias, filters, then the accept rule of
`kernels.reference.verify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.reference.sampling import (
    SamplingTensors,
    apply_bias,
    apply_penalties,
    counts_with_drafts,
    filter_logits,
)
from kernels.reference.verify import Verdict, verify, verify_greedy
from target_service.acceptance import SyntheticAcceptance
from target_service.messages import SamplingSettings, TokenLogprobs


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """The rows of a step that sample. S rows, N logit rows, K drafts at most.

    seats: [S] int64 and its host twin seats_np. cu_logits: [S + 1] int32, first logit row of each. draft_tokens: [S, K]
    int64, -1 absent. start_positions: [S] int64, absolute position of the token that the row's first logits decide.
    draft_probs: [S, K, V] float32 or None; has_probs: [S] bool or None.
    """

    seats: torch.Tensor
    seats_np: tuple[int, ...]
    cu_logits: torch.Tensor
    draft_tokens: torch.Tensor
    start_positions: torch.Tensor
    draft_probs: torch.Tensor | None = None
    has_probs: torch.Tensor | None = None


class SeatSampling:
    """Owner of the sampling state of every seat. Used by one thread."""

    def __init__(
        self, num_seats: int, vocab_size: int, device: torch.device, synthetic: SyntheticAcceptance | None = None
    ) -> None:
        self._num_seats = num_seats
        self._synthetic = synthetic
        self._vocab_size = vocab_size
        self._device = device
        self.tensors = SamplingTensors.greedy(num_seats, device)
        self._settings: list[SamplingSettings | None] = [None] * num_seats
        self._bias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # [S, V] each, allocated when the first request with penalties comes: most services never see one.
        self._prompt_mask: torch.Tensor | None = None
        self._output_counts: torch.Tensor | None = None

    def settings(self, seat: int) -> SamplingSettings:
        """The settings of a placed seat."""
        settings = self._settings[seat]
        if settings is None:
            raise KeyError(f"seat {seat} holds no request")
        return settings

    def place(self, seat: int, settings: SamplingSettings, token_ids: Sequence[int], prompt_len: int) -> None:
        """Take over a seat. Tokens from prompt_len on were generated in earlier epochs and count as output."""
        self._settings[seat] = settings
        tensors = self.tensors
        tensors.temperature[seat] = settings.temperature
        tensors.top_k[seat] = min(settings.top_k, self._vocab_size)
        tensors.top_p[seat] = settings.top_p
        tensors.min_p[seat] = settings.min_p
        tensors.seeds[seat] = settings.seed
        tensors.match_only[seat] = settings.seeded
        tensors.repetition_penalty[seat] = settings.repetition_penalty
        tensors.presence_penalty[seat] = settings.presence_penalty
        tensors.frequency_penalty[seat] = settings.frequency_penalty
        self._bias.pop(seat, None)
        if settings.logit_bias:
            self._bias[seat] = (
                torch.tensor([token for token, _ in settings.logit_bias], dtype=torch.int64, device=self._device),
                torch.tensor([bias for _, bias in settings.logit_bias], dtype=torch.float32, device=self._device),
            )
        if settings.has_penalties:
            prompt_mask, output_counts = self._histories()
            prompt_mask[seat] = False
            prompt_mask[seat, torch.tensor(token_ids[:prompt_len], dtype=torch.int64, device=self._device)] = True
            output_counts[seat] = 0
            self._count(seat, token_ids[prompt_len:])

    def count_output(self, seat: int, token_ids: Sequence[int]) -> None:
        """The seat's request has committed these tokens."""
        settings = self._settings[seat]
        if settings is not None and settings.has_penalties:
            self._count(seat, token_ids)

    def verdict(self, logits: torch.Tensor, rows: VerifyRows) -> Verdict:
        """Process the raw logits ([N, V] float32, left as they are) and apply the accept rule."""
        verdict = self._exact_verdict(logits, rows)
        if self._synthetic is None:
            return verdict
        return self._synthetic.apply(verdict, rows.draft_tokens, self.tensors.seeds[rows.seats], rows.start_positions)

    def _exact_verdict(self, logits: torch.Tensor, rows: VerifyRows) -> Verdict:
        all_settings = [self.settings(seat) for seat in rows.seats_np]
        processed = self._process(logits, rows, all_settings)
        if all(settings.temperature == 0 for settings in all_settings):
            return verify_greedy(processed, rows.cu_logits, rows.draft_tokens)
        tensors = self.tensors
        return verify(
            processed,
            rows.cu_logits,
            rows.draft_tokens,
            tensors.temperature[rows.seats],
            tensors.seeds[rows.seats],
            rows.start_positions,
            tensors.match_only[rows.seats],
            rows.draft_probs,
            rows.has_probs,
        )

    def _process(self, logits: torch.Tensor, rows: VerifyRows, all_settings: list[SamplingSettings]) -> torch.Tensor:
        penalised = any(settings.has_penalties for settings in all_settings)
        biased = [index for index, settings in enumerate(all_settings) if settings.logit_bias]
        filtered = any(
            settings.temperature > 0 and (settings.top_k > 0 or settings.top_p < 1 or settings.min_p > 0)
            for settings in all_settings
        )
        if not (penalised or biased or filtered):
            return logits
        lens = (rows.cu_logits[1:] - rows.cu_logits[:-1]).to(torch.int64)
        seats = torch.repeat_interleave(rows.seats, lens)  # of each logit row
        sampling = self.tensors.select(seats)
        if penalised:
            prompt_mask, output_counts = self._histories()
            logits = apply_penalties(
                logits,
                prompt_mask[seats],
                counts_with_drafts(output_counts[rows.seats], rows.draft_tokens, rows.cu_logits),
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            )
        if biased:
            starts = rows.cu_logits.tolist()
            where, tokens, values = [], [], []
            for index in biased:
                bias_tokens, bias_values = self._bias[rows.seats_np[index]]
                for logit_row in range(starts[index], starts[index + 1]):
                    where.append(torch.full_like(bias_tokens, logit_row))
                    tokens.append(bias_tokens)
                    values.append(bias_values)
            logits = apply_bias(logits, torch.cat(where), torch.cat(tokens), torch.cat(values))
        if filtered:
            logits = filter_logits(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        return logits

    def _histories(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._prompt_mask is None or self._output_counts is None:
            shape = (self._num_seats, self._vocab_size)
            self._prompt_mask = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._prompt_mask, self._output_counts

    def _count(self, seat: int, token_ids: Sequence[int]) -> None:
        if token_ids:
            _, output_counts = self._histories()
            tokens = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
            output_counts[seat].scatter_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_best: int) -> tuple[TokenLogprobs, ...]:
    """Log softmax of raw logits at the tokens chosen, and the num_best best of each.

    logits: [n, V] float32, the row that each token was chosen from; token_ids: n of them.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None])[
        :, 0
    ].tolist()
    if num_best <= 0:
        return tuple(TokenLogprobs(value) for value in chosen)
    best = logprobs.topk(min(num_best, logprobs.shape[1]), dim=-1)
    return tuple(
        TokenLogprobs(value, tuple(ids), tuple(values))
        for value, ids, values in zip(chosen, best.indices.tolist(), best.values.tolist(), strict=True)
    )
