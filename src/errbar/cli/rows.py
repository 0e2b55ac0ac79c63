"""Labelled inputs in files and folders, as data sets that read what is asked for and hold little else.

A row is `(x,)` or `(x, label)`. A loader asks for the rows of a batch at once (`__getitems__`), so that arrays are cut
and not collected one by one. Arrays of an uncompressed .npz stay on the disk, and of a .parquet one row group is held.
"""

from __future__ import annotations

import bisect
import struct
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from errbar.cli.extras import extra
from errbar.cli.user_code import description_with_place
from errbar.errors import DataError, ErrbarError, FileError, LabelError

Transform = Callable[[Any], Any]
Row = tuple[Any, ...]

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
_LABEL_COLUMNS = ("y", "label", "labels", "target")
_NAME_COLUMNS = ("id", "name")


class Rows(Dataset[Row], ABC):
    """Inputs, and labels where there are any, by their number; subclasses say how to read several at once."""

    labelled: bool

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> Row:
        """The batch of these rows: (x,) or (x, labels)."""

    def __getitem__(self, index: int) -> Row:
        return tuple(part[0] for part in self.__getitems__([index]))

    def name(self, index: int) -> int | str:
        """What people call this row."""
        return index


# ---------------------------------------------------------------------------------------------------------- arrays


class ArrayRows(Rows):
    """Rows of arrays, which may be larger than the memory."""

    def __init__(self, x: np.ndarray, y: np.ndarray | None, transform: Transform | None) -> None:
        self.x, self.y, self.transform = x, y, transform
        self.labelled = y is not None

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, indices: Sequence[int]) -> Row:
        x = _transformed(as_tensor(_rows(self.x, indices)), self.transform)
        return (x,) if self.y is None else (x, as_tensor(_rows(self.y, indices)))


def _rows(array: np.ndarray, indices: Sequence[int]) -> np.ndarray:
    """A copy of some rows; a slice where they follow each other, because that is one read of the disk."""
    numbers = list(indices)
    first, last = numbers[0], numbers[-1]
    return np.array(array[first : last + 1] if numbers == list(range(first, last + 1)) else array[numbers])


def as_tensor(array: np.ndarray) -> Tensor:
    """A tensor of numbers in the byte order of this machine; unsigned integers that torch hardly knows become int64."""
    if array.dtype.kind not in "biuf":
        raise DataError(f"An array holds {array.dtype}; expected numbers.")
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    if native.dtype in (np.uint16, np.uint32, np.uint64):
        native = native.astype(np.int64)
    if native.dtype.itemsize > 8:
        native = native.astype(np.float64)
    return torch.from_numpy(np.ascontiguousarray(native))


def _transformed(x: Tensor, transform: Transform | None) -> Tensor:
    return x if transform is None else stacked([apply(transform, row) for row in x])


def apply(transform: Transform, sample: Any) -> Tensor:
    """What the user's function makes of one sample."""
    try:
        tensor = transform(sample)
    except ErrbarError:
        raise
    except Exception as error:
        raise DataError(
            f"The transform raised {description_with_place(error)}. Expected a function from one sample to a tensor."
        ) from error
    if not isinstance(tensor, Tensor):
        raise DataError(f"The transform returned a {type(tensor).__name__}; expected a tensor for each sample.")
    return tensor


def stacked(samples: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(sample.shape) for sample in samples}
    if len(shapes) > 1:
        first, second = sorted(shapes)[:2]
        raise DataError(
            f"Inputs have different shapes, {first} and {second}; expected one shape. Use --image-size for pictures, "
            "or a --transform that makes them equal."
        )
    return torch.stack(list(samples))


def names_in(path: Path) -> set[str]:
    """The names of the arrays in an .npz; none if it cannot be read, which `read_arrays` tells."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except (zipfile.BadZipFile, OSError):
        return set()


def read_arrays(path: Path, split: str | None, preferred: Sequence[str]) -> tuple[np.ndarray, np.ndarray | None]:
    """x and y of an .npz: those without a suffix, of the split that is named, or of the first preferred one."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            x_name, y_name = _array_names(path, members, split, preferred)
            x = _array(path, archive, members[x_name])
            y = _array(path, archive, members[y_name]) if y_name in members else None
    except (zipfile.BadZipFile, ValueError, OverflowError, EOFError, OSError, struct.error) as error:
        if isinstance(error, ErrbarError):
            raise
        raise FileError(
            f"{path} cannot be read: {error}. Expected an .npz of arrays of numbers, as numpy.savez(path, x=x, y=y) "
            "writes it."
        ) from error
    if x.ndim == 0 or len(x) == 0:
        raise DataError(f"{path} has {x_name} of shape {x.shape}; expected at least one input.")
    if y is not None and (y.ndim == 0 or len(y) != len(x)):
        raise LabelError(
            f"{path} has {x_name} of shape {x.shape} and {y_name} of shape {y.shape}; expected a label for each input."
        )
    return x, y


def _array_names(
    path: Path, members: Mapping[str, Any], split: str | None, preferred: Sequence[str]
) -> tuple[str, str]:
    endings = [f"_{split}"] if split else ["", *(f"_{name}" for name in preferred)]
    for ending in endings:
        for letter in "xX":
            if f"{letter}{ending}" in members:
                return f"{letter}{ending}", next((n for n in (f"y{ending}", f"Y{ending}") if n in members), "")
    names = ", ".join(sorted(members)[:8]) or "nothing"
    splits = sorted(name[2:] for name in members if name[:2] in ("x_", "X_"))
    advice = f" Say which, for example {path}:{splits[0]}." if splits else ""
    raise DataError(
        f"{path} holds {names}; expected {' or '.join('x' + ending for ending in endings)}, and y likewise.{advice}"
    )


def _array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """An array that stays on the disk where it is stored as it is; a compressed one is read."""
    if info.compress_type == zipfile.ZIP_STORED:
        with path.open("rb") as file:
            file.seek(info.header_offset)
            # The local header of a member is 30 bytes, its name and an extra field, whose lengths end the 30 bytes.
            name, more = struct.unpack("<HH", file.read(30)[26:])
            file.seek(info.header_offset + 30 + name + more)
            version = np.lib.format.read_magic(file)
            if version in ((1, 0), (2, 0)):
                read = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
                shape, by_columns, kind = read(file)
                if kind.hasobject:
                    raise ValueError(f"{info.filename} holds Python objects")
                if all(shape):
                    order: Any = "F" if by_columns else "C"
                    return np.memmap(path, kind, "r", file.tell(), shape, order)
    with archive.open(info) as stream:
        return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))


def label_numbers(values: np.ndarray, classes: Sequence[str] | None, where: object) -> np.ndarray:
    """Labels as numbers: names of classes are looked up; numbers are themselves."""
    if values.dtype.kind not in "UO":
        return values
    if classes is None:
        raise LabelError(f"{where} has labels in words; expected numbers, or --class-names to look them up in.")
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = sorted({str(value) for value in values.ravel()} - set(numbers))
    if unknown:
        raise LabelError(
            f"{where} has the label {unknown[0]!r}; expected one of {', '.join(list(classes)[:8])}, the names of the "
            "classes."
        )
    return np.array([numbers[str(value)] for value in values.ravel()], dtype=np.int64)


# --------------------------------------------------------------------------------------------------------- parquet


class ParquetRows(Rows):
    """Rows of a .parquet file: x is a column of lists, or all columns of numbers; one row group is held at a time."""

    def __init__(
        self, path: Path, classes: Sequence[str] | None, transform: Transform | None, *, labelled: bool = True
    ) -> None:
        parquet = extra("pyarrow.parquet", f"Reading {path}", "pyarrow", "parquet")
        self.arrow = extra("pyarrow", f"Reading {path}", "pyarrow", "parquet")
        # Not an attribute of pyarrow before it is imported, which nothing else may have done.
        self.compute = extra("pyarrow.compute", f"Reading {path}", "pyarrow", "parquet")
        try:
            self.file = parquet.ParquetFile(path)
        except (self.arrow.ArrowException, OSError) as error:
            raise FileError(f"{path} cannot be read: {error}. Expected a .parquet file.") from error
        self.path, self.classes, self.transform = path, classes, transform
        schema = self.file.schema_arrow
        label = next((name for name in _LABEL_COLUMNS if name in schema.names), None)
        self.names = next((name for name in _NAME_COLUMNS if name in schema.names), None)
        self.label = label if labelled else None
        self.labelled = self.label is not None
        numbers = [field.name for field in schema if _is_number(self.arrow, field.type)]
        others = [name for name in numbers if name not in (label, self.names)]
        self.features = ["x"] if "x" in schema.names else others
        if not self.features:
            raise DataError(
                f"{path} has the columns {', '.join(schema.names[:8])}; expected a column x of lists of numbers, or "
                "columns of numbers."
            )
        sizes = [self.file.metadata.row_group(group).num_rows for group in range(self.file.num_row_groups)]
        self.starts = [0, *np.cumsum(sizes).tolist()]
        if not self.starts[-1]:
            raise DataError(f"{path} has no rows; expected at least one input.")
        self.held: tuple[int, np.ndarray, np.ndarray | None, list[Any] | None] | None = None

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitems__(self, indices: Sequence[int]) -> Row:
        parts: list[Row] = []
        position = 0
        while position < len(indices):
            group = bisect.bisect_right(self.starts, indices[position]) - 1
            start, stop = self.starts[group], self.starts[group + 1]
            end = position
            while end < len(indices) and start <= indices[end] < stop:
                end += 1
            inside = [index - start for index in indices[position:end]]
            _, x, y, _ = self._group(group)
            labels = () if y is None else (as_tensor(_rows(y, inside)),)
            parts.append((_transformed(as_tensor(_rows(x, inside)), self.transform), *labels))
            position = end
        return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))

    def name(self, index: int) -> int | str:
        if self.names is None:
            return index
        group = bisect.bisect_right(self.starts, index) - 1
        names = self._group(group)[3]
        assert names is not None
        return names[index - self.starts[group]]  # type: ignore[no-any-return]

    def _group(self, group: int) -> tuple[int, np.ndarray, np.ndarray | None, list[Any] | None]:
        if self.held is None or self.held[0] != group:
            names = [*self.features, *(name for name in (self.label, self.names) if name)]
            table = self.file.read_row_group(group, columns=names)
            columns = [self._array(table, name) for name in self.features]
            x = columns[0] if self.features == ["x"] else np.stack([c.astype(np.float64) for c in columns], 1)
            y = None
            if self.label is not None:
                y = label_numbers(table[self.label].to_numpy(), self.classes, self.path)
            self.held = (group, x, y, None if self.names is None else table[self.names].to_pylist())
        return self.held

    def _array(self, table: Any, name: str) -> np.ndarray:
        """A column as an array; lists, also of lists, become further dimensions and must be of one length each."""
        column, shape = table[name].combine_chunks(), [len(table)]
        kinds = self.arrow.types
        while kinds.is_list(column.type) or kinds.is_large_list(column.type) or kinds.is_fixed_size_list(column.type):
            lengths = self.compute.list_value_length(column).unique()
            if len(lengths) != 1 or lengths[0].as_py() is None:
                raise DataError(f"{self.path} has lists of different lengths in {name!r}; expected one length.")
            shape.append(lengths[0].as_py())
            column = column.flatten()
        if column.null_count or not _is_number(self.arrow, column.type):
            raise DataError(f"{self.path} has empty cells or no numbers in {name!r}; expected numbers in every row.")
        return np.asarray(column.to_numpy(zero_copy_only=False)).reshape(shape)


def _is_number(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind))
