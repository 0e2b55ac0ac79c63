"""More digits to train on, as people draw them: turned, shifted, with other strokes; and pictures that are no digits.

A digit of 8 × 8 averages is drawn again on 32 × 32 cells, thinned to its middle lines and given a pen of another width,
turned, sheared, cut out and enlarged as `PictureRule` does it with a drawing, and averaged again.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

_FINE, _FIELD = 32, 44
# Widths of the pen in cells of 32 × 32; beside them, the strokes as they were.
_PENS = (3, 5)
_TURN, _SHEAR, _STRETCH, _SHIFT = 10.0, 0.12, 0.12, 0.3
_FILL = (0.9, 1.05)
_THINNINGS = 6


class _Draws:
    """Uniform numbers from one generator."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def between(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=self.generator)

    def below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)


def redrawn(x: Float[Tensor, "N 64"], copies: int, seed: int) -> Float[Tensor, "A 64"]:
    """Each digit drawn again `copies` times, one after the other: A = N · copies."""
    draws = _Draws(seed)
    count = len(x) * copies
    fine = nn.functional.interpolate(x.reshape(-1, 1, 8, 8), size=(_FINE, _FINE), mode="bicubic", align_corners=False)
    ink = torch.sigmoid((fine - 0.4) / 0.05)
    lines = _middle_lines(ink)
    strokes = torch.stack([*(_widest(lines, pen) for pen in _PENS), ink])
    pictures = strokes[draws.below(len(strokes), count), torch.arange(len(x)).repeat_interleave(copies)]
    return _averaged(_cut_out(_turned(pictures, draws), draws))


def no_digits(x: Float[Tensor, "N 64"], count: int, seed: int) -> Float[Tensor, "A 64"]:
    """`count` // 3 each of noise, of filled blots, and of quarters of the digits x in a wrong order."""
    draws = _Draws(seed)
    each = count // 3
    return torch.cat([_noise(each, draws), _blots(each, draws), _mixed(x, each, draws)])


def _widest(pictures: Tensor, size: int) -> Tensor:
    return nn.functional.max_pool2d(pictures, size, 1, size // 2)


def _middle_lines(ink: Tensor) -> Tensor:
    """Lantuéjoul's skeleton: what each of several erosions removes and a dilation does not bring back."""
    lines = torch.zeros_like(ink)
    for _ in range(_THINNINGS):
        eroded = -_widest(-ink, 3)
        lines = torch.maximum(lines, ink - _widest(eroded, 3))
        ink = eroded
    return torch.maximum(lines, ink)


def _turned(pictures: Tensor, draws: _Draws) -> Tensor:
    """Turned, sheared and stretched, on a larger field, so that nothing is lost."""
    count = len(pictures)
    angle = torch.deg2rad(draws.between(-_TURN, _TURN, count))
    shear = draws.between(-_SHEAR, _SHEAR, count)
    stretch = torch.exp(draws.between(-_STRETCH, _STRETCH, count))
    # From places in the result to places in the picture: the inverse of a form and then a turn.
    turn = torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()], 1).reshape(count, 2, 2)
    form = torch.stack([1 / stretch, -shear, torch.zeros(count), stretch], 1).reshape(count, 2, 2)
    motion = form @ turn * (_FIELD / _FINE)
    return _moved(pictures, torch.cat([motion, torch.zeros(count, 2, 1)], 2), _FIELD)


def _cut_out(pictures: Tensor, draws: _Draws) -> Tensor:
    """The box around the ink, enlarged to about the full height or width and about centred."""
    count = len(pictures)
    is_ink = pictures[:, 0] > 0.3
    places = torch.arange(float(_FIELD))

    def ends(has_ink: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.where(has_ink, places, torch.inf).amin(1)
        return first, torch.where(has_ink, places, -torch.inf).amax(1) + 1

    (top, bottom), (left, right) = ends(is_ink.any(2)), ends(is_ink.any(1))
    size = torch.maximum(bottom - top, right - left) / _FIELD / draws.between(*_FILL, count)
    motion = torch.zeros(count, 2, 3)
    motion[:, 0, 0] = motion[:, 1, 1] = size
    for axis, (low, high) in enumerate(((left, right), (top, bottom))):
        motion[:, axis, 2] = (low + high) / _FIELD - 1 + draws.between(-_SHIFT, _SHIFT, count) / 4 * size
    return _moved(pictures, motion, _FINE)


def _moved(pictures: Tensor, motion: Tensor, side: int) -> Tensor:
    grid = nn.functional.affine_grid(motion, [len(pictures), 1, side, side], align_corners=False)
    return nn.functional.grid_sample(pictures, grid, align_corners=False)


def _averaged(pictures: Tensor) -> Tensor:
    return nn.functional.avg_pool2d(pictures, _FINE // 8).reshape(len(pictures), 64)


def _noise(count: int, draws: _Draws) -> Tensor:
    """Independent values, smoothed more or less, of any brightness and contrast."""
    rough = draws.between(0, 1, count, 1, 8, 8)
    smooth = nn.functional.avg_pool2d(nn.functional.pad(rough, (1, 1, 1, 1), mode="reflect"), 3, 1)
    share = draws.between(0, 1, count, 1, 1, 1)
    contrast = draws.between(1, 9, count, 1, 1, 1)
    level = draws.between(0, 1, count, 1, 1, 1)
    return torch.sigmoid((share * rough + (1 - share) * smooth - level) * contrast).reshape(count, 64)


def _blots(count: int, draws: _Draws) -> Tensor:
    """Filled ellipses, rectangles, and what lies between: |x/a|^p + |y/b|^p < 1."""
    places = torch.arange(_FINE) + 0.5 - _FINE / 2
    y, x = torch.meshgrid(places, places, indexing="ij")
    a, b = (_FINE / 2 * draws.between(0.75, 1.1, count, 1, 1) for _ in range(2))
    power = 2 + 6 * draws.between(0, 1, count, 1, 1) ** 3
    inside = ((x / a).abs() ** power + (y / b).abs() ** power < 1).float()
    return _averaged(inside[:, None]) * draws.between(0.5, 1, count, 1)


def _mixed(x: Tensor, count: int, draws: _Draws) -> Tensor:
    """Quarters of four digits, each in the opposite corner."""
    digits = x.reshape(-1, 8, 8)[draws.below(len(x), count, 4)]
    one, two, three, four = digits.unbind(1)
    upper = torch.cat([one[:, 4:, 4:], two[:, 4:, :4]], 2)
    lower = torch.cat([three[:, :4, 4:], four[:, :4, :4]], 2)
    return torch.cat([upper, lower], 1).reshape(count, 64)
