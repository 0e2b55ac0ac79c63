"""Results of any number of inputs, written as they come: .jsonl, .csv, .parquet or .npz, by the name of the file.

Columns have one entry for each input: numbers or texts (lists), or tensors (B,), (B, M), (B, M, M); of positions
(B, *S), (B, *S, M), (B, *S, M, M). The file takes its name when all of it is there (`_base.atomic`).
"""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from torch import Tensor

from errbar._base.atomic import replacing, require_writable_folder
from errbar.cli.extras import extra
from errbar.errors import ArgumentError, DataError, FileError

Columns = Mapping[str, Tensor | Sequence[Any]]


class Writer(Protocol):
    """Takes the columns of a batch; `finish` writes what can only be written at the end."""

    def add(self, columns: Columns) -> None: ...

    def finish(self) -> None: ...


def require_new(path: Path, force: bool) -> None:
    """Refuse an output before anything is computed for it: one that exists, or that could not be written."""
    if path.is_dir():
        raise FileError(f"The output {path} is a folder; expected the name of a file.")
    # First, because --force replaces no pipe and no device.
    require_writable_folder(path)
    if path.exists() and not force:
        raise FileError(f"The output {path} exists already; expected a new name, or --force to replace it.")


def require_format(path: Path) -> None:
    if path.suffix.lower() not in _WRITERS:
        raise ArgumentError(f"The output {path} ends in {path.suffix!r}; expected {', '.join(_WRITERS)}.")
    if path.suffix.lower() == ".parquet":
        extra("pyarrow.parquet", f"Writing {path}", "pyarrow", "parquet")


@contextmanager
def writing(path: Path, classes: Sequence[str] | None, *, of_positions: bool = False) -> Iterator[Writer]:
    """A writer for a file that appears, whole, when the block ends without an error.

    `of_positions` says that the dimensions of `label` after the first are those of the positions of an input.
    """
    require_format(path)
    with replacing(path) as descriptor, open(descriptor, "wb", closefd=False) as stream, ExitStack() as stack:
        writer = _WRITERS[path.suffix.lower()](stream, classes, path.parent, stack, of_positions)
        yield writer
        writer.finish()


class _JsonLines:
    """One JSON object on each line, with lists for what a class or a pair of classes has."""

    def __init__(self, stream: IO[bytes], *_: Any) -> None:
        self.stream = stream

    def add(self, columns: Columns) -> None:
        lists = [shortest(values) for values in columns.values()]
        for row in zip(*lists, strict=True):
            line = json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False)
            self.stream.write(line.encode() + b"\n")

    def finish(self) -> None:
        return


class _Csv:
    """One line for each input; pmf becomes pmf_0, pmf_1, … or has the names of the classes."""

    def __init__(self, stream: IO[bytes], classes: Sequence[str] | None, *_: Any) -> None:
        self.stream, self.classes = stream, classes
        self.begun = False

    def add(self, columns: Columns) -> None:
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        if not self.begun:
            writer.writerow([title for name, values in columns.items() for title in self._titles(name, values)])
            self.begun = True
        for row in zip(*(shortest(_flat(values)) for values in columns.values()), strict=True):
            writer.writerow([cell for part in row for cell in (part if isinstance(part, list) else [part])])
        self.stream.write(text.getvalue().encode())

    def finish(self) -> None:
        return

    def _titles(self, name: str, values: Tensor | Sequence[Any]) -> list[str]:
        if not isinstance(values, Tensor) or values.ndim == 1:
            return [name]
        names = self.classes or [str(number) for number in range(values.shape[1])]
        return ["_".join((name, *(names[i] for i in index))) for index in np.ndindex(*values.shape[1:])]


def _flat(values: Tensor | Sequence[Any]) -> Tensor | Sequence[Any]:
    return values.reshape(len(values), -1) if isinstance(values, Tensor) and values.ndim > 1 else values


class _Parquet:
    """One row for each input; lists of a fixed size for what a class or a pair of classes has."""

    def __init__(self, stream: IO[bytes], *_: Any) -> None:
        self.arrow = extra("pyarrow", "Writing .parquet", "pyarrow", "parquet")
        self.parquet = extra("pyarrow.parquet", "Writing .parquet", "pyarrow", "parquet")
        self.stream = stream
        self.writer: Any = None

    def add(self, columns: Columns) -> None:
        table = self.arrow.table({name: self._column(values) for name, values in columns.items()})
        if self.writer is None:
            self.writer = self.parquet.ParquetWriter(self.stream, table.schema)
        self.writer.write_table(table)

    def finish(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def _column(self, values: Tensor | Sequence[Any]) -> Any:
        if not isinstance(values, Tensor):
            return self.arrow.array(values)
        column = self.arrow.array(values.detach().cpu().contiguous().reshape(-1).numpy())
        for size in reversed(values.shape[1:]):
            column = self.arrow.FixedSizeListArray.from_arrays(column, size)
        return column


class _Npz:
    """One array for each column, with `classes` beside them where they have names.

    An array begins with its shape, which is known at the end only. So columns wait in unnamed files beside the target,
    and not in memory. Where inputs have different numbers of positions, each is padded to the largest at the end of
    each dimension, and `positions` has the size of each.
    """

    def __init__(
        self, stream: IO[bytes], classes: Sequence[str] | None, folder: Path, stack: ExitStack, of_positions: bool
    ) -> None:
        self.stream, self.classes, self.folder, self.stack = stream, classes, folder, stack
        self.of_positions = of_positions
        self.waiting: dict[str, IO[bytes]] = {}
        self.kinds: dict[str, np.dtype[Any]] = {}
        # The shape of one input by column, for as many inputs in a row as have it.
        self.runs: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
        # Dimensions of the positions of an input.
        self.dimensions = 0

    def add(self, columns: Columns) -> None:
        if self.of_positions:
            self.dimensions = self.dimensions or np.ndim(columns["label"]) - 1
        for name, values in columns.items():
            array = values.detach().cpu().contiguous().numpy() if isinstance(values, Tensor) else np.array(values)
            if name not in self.waiting:
                file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - the stack closes it
                self.waiting[name] = self.stack.enter_context(file)
                self.kinds[name], self.runs[name] = array.dtype, []
            self._require_alike(name, array)
            runs, shape = self.runs[name], array.shape[1:]
            if runs and runs[-1][1] == shape:
                runs[-1] = (runs[-1][0] + len(array), shape)
            else:
                runs.append((len(array), shape))
            if array.dtype.kind == "U":
                # Texts get the width of the longest, which is known at the end; until then they are lines.
                self.kinds[name] = max(array.dtype, self.kinds[name], key=lambda kind: kind.itemsize)
                self.waiting[name].write("".join(f"{json.dumps(str(text))}\n" for text in array).encode())
            else:
                self.waiting[name].write(array.tobytes())

    def finish(self) -> None:
        with zipfile.ZipFile(self.stream, "w") as archive:
            for name, waiting in self.waiting.items():
                kind, runs = self.kinds[name], self.runs[name]
                largest = tuple(max(sizes) for sizes in zip(*(shape for _, shape in runs), strict=True))
                waiting.seek(0)
                with _member(archive, name, kind, (sum(count for count, _ in runs), *largest)) as member:
                    if kind.kind == "U":
                        for line in waiting:
                            member.write(np.array(json.loads(line), dtype=kind).tobytes())
                    elif len(runs) == 1:
                        shutil.copyfileobj(waiting, member, 2**20)
                    else:
                        _copy_padded(waiting, member, kind, runs, largest)
            sizes = self.runs.get("label", [])
            if len(sizes) > 1:
                self._write(archive, "positions", np.repeat([s for _, s in sizes], [count for count, _ in sizes], 0))
            if self.classes is not None:
                self._write(archive, "classes", np.array(self.classes))

    def _write(self, archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
        with _member(archive, name, array.dtype, array.shape) as member:
            member.write(array.tobytes())

    def _require_alike(self, name: str, array: np.ndarray) -> None:
        """Refuse a batch that cannot be one array with those before it: only numbers of positions may differ."""
        before, kind = self.runs[name][:1], self.kinds[name]
        own, other = (array.dtype, array.shape[1:]), (kind, before[0][1] if before else array.shape[1:])
        is_text = own[0].kind == other[0].kind == "U"
        free = self.dimensions if array.ndim > 1 else 0
        same = len(own[1]) == len(other[1]) and own[1][free:] == other[1][free:]
        can_be_padded = own[1] == other[1] or own[0].kind in "fi"
        if not ((own[0] == other[0] or is_text) and same and can_be_padded):
            what = "only other numbers of positions" if self.of_positions else "the same for all"
            raise DataError(
                f"The column {name!r} has {own[0]} of shape {own[1]} for each input of a batch, and {other[0]} of "
                f"shape {other[1]} for those before it; expected {what}. Write them to files of their own."
            )


def _copy_padded(
    waiting: IO[bytes],
    member: IO[bytes],
    kind: np.dtype[Any],
    runs: Sequence[tuple[int, tuple[int, ...]]],
    largest: tuple[int, ...],
) -> None:
    """Copy inputs one by one, each padded at the end of its dimensions: with NaN, or −1 where numbers are whole."""
    for count, shape in runs:
        size = kind.itemsize * math.prod(shape)
        for _ in range(count):
            padded = np.full(largest, np.nan if kind.kind == "f" else -1, kind)
            padded[tuple(map(slice, shape))] = np.frombuffer(waiting.read(size), kind).reshape(shape)
            member.write(padded.tobytes())


@contextmanager
def _member(archive: zipfile.ZipFile, name: str, kind: np.dtype[Any], shape: tuple[int, ...]) -> Iterator[IO[bytes]]:
    # ZipInfo without a time: the same results are the same bytes.
    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
        header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(member, header)
        yield member


def shortest(values: Tensor | Sequence[Any]) -> list[Any]:
    """Lists of plain values; of float32 the fewest digits that give them back, and None for what is no number.

    >>> import torch
    >>> shortest(torch.tensor([0.1, 1e-12, float("nan")]))
    [0.1, 1e-12, None]
    """
    if not isinstance(values, Tensor):
        return list(values)
    array = values.detach().cpu().numpy()
    if array.dtype.kind != "f":
        return array.tolist()  # type: ignore[no-any-return]
    exact = array.astype("U32").astype(np.float64)
    if np.isfinite(exact).all():
        return exact.tolist()  # type: ignore[no-any-return]
    cells = exact.astype(object)
    cells[~np.isfinite(exact)] = None
    return cells.tolist()  # type: ignore[no-any-return]


_WRITERS: dict[str, Any] = {".jsonl": _JsonLines, ".csv": _Csv, ".parquet": _Parquet, ".npz": _Npz}
