"""Predictions of any number of inputs, written as they come, with the columns that were asked for."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import errbar
from errbar._base.progress import track
from errbar._model.batch import Batch, batches, count_batches
from errbar.cli.inputs import Source
from errbar.cli.output import Columns, require_format, writing
from errbar.cli.session import Session
from errbar.errors import ArgumentError, DataError


@dataclass(frozen=True, eq=False)
class PredictionColumns:
    """Which columns to write: risk by threshold, and the covariance or not."""

    classes: tuple[str, ...] | None
    thresholds: dict[str, float | Tensor]
    covariance: bool

    def of(self, prediction: errbar.Prediction, names: Sequence[int | str] | None = None) -> Columns:
        """The columns of one batch, with the names of its inputs if they are known."""
        columns: dict[str, Tensor | Sequence[Any]] = {} if names is None else {"input": names}
        columns["label"] = prediction.label
        if self.classes is not None and prediction.pmf.ndim == 2:
            columns["class"] = [self._named(label) for label in prediction.label.tolist()]
        columns |= {
            "confidence": prediction.confidence,
            "entropy": prediction.entropy,
            "mutual_information": prediction.mutual_information,
            "pmf": prediction.pmf,
            "std": prediction.std,
        }
        columns |= {name: prediction.risk(threshold) for name, threshold in self.thresholds.items()}
        if self.covariance:
            columns["covariance"] = prediction.covariance
        return columns

    def _named(self, label: int | list[int]) -> str:
        """The name of a class; of several labels those that are more likely true than not, with a bar between them."""
        assert self.classes is not None
        if isinstance(label, int):
            return self.classes[label]
        return "|".join(name for name, flag in zip(self.classes, label, strict=True) if flag)


def write_predictions(
    here: Session,
    output: Path,
    predictions: Generator[errbar.Prediction, None, None],
    source: Source,
    columns: PredictionColumns,
) -> None:
    """Write what comes, and say how much it was."""

    def rows() -> Iterator[Columns]:
        for prediction in predictions:
            yield columns.of(prediction)

    # Closed here, so that a mistake ends the progress line before it is told.
    with closing(predictions):
        facts = written(output, rows(), source, columns.classes)
    here.answer(facts)


def written(
    output: Path,
    rows: Iterator[Columns],
    source: Source,
    classes: tuple[str, ...] | None,
    *,
    of_positions: bool = False,
) -> dict[str, Any]:
    """Write the columns of one batch after the other; what to say about them."""
    count, confidence, information = 0, 0.0, 0.0
    with writing(output, classes, of_positions=of_positions) as writer:
        for columns in rows:
            size = len(columns["label"])
            # Inputs are named here where the rank that read them could not know how many came before.
            writer.add(columns if "input" in columns else {"input": source.names(count, size), **columns})
            count += size
            confidence += size * float(torch.as_tensor(columns["confidence"]).mean())
            information += size * float(torch.as_tensor(columns["mutual_information"]).mean())
        if not count:
            raise DataError(f"The data {source.where} are empty: expected at least one batch.")
    return {
        "output": output,
        "inputs": count,
        "mean_confidence": confidence / count,
        "mean_mutual_information": information / count,
        "bytes": output.stat().st_size,
    }


def require_format_for(posterior: Path, output: Path) -> None:
    """Refuse a kind of file that is not written, and for positions of an input one that has rows."""
    description = errbar.info(posterior)
    has_rows = isinstance(description, errbar.FusionDescription) or description.outputs != "positions"
    if not has_rows and output.suffix.lower() != ".npz":
        raise ArgumentError(
            f"The output {output} ends in {output.suffix!r}, and the posterior {posterior} was fitted with "
            "outputs='positions', with a PMF for every position of an input; expected an .npz file.",
            arguments={"outputs": "positions"},
        )
    require_format(output)


def is_of_positions(classifier: errbar.Posterior | errbar.FusedClassifier) -> bool:
    """Whether each input has many positions with a PMF each."""
    return isinstance(classifier, errbar.Posterior) and classifier.information.outputs == "positions"


def tracked_batches(source: Source, here: Session) -> Iterator[Batch]:
    """The batches of the data, with a progress line."""
    loader = source.loader()
    return track(batches(loader), "Predicting", total=count_batches(loader), enabled=here.progress)


def require_thresholds(thresholds: Mapping[str, float | Tensor], classes: int) -> None:
    """Refuse thresholds that are not as many as the classes, before anything is predicted."""
    for numbers in thresholds.values():
        if isinstance(numbers, Tensor) and len(numbers) != classes:
            typed = ",".join(f"{number:g}" for number in numbers.tolist())
            raise ArgumentError(
                f"The risk threshold is {typed!r}; expected a probability, or one for each of the {classes} classes "
                "with commas."
            )


def thresholds_of(risk: Sequence[str] | None) -> dict[str, float | Tensor]:
    """Columns of risk by their name: risk_0.05 for one threshold, risk_by_class for one for each class."""
    thresholds: dict[str, float | Tensor] = {}
    for text in risk or []:
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = [math.nan]
        if not all(0 <= number <= 1 for number in numbers):
            raise ArgumentError(
                f"The risk threshold is {text!r}; expected a probability, or one for each class with commas."
            )
        name = f"risk_{text.strip()}" if len(numbers) == 1 else "risk_by_class"
        if name in thresholds:
            raise ArgumentError(f"There are two thresholds for {name}; expected each once.")
        thresholds[name] = numbers[0] if len(numbers) == 1 else torch.tensor(numbers, dtype=torch.float64)
    return thresholds
