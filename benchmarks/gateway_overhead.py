"""What does the gateway add to each step?

Drives the real dispatcher against a target, in a process of its own, that answers every plan at once. So the time per
step is all overhead: the gateway's work, and the messages there and back with their Python on both ends.

    python -m benchmarks.gateway_overhead
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from gateway.config import GatewayConfig
from gateway.dispatcher import Dispatcher
from gateway.generation import Generation, SamplingOptions
from gateway.metrics import GatewayMetrics
from protos import common_pb2, target_pb2, target_pb2_grpc

NUM_STEPS = 800
NUM_ROWS = (1, 8, 32)
_READY = "instant target ready on port "


@dataclass(frozen=True, slots=True)
class _Step:
    text: str
    num_kept: int
    stopped: str | None


class _NoText:
    """Leaves text out of the measurement."""

    def push(self, token_ids: Sequence[int]) -> _Step:
        return _Step("", len(token_ids), None)

    def flush(self) -> str:
        return ""


class InstantTarget(target_pb2_grpc.TargetServiceServicer):
    """Every row samples token 7 at once."""

    def Serve(
        self, request_iterator: Iterator[target_pb2.TargetCommand], context: Any
    ) -> Iterator[target_pb2.TargetEvent]:
        """Answer each command."""
        capacity = common_pb2.Capacity(free_seats=64, free_blocks=100_000)
        for command in request_iterator:
            match command.WhichOneof("command"):
                case "hello":
                    info = target_pb2.TargetInfo(
                        instance_id="instant",
                        model="none",
                        vocab_size=1000,
                        max_model_len=8192,
                        block_size=16,
                        num_blocks=100_000,
                        num_seats=64,
                        max_step_tokens=512,
                        max_verify_len=7,
                    )
                    yield target_pb2.TargetEvent(info=info)
                case "admit":
                    admitted = common_pb2.Admitted(
                        request_id=command.admit.request_id,
                        epoch=command.admit.epoch,
                        status=common_pb2.ADMIT_STATUS_OK,
                        capacity=capacity,
                    )
                    yield target_pb2.TargetEvent(admitted=admitted)
                case "release":
                    released = common_pb2.Released(request_id=command.release.request_id, capacity=capacity)
                    yield target_pb2.TargetEvent(released=released)
                case "plan":
                    result = target_pb2.StepResult(seq=command.plan.seq, capacity=capacity)
                    for row in command.plan.rows:
                        result.rows.add(
                            request_id=row.request_id,
                            epoch=row.epoch,
                            status=target_pb2.ROW_STATUS_OK,
                            token_ids=[7] if row.samples else [],
                            context_len=row.context_len + row.query_len,
                        )
                    yield target_pb2.TargetEvent(result=result)


def serve() -> None:
    """Be the target, until killed."""
    server = grpc.server(ThreadPoolExecutor(4))
    target_pb2_grpc.add_TargetServiceServicer_to_server(InstantTarget(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"{_READY}{port}", flush=True)
    server.wait_for_termination()


async def measure(address: str) -> None:
    """Print one line for each number of rows."""
    registry = CollectorRegistry()
    config = GatewayConfig(target=address, drafter=None)
    async with Dispatcher(config, lambda generation: _NoText(), GatewayMetrics(registry, 7)) as dispatcher:

        async def client(name: str, num_tokens: int) -> list[float]:
            options = SamplingOptions(temperature=0.0)
            times: list[float] = []
            async for _ in await dispatcher.submit(Generation(name, (1, 2, 3), num_tokens, options)):
                times.append(time.perf_counter())
            return times

        def own() -> float:
            labels = {"service": "gateway", "part": "total"}
            return registry.get_sample_value("outrider_step_seconds_sum", labels) or 0.0

        await client("warm", 200)
        for num_rows in NUM_ROWS:
            cpu, own_before = time.process_time(), own()
            runs = await asyncio.gather(*(client(f"{num_rows}-{row}", NUM_STEPS) for row in range(num_rows)))
            cpu, own_after = time.process_time() - cpu, own()
            gaps = sorted(after - before for before, after in zip(runs[0], runs[0][1:], strict=False))
            p50, p99 = (1e3 * gaps[int(len(gaps) * part)] for part in (0.5, 0.99))
            own_ms, cpu_ms = (1e3 * seconds / NUM_STEPS for seconds in (own_after - own_before, cpu))
            print(
                f"{num_rows:3} rows: {p50:.2f} ms per step (p99 {p99:.2f}); from verdict to next plan {own_ms:.2f} ms; "
                f"CPU of the gateway {cpu_ms:.2f} ms"
            )


def main() -> None:
    """Run both processes."""
    if sys.argv[1:] == ["--serve"]:
        serve()
        return
    argv = [sys.executable, "-m", "benchmarks.gateway_overhead", "--serve"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as target:
        try:
            assert target.stdout is not None  # it is a pipe
            port = target.stdout.readline().removeprefix(_READY).strip()
            try:
                import uvloop
            except ImportError:
                asyncio.run(measure(f"127.0.0.1:{port}"))
            else:
                uvloop.run(measure(f"127.0.0.1:{port}"))
        finally:
            target.kill()


if __name__ == "__main__":
    main()
