"""One pass over labelled data: PMFs before and after calibration, and what watchers keep of each batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar._distributions.calibration import Calibration
from errbar._distributions.logits import LogitGaussian
from errbar._distributions.prediction import Prediction
from errbar._fusion.fused import FusedClassifier
from errbar._model.batch import Batch, checked_labels
from errbar._posterior.posterior import Posterior
from errbar._posterior.pushing import pushed_draws
from errbar.errors import DataError

Classifier = Posterior | FusedClassifier
Item = TypeVar("Item")

NETWORK, BEFORE, AFTER = "network", "before_calibration", "after_calibration"


def draws_of(classifier: Classifier, samples: int) -> int:
    """How many draws are taken where so many are asked for."""
    if isinstance(classifier, FusedClassifier):
        return samples
    return pushed_draws(classifier.information.task, samples)


def plain_logits(classifier: Classifier, batch: Batch, samples: int, seed: int) -> LogitGaussian:
    """The logits without T and T_c, or without T and q; where q is zero, P says nothing and is zero too."""
    if isinstance(classifier, FusedClassifier):
        return classifier.plain_logits(batch) if classifier.covariance_scale else classifier.unrounded_logits(batch)
    return classifier.uncalibrated().sampling_logits(batch, samples, seed)


def before_calibration(classifier: Classifier) -> Calibration:
    """What is not counted as calibration: of a fused classifier q, which belongs to its discrepancies."""
    if isinstance(classifier, FusedClassifier):
        return Calibration(covariance_scale=classifier.covariance_scale)
    return Calibration()


@dataclass(frozen=True, eq=False)
class BatchObservation:
    """One batch, the number of inputs before it, and what the posterior predicts for it.

    `gaussian` is without calibration, `calibrated` and `prediction` are with it; `labels` are on the CPU.
    """

    start: int
    batch: Batch
    labels: Int[Tensor, "B"]
    gaussian: LogitGaussian
    calibrated: LogitGaussian
    prediction: Prediction


class Watcher(Protocol):
    """Keeps something of the batches that pass."""

    def see(self, observation: BatchObservation) -> None: ...


@dataclass(frozen=True, eq=False)
class Observation:
    """PMFs of each variant (`NETWORK`, `BEFORE` and, where it is calibrated, `AFTER`), and the labels.

    Where an input has several decisions, these are of each of them, and `inputs` says of which input it is.
    """

    pmfs: dict[str, Float[Tensor, "N M"]]
    labels: Int[Tensor, "N"]
    inputs: Int[Tensor, "N"] | None = None

    @property
    def final(self) -> Float[Tensor, "N M"]:
        """The PMFs of the posterior as it is calibrated."""
        return self.pmfs.get(AFTER, self.pmfs[BEFORE])


def observe(
    posterior: Classifier, stream: Iterable[Batch], samples: int, seed: int, watchers: Sequence[Watcher] = ()
) -> Observation:
    """PMFs of the network alone, with error bars, and calibrated if the posterior is; and the labels.

    The network of a fused classifier is its ĝ, the fused mean of the logits; its error bars before the calibration are
    those of N(ĝ, qP), without T.
    """
    before, calibration = before_calibration(posterior), posterior.calibration
    samples = draws_of(posterior, samples)
    columns: dict[str, list[Tensor]] = {}
    labels: list[Tensor] = []
    start = 0
    for batch in stream:
        gaussian = plain_logits(posterior, batch, samples, seed)
        size, classes = gaussian.mean.shape
        labels.append(checked_labels(batch.labels, size=size, classes=classes, device=torch.device("cpu")))
        calibrated = gaussian if before == Calibration() else gaussian.calibrated(before)
        prediction = calibrated.predict(samples, seed)
        pmfs = {NETWORK: torch.softmax(gaussian.mean, 1), BEFORE: prediction.pmf}
        if calibration != before:
            calibrated = gaussian.calibrated(calibration)
            prediction = calibrated.predict(samples, seed)
            pmfs[AFTER] = prediction.pmf
        for name, pmf in pmfs.items():
            columns.setdefault(name, []).append(pmf.cpu())
        observation = BatchObservation(start, batch, labels[-1], gaussian, calibrated, prediction)
        for watcher in watchers:
            watcher.see(observation)
        start += size
    if not labels:
        raise DataError("The data are empty: expected at least one batch.")
    return Observation({name: torch.cat(parts) for name, parts in columns.items()}, torch.cat(labels))


class Doubts:
    """For each input the standard deviation of its most likely class, the mutual information, the contrast variance."""

    def __init__(self) -> None:
        self._std: list[Tensor] = []
        self._information: list[Tensor] = []
        self._variance: list[Tensor] = []
        self._logits: list[Tensor] = []

    def see(self, observation: BatchObservation) -> None:
        prediction = observation.prediction
        self._std.append(prediction.std.gather(1, prediction.label[:, None])[:, 0].cpu())
        self._information.append(prediction.mutual_information.cpu())
        self._variance.append(observation.calibrated.contrast_variance.cpu())
        self._logits.append(observation.gaussian.mean.cpu())

    @property
    def std(self) -> Float[Tensor, "N"]:
        return torch.cat(self._std)

    @property
    def mutual_information(self) -> Float[Tensor, "N"]:
        return torch.cat(self._information)

    @property
    def contrast_variance(self) -> Float[Tensor, "N"]:
        return torch.cat(self._variance)

    @property
    def logits(self) -> Float[Tensor, "N M"]:
        """The network's own logits ĝ, without T."""
        return torch.cat(self._logits)


class Spread(Generic[Item]):
    """The results of `extract` for some inputs, spread evenly over data of unknown length.

    Data are often sorted by class, so the first inputs would not represent them. The inputs kept are those whose
    number is a multiple of a power of two; whenever there are more than `limit`, every other one is dropped. At least
    half of `limit` remain if the data have that many, and no random numbers are needed.
    """

    def __init__(self, limit: int, extract: Callable[[BatchObservation, int], Item]) -> None:
        self.limit, self.extract = limit, extract
        self.stride = 1
        self.items: list[Item] = []

    def see(self, observation: BatchObservation) -> None:
        row = -observation.start % self.stride
        while row < len(observation.labels):
            self.items.append(self.extract(observation, row))
            if len(self.items) > self.limit:
                self.items = self.items[::2]
                self.stride *= 2
            row += self.stride - (observation.start + row) % self.stride


def gaussian_and_label(observation: BatchObservation, row: int) -> tuple[LogitGaussian, int]:
    """The logits of one input without calibration, and its label."""
    # Tempered by one: a copy, since a slice would keep its whole batch in memory.
    return observation.gaussian[row : row + 1].tempered(1.0), int(observation.labels[row])


def input_of(observation: BatchObservation, row: int) -> Batch:
    """One input as a batch."""
    return observation.batch.rows(row, row + 1).map(torch.clone)


@dataclass(frozen=True, eq=False)
class Leader:
    """An input with a high score: its number, and what is needed to show it."""

    score: float
    index: int
    batch: Batch
    label: int
    gaussian: LogitGaussian


class Leaders:
    """The inputs with the highest scores: the most uncertain, or (`wrong`) the most confident of the wrong ones."""

    def __init__(self, limit: int, *, wrong: bool) -> None:
        self.limit = limit
        self.wrong = wrong
        self.items: list[Leader] = []

    def see(self, observation: BatchObservation) -> None:
        prediction = observation.prediction
        scores = (prediction.confidence if self.wrong else prediction.mutual_information).cpu().double()
        if self.wrong:
            scores = scores.where(prediction.label.cpu() != observation.labels, -torch.inf)
        for row in scores.topk(min(self.limit, len(scores))).indices.tolist():
            score = float(scores[row])
            full = len(self.items) == self.limit
            if score == -torch.inf or (full and score <= self.items[-1].score):
                break
            # Tempered by one: a copy, since a slice would keep its whole batch in memory.
            gaussian = observation.calibrated[row : row + 1].tempered(1.0)
            leader = Leader(
                score, observation.start + row, input_of(observation, row), int(observation.labels[row]), gaussian
            )
            self.items.append(leader)
            self.items = sorted(self.items, key=lambda leader: -leader.score)[: self.limit]


class Fingerprint:
    """SHA-256 of all inputs and labels in order, whatever the batch size."""

    def __init__(self) -> None:
        self._inputs = hashlib.sha256()
        self._labels = hashlib.sha256()
        self.shape: tuple[int, ...] | None = None

    def see(self, observation: BatchObservation) -> None:
        self.add(observation.batch, observation.labels)

    def add(self, batch: Batch, labels: Tensor) -> None:
        for value in batch.tensors():
            self._inputs.update(_bytes(value))
            self.shape = self.shape or tuple(value.shape[1:])
        self._labels.update(_bytes(labels))

    def digest(self) -> str:
        return hashlib.sha256(self._inputs.digest() + self._labels.digest()).hexdigest()


def _bytes(value: Tensor) -> Any:
    return value.detach().cpu().contiguous().view(torch.uint8).numpy() if value.numel() else b""
