"""How do the gateway's parts come up together, and how do they stop?

One event loop runs all: the dispatcher with its target loops, the REST face (uvicorn) and the gRPC face. Stopping:
both faces refuse new work, what runs may end within `drain_s`, the rest ends with an error, then the connections are
closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry

from gateway.config import GatewayConfig, LoadedConfig, parse_address
from gateway.dispatcher import Dispatcher
from gateway.errors import ConfigError
from gateway.generation import Generation
from gateway.metrics import GatewayMetrics
from gateway.rest.app import create_app
from gateway.rest.connections import DeadlineProtocol
from gateway.rest.served import ServedModel
from gateway.servicer import GrpcFace
from gateway.text.errors import TextError
from gateway.text.token_text import TokenText

_log = logging.getLogger(__name__)

BACKLOG = 2048
FACES_STOP_S = 2.0  # for connections to close after everything on them has ended


def version() -> str:
    """Outrider's version, in a bare checkout the same words as `outrider version`."""
    try:
        return importlib.metadata.version("outrider")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0+uninstalled"


def load_served(loaded: LoadedConfig, directory: Path) -> ServedModel:
    """The text side of the model. Raises ConfigError naming `model`."""
    name = loaded.gateway.model_name or Path(loaded.model_label).name
    try:
        return ServedModel.from_directory(directory, name)
    except TextError as error:
        raise ConfigError("model", str(error)) from error


def listen(address: str, key: str) -> socket.socket:
    """A listening TCP socket: from here on clients connect, and are served when the faces are up. Raises ConfigError
    naming `key`.
    """
    wanted = parse_address(address)
    try:
        family, kind, proto, _, where = socket.getaddrinfo(
            wanted.host, wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(key, f"cannot listen on {address}: {error.strerror}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(key, f"cannot listen on {address}: {error.strerror}") from error
    return bound


class _RestServer(uvicorn.Server):
    """uvicorn without its own signal handling: the process decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayApp:
    """Everything of one gateway process, from `run` to its end."""

    def __init__(self, config: GatewayConfig, served: ServedModel) -> None:
        self._config = config
        self._served = served
        self._registry = CollectorRegistry()

    async def run(self, on_ready: Callable[[str, str], None]) -> None:
        """Serve until SIGTERM or SIGINT. on_ready: called with the REST and the gRPC address once both take requests.

        Raises ConfigError when an address cannot be bound.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        with contextlib.closing(listen(self._config.rest, "gateway.rest")) as rest_socket:
            dispatcher = Dispatcher(
                self._config, self._make_text, GatewayMetrics(self._registry, self._config.max_draft_len)
            )
            grpc_face = GrpcFace(dispatcher, self._served, self._config.grpc, version())
            async with dispatcher:
                try:
                    grpc_port = await grpc_face.start()
                except OSError as error:
                    raise ConfigError("gateway.grpc", str(error)) from error
                rest = self._rest_server(dispatcher)
                rest_task = asyncio.create_task(rest.serve(sockets=[rest_socket]))
                rest_port = rest_socket.getsockname()[1]
                on_ready(
                    f"{parse_address(self._config.rest).host}:{rest_port}",
                    f"{parse_address(self._config.grpc).host}:{grpc_port}",
                )
                try:
                    await self._until_stopped(stop, dispatcher, rest_task)
                finally:
                    await dispatcher.stop(self._config.drain_s)
                    rest.should_exit = True
                    await asyncio.gather(rest_task, grpc_face.stop(FACES_STOP_S))

    @staticmethod
    async def _until_stopped(stop: asyncio.Event, dispatcher: Dispatcher, rest_task: asyncio.Task[None]) -> None:
        """Until asked to stop; raises what ended a part that should have gone on."""
        loops = asyncio.create_task(dispatcher.run_until_failure())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((loops, stopped, rest_task), return_when=asyncio.FIRST_COMPLETED)
            if loops.done():
                loops.result()
            if rest_task.done():
                rest_task.result()
        finally:
            for task in (loops, stopped):
                task.cancel()
            await asyncio.gather(loops, stopped, return_exceptions=True)

    def _rest_server(self, dispatcher: Dispatcher) -> uvicorn.Server:
        app = create_app(
            dispatcher=dispatcher,
            served=self._served,
            max_draft_len=self._config.max_draft_len,
            status=dispatcher.status,
            registry=self._registry,
            version=version(),
        )
        return _RestServer(
            uvicorn.Config(
                app,
                http=DeadlineProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=max(1, round(FACES_STOP_S)),
            )
        )

    def _make_text(self, generation: Generation) -> TokenText:
        return TokenText(self._served.tokenizer, generation.stop, generation.token_ids)
