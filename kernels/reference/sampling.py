"""How do raw logits become a token?

In this order: penalties, bias, filters (top-k, top-p, min-p), draw. Logits stay *unscaled* all the way: whoever needs
the distribution takes the temperature beside them, so it is never applied twice. All functions return new tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from kernels.reference.philox import uniform

# How many of a row's best tokens the filters look at before they rank the whole vocabulary (ten times the cost).
_NUM_BEST = 1024


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The sampling state of N rows (or seats), one element each.

    temperature: float32, 0: greedy. top_k: int32, 0: off. top_p: float32, 1: off. min_p: float32, 0: off. seeds:
    int64, the bit pattern of a uint64. match_only: bool, the user gave the seed: drafts must not change the output.
    repetition_penalty (1: off), presence_penalty, frequency_penalty (0: off): float32.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    match_only: torch.Tensor
    repetition_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor

    @classmethod
    def greedy(cls, num: int, device: torch.device | str = "cpu") -> SamplingTensors:
        """Everything off, for `num` rows; new tensors that the caller may fill in place."""
        return cls(
            temperature=torch.zeros(num, dtype=torch.float32, device=device),
            top_k=torch.zeros(num, dtype=torch.int32, device=device),
            top_p=torch.ones(num, dtype=torch.float32, device=device),
            min_p=torch.zeros(num, dtype=torch.float32, device=device),
            seeds=torch.zeros(num, dtype=torch.int64, device=device),
            match_only=torch.zeros(num, dtype=torch.bool, device=device),
            repetition_penalty=torch.ones(num, dtype=torch.float32, device=device),
            presence_penalty=torch.zeros(num, dtype=torch.float32, device=device),
            frequency_penalty=torch.zeros(num, dtype=torch.float32, device=device),
        )

    def select(self, index: torch.Tensor) -> SamplingTensors:
        """The rows named by `index` ([M] int64), copied."""
        return SamplingTensors(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


def counts_with_drafts(
    output_counts: torch.Tensor, draft_tokens: torch.Tensor, cu_logits: torch.Tensor, num_logits: int | None = None
) -> torch.Tensor:
    """Output counts as each logit row sees them: row j of a request also counts its drafts d1 .. dj.

    output_counts: [S, V] int32, committed output tokens; draft_tokens: [S, K] int64, -1 absent; cu_logits: [S + 1]
    int32, first logit row of each request; num_logits: N, without which it has to be read from the device. Returns [N,
    V] int32.
    """
    lens = (cu_logits[1:] - cu_logits[:-1]).to(torch.int64)
    rows = torch.repeat_interleave(torch.arange(lens.shape[0], device=lens.device), lens, output_size=num_logits)
    offsets = torch.arange(rows.shape[0], device=lens.device) - cu_logits[:-1].to(torch.int64)[rows]
    counts = output_counts[rows]
    for column in range(draft_tokens.shape[1]):
        draft = draft_tokens[rows, column]
        seen = (offsets > column) & (draft >= 0)
        counts.scatter_add_(1, draft.clamp(min=0)[:, None], seen.to(counts.dtype)[:, None])
    return counts


def apply_penalties(
    logits: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
    repetition_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
) -> torch.Tensor:
    """Repetition (Keskar et al. 2019; prompt and output), then frequency and presence (OpenAI's API; output only).

    logits: [N, V] float32; prompt_mask: [N, V] bool, tokens in the prompt; output_counts: [N, V] int32; the
    penalties: [N] float32 (1, 0, 0: off). Returns [N, V].
    """
    in_output = output_counts > 0
    repetition = torch.where(prompt_mask | in_output, repetition_penalty[:, None], 1.0)
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - frequency_penalty[:, None] * output_counts
    return logits - presence_penalty[:, None] * in_output


def apply_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Add values[i] to logits[rows[i], token_ids[i]]. logits: [N, V]; rows, token_ids: [M] int64; values: [M].
    Returns [N, V].
    """
    return logits.index_put((rows, token_ids), values.to(logits.dtype), accumulate=True)


def scale_logits(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(logits - the row's best) / temperature: finite, or -inf, however small the temperature.

    logits: [N, V]; temperature: [N], above 0. Returns [N, V], at most 0.
    """
    return logits.sub(logits.amax(dim=1, keepdim=True)).div_(temperature[:, None])


def filter_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Set to -inf what top-k, then top-p, then min-p leave out; the rest, and the best token always, stay as they are.

    Top-p (Holtzman et al. 2019) keeps the smallest set of best tokens whose probability reaches top_p, out of those
    that top-k left, at the row's temperature. Min-p (Nguyen et al. 2024) keeps tokens of at least min_p times the
    best one's probability. Tokens that tie with the last one kept are kept. Greedy rows (temperature 0) pass
    unchanged.

    logits: [N, V] float32, unscaled; temperature: [N] float32; top_k: [N] int32, 0: off; top_p: [N] float32, 1: off;
    min_p: [N] float32, 0: off. Returns [N, V], unscaled.
    """
    vocab = logits.shape[1]
    by_rank = ((top_k > 0) & (top_k < vocab)) | (top_p < 1)
    rows = torch.nonzero((temperature > 0) & (by_rank | (min_p > 0))).squeeze(1)
    if rows.shape[0] == 0:
        return logits
    scaled = scale_logits(logits[rows], temperature[rows])
    # Each filter keeps the tokens from some value on; together they keep those from the highest of these values on.
    # The best token's is 0, so min-p is a bound on the others' as it stands.
    threshold = min_p[rows].log().clamp(max=0.0)
    ranked = torch.nonzero(by_rank[rows]).squeeze(1)
    num_best = min(_NUM_BEST, vocab)
    while ranked.shape[0]:
        chosen = rows[ranked]
        kept = torch.where(top_k[chosen] > 0, top_k[chosen], vocab).clamp(max=vocab).to(torch.int64)
        value, found = _rank_threshold(scaled[ranked], kept, top_p[chosen], num_best)
        threshold[ranked] = torch.maximum(threshold[ranked], torch.where(found, value, float("-inf")))
        # The rare row whose answer lies further down is ranked as a whole.
        ranked = ranked[~found]
        num_best = vocab
    result = logits.clone()
    result[rows] = logits[rows].masked_fill(scaled < threshold[:, None], float("-inf"))
    return result


def _rank_threshold(
    scaled: torch.Tensor, kept: torch.Tensor, top_p: torch.Tensor, num_best: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest value that top-k, then top-p, keep, looking at each row's `num_best` best values only.

    scaled: [M, V] logits / temperature; kept: [M] int64, top-k (V: off); top_p: [M]. Returns (value [M], found [M]
    bool: whether the values looked at were enough; always, when they were all).
    """
    vocab = scaled.shape[1]
    values = scaled.topk(num_best, dim=1).values
    allowed = torch.arange(num_best, device=scaled.device) < kept[:, None]
    among = values.masked_fill(~allowed, float("-inf")).logsumexp(dim=1)
    total = torch.where(kept >= vocab, scaled.logsumexp(dim=1), among)
    mass = (values - total[:, None]).exp().cumsum(dim=1)
    # A token is kept while the mass of those before it is short of top_p; the best one always is.
    inside = allowed.clone()
    # Rounding may bring the mass to 1 too early, so a top-p that is off must not compare.
    inside[:, 1:] &= (mass[:, :-1] < top_p[:, None]) | (top_p >= 1)[:, None]
    last = (inside.sum(dim=1, keepdim=True) - 1).clamp(min=0)
    found = (kept <= num_best) | ((kept >= vocab) & (mass[:, -1] >= top_p))
    return values.gather(1, last)[:, 0], found | (num_best >= vocab)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, stream: int, num: int) -> torch.Tensor:
    """Standard Gumbel noise, -log(-log(1 - u)), always finite. seeds, positions: [N]. Returns [N, num] float32."""
    noise = uniform(seeds, positions, stream, num)
    return noise.neg_().log1p_().neg_().log_().neg_()


def gumbel_sample(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: int
) -> torch.Tensor:
    """Draw one token per row from softmax(logits / temperature); argmax where the temperature is 0.

    Gumbel-max (argmax of logits / temperature + noise) rather than the inverse of the cumulative sum: a rounding
    difference in the logits flips it far more rarely, and a token's noise does not depend on the other tokens.

    logits: [N, V] float32, unscaled, -inf where filtered; temperature: [N] float32; seeds: [N] int64; positions: [N]
    int64, absolute position of the token drawn; stream: a constant of philox.py. Returns [N] int64.
    """
    tokens = logits.argmax(dim=1)
    rows = torch.nonzero(temperature > 0).squeeze(1)
    if rows.shape[0] == 0:
        return tokens
    noise = gumbel_noise(seeds[rows], positions[rows], stream, logits.shape[1])
    tokens[rows] = noise.add_(scale_logits(logits[rows], temperature[rows])).argmax(dim=1)
    return tokens
