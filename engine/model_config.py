"""What shape is the model, and which of its family's habits does it have?

Read once from a Hugging Face directory (config.json and generation_config.json) and frozen. The families differ only
in what is stated here: biases, query/key norms, windows, rotary frequencies, tied embeddings.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch

from engine.errors import ModelError
from engine.plain_config import read_plain_config

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")

# Far beyond what anybody has made: what is larger is a mistake, to be told before memory is taken for it.
LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "max_position_embeddings": 1 << 27,
}

# Rotary kinds whose frequencies do not depend on how long the sequence is.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder's dimensions and switches.

    inv_freq: the head_dim / 2 rotary frequencies, radians per position, exact float32 values.
    rope_scaling: factor on cos and sin (1 except for yarn).
    windows: for each layer how many tokens a query sees, itself included; None: all.
    max_model_len: longest sequence the positions were made for.
    eos_token_ids: tokens that end a generation, generation_config.json's where it names any.
    dtype: of the checkpoint's weights.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    inv_freq: tuple[float, ...]
    max_model_len: int
    windows: tuple[int | None, ...]
    rope_scaling: float = 1.0
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    @property
    def attention_scale(self) -> float:
        """Factor on the attention scores."""
        return float(self.head_dim**-0.5)

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelConfig:
        """Of a Hugging Face model directory. ModelError when it is missing or its model is not supported."""
        path = Path(directory)
        if not (path / "config.json").is_file():
            raise ModelError(f"{path}: not a model directory (no config.json)")
        eos_token_ids = _generation_eos(path)
        try:
            return cls.from_hf_config(_read_config(path), eos_token_ids)
        except ModelError as error:
            raise ModelError(f"{path}: config.json: {error}") from error
        except Exception as error:  # a value of the wrong kind ends transformers' reading in any way
            detail = " ".join(f"{type(error).__name__}: {error}".split())
            raise ModelError(f"{path}: config.json cannot be read: {detail}") from error

    @classmethod
    def from_hf_config(cls, hf_config: Any, eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
        """Of a transformers config object, or what `read_plain_config` gives. eos_token_ids: take these; else the
        config's own. ModelError names what is not supported, or can be no model's.
        """
        family = getattr(hf_config, "model_type", None)
        if family not in FAMILIES:
            raise ModelError(f"model_type {family!r} is not supported; supported are {', '.join(FAMILIES)}")
        if hf_config.hidden_act != "silu":
            raise ModelError(f"hidden_act {hf_config.hidden_act!r} is not supported; only 'silu' is")
        for name, largest in LARGEST.items():
            _check_size(name, getattr(hf_config, name), largest)
        head_dim = getattr(hf_config, "head_dim", None)
        if head_dim is None:
            head_dim = hf_config.hidden_size // hf_config.num_attention_heads
        _check_size("head_dim", head_dim, LARGEST["hidden_size"])
        if not (isinstance(hf_config.rms_norm_eps, float | int) and 0 <= hf_config.rms_norm_eps < math.inf):
            raise ModelError(f"rms_norm_eps must be a number from 0 on, got {hf_config.rms_norm_eps!r}")
        inv_freq, rope_scaling = rope_frequencies(hf_config, head_dim)
        attention_bias = bool(getattr(hf_config, "attention_bias", False))
        return cls(
            family=cast(Family, family),
            vocab_size=hf_config.vocab_size,
            hidden_size=hf_config.hidden_size,
            num_layers=hf_config.num_hidden_layers,
            num_heads=hf_config.num_attention_heads,
            num_kv_heads=hf_config.num_key_value_heads,
            head_dim=head_dim,
            intermediate_size=hf_config.intermediate_size,
            rms_eps=hf_config.rms_norm_eps,
            inv_freq=inv_freq,
            max_model_len=hf_config.max_position_embeddings,
            windows=_layer_windows(hf_config),
            rope_scaling=rope_scaling,
            tie_embeddings=bool(hf_config.tie_word_embeddings),
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=family != "qwen2" and attention_bias,
            mlp_bias=bool(getattr(hf_config, "mlp_bias", False)),
            qk_norm=family == "qwen3",
            eos_token_ids=eos_token_ids or _as_ids("eos_token_id", hf_config.eos_token_id),
            dtype=_as_dtype(getattr(hf_config, "dtype", None)),
        )


def rope_frequencies(hf_config: Any, head_dim: int) -> tuple[tuple[float, ...], float]:
    """(inv_freq [head_dim / 2], factor on cos and sin) of a transformers config; of scaled kinds by transformers' own
    functions.

    ModelError for kinds of rotary embedding that depend on the sequence's length or turn only part of a head.
    """
    rope = hf_config.rope_parameters
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES:
        raise ModelError(f"rope_type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    if kind == "default":
        inv_freq, scaling = default_frequencies(rope["rope_theta"], head_dim), 1.0
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # see from_directory

        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    if len(inv_freq) * 2 != head_dim:
        raise ModelError(f"rotary embedding turns {len(inv_freq) * 2} of {head_dim} dimensions; only whole heads do")
    if not bool(((inv_freq > 0) & (inv_freq < math.inf)).all()):
        raise ModelError(f"rope_parameters {dict(rope)} give rotary frequencies that are none")
    return tuple(inv_freq.tolist()), float(scaling)


def default_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """Rotary frequencies [head_dim / 2] float32 without any scaling: Su et al. 2021, in transformers' arithmetic, which
    keeps them in each model's class.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
    return 1.0 / (theta**exponents)


def _layer_windows(hf_config: Any) -> tuple[int | None, ...]:
    window = getattr(hf_config, "sliding_window", None)
    layer_types = getattr(hf_config, "layer_types", None)
    if hf_config.model_type == "llama":
        window, layer_types = None, None
    elif hf_config.model_type == "mistral":
        layer_types = None  # transformers' Mistral slides in every layer or in none
    if layer_types is None:
        return (window,) * int(hf_config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _read_config(path: Path) -> Any:
    if (plain := read_plain_config(path / "config.json")) is not None:
        return plain
    from transformers import AutoConfig  # only if needed: longer to import than all else that a start does

    return AutoConfig.from_pretrained(path, local_files_only=True)


def _check_size(name: str, value: object, largest: int) -> None:
    if type(value) is not int or not 0 < value <= largest:
        raise ModelError(f"{name} must be a whole number in 1..{largest}, got {value!r}")


def _generation_eos(path: Path) -> tuple[int, ...]:
    file = path / "generation_config.json"
    if not file.exists():
        return ()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: must be a JSON object, got {type(content).__name__}")
    return _as_ids(f"{file}: eos_token_id", content.get("eos_token_id"))


def _as_ids(name: str, value: object) -> tuple[int, ...]:
    """-1, as some write for none, is an id that no token has."""
    ids = value if isinstance(value, list | tuple) else () if value is None else (value,)
    for one in ids:
        if type(one) is not int or not -1 <= one <= LARGEST["vocab_size"]:
            raise ModelError(f"{name} must be a token id, or a list of them, got {value!r}")
    return tuple(ids)


def _as_dtype(value: object) -> torch.dtype:
    if value is None:
        return torch.float32
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise ModelError(f"dtype {value!r} is not a torch dtype")
    return dtype
