"""`errbar calibrate`: temperature, covariance scale and softening from held-out data."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

import errbar
from errbar.cli import options


def calibrate(
    posterior: options.PosteriorArgument,
    data: options.DataArgument,
    model: options.Model,
    output: options.Output,
    weights: options.Weights = None,
    objective: Annotated[options.ObjectiveName, typer.Option("--objective", help="What to minimise.")] = "nll",
    only: Annotated[options.ScaleName | None, typer.Option("--only", help="Fit this alone; without it both.")] = None,
    softening: Annotated[
        bool, typer.Option("--softening", help="Fit also how far T grows with the uncertainty of an input.")
    ] = False,
    per_label: Annotated[
        bool, typer.Option("--per-label", help="Fit them for each of several labels, in place of one for all.")
    ] = False,
    samples: options.Samples = 1000,
    seed: options.Seed = 0,
    factors: options.Factors = False,
    transform: options.Transform = None,
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = 256,
    device: options.Device = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
    progress: options.Progress = True,
) -> None:
    """Fit the temperature and the covariance scale, with --softening a third number, to held-out data with labels."""
    from errbar.cli.inputs import HELD_OUT, DataRequest
    from errbar.cli.posteriors import PosteriorRequest, opened, save
    from errbar.cli.session import session

    with session("calibrate", as_json=as_json, progress=progress, device=device, ranks=True) as here:
        request = PosteriorRequest(posterior, model, weights)
        data_request = DataRequest(data, batch_size, transform, image_size)
        loaded, source = opened(here, request, data_request, HELD_OUT, output, force)
        scales = get_args(options.ScaleName) if only is None else (only,)
        calibrated = errbar.calibrate(
            loaded.posterior,
            here.together(source.loader),
            objective=objective,
            fit=(*map(options.argument_of, scales), *(("softening",) if softening else ())),
            per_label=per_label,
            samples=samples,
            seed=seed,
            progress=here.progress,
        )
        save(here, calibrated, output, loaded.classes, {}, factors=factors)
