"""The container: one safetensors file with a description in JSON and named arrays. It knows nothing of posteriors.

    8 bytes   length of the header, little-endian
    header    JSON: "__metadata__" (text → text), and for each array its dtype, shape and place in the data
    data      the arrays, one after the other, without gaps

That is the safetensors format, and other software can read it. The metadata are `format`, `kind`, `errbar` and `torch`
(versions), `description` (JSON) and `content`: the SHA-256 of the whole file with the digits of `content` itself
set to zero. So no bit of a file can change unnoticed. This protects against damage, not against forgery: anyone can
compute a digest. Therefore nothing in a file is trusted: the header is parsed here, within limits, and memory is
allocated only for data that the file has.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from errbar._base.atomic import file_name, replacing, write_all
from errbar._base.json_fields import MOST_VALUES, Fields, count_values
from errbar._base.memory import require_memory
from errbar.errors import DamagedFileError, FileError, SizeError
from errbar.version import __version__

FORMAT = 1
_HEADER_LIMIT = 16 * 2**20
_DTYPES = {"F64": torch.float64, "F32": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ZEROS = "0" * 64
_FINITE = "Expected finite numbers: products of large inputs can exceed those of float32, so use precision='float64'."
_FINITE_ARGUMENTS = {"precision": "float64"}


@dataclass(frozen=True)
class Entry:
    """Where an array lies in the data, and what it is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Contents:
    """The contents of a file; `tensors` is empty if only the header was read."""

    path: str
    size: int
    kind: str
    versions: tuple[int, str, str]
    digest: str
    description: Fields
    tensors: Mapping[str, Tensor]

    def tensor(self, name: str, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """An array that must be there, with this shape and dtype."""
        array = self.tensors.get(name)
        if array is None or tuple(array.shape) != shape or array.dtype != dtype:
            description = "no such array" if array is None else f"{array.dtype} {tuple(array.shape)}"
            raise DamagedFileError(
                f"{self.path} has {description} where its description needs '{name}', {dtype} of shape {shape}."
            )
        return array

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array; () if it is missing."""
        array = self.tensors.get(name)
        return () if array is None else tuple(array.shape)


def write(path: str | os.PathLike[str], kind: str, description: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a file, replacing the one that is there, if any; on failure `FileError`, with the old file intact.

    Refuses to write what `read` would refuse: NaN, infinity, and descriptions that are too long.
    """
    where = file_name(path)
    for name, tensor in tensors.items():
        sentence = f"Cannot write {where}: '{name}' holds NaN or infinite values. {_FINITE}"
        _require_finite(tensor, FileError(sentence, arguments=_FINITE_ARGUMENTS))
    header = _header(where, kind, description, tensors)
    place = header.index(f'"content":"{_ZEROS}"'.encode()) + len('"content":"')
    digest = hashlib.sha256(header)
    with replacing(path) as descriptor:
        write_all(descriptor, header)
        for tensor in tensors.values():
            values = tensor.detach().cpu().contiguous().reshape(-1)
            data = values.view(torch.uint8).numpy().data
            digest.update(data)
            write_all(descriptor, data)
        os.lseek(descriptor, place, os.SEEK_SET)
        write_all(descriptor, digest.hexdigest().encode())


def _require_finite(tensor: Tensor, error: FileError) -> None:
    # NaN propagates through minimum and maximum, and infinity is one of them: no array of this size is made.
    if tensor.numel() and not all(math.isfinite(float(value)) for value in torch.aminmax(tensor.detach())):
        raise error


def _header(where: str, kind: str, description: dict[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    try:
        text_of_description = json.dumps(description, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise FileError(
            f"Cannot write {where}: its description holds NaN or infinite numbers. {_FINITE}",
            arguments=_FINITE_ARGUMENTS,
        ) from error
    metadata = {
        "content": _ZEROS,
        "format": str(FORMAT),
        "kind": kind,
        "errbar": __version__,
        "torch": str(torch.__version__),
        "description": text_of_description,
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    # Spaces, so that the data start at a multiple of eight bytes and can be mapped.
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_LIMIT or count_values(text) > MOST_VALUES:
        raise SizeError(
            f"The description of {len(tensors):,} arrays takes {len(text):,} bytes; expected at most "
            f"{_HEADER_LIMIT:,}, and {MOST_VALUES:,} values. Select fewer parameters."
        )
    return len(text).to_bytes(8, "little") + text


def read(path: str | os.PathLike[str], *, header_only: bool = False) -> Contents:
    """Read and check a whole file, or read its header alone, without checking the digest."""
    where = file_name(path)
    try:
        # Reading a pipe would wait.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FileError(f"Cannot read {where}: it is not a file; expected one written by errbar.")
        with open(path, "rb", buffering=0) as file:
            return _read(file, where, header_only)
    except FileError:
        raise
    except OSError as error:
        raise FileError(
            f"Cannot read {where}: {error.strerror or error}. Expected a file written by errbar."
        ) from error


def _read(file: Any, where: str, header_only: bool) -> Contents:
    size = os.fstat(file.fileno()).st_size
    first = _exactly(file, min(8, size), where)
    length = int.from_bytes(first, "little")
    if size < 8 or length > min(size - 8, _HEADER_LIMIT):
        raise DamagedFileError(
            f"{where} is not an errbar file, or is truncated: of its {size:,} bytes the header would take {length:,}."
        )
    text = _exactly(file, length, where)
    header = Fields.parsed(text, where)
    metadata = header.part("__metadata__")
    versions = _versions(metadata)
    kind, digest = metadata.text("kind"), metadata.digest("content")
    entries = _entries(header, size - 8 - length)
    tensors: dict[str, Tensor] = {}
    if not header_only:
        require_memory(
            2 * (size - 8 - length),
            torch.device("cpu"),
            what=f"Reading {where}",
            instead="Read it on a machine with more memory.",
        )
        content_digest = hashlib.sha256(first + text.replace(digest.encode(), _ZEROS.encode(), 1))
        for name, entry in entries.items():
            tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
            data = tensors[name].reshape(-1).view(torch.uint8).numpy().data
            _fill(file, data, where)
            content_digest.update(data)
        if content_digest.hexdigest() != digest:
            raise DamagedFileError(
                f"{where} is damaged: its content does not have the SHA-256 that was written with it. Use an intact "
                "copy, or fit again."
            )
        for name, tensor in tensors.items():
            sentence = f"{where} holds NaN or infinite values in {name!a}; expected finite numbers."
            _require_finite(tensor, DamagedFileError(sentence))
    # The description is JSON inside JSON, because safetensors metadata are plain text.
    description = Fields.parsed(metadata.text("description"), where)
    return Contents(where, size, kind, versions, digest, description, tensors)


def _versions(metadata: Fields) -> tuple[int, str, str]:
    """The versions of the format, of errbar and of torch; a newer format is refused by name."""
    if "format" not in metadata or "description" not in metadata:
        raise DamagedFileError(
            f"{metadata.where} is a safetensors file, but not one of errbar; expected one written by Posterior.save or "
            "Information.save."
        )
    text = metadata.text("format")
    if not (text.isascii() and text.isdecimal() and len(text) <= 6 and int(text) >= 1):
        raise DamagedFileError(f"{metadata.where} has the format {text[:60]!a}; expected a number.")
    number, errbar_version = int(text), metadata.text("errbar")
    if number > FORMAT:
        raise FileError(
            f"{metadata.where} has format {number}, written by errbar {errbar_version[:60]}; errbar {__version__} "
            f"reads formats up to {FORMAT}. Install a newer errbar."
        )
    return number, errbar_version, metadata.text("torch")


def _entries(header: Fields, available: int) -> dict[str, Entry]:
    """The arrays in the order of the data, which they must fill without gaps, overlaps or remainder."""
    entries: dict[str, Entry] = {}
    end = 0
    for name in header.names():
        if name == "__metadata__":
            continue
        part = header.part(name)
        dtype, shape = _DTYPES[part.choice("dtype", tuple(_DTYPES))], part.wholes("shape")
        start, stop = part.wholes("data_offsets", 2)
        # Dimensions next to a zero take no bytes, but must not overflow either.
        is_plausible = len(shape) <= 3 and math.prod(max(1, size) for size in shape) <= 2**50
        if not is_plausible or start != end or stop - start != math.prod(shape) * dtype.itemsize:
            raise DamagedFileError(f"{header.where} has array {name[:60]!a} in a place that does not fit its shape.")
        entries[name] = Entry(dtype, shape, start, stop)
        end = stop
    if end != available:
        raise DamagedFileError(
            f"{header.where} is truncated or has something appended: its arrays take {end:,} bytes, the file has "
            f"{available:,}."
        )
    return entries


def _exactly(file: Any, count: int, where: str) -> bytes:
    data = bytearray(count)
    _fill(file, memoryview(data), where)
    return bytes(data)


def _fill(file: Any, data: memoryview, where: str) -> None:
    while len(data):
        count = file.readinto(data)
        if not count:
            raise DamagedFileError(f"{where} became shorter while being read.")
        data = data[count:]
