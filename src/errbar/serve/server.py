"""Running the service: a socket bound before anything slow begins, uvicorn, and a stop that loses no request."""

from __future__ import annotations

import gc
import ipaddress
import logging
import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from errbar.errors import ArgumentError
from errbar.serve.connection import protocol_for
from errbar.serve.guard import LOOPBACK
from errbar.serve.limits import Limits
from errbar.serve.telemetry import Log, LogHandler


@dataclass(frozen=True)
class Address:
    """Where to listen; port 0 picks a free port."""

    host: str = "127.0.0.1"
    port: int = 8000

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Names that a Host header may have: on loopback only its own; elsewhere not all names can be known."""
        return tuple({*LOOPBACK, self.host}) if self.is_loopback else None

    def require_protected(self, token: str | None, *, insecure: bool) -> None:
        """Refuse to listen where other machines can ask without a token, unless that is what is wanted."""
        if not (self.is_loopback or token is not None or insecure):
            raise ArgumentError(
                f"Whoever reaches {self.host} could ask, since there is no token; expected --token-file or "
                "ERRBAR_TOKEN, or --insecure to serve everybody."
            )

    def bind(self) -> socket.socket:
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, protocol)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(where)
            except OSError:
                listener.close()
                raise
        except (OSError, OverflowError) as error:
            raise ArgumentError(
                f"Cannot listen on {self.host} port {self.port}: {getattr(error, 'strerror', None) or error}. Give "
                "another --host or --port, or stop the program that listens there."
            ) from error
        return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Announcing(uvicorn.Server):
    """Calls `ready` once connections are accepted."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


class _Farewell:
    """Adds `Connection: close` to the answers of a server that is stopping, so that no client asks there again."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.server: uvicorn.Server | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start" and self.server is not None and self.server.should_exit:
                headers = [header for header in message.get("headers", []) if header[0].lower() != b"connection"]
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
            await send(message)

        await self._app(scope, receive, sending)


def grace(limits: Limits) -> int:
    """Seconds that a server which is stopping waits for its answers."""
    return math.ceil(limits.seconds + limits.body_seconds + 5)


def server_for(app: Any, limits: Limits, log: Log, ready: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """uvicorn with the limits on connections, logging to `log`."""
    talk = logging.getLogger("uvicorn.error")
    talk.handlers = [LogHandler(log)]
    talk.propagate = False
    talk.setLevel(logging.WARNING)
    farewell = _Farewell(app)
    config = uvicorn.Config(
        farewell,
        http=protocol_for(limits),
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=limits.idle_seconds,
        timeout_graceful_shutdown=grace(limits),
    )
    server = _Announcing(config, ready)
    farewell.server = server
    return server


def settle() -> None:
    """Keep the garbage collector off what was made until now: a look through all modules and the model is a pause of
    half a second for all who wait. For a process that does nothing else than to serve.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def running(app: Any, listener: socket.socket, limits: Limits, log: Log) -> Iterator[uvicorn.Server]:
    """The service in a thread while the block runs; for tests, notebooks and benchmarks."""
    server = server_for(app, limits, log)
    failure: list[BaseException] = []

    def run() -> None:
        try:
            server.run(sockets=[listener])
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="errbar-serve", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        thread.join(0.01)
    if failure:
        raise failure[0]
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join()
