"""A gateway over fakes, put together per test: `await make_stack(...)`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from gateway.config import GatewayConfig
from gateway.dispatcher import Dispatcher
from gateway.metrics import GatewayMetrics
from tests.gateway.fake_drafter import FakeDrafter
from tests.gateway.fake_target import FakeTarget
from tests.gateway.stack_of_fakes import Stack, eventually
from tests.gateway.toy import ToyText
from tests.ports import ReservedPort

MakeStack = Callable[..., Awaitable[Stack]]


@pytest.fixture
def depth() -> int:
    """Steps under way at once in the test's stacks; a module of tests may have its own."""
    return 1


@pytest_asyncio.fixture
async def make_stack(reserve_port: type[ReservedPort], depth: int) -> AsyncIterator[MakeStack]:
    """make_stack(drafting=True, target={...}, drafter={...}, start_target=True, **config) -> a running Stack.

    At the end of the test nothing may be left on the fakes, and no rule of the protocol may have been broken.
    """
    stacks: list[Stack] = []

    async def make(
        drafting: bool = True,
        target: dict[str, Any] | None = None,
        drafter: dict[str, Any] | None = None,
        start_target: bool = True,
        **config: Any,
    ) -> Stack:
        fake_target = FakeTarget(reserve_port().port, **(target or {}))
        fake_drafter = FakeDrafter(reserve_port().port, {fake_target.address: fake_target}, **(drafter or {}))
        settings: dict[str, Any] = {
            "depth": depth,
            "reconnect_min_s": 0.01,
            "reconnect_max_s": 0.05,
            "step_deadline_ms": 500,
        }
        settings.update(config)
        gateway_config = GatewayConfig(
            target=fake_target.address, drafter=fake_drafter.address if drafting else None, **settings
        )
        registry = CollectorRegistry()
        dispatcher = Dispatcher(
            gateway_config, lambda generation: ToyText(generation.stop), GatewayMetrics(registry, 7)
        )
        stack = Stack(fake_target, fake_drafter, dispatcher, registry)
        stacks.append(stack)
        if start_target:
            await fake_target.start()
        if drafting:
            await fake_drafter.start()
        await dispatcher.__aenter__()
        if start_target:
            await eventually(lambda: all(one.state == "serving" for one in dispatcher.status().services))
        return stack

    yield make
    for stack in stacks:
        stack.target.go.set()
        stack.drafter.go.set()
        try:
            await stack.until_empty()
            stack.target.assert_empty()
            stack.drafter.assert_empty()
        finally:
            await stack.dispatcher.stop(0.0)
            await stack.drafter.kill()
            await stack.target.kill()
