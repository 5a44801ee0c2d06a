"""What does a config make of a drafter on a device, and what can it not have?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_service.assembly import (
    execution_of,
    make_device_program,
    make_local_drafter,
    make_speculator,
)
from drafter_service.config import DrafterConfig
from drafter_service.device.making import make_program
from drafter_service.draft_model import DraftModelSpeculator
from drafter_service.eagle3.config import write_config
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.eagle3.speculator import Eagle3Speculator
from drafter_service.messages import Admission, RowRequest, StepRequest
from drafter_service.ngram import NgramSpeculator
from drafter_service.speculator import Speculator
from engine.decoder import Decoder
from engine.errors import ConfigError
from tests.drafter_service.conftest import LAYERS, SETTINGS, head_config
from tests.drafter_service.device.harness import ALL_SIZES
from tests.drafter_service.fake_target import FakeTarget
from tests.drafter_service.harness import prompt_of

SMALL: dict[str, Any] = {
    "method": "eagle3",
    "random_head": {"draft_vocab_size": 128},
    "attention": "reference",
    "execution": "device",
    "block_size": 4,
    "num_blocks": 64,
    "num_seats": 16,
    "max_step_tokens": 256,
    "max_model_len": 128,
    "max_draft_len": 3,
}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"device": "cuda", "attention": "triton"}, "device"),
        ({"device": "cuda:1", "attention": "triton"}, "device"),
        ({"device": "cuda", "attention": "triton", "execution": "host"}, "host"),
        ({"attention": "reference"}, "host"),
        ({"attention": "reference", "execution": "device"}, "device"),
    ],
)
def test_execution(make_eagle3: Callable[..., Speculator], settings: dict[str, Any], expected: str) -> None:
    """With an attention that asks the host for nothing: `reference` here, where there is no GPU."""
    assert execution_of(DrafterConfig(method="eagle3", **settings), make_eagle3()) == expected


def test_what_asks_the_host_runs_there(head: Eagle3Head, decoder: Decoder) -> None:
    """The backend says so, and nobody keeps a list of those that do."""
    head.pack()
    for device in ("cpu", "cuda"):
        for execution in ("auto", "device"):
            for speculator, reason in (
                (NgramSpeculator(1, 3, 7), "method ngram reads tokens"),
                (Eagle3Speculator(head, LAYERS, SETTINGS), "attention 'torch' needs"),
                (DraftModelSpeculator(decoder, SETTINGS), "attention 'torch' needs"),
            ):
                config = DrafterConfig(device=device, execution=execution)
                if execution == "auto":
                    assert execution_of(config, speculator) == "host"
                    continue
                with pytest.raises(ConfigError, match=reason):
                    execution_of(config, speculator)
                with pytest.raises(ConfigError, match=reason):
                    make_program(speculator, ALL_SIZES)


def test_a_shadow_of_nothing_cannot_be_had(make_eagle3: Callable[..., Speculator]) -> None:
    with pytest.raises(ConfigError, match="metadata_shadow"):
        execution_of(DrafterConfig(metadata_shadow=True), make_eagle3())


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:0", ""])
def test_devices_that_are_none(device: str) -> None:
    with pytest.raises(ValueError, match="cuda:N"):
        DrafterConfig(device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_named(tiny_directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"drafter\.device"):
        make_speculator(DrafterConfig(**{**SMALL, "device": "cuda", "attention": "triton"}), str(tiny_directory))


@pytest.mark.parametrize("attention", ["triton", "flashinfer"])
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_an_attention_backend_that_cannot_be_had_is_named(tiny_directory: Path, method: str, attention: str) -> None:
    """For it is not installed, or the drafter runs on a CPU."""
    settings = {**SMALL, "method": method, "attention": attention, "execution": "host"}
    if method == "draft_model":
        settings |= {"random_head": None, "checkpoint": str(tiny_directory)}
    with pytest.raises(ConfigError, match=rf"drafter\.attention: .*{attention}"):
        make_speculator(DrafterConfig(**settings), str(tiny_directory))


def test_a_drafter_in_the_target_s_process(tiny_directory: Path, decoder: Decoder) -> None:
    drafter = make_local_drafter(DrafterConfig(**SMALL), str(tiny_directory))
    target = FakeTarget(decoder, drafter.speculator.needs.hidden_layers, kind="local", max_draft_len=3)
    try:
        assert target.local is not None
        drafter.attach(target.local.drafter, target.max_len)
        request = target.add("r", prompt_of(6, 1))
        spec = target.spec
        assert drafter.admit(Admission("r", 1, tuple(request.tokens), 6, 100, spec.channel_id)) == 0
        for _ in range(12):
            rows = target.plan_rows([request], 64)
            plan_rows = (RowRequest("r", 1, 3, request.context_len, len(rows[0].query)),)
            seq = target.step(rows)
            drafter.launch(StepRequest(seq, spec.channel_id, spec.epoch, plan_rows, 1000))
            reply = target.channel.take_reply(seq, 0.0)
            assert reply is not None
            request.drafts = [token for token in reply.tokens[0].tolist() if token >= 0]
            assert len(request.drafts) == 3
        drafter.collect(all_of_them=True)
        assert [report.seq for report in drafter.reports] == list(range(1, 13))
        assert drafter.steps.host_times.steps == 12
        drafter.release("r")
        drafter.speculator.check_integrity()
    finally:
        drafter.close()
        target.close()


def test_a_dummy_head_has_the_shape_of_its_config(tiny_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(write_config(head_config())))
    settings = {**SMALL, "random_head": None, "checkpoint": str(tmp_path), "load_format": "dummy", "dtype": "bfloat16"}
    speculator = make_speculator(DrafterConfig(**settings), str(tiny_directory))
    assert isinstance(speculator, Eagle3Speculator)
    assert speculator.needs.hidden_width == len(LAYERS) * 64
    assert speculator.head.embed_tokens is not None
    assert speculator.head.embed_tokens.dtype == torch.bfloat16
    assert speculator.head.inv_freq.dtype == torch.float32
    program = make_device_program(DrafterConfig(**settings), speculator)
    assert program is not None
    assert program.max_rows == 16
