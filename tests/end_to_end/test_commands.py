"""The commands a user types, on a tiny model with random weights: `outrider quickstart` and `outrider up`."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.ports import ReservedPort
from tests.processes import ProcessGroup
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def write_config(directory: Path, ports: list[str]) -> Path:
    model = make_tiny_model(directory / "model")
    content = {
        "model": str(model),
        "target": {"listen": ports[0], "threads": 1, "num_blocks": 64},
        "drafter": {"listen": ports[1], "method": "ngram", "threads": 1},
        "gateway": {"target": ports[0], "drafter": ports[1], "rest": ports[2], "grpc": ports[3]},
    }
    path = directory / "stack.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_quickstart_ends_with_its_json_line_and_leaves_nothing(
    processes: ProcessGroup, tmp_path: Path, reserve_port: type[ReservedPort]
) -> None:
    # The ports of the file are taken (held by this test): the quickstart finds its own.
    config = write_config(tmp_path, [reserve_port().address for _ in range(4)])
    process = processes.python("-m", "gateway.cli", "quickstart", str(config), "--max-tokens", "40")
    status = process.wait(240)
    lines = process.output.splitlines()
    assert status == 0, process.output
    result = json.loads(lines[-1])
    assert list(result) == [
        "text",
        "identical",
        "tokens",
        "mean_accepted_len",
        "tok_s",
        "tok_s_no_draft",
        "speedup",
    ]
    assert result["identical"] is True
    assert 2 <= result["tokens"] <= 40
    assert result["mean_accepted_len"] >= 1
    for name in ("target", "drafter", "gateway"):
        assert re.search(rf"✓ {name} +ready after", process.output)
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(config.parent / "model") in (p.info["cmdline"] or [])
    ]


def test_up_serves_restarts_what_dies_and_stops_on_sigterm(
    processes: ProcessGroup, tmp_path: Path, reserve_port: type[ReservedPort]
) -> None:
    ports = [reserve_port().address for _ in range(4)]
    config = write_config(tmp_path, ports)
    process = processes.python("-m", "gateway.cli", "up", str(config))
    process.wait_for_line("OpenAI API  http://", 120)
    children = {p.cmdline()[2]: p for p in psutil.Process(process.pid).children()}
    assert set(children) == {"target_service", "drafter_service", "gateway"}
    body = {"prompt": "a b a b a b", "max_tokens": 12, "temperature": 0}
    before = httpx.post(f"http://{ports[2]}/v1/completions", json=body, timeout=60).json()
    os.kill(children["drafter_service"].pid, signal.SIGKILL)
    process.wait_for_line("drafter │ died: SIGKILL; again in", 30)
    during = httpx.post(f"http://{ports[2]}/v1/completions", json=body, timeout=60).json()
    assert during["choices"][0]["text"] == before["choices"][0]["text"]
    process.terminate()
    assert process.wait(60) == 0
    _, alive = psutil.wait_procs(list(children.values()), timeout=5)
    assert not alive
