"""Does the drafter live as a process: started by a config, killed, started again, stopped, misconfigured?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.decoder import Decoder
from tests.drafter_service.fake_service import FakeTargetService, Gateway, fields_of
from tests.drafter_service.harness import prompt_of
from tests.ports import ReservedPort
from tests.processes import ProcessGroup


def write_config(path: Path, model: Path | None, **drafter: Any) -> Path:
    content: dict[str, Any] = {"drafter": drafter}
    if model is not None:
        content["model"] = str(model)
    path.write_text(json.dumps(content))  # JSON is YAML
    return path


def test_kill_and_restart(
    decoder: Decoder,
    tiny_directory: Path,
    processes: ProcessGroup,
    reserve_port: type[ReservedPort],
    tmp_path: Path,
) -> None:
    """The target keeps going; the drafter that comes back catches up from the tokens and is right again."""
    port = reserve_port().port
    config = write_config(
        tmp_path / "config.yaml",
        None,
        listen=f"127.0.0.1:{port}",
        method="draft_model",
        checkpoint=str(tiny_directory),
        block_size=4,
    )
    service = FakeTargetService(decoder)
    try:
        process = processes.python("-m", "drafter_service", "--config", str(config))
        process.wait_for_line(rf"^drafter ready on 127\.0\.0\.1:{port} method=draft_model")
        gateway = Gateway(f"127.0.0.1:{port}")
        opened = gateway.open(service.address)
        target = service.targets[opened.channel_id]
        request = target.add("r", prompt_of(9, 1))
        gateway.admit(**fields_of("r", request.tokens, opened.channel_id))
        for _ in range(3):
            gateway.plan(target, 3)
        assert request.num_accepted == request.num_drafted == 6
        first_instance = gateway.info.instance_id

        process.kill()
        assert gateway.ended()
        gateway.close()
        request.drafts = []
        seq = target.step(target.plan_rows([request], 64))
        # The target learns that nobody will answer well before its deadline.
        assert target.channel.take_reply(seq, 30.0) is None

        process = processes.python("-m", "drafter_service", "--config", str(config))
        process.wait_for_line("^drafter ready")
        gateway = Gateway(f"127.0.0.1:{port}")
        assert gateway.info.instance_id != first_instance
        opened = gateway.open(service.address)
        assert opened.ok, opened.detail
        renewed = service.targets[opened.channel_id]
        moved = renewed.add("r", request.tokens)
        # The fake target is a new one as well: it runs the text again, and the drafter follows from its tokens.
        gateway.admit(**fields_of("r", request.tokens, opened.channel_id, mid_stream=True))
        for _ in range(3):
            gateway.plan(renewed, 3)
        assert moved.num_accepted == moved.num_drafted == 6
        gateway.close()
        process.terminate()
        assert process.wait() == 0
    finally:
        service.close()


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"metod": "ngram"}, "drafter.metod: unknown key"),
        ({"method": "eagle4"}, "drafter.method"),
        ({"listen": "nowhere"}, "drafter.listen: must be HOST:PORT"),
        ({"block_size": 24}, "drafter.block_size: must be a power of two"),
        ({"ngram": {"min_n": 5, "max_n": 3}}, "drafter.ngram: min_n 5 is above max_n 3"),
        ({"method": "draft_model"}, "drafter.checkpoint: is required"),
        ({"method": "draft_model", "checkpoint": "no-such"}, "drafter.checkpoint: 'no-such' is neither a directory"),
        ({"method": "eagle3"}, "drafter.checkpoint: method eagle3 needs a checkpoint"),
        ({"method": "eagle3", "random_head": {}}, "model: must name a model"),
        ({"method": "ngram", "metadata_source": "reuse"}, "drafter.metadata_source"),
    ],
)
def test_a_bad_config_is_one_line_naming_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], drafter: dict[str, Any], message: str
) -> None:
    from drafter_service.__main__ import main

    config = write_config(tmp_path / "config.yaml", None, **drafter)
    assert main(["--config", str(config)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""


def test_heads_that_do_not_fit_the_target(
    tmp_path: Path, tiny_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from drafter_service.__main__ import main
    from drafter_service.eagle3.checkpoint import random_head, save_head
    from tests.drafter_service.conftest import head_config

    for name, overrides, message in (
        ("hidden", {"target_hidden_size": 32}, "drafter.checkpoint: the head reads hidden states of 32"),
        (
            "layers",
            {"hidden_layers": (0, 1, 7)},
            "drafter.checkpoint: {head}: captured layers (0, 1, 7) in a target of 3",
        ),
        (
            "vocab",
            {"vocab_size": 600},
            "drafter.checkpoint: {head}: token embedding is (512, 64), the EAGLE-3 head takes (600",
        ),
    ):
        head = random_head(head_config(**overrides), torch.float32, torch.device("cpu"), 0)
        save_head(head, tmp_path / name)
        config = write_config(
            tmp_path / f"{name}.yaml", tiny_directory, method="eagle3", checkpoint=str(tmp_path / name)
        )
        assert main(["--config", str(config)]) == 2
        assert message.format(head=tmp_path / name) in capsys.readouterr().err
