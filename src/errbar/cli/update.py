"""`errbar update`: a posterior after more data."""

from __future__ import annotations

from typing import Annotated

import typer

import errbar
from errbar.cli import options


def update(
    posterior: options.PosteriorArgument,
    data: options.DataArgument,
    model: options.Model,
    output: options.Output,
    weights: options.Weights = None,
    discount: Annotated[
        float, typer.Option("--discount", min=0.0, max=1.0, help="Weight of the earlier data, where things drift.")
    ] = 1.0,
    transform: options.Transform = None,
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = 256,
    device: options.Device = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Add the information of more data to a posterior; the weights do not move."""
    from errbar.cli.inputs import TRAINING, DataRequest, first_inputs
    from errbar.cli.posteriors import COMPARED, PosteriorRequest, opened, save, variance_change
    from errbar.cli.session import session

    with session("update", as_json=as_json, device=device, ranks=True) as here:
        request = PosteriorRequest(posterior, model, weights)
        data_request = DataRequest(data, batch_size, transform, image_size)
        loaded, source = opened(here, request, data_request, TRAINING, output, force)
        before = loaded.posterior
        discounted = before
        if discount < 1:
            conditioned = errbar.condition(before.information * discount, before.prior)
            discounted = conditioned.with_calibration(**vars(before.calibration)).with_label_factors(
                before.label_factors
            )
        inputs = here.together(lambda: first_inputs(source.loader(), COMPARED))
        after = discounted.update(here.together(source.loader))
        save(here, after, output, loaded.classes, variance_change(before, after, inputs))
