"""The readers of picture files: on tiny files of each format, on damaged ones, and on the real ones where they are.

Set ERRBAR_DATA to a folder with mnist/, cifar10/, fashion_mnist/, kmnist/, svhn/ and gtsrb/ for the last part.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from errbar.errors import DataError, LabelError, MissingExtraError
from errbar.experiments import datasets
from errbar.experiments.datasets import Images, Split, Tracks

IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def random(*shape: int, below: int = 256, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, below, shape, dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, names: tuple[str, ...], *, ending: str = "", seed: int = 0) -> list[np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = []
    for name in names:
        array = random(5, 4, 3, seed=seed) if "images" in name else random(5, below=10, seed=seed)
        content = idx(array)
        (folder / f"{name}{ending}").write_bytes(gzip.compress(content) if ending else content)
        arrays.append(array)
    return arrays


def write_grid(path: Path, x: np.ndarray, *, columns: int) -> None:
    """Pictures N × 3 × 32 × 32 as the tiles of one lossless picture, the last row filled up with white."""
    image = pytest.importorskip("PIL.Image")
    rows = -(-len(x) // columns)
    grid = np.full((32 * rows, 32 * columns, 3), 255, dtype=np.uint8)
    for number, tile in enumerate(x):
        top, left = 32 * (number // columns), 32 * (number % columns)
        grid[top : top + 32, left : left + 32] = tile.transpose(1, 2, 0)
    image.fromarray(grid).save(path, format="WEBP", lossless=True)


class Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


# ----------------------------------------------------------------------------------------------------------- values


def test_pictures_are_bytes_and_pixels_lie_between_zero_and_one() -> None:
    images = Images(torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(3, 1, 1, 1), torch.arange(3))
    assert images.pixels().dtype == torch.float32
    torch.testing.assert_close(images.pixels().flatten(), torch.tensor([0.0, 0.2, 1.0]))
    assert images.take(torch.tensor([2, 0])).y.tolist() == [2, 0]
    assert len(images.take(images.y > 0)) == 2


def test_values_that_do_not_belong_together_are_refused() -> None:
    x, y = torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
    for bad in [(x.float(), y), (x[0], y), (x, y[:2]), (x, y.int())]:
        with pytest.raises(DataError, match=r"expected torch.uint8 of shape \(N, C, H, W\) and torch.int64"):
            Images(*bad)
    with pytest.raises(DataError, match=r"\(3, 3, 2\); expected as many of each"):
        Tracks(Images(x, y), y, y[:2])


# -------------------------------------------------------------------------------------------------------------- IDX


@pytest.mark.parametrize("shape", [(7,), (2, 3, 4), (0, 5)])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_idx_file_is_read_whether_compressed_or_not(
    tmp_path: Path, pack: Callable[[bytes], bytes], shape: tuple[int, ...]
) -> None:
    array = random(*shape)
    path = tmp_path / "file.gz"  # the name does not matter
    path.write_bytes(pack(idx(array)))
    assert torch.equal(datasets.read_idx(path), torch.from_numpy(array))


WHOLE = idx(random(2, 3))
PACKED = gzip.compress(WHOLE, mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing; expected 00 00 08"),
        (b"<htm", "begins with 3c 68 74 6d; expected 00 00 08"),
        (b"\0\0\x0d" + WHOLE[3:], "begins with 00 00 0d 02; expected 00 00 08"),
        (b"\0\0\x08\0", "begins with 00 00 08 00; expected 00 00 08 and a rank"),
        (WHOLE[:6], "has 6 bytes; its header announces"),
        (WHOLE[:-1], "has 17 bytes; its header announces 2 × 3, 18 bytes. It is truncated"),
        (WHOLE + b"\0", "has 19 bytes; its header announces 2 × 3, 18 bytes"),
        (b"\0\0\x08\x02" + b"\xff" * 8, "has 12 bytes; its header announces 4294967295 × 4294967295"),
        (PACKED[:-9], "ended before the end-of-stream marker"),
        (PACKED[:12] + b"\xff" * 20, "Cannot read "),
    ],
)
def test_a_damaged_idx_file_says_what_is_wrong(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        datasets.read_idx(path)
    assert str(path) in str(caught.value)


def test_an_idx_file_that_is_not_there_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Cannot read .*nothing: .*No such file"):
        datasets.read_idx(tmp_path / "nothing")


# ---------------------------------------------------------------------------------------------- MNIST and its likes


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("subfolder", ["", "mnist", "MNIST/raw"])
def test_mnist_is_found_in_the_usual_folders(tmp_path: Path, subfolder: str, ending: str) -> None:
    train_x, train_y, test_x, test_y = write_idx(tmp_path / subfolder, IDX, ending=ending)
    split = datasets.read_mnist(tmp_path, verify=False)
    for images, x, y in [(split.train, train_x, train_y), (split.test, test_x, test_y)]:
        assert images.x.shape == (5, 1, 4, 3)
        assert images.x[:, 0].numpy().tolist() == x.tolist()
        assert images.y.tolist() == y.tolist()


def test_a_subfolder_says_whose_files_they_are(tmp_path: Path) -> None:
    write_idx(tmp_path, IDX, seed=0)
    x, _ = write_idx(tmp_path / "fashion_mnist", IDX[2:], seed=1)
    assert datasets.read_fashion_mnist(tmp_path, verify=False).x[:, 0].numpy().tolist() == x.tolist()


def test_kmnist_is_the_same_in_both_of_its_formats(tmp_path: Path) -> None:
    x, y = write_idx(tmp_path / "idx" / "KMNIST" / "raw", IDX[2:], ending=".gz")
    folder = tmp_path / "npz" / "kmnist"
    folder.mkdir(parents=True)
    np.savez_compressed(folder / "kmnist-test-imgs.npz", x)
    np.savez_compressed(folder / "kmnist-test-labels.npz", y)
    for images in [datasets.read_kmnist(tmp_path / name, verify=False) for name in ("idx", "npz")]:
        assert images.x[:, 0].numpy().tolist() == x.tolist()
        assert images.y.tolist() == y.tolist()
    np.savez(folder / "kmnist-test-imgs.npz", x.astype(float))
    with pytest.raises(DataError, match=r"kmnist-test-imgs.npz holds float64; expected uint8"):
        datasets.read_kmnist(tmp_path / "npz")


def test_pictures_and_labels_in_each_others_place_are_noticed(tmp_path: Path) -> None:
    write_idx(tmp_path, IDX[2:])
    (tmp_path / IDX[2]).write_bytes((tmp_path / IDX[3]).read_bytes())
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte holds an array of shape \(5,\); expected N × H × W"):
        datasets.read_fashion_mnist(tmp_path, verify=False)


# ------------------------------------------------------------------------------------------------- digests, absence


def test_content_is_verified_whether_compressed_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path / "plain", IDX[2:])
    write_idx(tmp_path / "packed", IDX[2:], ending=".gz")
    for name in IDX[2:]:
        digest = hashlib.sha1((tmp_path / "plain" / name).read_bytes()).hexdigest()
        monkeypatch.setitem(datasets._DIGESTS, f"Fashion-MNIST/{name}", digest)
    for folder in ("plain", "packed"):
        assert len(datasets.read_fashion_mnist(tmp_path / folder)) == 5
        with pytest.raises(DataError, match=r"expected .*, that of KMNIST. It is Fashion-MNIST/t10k-images-idx3-ubyte"):
            datasets.read_kmnist(tmp_path / folder)


def test_another_digest_names_the_file_both_digests_and_the_remedy(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist", IDX)
    path = tmp_path / "mnist" / IDX[0]
    found, expected = hashlib.sha1(path.read_bytes()).hexdigest(), datasets._DIGESTS[f"MNIST/{IDX[0]}"]
    with pytest.raises(DataError, match=rf"{path} has the SHA1 digest {found}; expected {expected}.*Download it again"):
        datasets.read_mnist(tmp_path)


def test_every_digest_is_one() -> None:
    assert len(set(datasets._DIGESTS.values())) == len(datasets._DIGESTS)
    assert all(re.fullmatch("[0-9a-f]{32}|[0-9a-f]{40}", digest) for digest in datasets._DIGESTS.values())


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        (datasets.read_mnist, [*IDX, "mnist", "MNIST/raw", "Yann LeCun"]),
        (datasets.read_fashion_mnist, [*IDX[2:], "fashion_mnist", "FashionMNIST/raw", "zalandoresearch"]),
        (datasets.read_kmnist, ["kmnist-test-imgs.npz", *IDX[2:], "kmnist", "rois-codh"]),
        (datasets.read_cifar10, ["data_batch_5.bin", "test_batch.webp", "cifar-10-batches-bin", "binary version"]),
        (datasets.read_svhn, ["test_32x32.mat", "test_crops.webp", "svhn", "Stanford"]),
        (datasets.read_gtsrb, ["signs.webp", "tracks.npy", "gtsrb", "Traffic Sign"]),
    ],
)
def test_what_is_missing_is_named_with_where_it_was_looked_for(
    tmp_path: Path, reader: Callable[[Path], object], words: list[str]
) -> None:
    with pytest.raises(
        DataError, match=r"was not found. Expected the files .* in one of the folders .* Get it"
    ) as caught:
        reader(tmp_path)
    assert [word for word in [*words, f" {tmp_path}."] if word not in str(caught.value)] == []


# --------------------------------------------------------------------------------------------------------- CIFAR-10


def write_cifar10(folder: Path, *, form: str) -> tuple[np.ndarray, np.ndarray]:
    """Six batches of two pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    x, y = random(6, 2, 3, 32, 32), random(6, 2, below=10)
    for name, pictures, labels in zip(BATCHES, x, y, strict=True):
        if form == "bin":
            records = [bytes([label]) + picture.tobytes() for picture, label in zip(pictures, labels, strict=True)]
            (folder / f"{name}.bin").write_bytes(b"".join(records))
        else:
            write_grid(folder / f"{name}.webp", pictures, columns=3)
    if form == "webp":
        np.save(folder / "train_labels.npy", y[:5].reshape(-1))
        np.save(folder / "test_labels.npy", y[5])
    return x, y


@pytest.mark.parametrize("form", ["bin", "webp"])
def test_cifar10_is_read_from_records_and_from_grids(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = write_cifar10(tmp_path / "cifar10" / "cifar-10-batches-bin" if form == "bin" else tmp_path, form=form)
    split = datasets.read_cifar10(tmp_path, verify=False)
    assert split.train.x.numpy().tolist() == x[:5].reshape(10, 3, 32, 32).tolist()
    assert split.train.y.tolist() == y[:5].reshape(-1).tolist()
    assert split.test.x.numpy().tolist() == x[5].tolist()
    assert split.test.y.tolist() == y[5].tolist()
    with pytest.raises(DataError, match=rf"data_batch_1.{form} has the SHA1 digest"):
        datasets.read_cifar10(tmp_path)
    for name, pictures, labels in zip(BATCHES, x, y, strict=True):
        records = np.concatenate([labels[:, None], pictures.reshape(2, -1)], axis=1)
        monkeypatch.setitem(datasets._DIGESTS, f"CIFAR-10/{name}", hashlib.sha1(records.tobytes()).hexdigest())
    assert len(datasets.read_cifar10(tmp_path).test) == 2


def test_damaged_records_say_what_is_wrong(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar10", form="bin")
    path = tmp_path / "cifar10" / "data_batch_3.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"data_batch_3.bin has 6145 bytes; expected 3073 for each picture"):
        datasets.read_cifar10(tmp_path, verify=False)
    path.write_bytes(b"\x0a" + content[1:])
    with pytest.raises(LabelError, match=r"data_batch_3.bin holds numbers from .* to 10; expected them from 0 to 9"):
        datasets.read_cifar10(tmp_path, verify=False)


# ------------------------------------------------------------------------------------------------------------ grids


def write_gtsrb(folder: Path, count: int = 5) -> np.ndarray:
    x = random(count, 3, 32, 32)
    write_grid(folder / "signs.webp", x, columns=3)
    np.save(folder / "labels.npy", np.array([0, 0, 0, 42, 42], dtype=np.uint8))
    np.save(folder / "tracks.npy", np.array([0, 0, 0, 1306, 1306], dtype=np.uint16))
    np.save(folder / "frames.npy", np.array([0, 3, 6, 0, 3], dtype=np.uint8))
    return x


def test_tracks_come_with_the_number_of_object_and_frame(tmp_path: Path) -> None:
    x = write_gtsrb(tmp_path)
    tracks = datasets.read_gtsrb(tmp_path, verify=False)
    assert tracks.images.x.numpy().tolist() == x.tolist()
    assert tracks.images.y.tolist() == [0, 0, 0, 42, 42]
    assert tracks.track.tolist() == [0, 0, 0, 1306, 1306]
    assert tracks.frame.tolist() == [0, 3, 6, 0, 3]
    with pytest.raises(DataError, match=r"signs.webp has the SHA1 digest"):
        datasets.read_gtsrb(tmp_path)


def test_a_grid_has_to_fit_its_labels_and_be_whole(tmp_path: Path) -> None:
    write_gtsrb(tmp_path, count=7)
    path = tmp_path / "signs.webp"
    with pytest.raises(DataError, match=r"signs.webp is 96 × 96; expected 5 tiles of 32 × 32"):
        datasets.read_gtsrb(tmp_path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"Cannot read the picture .*signs.webp.* truncated or damaged"):
        datasets.read_gtsrb(tmp_path)


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    write_gtsrb(tmp_path)
    trap = np.array([Trap(tmp_path / "sprung")], dtype=object)
    np.save(tmp_path / "tracks.npy", trap, allow_pickle=True)
    with pytest.raises(DataError, match=r"Cannot read .*tracks.npy: .*Expected an .npy file, without pickled objects"):
        datasets.read_gtsrb(tmp_path)
    (tmp_path / "tracks.npy").write_bytes(trap.dumps())
    with pytest.raises(DataError, match=r"Cannot read .*tracks.npy: .*Expected an .npy file, without pickled objects"):
        datasets.read_gtsrb(tmp_path)
    np.savez(tmp_path / "own.npz", x_train=trap, y_train=trap, x_test=trap, y_test=trap)
    with pytest.raises(DataError, match=r"Cannot read .*own.npz: .*without pickled objects"):
        datasets.read_npz(tmp_path / "own.npz")
    assert not (tmp_path / "sprung").exists()
    trap.copy()[0].__reduce__()[0](tmp_path / "sprung")
    assert (tmp_path / "sprung").exists()


def test_svhn_is_read_from_a_grid_and_from_matlab(tmp_path: Path) -> None:
    x, digits = random(3, 3, 32, 32), np.array([0, 9, 1], dtype=np.uint8)
    grid, mat = tmp_path / "grid", tmp_path / "mat" / "svhn"
    grid.mkdir()
    mat.mkdir(parents=True)
    write_grid(grid / "test_crops.webp", x, columns=2)
    np.save(grid / "test_labels.npy", digits)
    scipy_io = pytest.importorskip("scipy.io")
    official = {"X": x.transpose(2, 3, 1, 0), "y": np.array([[10], [9], [1]], dtype=np.uint8)}
    scipy_io.savemat(mat / "test_32x32.mat", official)
    for folder in (grid, tmp_path / "mat"):
        images = datasets.read_svhn(folder, verify=False)
        assert images.x.numpy().tolist() == x.tolist()
        assert images.y.tolist() == [0, 9, 1]
        with pytest.raises(DataError, match=r"digest .*; expected .*, that of SVHN"):
            datasets.read_svhn(folder)
    scipy_io.savemat(mat / "test_32x32.mat", official | {"X": x})
    with pytest.raises(
        DataError, match=r"X of .* is uint8 of shape \(3, 3, 32, 32\); expected uint8 of 32 × 32 × 3 × N"
    ):
        datasets.read_svhn(tmp_path / "mat", verify=False)
    (mat / "test_32x32.mat").write_bytes(b"<html>" * 100)
    with pytest.raises(DataError, match=r"Cannot read X and y of the MATLAB file"):
        datasets.read_svhn(tmp_path / "mat", verify=False)


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gtsrb(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        MissingExtraError, match=r"signs.webp needs Pillow, which is not installed: pip install '\.\[experiments\]'"
    ):
        datasets.read_gtsrb(tmp_path)
    (tmp_path / "test_32x32.mat").touch()
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(MissingExtraError, match=r"test_32x32.mat needs SciPy: pip install scipy"):
        datasets.read_svhn(tmp_path)


# ------------------------------------------------------------------------------------------------- data of one's own


def write_npz(path: Path, x: np.ndarray, y: np.ndarray, **others: np.ndarray) -> Path:
    np.savez(path, **({"x_train": x, "y_train": y, "x_test": x, "y_test": y} | others))
    return path


def test_an_npz_file_may_have_its_channels_first_last_or_not_at_all(tmp_path: Path) -> None:
    x, y = random(2, 3, 5, 4), np.array([1, 0])
    colour, grey = x.tolist(), x[:, :1].tolist()
    for number, (array, expected) in enumerate(
        [
            (x, colour),
            (x.transpose(0, 2, 3, 1), colour),
            (x[:, 0], grey),
            (x[:, 0, :, :, None], grey),
            (x.astype(np.float32) / 255, colour),
            (x.astype(np.float16) / 255, colour),
        ]
    ):
        split = datasets.read_npz(write_npz(tmp_path / f"{number}.npz", array, y))
        for images in (split.train, split.test):
            assert images.x.numpy().tolist() == expected
            assert images.y.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_test": random(2, 5, 4).astype(np.float32)}, "x_test of .* is float32 from .*; expected uint8, or floats"),
        ({"x_test": np.full((2, 5, 4), np.nan)}, "x_test of .* is float64 from nan to nan; expected uint8"),
        ({"x_train": np.zeros((2, 5, 4), dtype=bool)}, "x_train of .* is bool; expected uint8"),
        ({"x_train": random(2, 20)}, r"x_train of .* has shape \(2, 20\); expected N×H×W, "),
        ({"x_train": random(2, 4, 5, 4)}, r"x_train of .* has shape \(2, 4, 5, 4\); expected N×H×W, "),
        ({"x_train": random(2, 3, 5, 3)}, r"x_train of .* has shape \(2, 3, 5, 3\); expected N×H×W, "),
        ({"x_train": random(2, 6, 4)}, r"x_train \(2, 6, 4\) and x_test \(2, 5, 4\); expected pictures of one size"),
        ({"y_train": np.array([0, -1])}, "y_train of .* holds numbers from -1 to 0; expected them from 0"),
        ({"y_train": np.array([0.0, 1.0])}, r"y_train of .* holds float64 of shape \(2,\); expected whole numbers"),
        ({"y_test": np.array([0, 1, 2])}, r"labels torch.int64 of shape \(3,\); expected"),
    ],
)
def test_an_npz_file_that_cannot_be_used_says_what_is_expected(
    tmp_path: Path, changes: dict[str, np.ndarray], message: str
) -> None:
    path = write_npz(tmp_path / "own.npz", random(2, 5, 4), np.array([1, 0]), **changes)
    with pytest.raises(DataError, match=message):
        datasets.read_npz(path)


def test_an_npz_file_that_is_none_says_so(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    expected = "Cannot read .*own.npz: .*Expected an .npz file with x_train, y_train, x_test, y_test"
    with pytest.raises(DataError, match=expected):
        datasets.read_npz(path)
    for content in (
        b"",
        b"something else",
        write_npz(tmp_path / "cut.npz", random(9, 9, 9), random(9)).read_bytes()[:200],
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=expected):
            datasets.read_npz(path)
    np.savez(path, x_train=random(2, 3, 4))
    with pytest.raises(DataError, match=expected):
        datasets.read_npz(path)


# ---------------------------------------------------------------------------------------------------- the real data


@pytest.fixture(scope="module")
def real() -> Path:
    folder = os.environ.get("ERRBAR_DATA")
    if not folder:
        pytest.skip("ERRBAR_DATA does not say where the data are")
    return Path(folder)


def counts(images: Images) -> list[int]:
    return torch.bincount(images.y).tolist()


def moments(split: Split) -> list[list[float]]:
    """Mean and standard deviation of each channel, to four digits, from the counts of the 256 values."""
    count = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in split.train.x.unbind(1)])
    weight, value = count.double() / count.sum(1, keepdim=True), torch.arange(256, dtype=torch.float64) / 255
    mean = weight @ value
    std = (weight @ value.square() - mean.square()).sqrt()
    return [[round(number, 4) for number in numbers.tolist()] for numbers in (mean, std)]


def test_real_mnist(real: Path) -> None:
    split = datasets.read_mnist(real)
    assert split.train.x.shape == (60_000, 1, 28, 28)
    assert counts(split.train) == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert counts(split.test) == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert moments(split) == [[0.1307], [0.3081]]


@pytest.mark.parametrize("reader", [datasets.read_fashion_mnist, datasets.read_kmnist])
def test_real_strangers_to_mnist(real: Path, reader: Callable[[Path], Images]) -> None:
    images = reader(real)
    assert images.x.shape == (10_000, 1, 28, 28)
    assert counts(images) == [1000] * 10


def test_real_cifar10(real: Path) -> None:
    split = datasets.read_cifar10(real)
    assert split.train.x.shape == (50_000, 3, 32, 32)
    assert counts(split.train) == [5000] * 10
    assert counts(split.test) == [1000] * 10
    assert moments(split) == [[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]]


def test_real_svhn(real: Path) -> None:
    images = datasets.read_svhn(real)
    assert images.x.shape[1:] == (3, 32, 32)
    assert counts(images.take(torch.arange(10_000))) == [684, 1968, 1590, 1104, 964, 909, 773, 767, 621, 620]


def test_real_gtsrb(real: Path) -> None:
    tracks = datasets.read_gtsrb(real)
    assert tracks.images.x.shape == (13_070, 3, 32, 32)
    assert torch.equal(tracks.track, torch.arange(1307).repeat_interleave(10))
    assert torch.equal(tracks.frame, torch.arange(0, 30, 3).repeat(1307))
    sizes = counts(tracks.images)
    assert (len(sizes), min(sizes), max(sizes)) == (43, 70, 750)
    first = tracks.images.y[::10]
    assert torch.equal(tracks.images.y, first.repeat_interleave(10))  # a track has one class
