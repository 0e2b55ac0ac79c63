"""A folder of pictures: one subfolder for each class, or pictures without labels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from errbar.cli.extras import extra
from errbar.cli.rows import IMAGES, Row, Rows, Transform, apply, stacked
from errbar.errors import ArgumentError, DataError, FileError, LabelError

_GREY = ("1", "L", "LA", "I", "I;16", "I;16B", "I;16L", "F")
_BYTES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
_SIXTEEN_BITS = 2**16 - 1


class ImageRows(Rows):
    """Pictures as (channels, height, width) in 0 … 1, one channel if the first of them is grey, else three.

    A transform is given the picture itself, as the Pillow library opens it, and returns the tensor.
    """

    def __init__(
        self,
        folder: Path,
        classes: Sequence[str] | None,
        transform: Transform | None,
        size: tuple[int, int] | None,
        *,
        labelled: bool = True,
    ) -> None:
        self.pillow = extra("PIL.Image", f"Reading the pictures in {folder}", "Pillow", "images")
        self.folder, self.transform, self.size = folder, transform, size
        folders = _class_folders(folder) if labelled else []
        self.classes = tuple(classes) if classes is not None else tuple(part.name for part in folders) or None
        self.labelled = bool(folders)
        if folders:
            pairs = [(path, self._number(part.name)) for part in folders for path in _pictures(part)]
            self.paths, self.labels = [path for path, _ in pairs], [label for _, label in pairs]
        else:
            self.paths, self.labels = _pictures(folder), []
        if not self.paths:
            raise DataError(
                f"The folder {folder} holds no pictures ({', '.join(IMAGES[:4])}, …); expected a subfolder of pictures "
                "for each class."
            )
        self.grey = self._open(self.paths[0]).mode in _GREY

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, indices: Sequence[int]) -> Row:
        x = stacked([self._sample(self.paths[index]) for index in indices])
        return (x, torch.tensor([self.labels[index] for index in indices])) if self.labelled else (x,)

    def name(self, index: int) -> str:
        return self.paths[index].relative_to(self.folder).as_posix()

    def _sample(self, path: Path) -> Tensor:
        picture = self._open(path)
        if self.transform is None and picture.mode not in _BYTES:
            picture = self._scaled(picture, path)
        if self.size is not None:
            picture = picture.resize(self.size[::-1], self.pillow.Resampling.BILINEAR)
        if self.transform is not None:
            return apply(self.transform, picture)
        if picture.mode == "F":
            grey = torch.from_numpy(np.array(picture))[None]
            return grey if self.grey else grey.expand(3, -1, -1)
        pixels = np.array(picture.convert("L" if self.grey else "RGB"), dtype=np.float32) / 255
        return torch.from_numpy(pixels)[None] if self.grey else torch.from_numpy(pixels).permute(2, 0, 1)

    def _scaled(self, picture: Any, path: Path) -> Any:
        """A picture of sixteen bits in 0 … 1; made one of eight bits, all but its darkest parts would be white."""
        if picture.mode == "F" or np.array(picture).max() > _SIXTEEN_BITS:
            raise DataError(
                f"The picture {path} has numbers of another range than 0 to {_SIXTEEN_BITS} (mode {picture.mode!r}); "
                "expected 8 or 16 bits. Give a --transform that scales it."
            )
        return self.pillow.fromarray(np.array(picture, dtype=np.float32) / _SIXTEEN_BITS)

    def _open(self, path: Path) -> Any:
        try:
            with self.pillow.open(path) as picture:
                picture.load()
                return picture
        except (OSError, ValueError, SyntaxError) as error:
            raise FileError(f"The picture {path} cannot be read: {error}. Remove or replace it.") from error

    def _number(self, name: str) -> int:
        assert self.classes is not None
        if name not in self.classes:
            raise LabelError(
                f"The folder {self.folder} has a class {name!r}; expected {', '.join(self.classes[:8])}, the names of "
                "the classes."
            )
        return self.classes.index(name)


def image_size(text: str) -> tuple[int, int]:
    """(height, width) of "32" or "32x48".

    >>> image_size("32"), image_size("32x48")
    ((32, 32), (32, 48))
    """
    match = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", text)
    if match is None:
        raise ArgumentError(f"The image size is {text!r}; expected pixels, for example 32 or 32x48 (height, width).")
    return int(match[1]), int(match[2] or match[1])


def _class_folders(folder: Path) -> list[Path]:
    """Subfolders in the order of their names, which numbers the classes."""
    return sorted(part for part in folder.iterdir() if part.is_dir() and not part.name.startswith("."))


def _pictures(folder: Path) -> list[Path]:
    paths = (path for path in folder.rglob("*") if path.suffix.lower() in IMAGES and not path.name.startswith("."))
    return sorted(path for path in paths if path.is_file())
