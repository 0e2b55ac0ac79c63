"""`errbar predict`: PMFs with error bars."""

from __future__ import annotations

from collections.abc import Generator

import errbar
from errbar.cli import options


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
    """Write PMF, standard deviations, risk and mutual information of each input. Takes the memory of one batch."""
    from errbar.cli.inputs import NEW, DataRequest
    from errbar.cli.output import require_format, require_new
    from errbar.cli.posteriors import PosteriorRequest, notice_if_uncalibrated
    from errbar.cli.predictions import PredictionColumns, thresholds_of, tracked_batches, write_predictions
    from errbar.cli.session import session

    with session("predict", as_json=as_json, progress=progress, device=device) as here:
        require_new(output, force)
        require_format(output)
        thresholds = thresholds_of(risk)
        loaded = PosteriorRequest(posterior, model, weights).load(here.device)
        source = DataRequest(data, batch_size, transform, image_size).open(NEW, loaded.classes, labelled=False)

        def predictions() -> Generator[errbar.Prediction, None, None]:
            for batch in tracked_batches(source, here):
                yield loaded.posterior.predict(batch, samples, seed)
            notice_if_uncalibrated(here, loaded)

        columns = PredictionColumns(loaded.classes, thresholds, covariance)
        write_predictions(here, output, predictions(), source, columns)
