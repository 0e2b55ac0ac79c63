"""The mode in which errbar computes, whatever mode the caller is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from errbar._base.formulas import WrittenOut


@contextmanager
def plain_execution(device: torch.device) -> Iterator[None]:
    """No gradients, no autocast, no inference mode: each number in the dtype that it has.

    Derivatives by `torch.func` are not affected by the absence of gradients around them.
    """
    if not torch.is_inference_mode_enabled() and not torch.is_autocast_enabled(device.type):
        # The usual case; to switch off what is off already would take a twentieth of a prediction for one input.
        with torch.no_grad():
            yield
        return
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def graph_execution(device: torch.device) -> Iterator[None]:
    """The same with gradients, for results that keep their graph.

    Fused attention kernels have no derivative of their derivative; the plain formula has. So have those of `formulas`.
    """
    with plain_execution(device), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), WrittenOut():
        yield
