"""The mode in which errbar computes, whatever mode the caller is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def plain_execution(device: torch.device) -> Iterator[None]:
    """No gradients, no autocast, no inference mode: each number in the dtype that it has.

    Derivatives by `torch.func` are not affected by the absence of gradients around them.
    """
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
