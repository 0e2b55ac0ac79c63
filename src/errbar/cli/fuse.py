"""`errbar fuse`: several classifiers of the same inputs, or several frames of each object."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import errbar
from errbar.cli import options
from errbar.errors import ArgumentError, DataError, FileError

if TYPE_CHECKING:
    from errbar._model.batch import Batch


def fuse(
    data: options.DataArgument,
    output: options.Results,
    posterior: options.Posteriors,
    model: options.Models,
    weights: options.WeightsFiles = None,
    frames: Annotated[
        int | None, typer.Option("--frames", min=1, help="One classifier: this many inputs in a row are one object.")
    ] = None,
    joint: Annotated[
        bool, typer.Option("--joint", help="With --frames: use the covariance R between the frames (fuse_frames).")
    ] = False,
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
    """Fuse several classifiers of the same inputs, or with --frames several frames of each object, into one PMF.

    Classifiers are fused by their covariances alone, as in the paper; errbar calibrate-fusion weighs them by held-out
    data first, and errbar predict takes what it writes. Frames are weighted by their precisions, as errbar.Track does;
    with --joint by the covariance R between them, which assumes that only the parameters make frames differ.
    """
    from errbar.cli.inputs import NEW, DataRequest, Source
    from errbar.cli.output import require_format, require_new
    from errbar.cli.posteriors import notice_if_uncalibrated, posterior_requests, same_classes
    from errbar.cli.predictions import (
        PredictionColumns,
        require_thresholds,
        thresholds_of,
        tracked_batches,
        write_predictions,
    )
    from errbar.cli.session import session

    with session("fuse", as_json=as_json, progress=progress, device=device) as here:
        require_new(output, force)
        require_format(output)
        thresholds = thresholds_of(risk)
        _require_count(len(posterior), frames, joint)
        for path in posterior:
            _require_one_network(path, frames)
        loaded = [request.load(here.device) for request in posterior_requests(posterior, model or [], weights or [])]
        require_thresholds(thresholds, loaded[0].posterior.information.n_classes)
        classes = same_classes(loaded, posterior)
        data_request = DataRequest(data, frames or batch_size, transform, image_size)
        source = data_request.open(NEW, classes, labelled=False)

        def predictions() -> Generator[errbar.Prediction, None, None]:
            for batch in tracked_batches(source, here):
                if frames is not None:
                    _require_frames(batch, frames)
                if frames is None:
                    fused = errbar.fuse([member.posterior.logits(batch) for member in loaded])
                elif joint:
                    fused = errbar.fuse_frames(loaded[0].posterior.joint_logits(batch))
                else:
                    fused = errbar.Track(loaded[0].posterior).add(batch).logits
                yield fused.predict(samples, seed)
            notice_if_uncalibrated(here, *(member.posterior for member in loaded))

        # An object of several frames has a number of its own; inputs keep their names.
        objects = source if frames is None else Source(source.where, None, frames)
        columns = PredictionColumns(classes, thresholds, covariance)
        write_predictions(here, output, predictions(), objects, columns)


def _require_count(posteriors: int, frames: int | None, joint: bool) -> None:
    if joint and frames is None:
        raise ArgumentError("--joint is for frames of one object; expected --frames with it.")
    if frames is None and posteriors < 2:
        raise ArgumentError("There is one --posterior; expected two or more to fuse, or --frames for one classifier.")
    if frames is not None and posteriors != 1:
        raise ArgumentError(f"There are {posteriors} posteriors; expected one --posterior with --frames.")


def _require_one_network(path: Path, frames: int | None) -> None:
    description = errbar.info(path)
    if isinstance(description, errbar.FusionDescription):
        instead = (
            "errbar predict answers for its inputs one by one"
            if frames is None
            else "errbar serve fuses frames (POST /v1/fuse), and errbar predict answers for each of them"
        )
        raise FileError(
            f"{path} holds a fused classifier of {len(description.networks)} networks, which are fused already; "
            f"expected the posterior of one network. With this file {instead}."
        )


def _require_frames(batch: Batch, frames: int) -> None:
    if len(batch) != frames:
        raise DataError(
            f"An object has {len(batch)} frames and not {frames}; expected a multiple of {frames} inputs, and batches "
            "of one object from a callable."
        )
