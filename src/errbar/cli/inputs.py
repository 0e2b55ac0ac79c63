"""The data of a command, from what was typed: a file, a folder, or `package.module:callable`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from errbar._model.batch import Batch, batches
from errbar.cli.images import ImageRows, image_size
from errbar.cli.rows import ArrayRows, ParquetRows, Rows, Transform, label_numbers, names_in, read_arrays
from errbar.cli.user_code import called, named
from errbar.errors import ArgumentError, FileError

# Which arrays of an .npz without x are meant, by what the command does with them.
TRAINING = ("train",)
HELD_OUT = ("validation", "valid", "val", "calibration")
NEW = ("test",)
POOL = ("pool", "unlabelled")

_WORDS = {1: "one", 2: "two"}
_KINDS = "an .npz or .parquet file, a folder of pictures, or package.module:callable"


@dataclass(frozen=True, eq=False)
class Source:
    """Data that can be read from the beginning as often as needed: rows of a file, or what a callable returns."""

    where: str
    rows: Rows | None
    batch_size: int
    classes: tuple[str, ...] | None = None

    def loader(self) -> Any:
        """A DataLoader over rows or over a data set of the user's; other things of the user's as they are."""
        data = self.rows
        if data is None:
            value = called(named(self.where, "data"), self.where, "data")
            if not isinstance(value, Dataset):
                return value
            data = value  # type: ignore[assignment]
        # A generator of its own, so that reading takes nothing from the global random numbers.
        generator = torch.Generator().manual_seed(0)
        collate = _as_it_is if self.rows is not None else None
        return DataLoader(data, batch_size=self.batch_size, collate_fn=collate, generator=generator)  # type: ignore[arg-type]

    def names(self, start: int, count: int) -> list[int | str]:
        """What people call the inputs from number `start` on."""
        if self.rows is None:
            return list(range(start, start + count))
        return [self.rows.name(index) for index in range(start, start + count)]


def _as_it_is(batch: Any) -> Any:
    """Rows come as batches already."""
    return batch


@dataclass(frozen=True)
class DataRequest:
    """The data as they were typed, with the options that say how to read them."""

    where: str
    batch_size: int
    transform: str | None = None
    image_size: str | None = None

    def open(self, splits: Sequence[str], classes: Sequence[str] | None = None, *, labelled: bool = True) -> Source:
        """Find the data. `classes` are names that are known already; `labelled` says whether labels are of interest."""
        transform: Transform | None = None if self.transform is None else named(self.transform, "transform")
        if transform is not None and not callable(transform):
            raise ArgumentError(f"The transform {self.transform!r} is not callable; expected a function of one sample.")
        size = None if self.image_size is None else image_size(self.image_size)
        path, split = _file_and_split(self.where)
        names = None if classes is None else tuple(classes)
        if path is None:
            self._require_callable()
            return Source(self.where, None, self.batch_size, names)
        if path.is_dir():
            images = ImageRows(path, classes, transform, size, labelled=labelled)
            return Source(self.where, images, self.batch_size, images.classes)
        if size is not None:
            raise ArgumentError(
                f"The data {path} are not a folder of pictures; expected --image-size for folders only."
            )
        if path.suffix.lower() == ".parquet":
            return Source(self.where, ParquetRows(path, classes, transform, labelled=labelled), self.batch_size, names)
        x, y = read_arrays(path, split, splits)
        labels = label_numbers(y, classes, path) if y is not None and labelled else None
        return Source(self.where, ArrayRows(x, labels, transform), self.batch_size, names)

    def _require_callable(self) -> None:
        if self.transform is not None or self.image_size is not None:
            raise ArgumentError(
                f"The data {self.where!r} are made by a callable; expected no --transform and no --image-size for "
                "these. Let the callable do it."
            )
        value = named(self.where, "data")
        if not callable(value):
            raise ArgumentError(f"The data {self.where!r} are a {type(value).__name__}; expected a callable.")


def _file_and_split(where: str) -> tuple[Path | None, str | None]:
    """A path and perhaps the arrays of an .npz that are meant, `file.npz:test`; or nothing, for a callable."""
    path, split = Path(where), None
    if not path.exists() and ":" in where:
        before, _, after = where.rpartition(":")
        if Path(before).suffix.lower() != ".npz":
            return None, None
        path, split = Path(before), after
    if not path.exists():
        raise FileError(f"The data {path} do not exist; expected {_KINDS}.")
    if not path.is_dir() and path.suffix.lower() not in (".npz", ".parquet"):
        raise FileError(f"The data {path} end in {path.suffix!r}; expected {_KINDS}.")
    return path, split


def held_out_beside(where: str) -> str | None:
    """The held-out arrays in the same .npz as the training data, as they would be typed: `file.npz:validation`."""
    path, split = _file_and_split(where)
    if path is None or path.suffix.lower() != ".npz":
        return None
    names = names_in(path)
    found = (name for name in HELD_OUT if name != split and names & {f"x_{name}", f"X_{name}"})
    return next((f"{path}:{name}" for name in found), None)


def first_inputs(loader: Any, count: int) -> list[Batch]:
    """Batches from the beginning with `count` inputs in all, or as many as there are."""
    first: list[Batch] = []
    total = 0
    for batch in batches(loader, quiet=True):
        first.append(batch.rows(0, count - total))
        total += len(first[-1])
        if total >= count:
            break
    return first


def class_names(text: str | None, outputs: str = "classes") -> tuple[str, ...] | None:
    """Names of classes, or of labels: a file with one on each line, or names with commas between them.

    >>> class_names("cat, dog")
    ('cat', 'dog')
    """
    if text is None:
        return None
    path = Path(text)
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else text.split(",")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"The class names in {path} cannot be read: {error}. Expected one name on each line."
        ) from error
    names = tuple(line.strip() for line in lines if line.strip())
    least = 1 if outputs == "labels" else 2
    if len(set(names)) != len(names) or len(names) < least:
        raise ArgumentError(f"The class names are {text!r}; expected {_WORDS[least]} or more different names.")
    return names
