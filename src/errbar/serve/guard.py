"""Checks before anything is parsed: who may ask, how many requests at once, how large and how slow.

A request's whole body is read here, within the limits on bytes and seconds, so that the rest of the service need not
deal with slow or endless clients.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Collection
from typing import Any

from errbar.serve.limits import Limits, Refusal, busy

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PROTECTED = ("/v1/", "/metrics")
# Nothing is loaded from other sites, nobody may frame the page, and pictures come only from the page itself.
PAGE_HEADERS = [
    (b"content-security-policy", b"default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class Guard:
    """A wrapper of the application. `hosts` are the names that a Host header may have; None for any.

    Another site's page can make a browser query a service on loopback (DNS rebinding); the browser then sends that
    site's name as Host, which is refused.
    """

    def __init__(self, app: Any, limits: Limits, token: str | None, hosts: Collection[str] | None) -> None:
        self._app, self._limits, self._hosts = app, limits, hosts
        self._token = None if token is None else token.encode()
        self._active = 0
        self._held = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise Refusal(400, "This service speaks only HTTP.")

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *PAGE_HEADERS]}
            await send(message)

        body = bytearray()
        self._active += 1
        try:
            self._require_allowed(scope)
            if not await self._read(scope, receive, body):
                return
            await self._app(scope, _replayed(bytes(body), receive), sending)
        except Refusal as refusal:
            await send_refusal(refusal, sending)
        finally:
            self._active -= 1
            self._held -= len(body)

    def _require_allowed(self, scope: Any) -> None:
        headers = dict(scope["headers"])
        if self._hosts is not None and _host(headers.get(b"host", b"")) not in self._hosts:
            raise Refusal(
                421, f"This service answers only to {', '.join(sorted(self._hosts))}; use one of these names."
            )
        if self._token is not None and scope["path"].startswith(_PROTECTED):
            kind, _, credentials = headers.get(b"authorization", b"").partition(b" ")
            # In constant time: the time that a refusal takes must not reveal how much of the token was right.
            if kind.lower() != b"bearer" or not hmac.compare_digest(credentials.strip(), self._token):
                raise Refusal(
                    401,
                    "The token is missing or wrong; expected a header 'Authorization: Bearer TOKEN'.",
                    {"WWW-Authenticate": "Bearer"},
                )
        # Health checks are always answered.
        if self._active > self._limits.requests and scope["path"] != "/healthz":
            raise busy(
                f"There are already {self._limits.requests} requests, the most accepted at once. Try again after "
                "the seconds in Retry-After.",
                1,
            )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._limits.body_bytes:
            raise self._too_large()

    async def _read(self, scope: Any, receive: Any, body: bytearray) -> bool:
        """Read the whole body into `body`; False if the client has gone."""
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    part = message.get("body", b"")
                    body += part
                    self._held += len(part)
                    if len(body) > self._limits.body_bytes:
                        raise self._too_large()
                    if self._held > self._limits.held_bytes:
                        raise busy("The requests being read and answered take too much memory. Try again later.", 1)
                    if not message.get("more_body", False):
                        return True
        except TimeoutError:
            raise Refusal(
                408,
                f"The request did not arrive within {self._limits.body_seconds:g} seconds; send it faster, or less.",
                {"Connection": "close"},
            ) from None

    def _too_large(self) -> Refusal:
        return Refusal(
            413, f"The request is larger than {self._limits.body_bytes:,} bytes; send fewer or smaller inputs at once."
        )


async def send_refusal(refusal: Refusal, send: Any) -> None:
    body = json.dumps({"error": refusal.sentence, "kind": KINDS.get(refusal.status, "Refused")}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in refusal.headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


KINDS = {
    400: "BadRequest",
    401: "Unauthorized",
    404: "NotFound",
    405: "MethodNotAllowed",
    408: "RequestTimeout",
    413: "TooLarge",
    415: "UnsupportedMediaType",
    421: "MisdirectedRequest",
    422: "Invalid",
    429: "TooManyRequests",
    503: "Unavailable",
}


def _host(header: bytes) -> str:
    """The name in a Host header, without port and brackets."""
    text = header.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0] if text.count(":") == 1 else text


def _replayed(body: bytes, receive: Any) -> Any:
    """A `receive` that first returns the body, and then whatever comes from the connection."""
    is_replayed = False

    async def replay() -> Any:
        nonlocal is_replayed
        if is_replayed:
            return await receive()
        is_replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
