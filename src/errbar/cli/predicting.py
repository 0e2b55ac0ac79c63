"""`errbar predict` and `errbar fuse`: PMFs with error bars of any number of inputs, written as they come."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import errbar
from errbar._base.progress import track
from errbar._model.batch import Batch, batches, count_batches
from errbar.cli import options
from errbar.cli.posteriors import Loaded, PosteriorRequest
from errbar.cli.session import Session, session
from errbar.cli.source import NEW, DataRequest, Source
from errbar.cli.writers import Columns, require_format, require_new, writing
from errbar.errors import ArgumentError, DataError, MismatchError


def predict(
    posterior: options.PosteriorArgument,
    data: options.DataArgument,
    model: options.Model,
    output: options.Results,
    weights: options.Weights = None,
    risk: options.Risk = None,
    covariance: options.Covariance = False,
    samples: options.Samples = 1000,
    seed: options.Seed = 0,
    transform: options.Transform = None,
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = 256,
    device: options.Device = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
    progress: options.Progress = True,
) -> None:
    """PMF, standard deviations, risk and mutual information of each input. Takes the memory of one batch."""
    with session("predict", as_json=as_json, progress=progress, device=device) as here:
        require_new(output, force)
        require_format(output)
        thresholds = thresholds_of(risk)
        loaded = PosteriorRequest(posterior, model, weights).load(here.device)
        source = DataRequest(data, batch_size, transform, image_size).open(NEW, loaded.classes, labelled=False)

        def predictions() -> Iterator[errbar.Prediction]:
            for batch in _tracked(source, here):
                yield loaded.posterior.predict(batch, samples, seed)

        _write(here, output, predictions(), source, _Wanted(loaded.classes, thresholds, covariance))


def fuse(
    data: options.DataArgument,
    output: options.Results,
    posterior: Annotated[
        list[Path], typer.Option("--posterior", "-p", metavar="FILE", help="A classifier; repeat it for each.")
    ],
    model: Annotated[
        list[str],
        typer.Option(
            "--model", metavar="PACKAGE.MODULE:CALLABLE", help="Its model; one for each posterior, or one for all."
        ),
    ],
    weights: Annotated[
        list[Path] | None, typer.Option("--weights", metavar="FILE", help="Its weights; one for each posterior.")
    ] = None,
    frames: Annotated[
        int | None, typer.Option("--frames", min=1, help="One classifier: so many inputs in a row are one object.")
    ] = None,
    risk: options.Risk = None,
    covariance: options.Covariance = False,
    samples: options.Samples = 1000,
    seed: options.Seed = 0,
    transform: options.Transform = None,
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = 256,
    device: options.Device = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
    progress: options.Progress = True,
) -> None:
    """Several classifiers of the same inputs, or with --frames several frames of each object, as one PMF."""
    with session("fuse", as_json=as_json, progress=progress, device=device) as here:
        require_new(output, force)
        require_format(output)
        thresholds = thresholds_of(risk)
        asked = _requests(posterior, model, weights or [], frames)
        loaded = [request.load(here.device) for request in asked]
        classes = _same_classes(loaded, posterior)
        given = DataRequest(data, frames or batch_size, transform, image_size)
        source = given.open(NEW, classes, labelled=False)

        def predictions() -> Iterator[errbar.Prediction]:
            for batch in _tracked(source, here):
                if frames is None:
                    fused = errbar.fuse([one.posterior.logits(batch) for one in loaded])
                else:
                    _require_frames(batch, frames)
                    fused = errbar.fuse_frames(loaded[0].posterior.joint_logits(batch))
                yield fused.predict(samples, seed)

        # An object of several frames has a number of its own; inputs keep their names.
        named = source if frames is None else Source(source.where, None, frames)
        _write(here, output, predictions(), named, _Wanted(classes, thresholds, covariance))


@dataclass(frozen=True, eq=False)
class _Wanted:
    """Which columns to write: risk by threshold, and the covariance or not."""

    classes: tuple[str, ...] | None
    thresholds: dict[str, float | Tensor]
    covariance: bool

    def columns(self, prediction: errbar.Prediction, names: Sequence[int | str]) -> Columns:
        made: dict[str, Tensor | Sequence[Any]] = {"input": names, "label": prediction.label}
        if self.classes is not None:
            made["class"] = [self.classes[label] for label in prediction.label.tolist()]
        made |= {
            "confidence": prediction.confidence,
            "entropy": prediction.entropy,
            "mutual_information": prediction.mutual_information,
            "pmf": prediction.pmf,
            "std": prediction.std,
        }
        made |= {name: prediction.risk(threshold) for name, threshold in self.thresholds.items()}
        if self.covariance:
            made["covariance"] = prediction.covariance
        return made


def _write(
    here: Session, output: Path, predictions: Iterator[errbar.Prediction], source: Source, wanted: _Wanted
) -> None:
    count, confidence, information = 0, 0.0, 0.0
    # Closed here, so that a mistake ends the progress line before it is told.
    with closing(predictions), writing(output, wanted.classes) as writer:  # type: ignore[type-var]
        for prediction in predictions:
            writer.add(wanted.columns(prediction, source.names(count, len(prediction))))
            count += len(prediction)
            confidence += float(prediction.confidence.sum())
            information += float(prediction.mutual_information.sum())
        if not count:
            raise DataError(f"The data {source.where} are empty: expected at least one batch.")
    here.answer(
        {
            "output": output,
            "inputs": count,
            "mean_confidence": confidence / count,
            "mean_mutual_information": information / count,
            "bytes": output.stat().st_size,
        }
    )


def _tracked(source: Source, here: Session) -> Iterator[Batch]:
    loader = source.loader()
    return track(batches(loader), "Predicting", total=count_batches(loader), enabled=here.progress)


def thresholds_of(risk: Sequence[str] | None) -> dict[str, float | Tensor]:
    """Columns of risk by their name: risk_0.05 for one threshold, risk_by_class for one for each class."""
    found: dict[str, float | Tensor] = {}
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
        if name in found:
            raise ArgumentError(f"There are two thresholds for {name}; expected each once.")
        found[name] = numbers[0] if len(numbers) == 1 else torch.tensor(numbers, dtype=torch.float64)
    return found


def _requests(
    posteriors: Sequence[Path], models: Sequence[str], weights: Sequence[Path], frames: int | None
) -> list[PosteriorRequest]:
    """Files with their models and weights, by the order in which they were typed."""
    count = len(posteriors)
    if frames is None and count < 2:
        raise ArgumentError("There is one --posterior; expected two or more to fuse, or --frames for one classifier.")
    if frames is not None and count != 1:
        raise ArgumentError(f"There are {count} posteriors; expected one --posterior with --frames.")
    if len(models) not in (1, count) or len(weights) not in (0, count):
        raise ArgumentError(
            f"There are {count} posteriors, {len(models)} models and {len(weights)} weights; expected one --model for "
            "all or for each, and --weights for each or for none."
        )
    each = [models[0]] * count if len(models) == 1 else list(models)
    files: list[Path | None] = [*weights] if weights else [None] * count
    return [PosteriorRequest(*parts) for parts in zip(posteriors, each, files, strict=True)]


def _same_classes(loaded: Sequence[Loaded], paths: Sequence[Path]) -> tuple[str, ...] | None:
    names = {one.classes: path for one, path in zip(loaded, paths, strict=True) if one.classes is not None}
    if len(names) > 1:
        first, second = list(names.values())[:2]
        raise MismatchError(
            f"{first} and {second} name other classes, or in another order; expected the same classes to fuse."
        )
    return next(iter(names), None)


def _require_frames(batch: Batch, frames: int) -> None:
    if len(batch) != frames:
        raise DataError(
            f"An object has {len(batch)} frames and not {frames}; expected a multiple of {frames} inputs, and batches "
            "of one object from a callable."
        )
