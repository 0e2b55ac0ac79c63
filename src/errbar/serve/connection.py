"""Connections with time limits: uvicorn's own protocol, with the limits that it lacks.

uvicorn waits forever for the end of a request's head, and for a client that does not read its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from errbar.serve.limits import Limits


def protocol_for(limits: Limits) -> type[H11Protocol]:
    """A protocol class with these limits, for `uvicorn.Config(http=...)`."""

    class Limited(H11Protocol):
        """Disconnects clients that take too long to send the head of a request or to read the answer."""

        _head: asyncio.TimerHandle | None = None
        _writing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.transport = Joining(transport, self.loop)  # type: ignore[assignment]
            if len(self.connections) > limits.connections:
                self._answer(429, "There are too many connections. Try again later.", retry=True)
                return
            self._watch_head()

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            self._watch_head()

        def connection_lost(self, exc: Exception | None) -> None:
            _stop(self._head)
            _stop(self._writing)
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            # The rest of a refused body is read and dropped, for a while.
            if self.conn.their_state is h11.SEND_BODY and self._head is None:
                self._head = self.loop.call_later(limits.header_seconds, self._too_slow)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._writing = self.loop.call_later(limits.body_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            _stop(self._writing)
            super().resume_writing()

        def send_400_response(self, msg: str) -> None:
            self._answer(400, "This is not valid HTTP/1.1; check the request line and headers.")

        def _watch_head(self) -> None:
            """Start the clock while waiting for the head of a request, and stop it while answering one."""
            is_answering = self.cycle is not None and not self.cycle.response_complete
            if is_answering:
                _stop(self._head)
                self._head = None
            elif self._head is None and self.timeout_keep_alive_task is None:
                self._head = self.loop.call_later(limits.header_seconds, self._too_slow)

        def _too_slow(self) -> None:
            is_answered = self.cycle is not None and self.conn.their_state is h11.SEND_BODY
            if is_answered or self.conn.our_state is not h11.IDLE:
                self.transport.abort()
            else:
                self._answer(408, f"No request arrived within {limits.header_seconds:g} seconds.")

        def _answer(self, status: int, sentence: str, *, retry: bool = False) -> None:
            """Answer without the application, and close the connection."""
            body = json.dumps({"error": sentence, "kind": "Connection"}).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            headers += [(b"retry-after", b"1")] if retry else []
            events: list[Any] = [h11.Response(status_code=status, headers=headers), h11.Data(data=body)]
            # If it is too late to answer, the connection just ends.
            with contextlib.suppress(h11.LocalProtocolError):
                self.transport.write(b"".join(self.conn.send(event) or b"" for event in (*events, h11.EndOfMessage())))
            self.transport.close()

    return Limited


class Joining:
    """A transport that sends the head of an answer together with the body, which uvicorn writes right after it.

    Each packet costs as much as reading a request, and wakes the client.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n"):
            self._head = data
            # Where no body follows at once, the head does not wait for it.
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            self.write(b"")


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
