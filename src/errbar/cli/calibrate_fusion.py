"""`errbar calibrate-fusion`: several classifiers as one, weighed by held-out data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import errbar
from errbar.cli import options
from errbar.errors import ArgumentError

if TYPE_CHECKING:
    from errbar.cli.inputs import Source
    from errbar.cli.posteriors import Loaded


def calibrate_fusion(
    data: options.DataArgument,
    output: options.Output,
    posterior: options.Posteriors,
    model: options.Models,
    weights: options.WeightsFiles = None,
    folds: Annotated[int, typer.Option("--folds", min=2, help="Folds of the cross-validation.")] = 5,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Monte Carlo draws in the search.")] = 128,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the folds and of the draws.")] = 0,
    factors: options.Factors = False,
    transform: options.Transform = None,
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = 256,
    device: options.Device = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
    progress: options.Progress = True,
) -> None:
    """Fuse several classifiers as one, each weighed by what held-out data with labels say of it, and save it.

    errbar predict, evaluate, export and serve take the file, with the --model of each network in the same order; info
    and verify take it too.
    """
    from errbar._base.memory import readable
    from errbar.cli.inputs import HELD_OUT, DataRequest
    from errbar.cli.output import require_new
    from errbar.cli.posteriors import posterior_requests, same_classes
    from errbar.cli.session import session

    with session("calibrate-fusion", as_json=as_json, progress=progress, device=device, ranks=True) as here:

        def prepared() -> tuple[list[Loaded], tuple[str, ...] | None, Source]:
            if here.team.leads:
                require_new(output, force)
            if len(posterior) < 2:
                raise ArgumentError("There is one --posterior; expected two or more to fuse.")
            requests = posterior_requests(posterior, model or [], weights or [])
            loaded = [request.load(here.device) for request in requests]
            classes = same_classes(loaded, posterior)
            source = DataRequest(data, batch_size, transform, image_size).open(HELD_OUT, classes)
            return loaded, classes, source

        loaded, classes, source = here.together(prepared)
        fused = errbar.calibrate_fusion(
            [member.posterior for member in loaded],
            here.together(source.loader),
            folds=folds,
            seed=seed,
            samples=samples,
            progress=here.progress,
        )
        here.leading(lambda: fused.save(output, factors=factors, classes=classes))
        if here.team.leads:
            size = output.stat().st_size
            facts = {
                "output": output,
                "networks": len(fused),
                "scales": fused.scales,
                "discrepancies": fused.discrepancies,
                "temperature": fused.temperature,
                "covariance_scale": fused.covariance_scale,
                "classes": fused.n_classes if classes is None else list(classes),
                "table": None if fused.table is None else fused.table.described(),
                "bytes": size,
            }
            here.answer(facts, f"{fused}\nSaved: {output}, {readable(size)}")
