"""`errbar forget`: a posterior without some of its data."""

from __future__ import annotations

from errbar.cli import options


def forget(
    posterior: options.PosteriorArgument,
    data: options.DataArgument,
    model: options.Model,
    output: options.Output,
    weights: options.Weights = None,
    transform: options.Transform = None,
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = 256,
    device: options.Device = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Remove the information of some data from a posterior. This is not unlearning: the weights do not move."""
    from errbar.cli.inputs import TRAINING, DataRequest, first_inputs
    from errbar.cli.posteriors import COMPARED, PosteriorRequest, opened, save, variance_change
    from errbar.cli.session import session

    with session("forget", as_json=as_json, device=device, ranks=True) as here:
        request = PosteriorRequest(posterior, model, weights)
        data_request = DataRequest(data, batch_size, transform, image_size)
        loaded, source = opened(here, request, data_request, TRAINING, output, force)
        inputs = here.together(lambda: first_inputs(source.loader(), COMPARED))
        after = loaded.posterior.forget(here.together(source.loader))
        save(here, after, output, loaded.classes, variance_change(loaded.posterior, after, inputs))
