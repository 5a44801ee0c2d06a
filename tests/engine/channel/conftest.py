"""A cuda_ipc channel on simulated devices, closed with its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.channel.device_ends import Ends


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()
