"""Does `python -m gateway` start, serve both faces, drain and stop; and how does it fail?"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
import yaml

from protos import gateway_pb2, gateway_pb2_grpc
from tests.gateway.fake_drafter import FakeDrafter
from tests.gateway.fake_target import FakeTarget
from tests.gateway.stack_of_fakes import eventually
from tests.gateway.toy import continuation
from tests.ports import ReservedPort
from tests.processes import ProcessGroup
from tests.tiny_models import tiny_tokenizer


def model_directory(tmp_path: Path) -> Path:
    """The text side of a model: all that a gateway reads of it."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"vocab_size": 97, "max_position_embeddings": 256}))
    return directory


def config_file(tmp_path: Path, model: str | Path, **gateway: object) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"model": str(model), "gateway": gateway}))
    return str(path)


async def test_both_faces_serve_and_sigterm_drains(
    tmp_path: Path, processes: ProcessGroup, reserve_port: type[ReservedPort]
) -> None:
    target = FakeTarget(reserve_port().port)
    drafter = FakeDrafter(reserve_port().port, {target.address: target})
    await target.start()
    await drafter.start()
    rest, public = reserve_port().address, reserve_port().address
    config = config_file(
        tmp_path, model_directory(tmp_path), rest=rest, grpc=public, target=target.address, drafter=drafter.address
    )
    process = processes.python("-m", "gateway", "--config", config)
    await asyncio.to_thread(process.wait_for_line, f"gateway ready on http://{rest} grpc={public}")
    try:
        async with httpx.AsyncClient(base_url=f"http://{rest}") as http, grpc.aio.insecure_channel(public) as channel:
            await eventually(lambda: drafter.channel is not None)
            health = await http.get("/health")
            assert (health.status_code, health.json()["status"]) == (200, "ok")
            body = {"prompt": [4, 8], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            answer = (await http.post("/v1/completions", json=body)).json()
            assert answer["model"] == "tiny"
            assert answer["usage"]["completion_tokens"] == 12
            metrics = (await http.get("/metrics")).text
            assert "outrider_generated_tokens_total 12.0" in metrics
            assert "_created" not in metrics

            target.step_s = 0.02
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            request = gateway_pb2.GenerateRequest(
                token_ids=gateway_pb2.TokenIds(ids=[5]), max_tokens=20, temperature=0.0, ignore_eos=True, draft_len=0
            )
            call = stub.Generate(request)
            tokens: list[int] = []
            async for response in call:
                if not tokens:
                    process.terminate()
                tokens += response.token_ids
            assert tokens == continuation((5,), 20), "what runs may end after SIGTERM"
        assert await asyncio.to_thread(process.wait) == 0
        await eventually(lambda: not target.resident and not drafter.state)
        target.assert_empty()
        assert "Traceback" not in process.output
    finally:
        await drafter.kill()
        await target.kill()


async def drain(call: Any) -> None:
    while await call.read():
        pass


async def test_sigterm_cuts_off_what_does_not_end(
    tmp_path: Path, processes: ProcessGroup, reserve_port: type[ReservedPort]
) -> None:
    target = FakeTarget(reserve_port().port)
    await target.start()
    public = reserve_port().address
    config = config_file(
        tmp_path,
        model_directory(tmp_path),
        rest=reserve_port().address,
        grpc=public,
        target=target.address,
        drain_s=0.2,
    )
    process = processes.python("-m", "gateway", "--config", config)
    await asyncio.to_thread(process.wait_for_line, "gateway ready")
    try:
        target.step_s = 0.05
        async with grpc.aio.insecure_channel(public) as channel:
            request = gateway_pb2.GenerateRequest(
                token_ids=gateway_pb2.TokenIds(ids=[5]), max_tokens=200, ignore_eos=True
            )
            call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request)
            await call.read()
            process.terminate()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await drain(call)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(process.wait, 10) == 0
        await eventually(lambda: not target.resident)
        assert "Traceback" not in process.output
    finally:
        await target.kill()


@pytest.mark.parametrize(
    ("gateway", "line"),
    [
        ({"drafft_len": 3}, "gateway: gateway.drafft_len: unknown key"),
        ({"rest": "127.0.0.1:TAKEN", "grpc": "127.0.0.1:0"}, "gateway: gateway.rest: cannot listen on 127.0.0.1:"),
        ({"rest": "127.0.0.1:0", "grpc": "127.0.0.1:TAKEN"}, "gateway: gateway.grpc: cannot listen on 127.0.0.1:"),
    ],
)
def test_bad_config_is_one_line_and_status_2(
    tmp_path: Path, processes: ProcessGroup, gateway: dict[str, str], line: str
) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        settings = {
            key: value.replace("TAKEN", port) if isinstance(value, str) else value for key, value in gateway.items()
        }
        process = processes.python(
            "-m", "gateway", "--config", config_file(tmp_path, model_directory(tmp_path), **settings)
        )
        assert process.wait() == 2
    lines = [one for one in process.output.splitlines() if one.startswith("gateway:")]
    assert len(lines) == 1
    assert lines[0].startswith(line)
    assert "Traceback" not in process.output


def test_a_model_without_tokenizer_is_told(tmp_path: Path, processes: ProcessGroup) -> None:
    (tmp_path / "empty").mkdir()
    process = processes.python("-m", "gateway", "--config", config_file(tmp_path, tmp_path / "empty"))
    assert process.wait() == 2
    assert process.output.strip().splitlines()[-1].startswith("gateway: model: ")
