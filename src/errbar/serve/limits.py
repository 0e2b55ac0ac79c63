"""What one client, and all clients together, may ask of the service, and the refusal of anything more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from errbar.errors import ArgumentError


@dataclass(frozen=True)
class Limits:
    """Sizes and seconds. Together they bound the memory: everything stored counts towards one of them.

    - `body_bytes`: of one request; `held_bytes`: of all requests that are being read or answered;
    - `requests`: being read, waiting or computed at once; `connections`: open at once;
    - `inputs`, `frames`, `samples`: of one request; `pixels`: of one picture, before it is resized;
    - `request_pixels`: of all pictures of one request; `queue_pixels`: of all pictures that wait or are being decoded;
    - `queue_inputs`: waiting for the network; `batch_inputs`: in one run of it (1: requests are not joined);
    - `seconds`: from the end of a request to its answer, decoding included; `header_seconds` and `body_seconds`: for a
      client to send these, and the latter also to read the answer; `idle_seconds`: of a connection between two
      requests.
    """

    body_bytes: int = 4 * 2**20
    held_bytes: int = 64 * 2**20
    requests: int = 256
    connections: int = 512
    inputs: int = 64
    frames: int = 16
    samples: int = 10_000
    pixels: int = 4_000_000
    request_pixels: int = 16_000_000
    queue_pixels: int = 64_000_000
    queue_inputs: int = 512
    batch_inputs: int = 64
    seconds: float = 10.0
    body_seconds: float = 10.0
    header_seconds: float = 10.0
    idle_seconds: int = 30

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf):
                raise ArgumentError(f"The limit {one.name} is {value!r}; expected a positive number.")
        if self.inputs > self.queue_inputs:
            raise ArgumentError(
                f"A request may have {self.inputs} inputs and the queue holds {self.queue_inputs}; expected a queue "
                "with room for at least one request."
            )
        if not self.pixels <= self.request_pixels <= self.queue_pixels:
            raise ArgumentError(
                f"A picture may have {self.pixels:,} pixels, a request {self.request_pixels:,}, and the decoding queue "
                f"holds {self.queue_pixels:,}; expected each with room for at least one of those before it."
            )


# Numbers in the samples of one request, and in the joint covariance of its frames: 64 MiB of float32 each.
LARGEST = 2**24


class Refusal(Exception):  # noqa: N818 - a refusal is an answer
    """A request that is not answered: the status, and what was wrong, what was expected, what to do."""

    def __init__(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.headers = dict(headers or {})


def busy(sentence: str, seconds: float, status: int = 429) -> Refusal:
    """Too much at once: try again in `seconds`."""
    return Refusal(status, sentence, {"Retry-After": str(max(1, math.ceil(seconds)))})
