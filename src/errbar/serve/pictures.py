"""From a picture to an input of the network: one rule per model, stated in a sentence, for page and programs alike."""

from __future__ import annotations

import base64
import binascii
import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from errbar.errors import DataError, MismatchError

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DAMAGED = f"A picture cannot be read; expected an undamaged file in one of the formats {', '.join(_FORMATS)}."
# Ink fainter than this share of the darkest is ignored when locating the digit.
_INK = 0.25
_CELLS = 4


@dataclass(frozen=True)
class PictureRule:
    """How a picture becomes an input of `shape`: resized whole, or prepared as a handwritten digit.

    `given` is the layout (channels, height, width), where the shape does not say it; black becomes `low`, and white
    `high`.
    """

    shape: tuple[int, ...]
    digit: bool = False
    given: tuple[int, int, int] | None = None
    low: float = 0.0
    high: float = 1.0

    @property
    def layout(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        if self.given is not None:
            return self.given
        if self.digit:
            side = round(self.shape[-1] ** 0.5)
            return 1, side, side
        return self.shape[0] if len(self.shape) == 3 else 1, self.shape[-2], self.shape[-1]

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)."""
        return self.layout[1:]

    @property
    def channels(self) -> int:
        return self.layout[0]

    @property
    def sentence(self) -> str:
        height, width = self.size
        if self.digit:
            return (
                f"Converted to grey, with ink lighter or darker than its background; cropped, enlarged to the full "
                f"height or width, centred, and averaged to {height} × {width} values from 0 to 1, like the training "
                f"digits."
            )
        colours = "grey" if self.channels == 1 else "red, green and blue"
        scale = "divided by 255"
        if (self.low, self.high) != (0, 1):
            scale = f"with values from {self.low:g} to {self.high:g}, as the training inputs have them"
        return f"Resized to {height} × {width} (height × width), {colours}, {scale}; nothing is cropped."

    def read(self, text: str, pixels: int) -> Float[Tensor, "..."]:
        """The input in a picture given as base64 text or a data URL; raises `DataError` if it is not a picture."""
        return self.prepared(opened(text, pixels))

    def prepared(self, picture: Image.Image) -> Float[Tensor, "..."]:
        """The input in a picture that was opened; this is what takes time."""
        try:
            picture.load()
        except Exception as error:  # Decoders raise all kinds of errors on damaged files.
            raise DataError(_DAMAGED) from error
        values = _digit(picture, self.size) if self.digit else _resized(picture, self.size, self.channels)
        return (self.low + (self.high - self.low) * torch.from_numpy(values)).reshape(self.shape)


def rule_for(
    shape: tuple[int, ...] | None,
    layout: tuple[int, int, int] | None = None,
    ends: tuple[float, float] = (0.0, 1.0),
) -> PictureRule | None:
    """The rule for inputs of this shape: (H, W), (1, H, W) or (3, H, W); None if these are not pictures.

    Inputs of any other shape are pictures if they have a `layout` (channels, height, width); `ends` are the lowest and
    the highest value then known of them, which are black and white unless all lies in 0 … 1.
    """
    if layout is not None:
        if shape is not None and math.prod(shape) != math.prod(layout):
            sizes = " × ".join(map(str, layout))
            raise MismatchError(f"An input has {math.prod(shape)} numbers; expected {sizes} for a picture.")
        low, high = ends
        black, white = (0.0, 1.0) if (low >= 0 and high <= 1) or low >= high else (low, high)
        return PictureRule(layout if shape is None else shape, given=layout, low=black, high=white)
    if shape is None or len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] not in (1, 3)):
        return None
    return PictureRule(shape)


def opened(text: str, pixels: int) -> Image.Image:
    """The picture in base64 text or a data URL; only its head is read."""
    content = text.partition(",")[2] if text.startswith("data:") else text
    try:
        raw = base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError("A picture is not base64; expected the bytes of a PNG or JPEG file in base64.") from error
    try:
        picture: Image.Image = Image.open(io.BytesIO(raw), formats=_FORMATS)
    except Exception as error:
        raise DataError(_DAMAGED) from error
    # The size is in the header: a small file that would expand to gigabytes is refused before it does.
    if picture.width * picture.height > pixels:
        raise DataError(
            f"A picture has {picture.width} × {picture.height} pixels; expected at most {pixels:,}. Make it smaller "
            "first."
        )
    return picture


def _on_white(picture: Image.Image, mode: str) -> Image.Image:
    """Without transparency: on white paper."""
    if "A" in picture.getbands() or "transparency" in picture.info:
        foreground = picture.convert("RGBA")
        paper = Image.new("RGBA", foreground.size, "white")
        return Image.alpha_composite(paper, foreground).convert(mode)
    if picture.mode.startswith("I;16") or picture.mode in ("I", "F"):
        values = np.asarray(picture, dtype=np.float64)
        most = 65535.0 if picture.mode.startswith("I") else max(float(values.max()), 1.0)
        picture = Image.fromarray((values.clip(0, most) * (255 / most)).astype(np.uint8))
    return picture.convert(mode)


def _resized(picture: Image.Image, size: tuple[int, int], channels: int) -> Any:
    plain = _on_white(picture, "L" if channels == 1 else "RGB")
    smaller = plain.resize(size[::-1], Image.Resampling.BILINEAR)
    values = np.asarray(smaller, dtype=np.float32) / 255
    return np.ascontiguousarray(values.transpose(2, 0, 1) if channels == 3 else values)


def _digit(picture: Image.Image, size: tuple[int, int]) -> Any:
    """The ink of a digit as in scikit-learn's digits: a bitmap that it fills, averaged over cells of 4 × 4."""
    grey = np.asarray(_on_white(picture, "L"), dtype=np.float32) / 255
    ground = float(np.median(np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])))
    ink = np.abs(grey - ground)
    strongest = float(ink.max())
    if strongest < 0.1:
        raise DataError("The picture is empty; expected a digit that is darker or lighter than its background.")
    ink = ink / strongest
    rows, columns = (np.flatnonzero((ink > _INK).any(axis)) for axis in (1, 0))
    crop = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    target = (size[0] * _CELLS, size[1] * _CELLS)
    scale = min(target[0] / crop.shape[0], target[1] / crop.shape[1])
    height, width = (max(1, round(side * scale)) for side in crop.shape)
    bitmap = Image.fromarray((crop * 255).round().astype(np.uint8)).resize((width, height), Image.Resampling.BOX)
    whole = np.zeros(target, dtype=np.float32)
    top, left = (target[0] - height) // 2, (target[1] - width) // 2
    whole[top : top + height, left : left + width] = np.asarray(bitmap, dtype=np.float32) / 255
    return whole.reshape(size[0], _CELLS, size[1], _CELLS).mean((1, 3)).astype(np.float32)
