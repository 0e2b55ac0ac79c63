"""Pictures as they are not in the training data: turned, noisy, blurred, of low contrast.

Severities 1 … 5 of noise, blur and contrast are those that are usual for CIFAR-10.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from errbar.experiments.views import rotated

_NOISE = (0.04, 0.06, 0.08, 0.09, 0.10)
_BLUR = (0.4, 0.6, 0.7, 0.8, 1.0)
_CONTRAST = (0.75, 0.5, 0.4, 0.3, 0.15)


@dataclass(frozen=True)
class Shift:
    """A kind of change and how strong it is made; `apply(pixels, severity)` depends on nothing else."""

    kind: str
    severities: tuple[float, ...]
    apply: Callable[[Float[Tensor, "N C H W"], float], Float[Tensor, "N C H W"]]


def noisy(pixels: Float[Tensor, "N C H W"], severity: float) -> Float[Tensor, "N C H W"]:
    """Gaussian noise of a standard deviation by severity, the same draws for each; 0 is none."""
    if severity == 0:
        return pixels
    draws = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0)).to(pixels)
    return (pixels + _NOISE[int(severity) - 1] * draws).clamp(0, 1)


def blurred(pixels: Float[Tensor, "N C H W"], severity: float) -> Float[Tensor, "N C H W"]:
    """Convolved with a Gaussian of σ pixels by severity."""
    if severity == 0:
        return pixels
    distance = torch.arange(-4, 5, device=pixels.device, dtype=pixels.dtype)
    weights = torch.exp(-0.5 * (distance / _BLUR[int(severity) - 1]) ** 2)
    weights = weights / weights.sum()
    channels = pixels.shape[1]
    padded = torch.nn.functional.pad(pixels, (4, 4, 4, 4), mode="reflect")
    rows = torch.nn.functional.conv2d(padded, weights.expand(channels, 1, 1, 9).contiguous(), groups=channels)
    columns = weights[:, None].expand(channels, 1, 9, 1).contiguous()
    return torch.nn.functional.conv2d(rows, columns, groups=channels)


def faded(pixels: Float[Tensor, "N C H W"], severity: float) -> Float[Tensor, "N C H W"]:
    """Drawn towards the mean of each channel: mean + c (x − mean), c by severity."""
    if severity == 0:
        return pixels
    mean = pixels.mean((2, 3), keepdim=True)
    return mean + _CONTRAST[int(severity) - 1] * (pixels - mean)


ROTATION = Shift("rotation", tuple(float(angle) for angle in range(0, 181, 15)), rotated)
NOISE = Shift("noise", (0, 1, 2, 3, 4, 5), noisy)
BLUR = Shift("blur", (0, 1, 2, 3, 4, 5), blurred)
CONTRAST = Shift("contrast", (0, 1, 2, 3, 4, 5), faded)


def quick_shifts(shifts: Sequence[Shift]) -> tuple[Shift, ...]:
    """Two severities of each, for a first look."""
    return tuple(Shift(shift.kind, (shift.severities[0], shift.severities[2]), shift.apply) for shift in shifts)
