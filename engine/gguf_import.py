"""How does a Llama-family GGUF file become a Hugging Face model directory?

Weights are dequantised and stored as bf16; the directory, not the GGUF file, is then *the* model, and comparisons
load the same directory. The tokenizer is rebuilt from the file's vocabulary and merges with the pre-tokenizer that
the file only names by a word, and is checked before anything is kept. GGUF:
github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.errors import ModelError

# GGUF's word for how text is split before BPE -> what it means. Any other word is refused: a wrong split gives a
# model that works and is subtly worse.
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
}

# Token types of the GGUF specification.
CONTROL_TOKEN, USER_TOKEN = 3, 4

ROUND_TRIPS = (
    "Digits 0123456789, 2026-11-29 and 3.14159.",
    "tabs\tand\n\nnew lines\r\n  with   runs of spaces ",
    "emoji 🚀👩‍👩‍👧‍👦🏳️‍🌈 beside text",
    "中文、日本語とかな、한국어",
    "combining e\u0301 n\u0303 a\u0308\u0323, zalgo t\u0335\u0322e\u0336",
    "código façade Ωμέγα Привет שלום مرحبا",
)

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def import_gguf(file: Path, directory: Path, progress: Callable[[int, int], None] = lambda _done, _total: None) -> None:
    """Write the model of `file` into the existing, empty `directory`.

    progress is told (tensors done, tensors in all). ModelError when the file is not a Llama-family GGUF, or its
    tokenizer does not hold up.
    """
    try:
        reader = gguf.GGUFReader(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not a GGUF file: {error}") from error
    fields = _Fields(file, reader)
    if (architecture := fields.value("general.architecture")) != "llama":
        raise ModelError(f"{file}: architecture {architecture!r} is not supported, only 'llama'")
    tokenizer = build_tokenizer(fields)
    check_tokenizer(tokenizer)
    tensors = _read_tensors(reader, fields, progress)
    config = _model_config(fields, tied="lm_head.weight" not in tensors)
    special = {key: config[f"{key}_token_id"] for key in ("bos", "eos", "pad")}
    tokenizer.save(str(directory / "tokenizer.json"))
    chat_template = fields.value("tokenizer.chat_template")
    (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {f"{key}_token_id": value for key, value in special.items()})
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{key}_token": tokenizer.id_to_token(value) for key, value in special.items()},
            "unk_token": tokenizer.id_to_token(fields.value("tokenizer.ggml.unknown_token_id")),
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": chat_template,
        },
    )
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def build_tokenizer(fields: _Fields) -> Tokenizer:
    """A byte-level BPE tokenizer from the file's tokens, merges and token types."""
    kind, split = fields.value("tokenizer.ggml.model"), fields.value("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in PRE_TOKENIZERS:
        raise ModelError(f"{fields.file}: tokenizer {kind!r} with pre-tokenizer {split!r} is not supported")
    tokens: list[str] = fields.value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in fields.value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = fields.value("tokenizer.ggml.token_type")
    for special, wanted in ((True, CONTROL_TOKEN), (False, USER_TOKEN)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == wanted
        ]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size() != len(tokens):
        raise ModelError(f"{fields.file}: {tokenizer.get_vocab_size()} tokens where the vocabulary has {len(tokens)}")
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """ModelError unless hard texts survive encoding and decoding, digits come one by one, and special tokens are one
    id.
    """
    for text in ROUND_TRIPS:
        decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        if decoded != text:
            raise ModelError(f"tokenizer turns {text!r} into {decoded!r}")
    # Asked of the split itself: no merge in the vocabulary may join digits today, and the ids would not tell.
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("20261129")]
    if pieces != list("20261129"):
        raise ModelError(f"tokenizer must split digits one by one, but gives {pieces}")
    for token in tokenizer.get_added_tokens_decoder().values():
        ids = tokenizer.encode(f"a{token.content}b", add_special_tokens=False).ids
        if tokenizer.token_to_id(token.content) not in ids:
            raise ModelError(f"tokenizer does not recognise {token.content!r}")


class _Fields:
    """The file's metadata by key."""

    def __init__(self, file: Path, reader: gguf.GGUFReader) -> None:
        self.file = file
        self._reader = reader

    def value(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise ModelError(f"{self.file}: no field {key}")
        return field.contents()


def _model_config(fields: _Fields, tied: bool) -> dict[str, Any]:
    heads, hidden = fields.value("llama.attention.head_count"), fields.value("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields.value("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": fields.value("llama.feed_forward_length"),
        "num_hidden_layers": fields.value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.value("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields.value("llama.context_length"),
        # The file holds fp32 fields: the shortest decimal of each is what the model's authors wrote.
        "rms_norm_eps": _shortest(fields.value("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(fields.value("llama.rope.freq_base")),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.value("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def _read_tensors(
    reader: gguf.GGUFReader, fields: _Fields, progress: Callable[[int, int], None]
) -> dict[str, torch.Tensor]:
    heads = {
        "attn_q": fields.value("llama.attention.head_count"),
        "attn_k": fields.value("llama.attention.head_count_kv"),
    }
    tensors: dict[str, torch.Tensor] = {}
    total = len(reader.tensors)
    for done, tensor in enumerate(reader.tensors, start=1):
        name = _hugging_face_name(fields.file, tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = _unpermute(values, heads[part])
        tensors[name] = torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)
        progress(done, total)
    return tensors


def _hugging_face_name(file: Path, name: str) -> str:
    if name in MODEL_TENSORS:
        return MODEL_TENSORS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_TENSORS and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.weight"
    raise ModelError(f"{file}: tensor {name} has no place in a Llama model")


def _unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo the GGUF converter's reordering of query and key rows, from interleaved pairs to half rotation."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
