"""The fake stack of the HTTP tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.gateway.rest import fakes
from tests.gateway.text import tiny_tokenizers


@pytest.fixture
def dispatcher() -> fakes.FakeDispatcher:
    return fakes.FakeDispatcher(tiny_tokenizers.byte_level())


@pytest.fixture
async def http(dispatcher: fakes.FakeDispatcher) -> AsyncIterator[httpx.AsyncClient]:
    async with fakes.client(fakes.make_app(dispatcher)) as http:
        yield http
