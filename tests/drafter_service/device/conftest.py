"""Fixtures of the device execution's tests: a packed head, speculators on `attention: reference`, harnesses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from drafter_service.device.program import DeviceOptions
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.eagle3.speculator import Eagle3Speculator
from drafter_service.settings import CacheSettings
from drafter_service.speculator import Speculator
from engine.decoder import Decoder
from tests.drafter_service.conftest import LAYERS, SETTINGS
from tests.drafter_service.device.harness import ALL_SIZES, DeviceHarness
from tests.drafter_service.fake_target import FakeTarget
from tests.drafter_service.harness import Harness

REFERENCE = replace(SETTINGS, attention="reference")


@pytest.fixture
def make_eagle3(head: Eagle3Head) -> Callable[..., Eagle3Speculator]:
    """`make_eagle3(**settings)`: speculators over one packed head."""
    head.pack()

    def make(**overrides: Any) -> Eagle3Speculator:
        settings: CacheSettings = replace(REFERENCE, **overrides)
        return Eagle3Speculator(head, LAYERS, settings)

    return make


@pytest.fixture
def make_device(decoder: Decoder) -> Iterator[Callable[..., DeviceHarness]]:
    """`make_device(speculator, options=..., **fake_target_options)`."""
    made: list[DeviceHarness] = []

    def make(speculator: Speculator, options: DeviceOptions = ALL_SIZES, **target: Any) -> DeviceHarness:
        fake = FakeTarget(decoder, speculator.needs.hidden_layers, kind="local", **target)
        made.append(DeviceHarness(fake, speculator, options))
        return made[-1]

    yield make
    for harness in made:
        harness.close()


@pytest.fixture
def make_host(decoder: Decoder) -> Iterator[Callable[..., Harness]]:
    """`make_host(speculator, **fake_target_options)`: the yardstick, host execution in lockstep."""
    made: list[Harness] = []

    def make(speculator: Speculator, **target: Any) -> Harness:
        num_seats = speculator.settings.num_seats  # type: ignore[attr-defined]
        made.append(Harness(FakeTarget(decoder, speculator.needs.hidden_layers, **target), speculator, num_seats))
        return made[-1]

    yield make
    for harness in made:
        harness.close()
