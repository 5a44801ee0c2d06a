"""What does a `config.json` say where it leaves nothing to transformers?

Importing transformers takes longer than all else that starting a service on a small model does, and a service needs it
for nothing but the defaults and the old spellings of this file. Most files say everything themselves: those are read
here. Of all others, wrong ones among them, nothing is said: transformers reads them, or names what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
# Off in every family, where the file does not say.
SWITCHES = ("attention_bias", "mlp_bias")
# What gives a file rules of its own.
ELSEWHERE = ("attribute_map", "auto_map", "configuration_files", "partial_rotary_factor", "text_config")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def read_plain_config(file: Path) -> SimpleNamespace | None:
    """A model's config, by the names of transformers' config objects; None: ask transformers."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or any(key in raw for key in ELSEWHERE):
        return None
    layers = plain_layers(raw, has_default_head_dim=raw.get("model_type") == "qwen3")
    if layers is None:
        return None
    window, dtype = _window(raw), _dtype(raw)
    if window is None or dtype is None:
        return None
    said = (
        isinstance(raw.get("tie_word_embeddings"), bool),
        isinstance(raw.get("hidden_act"), str),
        "eos_token_id" in raw and _are_ids(raw["eos_token_id"]),
    )
    if not all(said):
        return None
    return SimpleNamespace(
        **vars(layers),
        **{key: raw[key] for key in ("model_type", "tie_word_embeddings", "hidden_act", "eos_token_id")},
        sliding_window=window[0],
        dtype=dtype,
    )


def plain_layers(raw: Mapping[str, Any], has_default_head_dim: bool = False) -> SimpleNamespace | None:
    """What all layers of a config have in common, by the same names; None: ask transformers. has_default_head_dim: of
    the family, so that leaving it out says something.
    """
    rope = plain_rope(raw)
    if rope is None or not all(_is_number(raw.get(key)) for key in NUMBERS):
        return None
    head_dim = raw.get("head_dim")
    if head_dim is None and not has_default_head_dim:
        head_dim = raw["hidden_size"] // raw["num_attention_heads"]
    said = (
        _is_number(head_dim),
        raw["hidden_size"] % raw["num_attention_heads"] == 0,
        all(isinstance(raw.get(key, False), bool) for key in SWITCHES),
        isinstance(raw.get("rms_norm_eps"), float),
    )
    if not all(said):
        return None
    return SimpleNamespace(
        **{key: raw[key] for key in (*NUMBERS, "rms_norm_eps")},
        **{key: raw.get(key, False) for key in SWITCHES},
        head_dim=head_dim,
        rope_parameters=rope,
    )


def plain_rope(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rope_parameters` of rotary embeddings without any scaling, from the new spelling or the old one; None: they are
    something else, or it is not said.
    """
    rope = raw.get("rope_parameters")
    if rope is None:
        rope = {"rope_type": "default", "rope_theta": raw.get("rope_theta")}
    is_default = isinstance(rope, Mapping) and set(rope) == {"rope_type", "rope_theta"}
    if raw.get("rope_scaling") is not None or not is_default or rope["rope_type"] != "default":
        return None
    return dict(rope) if type(rope["rope_theta"]) in (int, float) else None


def _is_number(value: Any) -> bool:
    return type(value) is int and value > 0


def _are_ids(value: Any) -> bool:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return all(type(one) is int for one in ids)


def _window(raw: Mapping[str, Any]) -> tuple[int | None] | None:
    """The sliding window of all layers, which may be none."""
    family, layer_types = raw.get("model_type"), raw.get("layer_types")
    if layer_types is not None and layer_types != ["full_attention"] * raw["num_hidden_layers"]:
        return None
    if family == "llama":
        return (None,)
    if family == "mistral" and "sliding_window" in raw and layer_types is None:
        window = raw["sliding_window"]
        return (window,) if window is None or _is_number(window) else None
    if family in ("qwen2", "qwen3") and raw.get("use_sliding_window") is False:
        return (None,)
    return None


def _dtype(raw: Mapping[str, Any]) -> torch.dtype | None:
    """Of the weights, by the key of today or by the old one."""
    names = [raw[key] for key in ("dtype", "torch_dtype") if key in raw]
    return DTYPES.get(names[0]) if len(names) == 1 and isinstance(names[0], str) else None
