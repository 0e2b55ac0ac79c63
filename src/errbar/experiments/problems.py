"""The experiments' data, networks and recipes. What the paper leaves open is chosen here, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from errbar.errors import ArgumentError, MissingExtraError, how_to_install
from errbar.experiments import datasets
from errbar.experiments.networks import Normalise, convolutional_network, paper_network
from errbar.experiments.problem import PRIORS, Problem, Recipe, Samples, halves
from errbar.experiments.shifts import BLUR, CONTRAST, NOISE, ROTATION, quick_shifts

_CIFAR_MEAN, _CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FEW_PRIORS = (1.0, 10.0, 100.0)
_SMALL = (8, 8, 16, 16, 32, 32)


@dataclass(frozen=True, eq=False)
class Sequences:
    """F frames of each of N objects, in the order of recording."""

    frames: Float[Tensor, "N F C H W"]
    labels: Int[Tensor, " N"]


@dataclass(frozen=True, eq=False)
class Experiment:
    """A problem, with sequences to fuse and pictures with which to contaminate the training data."""

    problem: Problem
    sequences: tuple[Sequences, Sequences] | None = None  # validation, test
    foreign: Float[Tensor, "L C H W"] | None = None
    views: tuple[int, int] = (10, 300)  # frames of each, and of how many pictures, where there are no sequences


def mnist(folder: Path, *, quick: bool, device: torch.device) -> Experiment:
    """Five fully connected layers, 784–256–150–100–40–10; three epochs in batches of 256 reach the paper's 91 %."""
    split = datasets.read_mnist(folder)
    train = _samples(split.train, device)
    validation, test = halves(_samples(split.test, device))
    outliers = {
        "Fashion-MNIST": datasets.read_fashion_mnist(folder).pixels().to(device),
        "KMNIST": datasets.read_kmnist(folder).pixels().to(device),
    }
    problem = Problem(
        name="mnist",
        train=train,
        validation=validation,
        test=test,
        network=lambda dropout: nn.Sequential(nn.Flatten(), *paper_network(784, dropout=dropout)),
        recipe=Recipe(epochs=3, batch_size=256),
        members=50,
        outliers=outliers,
        shifts=(ROTATION,),
        class_names=tuple("0123456789"),
    )
    return _finished(problem, outliers["Fashion-MNIST"], quick)


def cifar10(folder: Path, *, quick: bool, device: torch.device) -> Experiment:
    """Six convolutional layers of 128 to 512 channels and four fully connected; ten epochs in batches of 128."""
    split = datasets.read_cifar10(folder)
    validation, test = halves(_samples(split.test, device))
    widths = _SMALL if quick else (128, 128, 256, 256, 512, 512)
    problem = Problem(
        name="cifar10",
        train=_samples(split.train, device),
        validation=validation,
        test=test,
        network=lambda dropout: nn.Sequential(
            Normalise(_CIFAR_MEAN, _CIFAR_STD), *convolutional_network(10, widths, dropout)
        ),
        recipe=Recipe(epochs=3 if quick else 10, batch_size=128, bfloat16_on_gpu=True),
        members=10,
        outliers={"SVHN": datasets.read_svhn(folder).pixels().to(device)},
        shifts=(NOISE, BLUR, CONTRAST),
        class_names=_CIFAR_CLASSES,
        whole_network_samples=5000,
    )
    return _finished(problem, None, quick)


def gtsrb(folder: Path, *, quick: bool, device: torch.device) -> Experiment:
    """German traffic signs, 43 classes, a head of 100–40–43; 60, 20 and 20 % of each class's tracks, by a seed."""
    tracks = datasets.read_gtsrb(folder)
    frames = int(torch.bincount(tracks.track).max())
    order = torch.argsort(tracks.track * 1000 + tracks.frame, stable=True).reshape(-1, frames)
    labels = tracks.images.y[order[:, 0]]
    pixels = tracks.images.pixels()
    parts = [
        Sequences(pixels[order[rows]].to(device), labels[rows].to(device))
        for rows in _stratified(labels, (0.6, 0.2, 0.2), seed=0)
    ]
    if quick:
        parts = [Sequences(part.frames[::9, :3], part.labels[::9]) for part in parts]
        frames = 3
    train, validation, test = (
        Samples(part.frames.flatten(0, 1), part.labels.repeat_interleave(frames)) for part in parts
    )
    problem = Problem(
        name="gtsrb",
        train=train,
        validation=validation,
        test=test,
        network=lambda dropout: nn.Sequential(
            Normalise((0.33, 0.31, 0.32), (0.28, 0.26, 0.27)),
            *convolutional_network(43, _SMALL if quick else (64, 64, 128, 128, 256, 256), dropout),
        ),
        recipe=Recipe(
            epochs=2 if quick else 15,
            batch_size=64,
            learning_rate=1e-3 if quick else 3e-4,
            bfloat16_on_gpu=True,
        ),
        members=2 if quick else 5,
        shifts=quick_shifts((NOISE,)) if quick else (NOISE, BLUR, CONTRAST),
        class_names=tuple(str(label) for label in range(43)),
        dropout_samples=5 if quick else 50,
        priors=_FEW_PRIORS if quick else PRIORS,
    )
    return Experiment(problem, sequences=(parts[1], parts[2]))


def digits(folder: Path | None = None, *, quick: bool, device: torch.device) -> Experiment:
    """scikit-learn's 1797 digits of 8 × 8 pixels: no files needed. Outliers are the same pictures scrambled."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as missing:
        raise MissingExtraError(
            f"The digits come with scikit-learn, which is not installed: {how_to_install('demo')}."
        ) from missing
    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.as_tensor(labels).long()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    everything = Samples(x[order], y[order]).to(device)
    validation, test = halves(everything.take(slice(900, None)))
    scramble = torch.randperm(64, generator=torch.Generator().manual_seed(0)).to(device)
    scrambled = everything.x[-500:].flatten(1)[:, scramble].reshape(-1, 1, 8, 8)
    problem = Problem(
        name="digits",
        train=everything.take(slice(0, 900)),
        validation=validation,
        test=test,
        network=lambda dropout: nn.Sequential(
            nn.Flatten(),
            *(paper_network(64, (), dropout, head=(32, 16)) if quick else paper_network(64, dropout=dropout)),
        ),
        recipe=Recipe(epochs=12 if quick else 40, batch_size=32, learning_rate=1e-3),
        members=10,
        outliers={"scrambled": scrambled},
        shifts=(ROTATION,),
        class_names=tuple("0123456789"),
    )
    return _finished(problem, scrambled, quick)


BUILDERS: dict[str, Callable[..., Experiment]] = {"mnist": mnist, "cifar10": cifar10, "gtsrb": gtsrb, "digits": digits}


def build(name: str, folder: Path | None, *, quick: bool, device: torch.device) -> Experiment:
    if name not in BUILDERS:
        raise ArgumentError(
            f"There is no experiment {name!r}; expected {', '.join(BUILDERS)}, resnet20 or "
            "resnet32, or for fusion alone fusion-mnist and so on, fusion-resnets or frames-mnist and so on, or for "
            "the choice of labels acquire-mnist and so on."
        )
    if folder is None and name != "digits":
        raise ArgumentError(f"The experiment {name} needs its data: give the folder that holds them with --data.")
    return BUILDERS[name](folder, quick=quick, device=device)


def _samples(images: datasets.Images, device: torch.device) -> Samples:
    return Samples(images.pixels().to(device), images.y.to(device))


def _finished(problem: Problem, foreign: Tensor | None, quick: bool) -> Experiment:
    if not quick:
        return Experiment(problem, foreign=foreign)
    small = Problem(
        name=problem.name,
        train=problem.train.take(slice(0, 1500)),
        validation=problem.validation.take(slice(0, 200)),
        test=problem.test.take(slice(0, 200)),
        network=problem.network,
        recipe=Recipe(epochs=problem.recipe.epochs, batch_size=problem.recipe.batch_size // 4 or 1, learning_rate=1e-3),
        members=2,
        outliers={name: x[:200] for name, x in problem.outliers.items()},
        shifts=quick_shifts(problem.shifts),
        class_names=problem.class_names,
        dropout_samples=5,
        priors=_FEW_PRIORS,
        whole_network_samples=50,
    )
    return Experiment(small, foreign=None if foreign is None else foreign[:200], views=(3, 15))


def _stratified(labels: Int[Tensor, " N"], shares: tuple[float, ...], seed: int) -> list[Int[Tensor, " k"]]:
    """Rows for each share, with each class divided in these proportions."""
    generator = torch.Generator().manual_seed(seed)
    parts: list[list[Tensor]] = [[] for _ in shares]
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=generator)]
        start, total = 0, 0.0
        for part, share in zip(parts, shares, strict=True):
            total += share
            stop = round(total * len(rows))
            part.append(rows[start:stop])
            start = stop
    return [torch.cat(part) for part in parts]
