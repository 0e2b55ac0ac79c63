"""What a connection sends: the head of an answer and its body at once, and nothing late."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from errbar.serve.connection import Joining

HEAD = b"HTTP/1.1 200 \r\ncontent-length: 2\r\n\r\n"


class Sent:
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        self.packets: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.packets.append(data)

    def close(self) -> None:
        self.closed = True


async def packets(*written: bytes, close: bool = False) -> Sent:
    """What is sent of this before anything else runs, and then a turn of the loop later."""
    sent = Sent()
    transport = Joining(cast(asyncio.Transport, sent), asyncio.get_running_loop())
    for data in written:
        transport.write(data)
    if close:
        transport.close()
    else:
        await asyncio.sleep(0)
    return sent


def sent(*written: bytes, **options: Any) -> list[bytes]:
    return asyncio.run(packets(*written, **options)).packets


def test_head_and_body_are_one_packet() -> None:
    assert sent(HEAD, b"{}", b"") == [HEAD + b"{}", b""]
    assert sent(HEAD, b"{}", HEAD, b"[]") == [HEAD + b"{}", HEAD + b"[]"]


def test_a_head_without_a_body_is_sent_in_the_same_turn() -> None:
    assert sent(HEAD) == [HEAD]
    assert asyncio.run(packets(HEAD, close=True)).packets == [HEAD]
    assert asyncio.run(packets(HEAD, close=True)).closed
