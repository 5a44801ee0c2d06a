"""What does a head look like before training, and after it?

Before: a draft vocabulary of the target's most frequent answer tokens, as large as the file size allows, and weights
that begin from the target's own last layer and output rows. The captured layers differ in scale by orders of magnitude,
and so do single features; training sees each feature divided by its root mean square, and the factors go into `fc` at
the end.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from drafter_service.eagle3.checkpoint import random_head
from drafter_service.eagle3.config import Eagle3Config, default_hidden_layers
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training.corpus import Ints
from engine.decoder import Decoder
from engine.errors import ConfigError
from engine.model_config import ModelConfig

_HEADER_BYTES = 4096
_VOCAB_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """target_ids: ascending; coverage: the share of answer tokens in the corpus that are among them."""

    target_ids: Ints
    coverage: float


def head_config(
    target: ModelConfig, rope: Mapping[str, Any], draft_vocab_size: int, intermediate_size: int
) -> Eagle3Config:
    """A head whose layer has the target's sizes, except for its own MLP width and vocabulary."""
    return Eagle3Config(
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_eps=target.rms_eps,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        rope=dict(rope),
        max_len=target.max_model_len,
        hidden_layers=default_hidden_layers(target.num_layers),
    )


def head_parameters(target: ModelConfig, draft_vocab_size: int, intermediate_size: int) -> int:
    """Values in the head's checkpoint without the vocabulary maps."""
    hidden = target.hidden_size
    heads, kv = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    attention = 2 * hidden * (heads + 2 * kv) + heads * hidden
    return 3 * hidden * hidden + attention + 3 * hidden * intermediate_size + hidden * draft_vocab_size + 4 * hidden


def largest_draft_vocab(target: ModelConfig, intermediate_size: int, max_bytes: int) -> int:
    """The most draft tokens with which the bf16 checkpoint stays within max_bytes. ConfigError if that is hardly
    any.
    """
    fixed = 2 * head_parameters(target, 0, intermediate_size) + target.vocab_size + _HEADER_BYTES
    fits = (max_bytes - fixed) // (2 * target.hidden_size + 8)
    size = min(target.vocab_size, fits // _VOCAB_MULTIPLE * _VOCAB_MULTIPLE)
    if size < _VOCAB_MULTIPLE:
        raise ConfigError("max_bytes", f"the head without any vocabulary takes {fixed} bytes, {max_bytes} are allowed")
    return int(size)


def choose_draft_vocab(counts: Ints, size: int, always: tuple[int, ...]) -> DraftVocab:
    """The `size` most frequent tokens, those of `always` among them. counts: [vocab_size] in the target's answers."""
    ranked = counts.astype(np.float64)
    ranked[[token for token in always if 0 <= token < counts.size]] = np.inf
    chosen = np.sort(np.argsort(-ranked, kind="stable")[: min(size, counts.size)]).astype(np.int64)
    return DraftVocab(chosen, float(counts[chosen].sum() / max(1, counts.sum())))


def initial_head(
    config: Eagle3Config, target: Decoder, vocab: DraftVocab, feature_rms: torch.Tensor, device: torch.device, seed: int
) -> Eagle3Head:
    """A head to train, fp32, with the target's embedding attached.

    feature_rms: [A * H], what captured features are divided by before they reach the head (see `fold_scale`).
    The last captured state begins as the residual, the layer as the target's last one with the embedding half small and
    random, the output as the target's rows of the draft vocabulary.
    """
    head = random_head(config, torch.float32, torch.device("cpu"), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.from_numpy(vocab.target_ids)
    hidden = config.hidden_size
    last = target.layers[-1]
    rms = feature_rms.detach().cpu().float()[-hidden:]
    typical = float(rms.median())

    def weight(of: object) -> torch.Tensor:
        assert isinstance(of, nn.Linear)
        return of.weight

    with torch.no_grad():
        head.set_draft_vocab(ids)
        weight(head.lm_head).copy_(target.lm_head_weight[ids.to(target.lm_head_weight.device)].cpu().float())
        head.norm.weight.copy_(target.final_norm.cpu().float())
        fc = weight(head.fc)
        fc.normal_(0.0, 0.005, generator=generator)
        fc[:, -hidden:] += torch.diag(rms / typical)
        qkv = weight(head.qkv_proj)
        qkv[:, hidden:] = last.qkv.weight.cpu().float()
        head.hidden_norm.weight.copy_(last.input_norm.cpu().float())
        weight(head.o_proj).copy_(last.out.weight.cpu().float() / typical)
        head.post_attention_layernorm.weight.copy_(last.post_norm.cpu().float())
        kept = strongest_neurons(last.gate_up.weight.cpu().float(), last.down.weight.cpu().float(), config)
        number, inner = kept.numel(), target.config.intermediate_size
        gate, up = last.gate_up.weight.cpu().float().split(inner)
        weight(head.gate_up_proj)[:number] = gate[kept]
        weight(head.gate_up_proj)[config.intermediate_size :][:number] = up[kept]
        weight(head.down_proj)[:, :number] = last.down.weight.cpu().float()[:, kept] / typical
    head = head.to(device)
    head.attach_embedding(target.embed_weight)
    return head


def strongest_neurons(gate_up: torch.Tensor, down: torch.Tensor, config: Eagle3Config) -> torch.Tensor:
    """Which of a wider MLP's neurons to begin with: as many as fit, by the norms of their weights, in order."""
    gate, up = gate_up.chunk(2)
    strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    kept: torch.Tensor = strength.topk(min(config.intermediate_size, strength.numel())).indices.sort().values
    return kept


def fold_scale(head: Eagle3Head, feature_rms: torch.Tensor, dtype: torch.dtype) -> Eagle3Head:
    """A copy of the head that takes captured features as they are: the division by feature_rms [A * H] goes into
    `fc`.
    """
    embedding, head.embed_tokens = head.embed_tokens, None
    try:
        folded = copy.deepcopy(head)
    finally:
        head.embed_tokens = embedding
    assert isinstance(folded.fc, nn.Linear)
    with torch.no_grad():
        folded.fc.weight.div_(feature_rms.to(folded.fc.weight))
    folded = folded.to(dtype)
    if embedding is not None:
        folded.attach_embedding(embedding)
    return folded.requires_grad_(False)
