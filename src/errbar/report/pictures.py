"""Inputs as pictures: PNG files written with the standard library alone, and small enough for a page."""

from __future__ import annotations

import re
import struct
import zlib

import torch
from jaxtyping import UInt8
from torch import Tensor

from errbar._model.batch import Batch
from errbar.errors import ArgumentError, MismatchError
from errbar.report.values import Picture

# Larger pictures are shrunk: a page shows a dozen of them, at the size of a stamp.
_LARGEST = 96
_LEAST = 4


def picture_of(batch: Batch, shape: tuple[int, int, int] | None = None) -> Picture | None:
    """The picture of a batch of one input, (1, H, W) or (3, H, W), if need be reshaped to `shape`; else None.

    Values in 0 … 1 are used directly, bytes as 0 … 255; others, such as normalised ones, are stretched from the
    smallest to the largest.
    """
    values = batch.tensors()
    if len(values) != 1:
        return None
    x = values[0][0].detach().cpu()
    if shape is not None:
        if x.numel() != shape[0] * shape[1] * shape[2]:
            dimensions = "×".join(map(str, shape))
            raise MismatchError(f"An input has {x.numel()} numbers; expected {dimensions} for a picture.")
        x = x.reshape(shape)
    if x.ndim != 3 or x.shape[0] not in (1, 3) or min(x.shape[1:]) < _LEAST:
        return None
    is_byte = x.dtype == torch.uint8
    pixels = x.float() / 255 if is_byte else x.float()
    low, high = float(pixels.min()), float(pixels.max())
    is_stretched = low < 0 or high > 1
    if is_stretched:
        pixels = (pixels - low) / (high - low)
    side = max(pixels.shape[1:])
    if side > _LARGEST:
        size = [max(1, round(length * _LARGEST / side)) for length in pixels.shape[1:]]
        pixels = torch.nn.functional.interpolate(pixels[None], size=size, mode="area")[0]
    data = png((pixels.clamp(0, 1) * 255).round().to(torch.uint8))
    return Picture(data, pixels.shape[2], pixels.shape[1], is_stretched)


def picture_shape(text: str) -> tuple[int, int, int]:
    """(channels, height, width) of "8x8" or "3x32x32".

    >>> picture_shape("8x8"), picture_shape("3x32x32")
    ((1, 8, 8), (3, 32, 32))
    """
    match = re.fullmatch(r"(?:([13])x)?([1-9]\d{0,4})x([1-9]\d{0,4})", text)
    if match is None:
        raise ArgumentError(
            f"The picture shape is {text!r}; expected height x width, for example 8x8, or 3x32x32 for colour."
        )
    return int(match[1] or 1), int(match[2]), int(match[3])


def png(pixels: UInt8[Tensor, "C H W"]) -> bytes:
    """A PNG file of grey (C = 1) or coloured (C = 3) pixels."""
    channels, height, width = pixels.shape
    rows = pixels.permute(1, 2, 0).reshape(height, width * channels).numpy()
    # Each line begins with the number of its filter, 0 for none.
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(raw, 9)) + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def numbers_of(batch: Batch, limit: int = 12) -> str:
    """The first numbers of an input that is not a picture."""
    parts = []
    names = {id(value): name for name, value in batch.kwargs.items()}
    for value in batch.tensors():
        name = names.get(id(value), "")
        flat = (value[0] if value.ndim else value).detach().cpu().reshape(-1)
        entries = ", ".join(f"{entry:.3g}" for entry in flat[:limit].tolist())
        more = ", …" if flat.numel() > limit else ""
        size = f" ({'×'.join(map(str, value.shape[1:]))})" if value.ndim > 2 else ""
        parts.append(f"{name + ' ' if name else ''}{entries}{more}{size}".replace("-", "\u2212"))
    return "; ".join(parts)
