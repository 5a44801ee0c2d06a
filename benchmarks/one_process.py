"""What would the same target and drafter cost in one process?

A worker process holds both services' code, without their servers and threads: `PlanDriver`'s commands are carried out
where they are sent, by the services' own cores, on one stream, and the channel is memory of the process (kind `local`).
Steps are launched as far ahead as the driver's depth says, and nothing waits for anything but the device. What is left
of the services' cost is the work itself, so the split is measured against it.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections import deque
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import yaml

from benchmarks.plan_driver import DriverError, Load, PlanDriver, Timeline
from protos import common_pb2, drafter_pb2

if TYPE_CHECKING:
    from drafter_service.device.local import LocalDrafter
    from target_service.core import TargetCore
    from target_service.messages import ServiceInfo

READY_S = 180.0
RUN_S = 240.0
CHANNEL_ID = "local"


class OneProcess:
    """`with` it: the worker. `target`, `drafter`: config sections as for the services; both execute on the device."""

    def __init__(self, directory: Path, model: str, target: Mapping[str, Any], drafter: Mapping[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        config = directory / "one.yaml"
        sections = {"model": model, "target": dict(target), "drafter": dict(drafter)}
        for section in (sections["target"], sections["drafter"]):
            assert isinstance(section, dict)
            section |= {"execution": "device"}
            if section.get("device", "cpu") == "cpu":
                section["attention"] = "reference"
        config.write_text(yaml.safe_dump(sections, sort_keys=False))
        context = multiprocessing.get_context("spawn")
        self._link, other = context.Pipe()
        self._process = context.Process(target=_work, args=(other, str(config)), daemon=True)
        self._other: Connection | None = other

    def __enter__(self) -> OneProcess:
        self._process.start()
        assert self._other is not None
        self._other.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._link.send(None)
        self._process.join(15)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)

    def wait_ready(self) -> None:
        """Until it has loaded. DriverError: it could not."""
        self._answer(READY_S)

    def run(self, load: Load, warm: int, steps: int, depth: int) -> tuple[Timeline, dict[str, float], dict[str, float]]:
        """Place the load, run `warm` steps, then `steps`. Returns these; the CPU milliseconds of each; and what the
        host's parts of one take, in microseconds (see `host_parts_us`).
        """
        self._link.send((load, warm, steps, depth))
        timeline, host, parts = self._answer(RUN_S)
        return timeline, host, parts

    def _answer(self, deadline_s: float) -> Any:
        try:
            if not self._link.poll(deadline_s):
                raise DriverError(f"the worker did not answer within {deadline_s:.0f} s")
            answer = self._link.recv()
        except EOFError:
            raise DriverError("the worker died") from None
        if isinstance(answer, DriverError):
            raise answer
        return answer


def _work(link: Connection, config: str) -> None:
    """The worker. What goes wrong is sent as a DriverError."""
    try:
        with both_in_one(Path(config)) as (target, drafter):
            asyncio.run(_serve(link, target, drafter))
    except Exception as error:  # whatever it is, the parent reports it
        link.send(DriverError(f"{type(error).__name__}: {error}"))
        raise


async def _serve(link: Connection, target: InProcessTarget, drafter: InProcessDrafter) -> None:
    """Runs what it is asked to, on one driver, so that steps are numbered on, until it is told to end."""
    async with PlanDriver(target, drafter, "one") as driver:
        link.send("ready")
        while (order := link.recv()) is not None:
            load, warm, steps, depth = order
            await driver.place(load)
            await driver.decode(warm, depth)
            before, parts = time.process_time(), host_parts_us(target, drafter)
            timeline = await driver.decode(steps, depth)
            host = {"one process": 1e3 * (time.process_time() - before) / steps}
            after = host_parts_us(target, drafter)
            await driver.release()
            link.send((timeline, host, {name: round((after[name] - parts[name]) / steps, 1) for name in after}))


def host_parts_us(target: InProcessTarget, drafter: InProcessDrafter) -> dict[str, float]:
    """Microseconds of the host so far: launching the target's steps and the drafter's, of those what follows the draft
    prefill (drafts, reply, publication), and taking in what the drafter's steps gave.
    """
    times = drafter.host_times
    return {
        "target launch": target.launch_us,
        "drafter launch": 1e6 * times.launch_s,
        "drafter after prefill": 1e6 * times.after_prefill_s,
        "drafter complete": 1e6 * times.complete_s,
    }


@contextlib.contextmanager
def both_in_one(config: Path) -> Iterator[tuple[InProcessTarget, InProcessDrafter]]:
    """Both services' cores, loaded, on one stream, with a channel between them."""
    import torch

    from drafter_service.assembly import make_local_drafter
    from drafter_service.config import DrafterConfig
    from engine.channel.interface import ChannelSpec
    from engine.channel.local import LocalChannel
    from engine.config_file import load_model_name, load_section
    from engine.fetch import fetch_model
    from target_service.assembly import build_target, warm_up
    from target_service.channels import OpenChannel
    from target_service.config import TargetConfig

    model = load_model_name(config, None)
    target_config = load_section(config, "target", TargetConfig)
    drafter_config = load_section(config, "drafter", DrafterConfig)
    target = build_target(target_config, model, fetch_model(model))
    engine = target.engine
    on_stream = torch.cuda.stream(engine.stream) if engine.stream is not None else contextlib.nullcontext()
    with torch.inference_mode(), on_stream:
        warm_up(engine, (1, target_config.max_verify_len + 1), lambda line: None)
        drafter = make_local_drafter(drafter_config, model)
        needs, blocks = drafter.speculator.needs, engine.sessions.blocks
        channel = LocalChannel(
            ChannelSpec(
                channel_id=CHANNEL_ID,
                epoch=1,
                depth=target_config.channel_depth,
                max_rows=target_config.num_seats,
                max_tokens=target_config.max_step_tokens,
                max_draft_len=needs.max_draft_len,
                hidden_width=needs.hidden_width,
                hidden_dtype=engine.decoder.dtype,
                vocab_size=target.info.vocab_size,
                max_blocks_per_row=blocks.max_blocks,
                block_size=target_config.block_size,
                num_blocks=blocks.pool.num_blocks,
                draft_probs=needs.draft_probs,
            ),
            engine.device,
        )
        # Not attached over RPCs, as a drafter would be: there is only this one.
        target.channels._open[CHANNEL_ID] = OpenChannel(
            channel.target,
            drafter_config.drafter_id,
            needs.hidden_layers,
            shares_blocks=needs.metadata_source == "reuse",
            last_alive=time.monotonic(),
        )
        drafter.attach(channel.drafter, target.info.max_model_len)
        try:
            yield InProcessTarget(target.core, target.info), InProcessDrafter(drafter)
        finally:
            target.core.settle()
            drafter.collect(all_of_them=True)
            drafter.close()
            target.channels.close()


class InProcessTarget:
    """PlanDriver's stream to the target, whose commands are carried out as they are sent."""

    def __init__(self, core: TargetCore, info: ServiceInfo) -> None:
        from engine.outbox import Outbox
        from target_service.streams import GatewayStream

        self.info = info
        self.launch_us = 0.0
        self._core = core
        self._stream = GatewayStream(1, Outbox(1, lambda: None))
        self._outcomes: deque[Any] = deque()

    async def send(self, message: Any) -> None:
        from target_service.codec import command_from_proto

        self._outcomes.append(self._core.handle(self._stream, command_from_proto(message)))

    async def event(self, kind: str) -> Any:
        from target_service.codec import event_to_proto
        from target_service.flights import Flight
        from target_service.messages import StepReply

        event = self._outcomes.popleft()
        if isinstance(event, Flight):
            if event.reply is None:
                event.landing.wait()
                self._core.land(event)
            event = event.reply
        if isinstance(event, StepReply):
            self.launch_us += 1e3 * event.times.launch_ms
        message = event_to_proto(event)
        if message.WhichOneof("event") != kind:
            raise DriverError(f"target: expected {kind}, got {message}")
        return getattr(message, kind)


class InProcessDrafter:
    """PlanDriver's stream to the drafter, likewise."""

    def __init__(self, drafter: LocalDrafter) -> None:
        self.host_times = drafter.steps.host_times
        self._drafter = drafter
        self._answers: deque[Any] = deque()

    async def send(self, message: Any) -> None:
        from drafter_service.codec import command_from_proto

        match message.WhichOneof("command"):
            case "plan":
                self._drafter.launch(command_from_proto(message))  # type: ignore[arg-type]  # a plan, as it says
            case "hello":
                self._answers.append(drafter_pb2.DrafterInfo())
            case "open":
                self._answers.append(
                    drafter_pb2.ChannelOpened(ok=True, channel_id=CHANNEL_ID, channel_epoch=1, kind="local")
                )
            case "admit":
                cached_len = self._drafter.admit(command_from_proto(message))  # type: ignore[arg-type]  # likewise
                self._answers.append(
                    common_pb2.Admitted(
                        request_id=message.admit.request_id,
                        epoch=message.admit.epoch,
                        status=common_pb2.ADMIT_STATUS_OK,
                        cached_len=cached_len,
                    )
                )
            case "release":
                self._drafter.release(message.release.request_id)
                self._answers.append(common_pb2.Released(request_id=message.release.request_id))

    async def event(self, kind: str) -> Any:
        from drafter_service.codec import event_to_proto

        if kind != "report":
            return self._answers.popleft()
        if not self._drafter.reports:
            self._drafter.collect(all_of_them=True)
        return event_to_proto(self._drafter.reports.pop(0)).report
