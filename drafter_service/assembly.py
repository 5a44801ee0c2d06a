"""How is a drafter put together from its config and the target's model directory?

What cannot work is refused here, before anything listens.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

from drafter_service.config import DrafterConfig
from drafter_service.device.local import LocalDrafter
from drafter_service.device.making import make_program, why_not_on_device
from drafter_service.device.program import DeviceOptions, DrafterProgram
from drafter_service.device.shapes import graph_rows_within
from drafter_service.draft_model import DraftModelSpeculator
from drafter_service.eagle3.checkpoint import dummy_head, load_head, random_head
from drafter_service.eagle3.config import Eagle3Config
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.eagle3.speculator import Eagle3Speculator
from drafter_service.messages import ServiceInfo
from drafter_service.ngram import NgramSpeculator
from drafter_service.settings import CacheSettings
from drafter_service.speculator import Speculator
from engine.decoder import Decoder
from engine.errors import ConfigError, ModelError
from engine.fetch import fetch_model
from engine.model_config import ModelConfig
from engine.weights import SafetensorsWeights

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_speculator(config: DrafterConfig, target_model: str | None) -> Speculator:
    """The speculator that the config asks for, loaded. ConfigError or ModelError say what is missing or does not fit.

    target_model: directory or name of the target's model, which only `eagle3` reads.
    """
    config.check_together()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = _use_device(config.device)
    settings = CacheSettings(
        num_seats=config.num_seats,
        max_tokens=config.max_step_tokens,
        max_draft_len=config.max_draft_len,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_len=config.max_model_len,
        attention=config.attention,
        metadata_source=config.metadata_source,
        draft_sampling=config.draft_sampling,
        prefix_caching=config.prefix_caching,
    )
    match config.method:
        case "ngram":
            return NgramSpeculator(config.ngram.min_n, config.ngram.max_n, config.max_draft_len)
        case "draft_model":
            assert config.checkpoint is not None, "checked"
            with _naming_the_checkpoint(config.checkpoint):
                directory = fetch_model(config.checkpoint)
                decoder = Decoder.load(directory, _DTYPES[config.dtype], device, config.load_format)
            with _naming_the_attention():
                return DraftModelSpeculator(decoder, settings)
        case "eagle3":
            if target_model is None:
                raise ConfigError("model", "method eagle3 reads the target's embedding, so it must be named")
            return _eagle3(config, settings, fetch_model(target_model), device)


def execution_of(config: DrafterConfig, speculator: Speculator) -> Literal["host", "device"]:
    """How steps run. ConfigError: `device` was asked for, and method or attention cannot."""
    reason = why_not_on_device(speculator)
    if config.execution == "device" and reason is not None:
        raise ConfigError("drafter.execution", f"`device` cannot be had: {reason}")
    on_gpu = torch.device(config.device).type == "cuda"
    chosen = config.execution if config.execution != "auto" else "device" if on_gpu and reason is None else "host"
    if chosen == "host" and config.metadata_shadow:
        raise ConfigError(
            "drafter.metadata_shadow", "compares what device execution builds; this drafter runs on the host"
        )
    return chosen


def make_device_program(config: DrafterConfig, speculator: Speculator) -> DrafterProgram | None:
    """The speculator's device form, compiled and captured; None with host execution."""
    if execution_of(config, speculator) == "host":
        return None
    options = DeviceOptions(
        graph_rows=graph_rows_within(config.graph_rows, config.num_seats),
        cuda_graphs=config.cuda_graphs,
        fused=config.metadata_fusion != "off",
        shadow=config.metadata_shadow,
    )
    program = make_program(speculator, options)
    program.warm_up()
    if program.device.type == "cuda":
        torch.cuda.synchronize(program.device)  # steps run on another stream than what made their weights
    return program


def make_local_drafter(config: DrafterConfig, target_model: str | None) -> LocalDrafter:
    """A drafter without RPCs, whose steps run on the caller's current stream. ConfigError, ModelError as above."""
    speculator = make_speculator(config, target_model)
    program = make_device_program(config, speculator)
    if program is None:
        raise ConfigError("drafter.execution", "a drafter in the target's process needs device execution")
    return LocalDrafter(speculator, program, config.num_seats, config.max_entry_wait_s)


def make_info(config: DrafterConfig, speculator: Speculator) -> ServiceInfo:
    """What the drafter tells of itself; the instance id is new at every start."""
    try:
        package_version = version("outrider")
    except PackageNotFoundError:  # run from a source tree that is not installed
        package_version = "0+unknown"
    return ServiceInfo(
        instance_id=secrets.token_hex(8),
        drafter_id=config.drafter_id,
        method=speculator.method,
        max_draft_len=config.max_draft_len,
        version=package_version,
        vocab_size=speculator.needs.vocab_size,
    )


def _use_device(name: str) -> torch.device:
    """The device of that name, with its index, made this thread's: kernels are launched where the thread is.

    ConfigError: there is no such device.
    """
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ConfigError("drafter.device", f"{device}: torch {torch.__version__} sees no CUDA device here")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError("drafter.device", f"{device}: there are {torch.cuda.device_count()} devices")
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    return device


@contextmanager
def _naming_the_checkpoint(name: str | None) -> Iterator[None]:
    """A checkpoint that is not there, or does not fit, becomes a ConfigError of the key that names it.

    name: what the key says; None where a random head stands in, whose errors stay as they are.
    """
    try:
        yield
    except ModelError as error:
        if name is None:
            raise
        detail = str(error) if name in str(error) else f"{name}: {error}"
        raise ConfigError("drafter.checkpoint", detail) from error


@contextmanager
def _naming_the_attention() -> Iterator[None]:
    """A backend that is not installed, or cannot run the shape, becomes a ConfigError of the key that names it."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("attention: "):  # as kernels/attention/registry.py has it
            raise
        raise ConfigError("drafter.attention", str(error).removeprefix("attention: ")) from error


def _eagle3(
    config: DrafterConfig, settings: CacheSettings, target_directory: Path, device: torch.device
) -> Eagle3Speculator:
    target, dtype = ModelConfig.from_directory(target_directory), _DTYPES[config.dtype]
    dummy = config.load_format == "dummy"
    if config.checkpoint is not None:
        with _naming_the_checkpoint(config.checkpoint):
            directory = fetch_model(config.checkpoint)
            head = dummy_head(directory, dtype, device) if dummy else load_head(directory, dtype, device)
    else:
        head = _random_head(config, target, dtype, device)
    if head.config.target_hidden_size != target.hidden_size:
        raise ConfigError(
            "drafter.checkpoint",
            f"the head reads hidden states of {head.config.target_hidden_size}, the model's are {target.hidden_size}",
        )
    if head.embed_tokens is None and dummy:
        shape = (target.vocab_size, target.hidden_size)
        with _naming_the_checkpoint(config.checkpoint):
            head.attach_embedding(torch.randn(shape, dtype=dtype, device=device))
    elif head.embed_tokens is None:
        with SafetensorsWeights(target_directory) as weights:
            shape = (target.vocab_size, target.hidden_size)
            embedding = weights.get("model.embed_tokens.weight", shape)
        with _naming_the_checkpoint(config.checkpoint):
            head.attach_embedding(embedding)
    with _naming_the_checkpoint(config.checkpoint):
        hidden_layers = head.config.layers_of_target(target.num_layers)
    head.pack()
    with _naming_the_attention():
        return Eagle3Speculator(head, hidden_layers, settings)


def _random_head(config: DrafterConfig, target: ModelConfig, dtype: torch.dtype, device: torch.device) -> Eagle3Head:
    assert config.random_head is not None
    choice = config.random_head
    layers = choice.hidden_layers or ()
    head_config = Eagle3Config(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_eps=target.rms_eps,
        vocab_size=target.vocab_size,
        draft_vocab_size=choice.draft_vocab_size or target.vocab_size,
        target_hidden_size=target.hidden_size,
        rope={"rope_type": "default", "rope_theta": 10_000.0},
        max_len=target.max_model_len,
        hidden_layers=layers,
        num_captured=len(layers) or 3,
    )
    return random_head(head_config, dtype, device, choice.seed)
