"""The process: its ready line, health, reflection, one-line config errors, a clean end on SIGTERM."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import serving.server
from engine.config_file import parse_section
from engine.errors import ConfigError, IntegrityError
from protos import common_pb2, target_pb2
from target_service.__main__ import main
from target_service.channels import TargetChannels
from target_service.config import TargetConfig
from tests.processes import ProcessGroup
from tests.target_service.conftest import EXECUTIONS, LocalTarget, start_target, write_config
from tests.target_service.gateway_client import Driver, Gateway
from tests.target_service.scripted_drafter import ScriptedDrafter
from tests.target_service.test_greedy import prompt_of

SERVICE = "outrider.v1.TargetService"


def test_health_and_reflection(target_address: str) -> None:
    with grpc.insecure_channel(target_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            status = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answer = next(stub.ServerReflectionInfo(iter([request]), timeout=10))
        assert SERVICE in {service.name for service in answer.list_services_response.service}


def test_what_cannot_be_decoded_leaves_no_traceback(processes: ProcessGroup, tmp_path: Path, tiny_dir: Path) -> None:
    """As the first message and after others, of every kind of call; who calls afterwards is served."""
    address, process = start_target(processes, write_config(tmp_path / "target.yaml", tiny_dir, num_blocks=16))
    hello = target_pb2.TargetCommand(hello=target_pb2.TargetHello(gateway_id="g")).SerializeToString()
    with grpc.insecure_channel(address) as channel:
        for method, messages in (
            ("Attach", [b"\xff"]),
            ("Detach", [b"\xff"]),
            ("Exchange", [b"\xff"]),
            ("Serve", [b"\xff"]),
            ("Serve", [hello, b"\xff"]),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                list(channel.stream_stream(f"/{SERVICE}/{method}", bytes, bytes)(iter(messages), timeout=20))
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, (method, messages)
            process.wait_for_line(f"/{SERVICE}/{method}: a message that cannot be decoded")
    with Gateway(address) as gateway:
        assert gateway.info.vocab_size == 512
    process.terminate()
    assert process.wait(15) == 0
    assert "Traceback" not in process.output
    assert "Exception" not in process.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ends_cleanly(processes: ProcessGroup, tmp_path: Path, tiny_dir: Path, number: signal.Signals) -> None:
    config = write_config(tmp_path / "target.yaml", tiny_dir, num_blocks=16, drain_s=0.2)
    address, process = start_target(processes, config)
    assert f"target ready on {address} model={tiny_dir} blocks=16" in process.output
    with Gateway(address) as gateway:
        assert (gateway.info.num_blocks, gateway.info.vocab_size, gateway.info.max_model_len) == (16, 512, 512)
        assert list(gateway.info.eos_token_ids) == [2]
        driver = Driver(gateway)
        running = driver.request(prompt_of(4), 9)
        driver.admit(running)
        driver.step([running])
        process.popen.send_signal(number)
        assert process.wait(15) == 0, process.output
        gateway.half_close()
        assert gateway.status in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
    assert "Traceback" not in process.output


def test_sigterm_lets_running_requests_end(processes: ProcessGroup, tmp_path: Path, tiny_dir: Path) -> None:
    config = write_config(tmp_path / "target.yaml", tiny_dir, num_blocks=16, drain_s=20)
    address, process = start_target(processes, config)
    with Gateway(address) as gateway:
        driver = Driver(gateway)
        running = driver.request(prompt_of(4), 30)
        driver.admit(running)
        driver.step([running])
        process.terminate()
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            end = time.monotonic() + 10
            serving = health_pb2.HealthCheckResponse.SERVING
            while (
                health.Check(health_pb2.HealthCheckRequest(), timeout=10).status == serving and time.monotonic() < end
            ):
                time.sleep(0.02)  # until the signal has arrived
            assert health.Check(health_pb2.HealthCheckRequest(), timeout=10).status != serving
        while not running.done:
            driver.step([running])
        gateway.release(running.request_id)
        assert process.wait(15) == 0


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"block_size": 12}, "target.block_size"),
        ({"num_blocks": 0}, "target.num_blocks"),
        ({"num_seats": "many"}, "target.num_seats"),
        ({"blocksize": 16}, "target.blocksize"),
        ({"dtype": "int3"}, "target.dtype"),
        ({"device": "tpu"}, "target.device"),
        ({"device": "cuda:x"}, "target.device"),
        ({"attention": "magic"}, "target.attention"),
        ({"execution": "both"}, "target.execution"),
        ({"load_format": "gguf"}, "target.load_format"),
        ({"graph_rows": [0]}, "target.graph_rows"),
        ({"accept": "synthetic:0.5"}, "target.accept"),
        ({"accept": "all"}, "target.accept"),
        ({"listen": "here"}, "target.listen"),
        ({"listen": "127.0.0.1:99999"}, "target.listen"),
        ({"channel_kinds": []}, "target.channel_kinds"),
        ({"heartbeat_deadline_s": 0}, "target.heartbeat_deadline_s"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_section(settings, "target", TargetConfig)
    assert error.value.key.startswith(key)


def test_bad_config_is_one_line(tmp_path: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for settings, key in (
            ({"block_size": 12}, "target.block_size: "),
            ({"max_model_len": 513}, "target.max_model_len: "),
            ({"listen": "192.0.2.1:1"}, "target.listen: "),
            ({"num_blocks": 1 << 24, "block_size": 1024}, "target.num_blocks: "),
            ({"attention": "triton"}, "target.attention: "),  # on a CPU
            ({"execution": "device"}, "target.execution: "),  # with an attention that needs the host
            ({"channel_kinds": ["cuda_ipc"]}, "target.channel_kinds: "),
            ({"accept": "synthetic:9.5"}, "target.accept: "),  # seven drafts at most
            *(() if torch.cuda.is_available() else (({"device": "cuda"}, "target.device: "),)),
        ):
            config = write_config(tmp_path / "bad.yaml", tiny_dir, **settings)
            assert main(["--config", str(config)]) == 2
            lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("target_service: ")]
            assert len(lines) == 1
            assert lines[0].startswith(f"target_service: {key}")
        config = write_config(tmp_path / "good.yaml", tiny_dir)
        assert main(["--config", str(config), "--model", str(tmp_path / "nowhere")]) == 2
        assert "nowhere" in capsys.readouterr().err
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_bug_in_the_device_thread_ends_the_process(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that listened on, and never answered, would not be started anew by whoever watches over it."""
    close_retired, calls = TargetChannels.close_retired, itertools.count()

    def broken_once(self: TargetChannels) -> None:
        if next(calls) == 0:
            raise IntegrityError("lost count")
        close_retired(self)

    monkeypatch.setattr(TargetChannels, "close_retired", broken_once)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        began = time.monotonic()
        assert main(["--config", str(write_config(tmp_path / "target.yaml", tiny_dir))]) == 1
        assert time.monotonic() - began < 30
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


LOSES_ITS_DEVICE = """
import sys
import target_service.core
from engine.decoder import Decoder
from target_service.__main__ import main
from target_service.failures import DeviceLost

def broken(*arguments, **named):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def lost(error):
    raise DeviceLost(str(error))

Decoder.forward = broken
target_service.core.raise_if_device_lost = lost
sys.exit(main(sys.argv[1:]))
"""


def test_a_lost_device_ends_the_process_with_one_line(
    processes: ProcessGroup, tmp_path: Path, tiny_dir: Path, execution: str
) -> None:
    """Whoever supervises it starts another; nothing that can be done in this process would help."""
    config = write_config(tmp_path / "target.yaml", tiny_dir, **EXECUTIONS[execution])
    process = processes.python("-c", LOSES_ITS_DEVICE, "--config", str(config))
    address = process.wait_for_line(r"target ready on (\S+) ", 90).group(1)
    with Gateway(address) as gateway:
        driver = Driver(gateway)
        running = driver.request(prompt_of(4), 30)
        driver.admit(running)
        gateway.send(plan=common_pb2.StepPlan(seq=1, rows=[driver.row(running)]))
        assert process.wait(30) == 3
        process.wait_for_line("target_service: the device is lost: CUDA error: an illegal memory access", 5)


def test_synthetic_acceptance_is_announced_and_has_its_mean(
    processes: ProcessGroup, tmp_path: Path, tiny_dir: Path, execution: str
) -> None:
    config = write_config(
        tmp_path / "target.yaml", tiny_dir, accept="synthetic:2.5", max_verify_len=3, **EXECUTIONS[execution]
    )
    address, process = start_target(processes, config)
    process.wait_for_line("WARNING: target.accept is synthetic:2.5: .*not the model's", 5)
    with Gateway(address) as gateway, ScriptedDrafter(address) as drafter:
        driver = Driver(gateway, drafter)
        running = [driver.request(prompt_of(5, seed), 150, draft_len=3, sampling={"seed": seed}) for seed in range(4)]
        drafter.script = lambda row, position, drafts: [3, 4, 5]
        steps = 0
        for request in running:
            driver.admit(request)
        driver.step(running)
        while all(len(request.generated) < 140 for request in running):
            driver.step(running)
            steps += 1
        given = sum(len(request.generated) - 1 for request in running) / (steps * len(running))
        assert 2.2 < given < 2.8
        for request in running:
            gateway.release(request.request_id)


def test_a_call_too_many_is_refused_at_once(
    local_target: Callable[..., LocalTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream holds a thread: a call that found none would wait for one without end."""
    monkeypatch.setattr(serving.server, "MAX_STREAMS", 2)
    address, _ = local_target()
    with Gateway(address), Gateway(address):
        third = Gateway(address, hello=False)
        third._reader.join(10)
        assert third.status == grpc.StatusCode.RESOURCE_EXHAUSTED
        third.close()
