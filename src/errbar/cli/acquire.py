"""`errbar acquire`: which inputs to label next."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import errbar
from errbar.cli import options

if TYPE_CHECKING:
    from errbar.cli.inputs import Source


def acquire(
    posterior: options.PosteriorArgument,
    data: options.DataArgument,
    model: options.Model,
    count: Annotated[int, typer.Option("--count", "-k", min=1, help="How many to choose.")],
    weights: options.Weights = None,
    by: Annotated[
        options.AcquisitionName,
        typer.Option("--by", help="What makes a label worth its price; information looks at all that are chosen."),
    ] = "information",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The choice, in order: .jsonl, .csv, .parquet or .npz."),
    ] = None,
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
    """Choose the inputs of a pool to label next; labels in the data are ignored."""
    from errbar.cli.inputs import POOL, DataRequest
    from errbar.cli.output import require_format, require_new, writing
    from errbar.cli.posteriors import PosteriorRequest
    from errbar.cli.session import session, table

    with session("acquire", as_json=as_json, progress=progress, device=device) as here:
        if output is not None:
            require_new(output, force)
            require_format(output)
        loaded = PosteriorRequest(posterior, model, weights).load(here.device)
        request = DataRequest(data, batch_size, transform, image_size)
        source: Source = request.open(POOL, loaded.classes, labelled=False)
        chosen = errbar.acquire(
            loaded.posterior,
            source.loader(),
            count,
            by=options.argument_of(by),
            samples=samples,
            seed=seed,
            progress=here.progress,
        ).tolist()
        # All at once and in order: a .parquet file would be read again for each name in the order of choice.
        names = source.names(0, max(chosen) + 1)
        inputs = [names[index] for index in chosen]
        if output is not None:
            with writing(output, loaded.classes) as writer:
                writer.add({"input": inputs, "index": chosen})
        facts = {"by": options.argument_of(by), "output": output, "chosen": inputs, "indices": chosen}
        rows = [(place, name) for place, name in enumerate(inputs, start=1)]
        here.answer(facts, table(f"What to label next, by {by.replace('-', ' ')}", ["choice", "input"], rows))
