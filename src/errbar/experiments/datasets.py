"""Pictures from files that are already on disk: found, read, and checked. Nothing is downloaded or unpickled.

Formats: *IDX* (MNIST and its likes), the *records* of CIFAR-10's binary version (a label byte, then 3 · 32 · 32 bytes
of red, green and blue), NumPy arrays, and *grids*: one lossless picture of 32 × 32 tiles, row by row.

A digest belongs to the content and not to its packing: an IDX file is digested decompressed, a grid as the equivalent
records, KMNIST's arrays as the equivalent IDX files.

The readers look in the usual subfolders of `folder`, then in `folder` itself; `verify=False` takes files as they are.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from errbar.errors import DataError, LabelError, MissingExtraError, how_to_install


@dataclass(frozen=True, eq=False)
class Images:
    """N pictures of C channels, as bytes, and the number of the class of each."""

    x: UInt8[Tensor, "N C H W"]
    y: Int[Tensor, " N"]

    def __post_init__(self) -> None:
        bytewise = self.x.dtype == torch.uint8 and self.x.ndim == 4
        if not bytewise or self.y.dtype != torch.int64 or self.y.shape != self.x.shape[:1]:
            raise DataError(
                f"Pictures are {self.x.dtype} of shape {tuple(self.x.shape)}, labels {self.y.dtype} of shape "
                f"{tuple(self.y.shape)}; expected torch.uint8 of shape (N, C, H, W) and torch.int64 of shape (N,)."
            )

    def __len__(self) -> int:
        return len(self.x)

    def pixels(self) -> Float[Tensor, "N C H W"]:
        """x/255: float32 in [0, 1]."""
        return self.x.float() / 255

    def take(self, rows: Tensor) -> Images:
        """The pictures with these numbers, or where a mask is true."""
        return Images(self.x[rows], self.y[rows])


@dataclass(frozen=True, eq=False)
class Tracks:
    """Frames of objects: `track` numbers the object of each picture, `frame` its place in the sequence."""

    images: Images
    track: Int[Tensor, " N"]
    frame: Int[Tensor, " N"]

    def __post_init__(self) -> None:
        if not len(self.images) == len(self.track) == len(self.frame):
            counts = len(self.images), len(self.track), len(self.frame)
            raise DataError(f"Pictures, track numbers and frame numbers are {counts}; expected as many of each.")


@dataclass(frozen=True, eq=False)
class Split:
    """What to train on and what to test on."""

    train: Images
    test: Images


@dataclass(frozen=True)
class _Source:
    """A data set: its name, its usual folders, and in words where to get it."""

    title: str
    folders: tuple[str, ...]
    origin: str


_MNIST = _Source("MNIST", ("mnist", "MNIST/raw"), "the MNIST page of Yann LeCun")
_FASHION = _Source("Fashion-MNIST", ("fashion_mnist", "FashionMNIST/raw"), "zalandoresearch/fashion-mnist on GitHub")
_KMNIST = _Source("KMNIST", ("kmnist", "KMNIST/raw"), "rois-codh/kmnist on GitHub")
_CIFAR10 = _Source(
    "CIFAR-10",
    ("cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"),
    "the CIFAR-10 page of Alex Krizhevsky (the binary version), and unpack it",
)
_SVHN = _Source("SVHN", ("svhn", "SVHN"), "Stanford's page of the Street View House Numbers (test_32x32.mat)")
_GTSRB = _Source(
    "GTSRB", ("gtsrb", "GTSRB"), "the German Traffic Sign Recognition Benchmark, and pack it as read_gtsrb says"
)

_IDX_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
_IDX_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")

# SHA-1 of contents, as above; MD5, the shorter ones, of whole files.
_DIGESTS = {
    "MNIST/train-images-idx3-ubyte": "c3557c10f29b266e19b3eeee1553c85e0ef4a8ea",
    "MNIST/train-labels-idx1-ubyte": "adbf52269f5d842899f287c269e2883e40b4f6e2",
    "MNIST/t10k-images-idx3-ubyte": "65e11ec1fd220343092a5070b58418b5c2644e26",
    "MNIST/t10k-labels-idx1-ubyte": "a6d52cc628797e845885543326e9f10abb8a6f89",
    "Fashion-MNIST/t10k-images-idx3-ubyte": "880056926db704f9f713097915f99da346f5b1d1",
    "Fashion-MNIST/t10k-labels-idx1-ubyte": "958122e8b4b97fd4e71eca2d08ef754ed77c3ad9",
    "KMNIST/t10k-images-idx3-ubyte": "bee1340cab37acc00dd75b50d64e6551b4642a9a",
    "KMNIST/t10k-labels-idx1-ubyte": "e56e5f87583eeb5d1222dc1dc10242a8db4efb6b",
    "CIFAR-10/data_batch_1": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "CIFAR-10/data_batch_2": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "CIFAR-10/data_batch_3": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "CIFAR-10/data_batch_4": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "CIFAR-10/data_batch_5": "26e2849e66a845b7f1e4614ae70f4889ae604628",
    "CIFAR-10/test_batch": "67eb016db431130d61cd03c7ad570b013799c88c",
    "SVHN/test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
    "SVHN/test_crops": "54d0012aa83f72aaf6e5540ef568a57e2a54c04b",
    "GTSRB/signs": "43d5e642911184e19b5b1908d7d79e454ca76505",
    "GTSRB/tracks.npy": "57850834401fad524ecb41e9b66a9f0f",
    "GTSRB/frames.npy": "9e0d0d62a9d116de0ff4c1102a127073",
}
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, zlib.error, zipfile.BadZipFile)
_DAMAGED = "It is truncated or damaged: download it again."


def read_mnist(folder: Path, *, verify: bool = True) -> Split:
    """MNIST: handwritten digits, 28 × 28, grey; four IDX files, compressed or not."""
    paths = _find(folder, _MNIST, _IDX_TRAIN + _IDX_TEST)
    train = _idx_images(_MNIST, _IDX_TRAIN, paths[:2], verify)
    return Split(train, _idx_images(_MNIST, _IDX_TEST, paths[2:], verify))


def read_fashion_mnist(folder: Path, *, verify: bool = True) -> Images:
    """The test pictures of Fashion-MNIST: clothes, 28 × 28, grey; two IDX files, compressed or not."""
    return _idx_images(_FASHION, _IDX_TEST, _find(folder, _FASHION, _IDX_TEST), verify)


def read_kmnist(folder: Path, *, verify: bool = True) -> Images:
    """The test pictures of KMNIST: cursive Japanese, 28 × 28, grey; the two .npz files, or IDX."""
    paths = _find(folder, _KMNIST, ("kmnist-test-imgs.npz", "kmnist-test-labels.npz"), _IDX_TEST)
    return _idx_images(_KMNIST, _IDX_TEST, paths, verify)


def read_cifar10(folder: Path, *, verify: bool = True) -> Split:
    """CIFAR-10: things, 32 × 32, colour; the six files of the binary version, or six grids and two label arrays."""
    grids = (*(f"{name}.webp" for name in _BATCHES), "train_labels.npy", "test_labels.npy")
    paths = _find(folder, _CIFAR10, tuple(f"{name}.bin" for name in _BATCHES), grids)
    if paths[0].suffix == ".bin":
        contents = (_bytes(path) for path in paths)
    else:
        train_labels, test_labels = (_labels(path, *_arrays(path), classes=10) for path in paths[-2:])
        labels = (*train_labels.tensor_split(5), test_labels)
        contents = (_records(_tiles(path, len(y)), y) for path, y in zip(paths, labels, strict=False))
    batches = []
    for name, path, content in zip(_BATCHES, paths, contents, strict=False):
        batches.append(_record_images(content, path))
        _require_digest(_CIFAR10, name, path, content, verify)
    train = Images(torch.cat([batch.x for batch in batches[:-1]]), torch.cat([batch.y for batch in batches[:-1]]))
    return Split(train, batches[-1])


def read_svhn(folder: Path, *, verify: bool = True) -> Images:
    """The test pictures of SVHN: house numbers, 32 × 32, colour; test_32x32.mat, or a grid and a label array."""
    paths = _find(folder, _SVHN, ("test_32x32.mat",), ("test_crops.webp", "test_labels.npy"))
    if len(paths) == 1:
        return _svhn_mat(paths[0], verify)
    labels = _labels(paths[1], *_arrays(paths[1]), classes=10)
    images = Images(_tiles(paths[0], len(labels)), labels)
    _require_digest(_SVHN, "test_crops", paths[0], _records(images.x, labels), verify)
    return images


def read_gtsrb(folder: Path, *, verify: bool = True) -> Tracks:
    """Traffic signs seen from an approaching car, 32 × 32, colour, 43 classes: frames 0, 3, …, 27 of each track.

    signs.webp is a grid of 100 tiles in a row, sorted by class, track and frame; labels.npy, tracks.npy and frames.npy
    are arrays in its order. Split by track and never by picture: the frames of a track are near copies.
    """
    signs, *arrays = _find(folder, _GTSRB, ("signs.webp", "labels.npy", "tracks.npy", "frames.npy"))
    labels, track, frame = (_labels(path, *_arrays(path)) for path in arrays)
    tracks = Tracks(Images(_tiles(signs, len(labels)), labels), track, frame)
    _require_digest(_GTSRB, "signs", signs, _records(tracks.images.x, labels), verify)
    for path in arrays[1:]:
        _require_digest(_GTSRB, path.name, path, _bytes(path), verify)
    return tracks


def read_npz(path: Path) -> Split:
    """Data of one's own: an .npz file with x_train, y_train, x_test and y_test.

    x: N × H × W, N × H × W × C or N × C × H × W with C = 1 or 3; bytes, or floats in [0, 1], which are rounded to
    multiples of 1/255. y: N class numbers from 0.
    """
    x_train, y_train, x_test, y_test = _arrays(path, "x_train", "y_train", "x_test", "y_test")
    train = Images(_pictures(f"x_train of {path}", x_train), _labels(f"y_train of {path}", y_train))
    test = Images(_pictures(f"x_test of {path}", x_test), _labels(f"y_test of {path}", y_test))
    if train.x.shape[1:] != test.x.shape[1:]:
        raise DataError(f"{path} has x_train {x_train.shape} and x_test {x_test.shape}; expected pictures of one size.")
    return Split(train, test)


def read_idx(path: Path) -> UInt8[Tensor, "..."]:
    """The array of an IDX file of unsigned bytes, compressed with gzip or not."""
    return _parsed_idx(_idx_content(path), path)


def _find(folder: Path, source: _Source, *choices: tuple[str, ...]) -> list[Path]:
    """The files of the first choice that is complete in one folder, IDX files also with .gz after their name.

    `folder` itself comes last: MNIST and its likes name their files alike, and a subfolder says whose they are.
    """
    places = [*(folder / name for name in source.folders), folder]
    for choice in choices:
        for place in places:
            plain = [place / name for name in choice]
            packed = [path.with_name(f"{path.name}.gz") if path.name.endswith("ubyte") else path for path in plain]
            paths = [one if one.is_file() else other for one, other in zip(plain, packed, strict=True)]
            if all(path.is_file() for path in paths):
                return paths
    names = "; or ".join(", ".join(choice) for choice in choices)
    raise DataError(
        f"{source.title} was not found. Expected the files {names} (…ubyte also with .gz), together in one of the "
        f"folders {', '.join(str(place) for place in places)}. Get it from {source.origin}."
    )


def _require_digest(source: _Source, name: str, path: Path, content: bytes, verify: bool) -> None:
    if not verify:
        return
    expected = _DIGESTS[f"{source.title}/{name}"]
    algorithm = "md5" if len(expected) == 32 else "sha1"
    actual = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
    if actual != expected:
        owner = next((entry for entry, digest in _DIGESTS.items() if digest == actual), "damaged, or something else")
        raise DataError(
            f"The content of {path} has the {algorithm.upper()} digest {actual}; expected {expected}, that of "
            f"{source.title}. It is {owner}. Download it again from {source.origin}."
        )


def _bytes(path: Path) -> bytes:
    """The bytes of a file, decompressed if they begin as gzip does: a browser may decompress and leave the .gz."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except _UNREADABLE as error:
        raise DataError(f"Cannot read {path}: {error}. Expected a whole file: download it again.") from error


def _idx_images(source: _Source, names: tuple[str, str], paths: list[Path], verify: bool) -> Images:
    arrays = []
    for name, path, shape in zip(names, paths, (("N", "H", "W"), ("N",)), strict=True):
        content = _idx_content(path)
        array = _parsed_idx(content, path)
        if array.ndim != len(shape):
            raise DataError(f"{path} holds an array of shape {tuple(array.shape)}; expected {' × '.join(shape)}.")
        _require_digest(source, name, path, content, verify)
        arrays.append(array)
    x, y = arrays
    return Images(x[:, None], y.long())


def _idx_content(path: Path) -> bytes:
    """The bytes of an IDX file, decompressed; those of an .npz file with one array, as the equivalent IDX file."""
    if path.suffix == ".npz":
        (array,) = _arrays(path, "arr_0")
        if array.dtype != np.uint8:
            raise DataError(f"{path} holds {array.dtype}; expected uint8.")
        return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes() + array.tobytes()
    return _bytes(path)


def _parsed_idx(content: bytes, path: Path) -> UInt8[Tensor, "..."]:
    """Two zero bytes, the type, the number of dimensions, their sizes as big-endian 32-bit numbers, the elements."""
    if content[:3] != b"\0\0\x08" or content[3:4] in (b"", b"\0"):
        start_bytes = content[:4].hex(" ") or "nothing"
        raise DataError(
            f"{path} begins with {start_bytes}; expected 00 00 08 and a rank: an IDX file of unsigned bytes."
        )
    start = 4 + 4 * content[3]
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    size = start + math.prod(shape)
    if len(content) < start or len(content) != size:
        form = " × ".join(str(length) for length in shape)
        raise DataError(f"{path} has {len(content)} bytes; its header announces {form}, {size} bytes. {_DAMAGED}")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).copy()).reshape(shape)


def _records(x: UInt8[Tensor, "N 3 32 32"], y: Int[Tensor, " N"]) -> bytes:
    """Pictures and labels in the layout of CIFAR-10's binary version."""
    return torch.cat([y[:, None].to(torch.uint8), x.flatten(1)], dim=1).numpy().tobytes()


def _record_images(content: bytes, path: Path) -> Images:
    size = 1 + 3 * 32 * 32
    if not content or len(content) % size:
        raise DataError(f"{path} has {len(content)} bytes; expected {size} for each picture. {_DAMAGED}")
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    labels = _labels(path, records[:, 0], classes=10)
    return Images(torch.from_numpy(records[:, 1:].copy()).reshape(-1, 3, 32, 32), labels)


def _tiles(path: Path, count: int) -> UInt8[Tensor, "N 3 32 32"]:
    """The first `count` tiles of a grid; the filler of its last row is dropped."""
    try:
        from PIL import Image
    except ImportError as missing:
        raise MissingExtraError(
            f"Reading {path} needs Pillow, which is not installed: {how_to_install('experiments')}."
        ) from missing
    try:
        with Image.open(path) as picture:
            grid = torch.from_numpy(np.array(picture.convert("RGB")))
    except (*_UNREADABLE, Image.DecompressionBombError) as error:
        raise DataError(f"Cannot read the picture {path}: {error}. {_DAMAGED}") from error
    height, width, _ = grid.shape
    rows, columns = height // 32, width // 32
    if height % 32 or width % 32 or not 0 <= rows * columns - count < columns:
        raise DataError(
            f"{path} is {width} × {height}; expected {count} tiles of 32 × 32, and less than a row of filler."
        )
    tiles = grid.reshape(rows, 32, columns, 32, 3).permute(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)
    return tiles[:count].contiguous()


def _svhn_mat(path: Path, verify: bool) -> Images:
    try:
        matlab = importlib.import_module("scipy.io")
    except ImportError as missing:
        raise MissingExtraError(f"Reading {path} needs SciPy: pip install scipy.") from missing
    _require_digest(_SVHN, path.name, path, _bytes(path), verify)
    try:
        file = matlab.loadmat(str(path), variable_names=["X", "y"])
        x, y = np.asarray(file["X"]), np.asarray(file["y"])
    except Exception as error:  # SciPy's errors on damaged files have no type in common
        raise DataError(f"Cannot read X and y of the MATLAB file {path}: {error}. {_DAMAGED}") from error
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[:3] != (32, 32, 3):
        raise DataError(f"X of {path} is {x.dtype} of shape {x.shape}; expected uint8 of 32 × 32 × 3 × N.")
    labels = _labels(path, y.reshape(-1), classes=11) % 10  # the digit 0 has the label 10
    return Images(torch.from_numpy(np.ascontiguousarray(x.transpose(3, 2, 0, 1))), labels)


def _arrays(path: Path, *keys: str) -> list[np.ndarray[Any, Any]]:
    """The arrays of an .npz file that have these names; without names, the one of an .npy file."""
    try:
        with path.open("rb") as file:
            if not keys:
                return [np.lib.format.read_array(file, allow_pickle=False)]
            with np.lib.npyio.NpzFile(file, allow_pickle=False) as arrays:
                return [arrays[key] for key in keys]
    except _UNREADABLE as error:
        expectation = f"an .npz file with {', '.join(keys)}" if keys else "an .npy file"
        raise DataError(f"Cannot read {path}: {error}. Expected {expectation}, without pickled objects.") from error


def _labels(where: Path | str, array: np.ndarray[Any, Any], *, classes: int | None = None) -> Int[Tensor, " N"]:
    """Whole numbers from 0, below `classes` where that is known."""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise LabelError(f"{where} holds {array.dtype} of shape {array.shape}; expected whole numbers of shape (N,).")
    if array.size and not (array.min() >= 0 and (classes is None or array.max() < classes)):
        upper = "" if classes is None else f" to {classes - 1}"
        raise LabelError(f"{where} holds numbers from {array.min()} to {array.max()}; expected them from 0{upper}.")
    return torch.from_numpy(array.astype(np.int64))


def _pictures(where: str, array: np.ndarray[Any, Any]) -> UInt8[Tensor, "N C H W"]:
    if array.dtype.kind == "f" and array.size and array.min() >= 0 and array.max() <= 1:
        array = np.rint(255 * array).astype(np.uint8)
    if array.dtype != np.uint8:
        span = f" from {array.min()} to {array.max()}" if array.size and array.dtype.kind in "iuf" else ""
        raise DataError(f"{where} is {array.dtype}{span}; expected uint8, or floats from 0 to 1 without normalisation.")
    if array.ndim == 3:
        return torch.from_numpy(array[:, None])
    last, first = (array.ndim == 4 and array.shape[axis] in (1, 3) for axis in (3, 1))
    if last == first:
        raise DataError(f"{where} has shape {array.shape}; expected N×H×W, N×H×W×C or N×C×H×W with C = 1 or 3.")
    return torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2) if last else array))
