"""`errbar predict`: PMFs with error bars."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from errbar.cli import options

if TYPE_CHECKING:
    from torch import Tensor

    from errbar._distributed.order import Columns, Place
    from errbar.cli.inputs import Source
    from errbar.cli.posteriors import LoadedClassifier


def predict(
    posterior: options.ClassifierArgument,
    data: options.DataArgument,
    model: options.NetworkModels,
    output: options.Results,
    weights: options.NetworkWeights = None,
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
    """Write PMF, standard deviations, risk and mutual information of each input. Takes the memory of one batch."""
    from errbar._distributed.order import share_of, used_in_order
    from errbar.cli.inputs import NEW, DataRequest
    from errbar.cli.output import require_new
    from errbar.cli.posteriors import ClassifierRequest, notice_if_uncalibrated
    from errbar.cli.predictions import (
        PredictionColumns,
        is_of_positions,
        require_format_for,
        require_thresholds,
        thresholds_of,
        written,
    )
    from errbar.cli.session import session

    with session("predict", as_json=as_json, progress=progress, device=device, ranks=True) as here:

        def prepared() -> tuple[dict[str, float | Tensor], LoadedClassifier, Source]:
            if here.team.leads:
                require_new(output, force)
                require_format_for(posterior, output)
            thresholds = thresholds_of(risk)
            loaded = ClassifierRequest(posterior, tuple(model), tuple(weights or ())).load(here.device)
            require_thresholds(thresholds, loaded.n_classes)
            request = DataRequest(data, batch_size, transform, image_size)
            return thresholds, loaded, request.open(NEW, loaded.classes, labelled=False)

        thresholds, loaded, source = here.together(prepared)
        loaded.classifier.require_ready(here.team)
        columns = PredictionColumns(loaded.classes, thresholds, covariance)
        share = share_of(here.together(source.loader), here.team, title="Predicting", progress=here.progress)

        def results() -> Generator[tuple[Place, Columns], None, None]:
            for placed in share.stream:
                prediction = loaded.classifier.predict(placed.batch, samples, seed)
                names = None if placed.first is None else source.names(placed.first, len(prediction))
                yield placed.place, columns.of(prediction, names)

        positions = is_of_positions(loaded.classifier)
        facts = used_in_order(
            lambda rows: written(output, rows, source, loaded.classes, of_positions=positions),
            results(),
            share,
            here.team,
            output.parent,
        )
        if facts is not None:
            notice_if_uncalibrated(here, loaded.classifier)
            here.answer(facts)
