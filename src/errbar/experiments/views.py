"""Several views of one picture: turned, shifted and noisy; and pictures turned by a fixed angle.

Pixels are floating-point numbers in [0, 1]; those from outside the picture are 0.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from errbar._distributions.sampling import require_seed
from errbar.errors import ArgumentError, DataError

# Pictures moved at a time: enough for efficient resampling, small beside any network.
_BLOCK = 1024


def views(
    images: Float[Tensor, "N C H W"], frames: int, *, degrees: float, pixels: float, noise: float, seed: int
) -> Float[Tensor, "N F C H W"]:
    """Each picture seen `frames` times: turned by N(0, degrees²), shifted by N(0, pixels²), plus N(0, noise²).

    All draws are independent and come from `seed` alone; the noisy pixels are cut to [0, 1].
    """
    _require_pixels(images)
    if isinstance(frames, bool) or not isinstance(frames, int) or frames < 1:
        raise ArgumentError(f"frames is {frames!r}; expected how many views of each picture, one or more.")
    for name, value in (("degrees", degrees), ("pixels", pixels), ("noise", noise)):
        if not (math.isfinite(value) and value >= 0):
            raise ArgumentError(f"{name} is {value!r}; expected a standard deviation of zero or more.")
    count, (channels, height, width) = len(images) * frames, images.shape[1:]
    generator = torch.Generator().manual_seed(require_seed(seed))
    draws = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    result = images.new_empty(count, channels, height, width)
    for start in range(0, count, _BLOCK):
        rows = torch.arange(start, min(start + _BLOCK, count))
        block = draws[rows]
        pictures = _moved(images[rows.to(images.device) // frames], degrees * block[:, 0], pixels * block[:, 1:])
        grain = noise * torch.randn(pictures.shape, generator=generator, dtype=torch.float64)
        result[start : start + len(rows)] = (pictures + grain.to(pictures)).clamp(0, 1)
    return result.reshape(len(images), frames, channels, height, width)


def rotated(images: Float[Tensor, "N C H W"], degrees: float) -> Float[Tensor, "N C H W"]:
    """Each picture turned anticlockwise by `degrees` about its centre; bilinear between pixels."""
    _require_pixels(images)
    if not math.isfinite(degrees):
        raise ArgumentError(f"degrees is {degrees!r}; expected a finite angle.")
    result = torch.empty_like(images)
    for start in range(0, len(images), _BLOCK):
        part = images[start : start + _BLOCK]
        angles = torch.full((len(part),), degrees, dtype=torch.float64)
        result[start : start + _BLOCK] = _moved(part, angles, torch.zeros(len(part), 2, dtype=torch.float64))
    return result


def _moved(
    images: Float[Tensor, "B C H W"], degrees: Float[Tensor, " B"], pixels: Float[Tensor, "B 2"]
) -> Float[Tensor, "B C H W"]:
    """Where the pixels of the result come from: a rotation about the centre, then a shift.

    affine_grid measures in half widths and half heights, so that a rotation of pixels has the aspect ratio in it.
    """
    height, width = images.shape[2:]
    angle = torch.deg2rad(degrees)
    cos, sin = angle.cos(), angle.sin()
    half = torch.tensor([width / 2, height / 2], dtype=torch.float64)
    rotation = torch.stack([cos, -sin * (height / width), sin * (width / height), cos], 1).reshape(-1, 2, 2)
    motion = torch.cat([rotation, (pixels / half)[:, :, None]], 2).to(images)
    grid = affine_grid(motion, list(images.shape), align_corners=False)
    return grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _require_pixels(images: Tensor) -> None:
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
        actual = (
            f"{images.dtype} of shape {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        )
        raise DataError(
            f"Pictures are {actual}; expected floating-point pixels in [0, 1] of shape (pictures, channels, height, "
            "width). Divide bytes by 255."
        )
