"""How is an EAGLE-3 head read from and written to a directory?

Both public layouts are read: `original` (SafeAILab, SpecForge) names the layer `midlayer.*` and may come as
`pytorch_model.bin`; `speculators` names it `layers.0.*`. Both have `fc.weight`, `norm.weight`, `lm_head.weight`, and
`d2t` (int64 offsets), `t2d` (bool) where the draft vocabulary is reduced; `embed_tokens.weight` is optional. Written is
the original layout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from drafter_service.eagle3.config import Eagle3Config, read_config, rotary_frequencies, write_config
from drafter_service.eagle3.head import Eagle3Head, Norm
from engine.errors import ModelError

_LAYER_PREFIX = re.compile(r"^(?:model\.)?(?:midlayer|layers\.0)\.")
_EMBEDDING = "embed_tokens.weight"
_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def load_head(directory: str | Path, dtype: torch.dtype, device: torch.device) -> Eagle3Head:
    """The head in `directory`. Its token embedding is attached only where the checkpoint has one.

    ModelError: no such file, a tensor missing, unknown or of another shape, a draft vocabulary outside the target's.
    """
    root = Path(directory)
    config = read_config(_read_json(root / "config.json"))
    tensors = {_plain_name(name): tensor for name, tensor in _read_tensors(root).items()}
    head = Eagle3Head(config)
    embedding, d2t = tensors.pop(_EMBEDDING, None), tensors.pop("d2t", None)
    tensors.pop("t2d", None)  # follows from d2t
    with torch.no_grad():
        for name, parameter in _parts(head):
            if name not in tensors:
                raise ModelError(f"{root}: no tensor {name!r}")
            tensor = tensors.pop(name)
            if tensor.shape != parameter.shape:
                raise ModelError(f"{root}: {name} is {tuple(tensor.shape)}, config.json says {tuple(parameter.shape)}")
            parameter.copy_(tensor)
    if tensors:
        raise ModelError(f"{root}: unknown tensors {', '.join(sorted(tensors)[:4])}")
    _set_vocab(head, d2t, root)
    head = _placed(head, dtype, device)
    if embedding is not None:
        head.attach_embedding(embedding)
    return head


def dummy_head(directory: str | Path, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Eagle3Head:
    """A head of the shape that `directory`'s config.json gives, token embedding included, with random weights drawn on
    the device: what a head of this size costs, without one. ModelError: no such file, or not a head's.
    """
    config = read_config(_read_json(Path(directory) / "config.json"))
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device(device):
        head = Eagle3Head(config)
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
    head.set_draft_vocab(_spread_ids(config))
    head = _placed(head, dtype, device)
    embedding = torch.empty((config.vocab_size, config.hidden_size), dtype=dtype, device=device)
    head.attach_embedding(embedding.normal_(generator=generator))
    return head


def save_head(head: Eagle3Head, directory: str | Path, with_embedding: bool = False) -> None:
    """Write the head in the original layout: `config.json`, `model.safetensors`. Makes the directory."""
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    tensors = {_layer_name(name): part.detach().cpu().clone() for name, part in _parts(head)}
    tensors["d2t"], tensors["t2d"] = head.d2t.cpu().clone(), head.t2d.cpu().clone()
    if with_embedding and head.embed_tokens is not None:
        tensors[_EMBEDDING] = head.embed_tokens.detach().cpu().clone()
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    (root / "config.json").write_text(json.dumps(write_config(head.config), indent=2) + "\n")


def random_head(config: Eagle3Config, dtype: torch.dtype, device: torch.device, seed: int) -> Eagle3Head:
    """A head with random weights (deviation 0.02; norms 1) and a draft vocabulary of evenly spread target ids."""
    generator = torch.Generator().manual_seed(seed)
    head = Eagle3Head(config)
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * 0.02)
                if module.bias is not None:
                    module.bias.copy_(torch.randn(module.bias.shape, generator=generator) * 0.02)
    head.set_draft_vocab(_spread_ids(config))
    return _placed(head, dtype, device)


def _spread_ids(config: Eagle3Config) -> torch.Tensor:
    """A draft vocabulary of evenly spread target ids."""
    return torch.arange(config.draft_vocab_size, dtype=torch.int64) * config.vocab_size // config.draft_vocab_size


def _placed(head: Eagle3Head, dtype: torch.dtype, device: torch.device) -> Eagle3Head:
    """The head on its device, with weights of `dtype`; the rotary frequencies stay float32, or angles would be off."""
    head = head.to(device=device, dtype=dtype)
    head.inv_freq = rotary_frequencies(head.config)[0].to(device)
    return head


def _parts(head: Eagle3Head) -> list[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors as views of the head's fused parameters, by name without the layer's prefix."""
    config = head.config
    heads_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    parts: list[tuple[str, torch.Tensor]] = []

    def add(names: tuple[str, ...], sizes: tuple[int, ...], linear: object) -> None:
        if not isinstance(linear, nn.Linear):
            raise ModelError("a packed EAGLE-3 head has no checkpoint form")
        for kind, fused in (("weight", linear.weight), ("bias", linear.bias)):
            if fused is not None:
                parts.extend(
                    (f"{name}.{kind}", part) for name, part in zip(names, fused.data.split(sizes), strict=True)
                )

    add(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (heads_width, kv_width, kv_width), head.qkv_proj)
    add(("self_attn.o_proj",), (config.hidden_size,), head.o_proj)
    add(("mlp.gate_proj", "mlp.up_proj"), (inner, inner), head.gate_up_proj)
    add(("mlp.down_proj",), (config.hidden_size,), head.down_proj)
    add(("fc",), (config.hidden_size,), head.fc)
    add(("lm_head",), (config.draft_vocab_size,), head.lm_head)
    for name in (*_NORMS, "norm"):
        parts.append((f"{name}.weight", getattr(head, name).weight.data))
    if head.input_norm is not None:
        parts.append(("input_norm.weight", head.input_norm.weight.data))
    if head.fc_norm is not None:
        for index, norm in enumerate(head.fc_norm.children()):
            if isinstance(norm, Norm):
                parts.append((f"fc_norm.{index}.weight", norm.weight.data))
    return parts


def _plain_name(name: str) -> str:
    """A tensor's name without the layer's prefix; `model.` in front of the others goes too."""
    return _LAYER_PREFIX.sub("", name) if _LAYER_PREFIX.match(name) else name.removeprefix("model.")


def _layer_name(name: str) -> str:
    in_layer = name.startswith(("self_attn.", "mlp.")) or name.split(".")[0] in _NORMS
    return f"midlayer.{name}" if in_layer else name


def _set_vocab(head: Eagle3Head, d2t: torch.Tensor | None, root: Path) -> None:
    config = head.config
    if d2t is None:
        if config.draft_vocab_size != config.vocab_size:
            raise ModelError(f"{root}: no tensor 'd2t' for a draft vocabulary of {config.draft_vocab_size}")
        return
    if tuple(d2t.shape) != (config.draft_vocab_size,):
        raise ModelError(f"{root}: d2t is {tuple(d2t.shape)}, config.json says ({config.draft_vocab_size},)")
    ids = torch.arange(config.draft_vocab_size) + d2t.to(torch.int64)
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size):
        raise ModelError(f"{root}: d2t leads outside the target's vocabulary of {config.vocab_size}")
    mask = torch.zeros(config.vocab_size, dtype=torch.bool)
    mask[ids] = True
    head.d2t.copy_(d2t.to(torch.int64))
    head.t2d.copy_(mask)


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: not a JSON object")
    return raw


def _read_tensors(root: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(root.glob("*.safetensors")):
        tensors.update(load_file(path))
    if not tensors:
        for path in sorted(root.glob("pytorch_model*.bin")):
            tensors.update(torch.load(path, map_location="cpu", weights_only=True))
    if not tensors:
        raise ModelError(f"{root}: neither *.safetensors nor pytorch_model*.bin")
    return tensors
