"""Reading the pictures of requests beside the event loop: few at once, in turn, and no more than there is room for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import anyio
import anyio.to_thread
import torch
from PIL import Image
from torch import Tensor

from errbar.errors import DataError
from errbar.serve.limits import Limits, busy
from errbar.serve.pictures import PictureRule, opened

_THREADS = 2
# Retry-After of a full queue: about the seconds that it takes to decode what is in it.
_RETRY_SECONDS = 1


class Decoder:
    """Makes inputs of pictures in threads of its own.

    A request waits for its pictures one by one, so that requests take turns: one with a single picture does not wait
    for all the pictures of the others.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._heads: anyio.CapacityLimiter | None = None
        self._threads: anyio.CapacityLimiter | None = None
        self._pixels = 0

    @property
    def queued_pixels(self) -> int:
        """Of pictures that wait or are being decoded."""
        return self._pixels

    async def inputs(self, rule: PictureRule, images: Sequence[str]) -> Tensor:
        """The pictures of a request as inputs; raises a refusal (429) if there is no room for them."""
        if self._threads is None or self._heads is None:  # They need the event loop, which did not run until now.
            self._heads, self._threads = anyio.CapacityLimiter(1), anyio.CapacityLimiter(_THREADS)
        # Heads have a thread of their own: a request that is refused does not wait for pictures to be decoded.
        read = partial(_opened, images, self._limits)
        pictures, pixels = await anyio.to_thread.run_sync(read, limiter=self._heads)
        room = self._limits.queue_pixels
        if self._pixels + pixels > room:
            raise busy(
                f"Pictures of {self._pixels:,} pixels are waiting, and there is room for {room:,}. Try again after "
                "the seconds in Retry-After.",
                _RETRY_SECONDS,
            )
        self._pixels += pixels
        try:
            parts = [
                await anyio.to_thread.run_sync(partial(rule.prepared, picture), limiter=self._threads)
                for picture in pictures
            ]
        finally:
            self._pixels -= pixels
        return torch.stack(parts)


def _opened(images: Sequence[str], limits: Limits) -> tuple[list[Image.Image], int]:
    """The pictures with their heads read, and how many pixels they have; refused before any of them is decoded."""
    pictures: list[Image.Image] = []
    pixels = 0
    for image in images:
        pictures.append(opened(image, limits.pixels))
        pixels += pictures[-1].width * pictures[-1].height
        if pixels > limits.request_pixels:
            raise DataError(
                f"The pictures have more than {limits.request_pixels:,} pixels together; expected at most that many in "
                "one request. Send fewer at once, or make them smaller first."
            )
    return pictures, pixels
