"""`errbar export`: a posterior as one file that predicts without errbar, or without Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from errbar.cli import options
from errbar.errors import DataError

if TYPE_CHECKING:
    from errbar._model.batch import Batch

# Inputs on which the file is compared with what errbar predicts, before it is written.
_EXAMPLE = 16


def export(
    posterior: options.ClassifierArgument,
    data: options.DataArgument,
    model: options.NetworkModels,
    output: options.Graph,
    weights: options.NetworkWeights = None,
    risk: options.Risk = None,
    only: Annotated[
        list[options.OutputName] | None,
        typer.Option("--only", help="This output, not all of them. Can be repeated."),
    ] = None,
    level: Annotated[
        float, typer.Option("--level", help="Probability that lower and upper contain, which --only asks for.")
    ] = 0.95,
    draws: Annotated[options.DrawsName, typer.Option("--draws", help="How the draws are made.")] = "random",
    samples: options.Samples = 1000,
    seed: options.Seed = 0,
    transform: options.Transform = None,
    image_size: options.ImageSize = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Export one graph from input to PMF, error bars and risk, as .onnx or .pt2, checked on the first inputs."""
    from errbar._export.write import OUTPUTS, checked_path
    from errbar.cli.inputs import NEW, DataRequest, first_inputs
    from errbar.cli.output import require_new
    from errbar.cli.posteriors import ClassifierRequest
    from errbar.cli.predictions import require_thresholds, thresholds_of
    from errbar.cli.session import session

    with session("export", as_json=as_json) as here:
        require_new(output, force)
        checked_path(output)
        by_name = thresholds_of(risk)
        thresholds = list(by_name.values())
        loaded = ClassifierRequest(posterior, tuple(model), tuple(weights or ())).load(here.device)
        require_thresholds(by_name, loaded.n_classes)
        source = DataRequest(data, _EXAMPLE, transform, image_size).open(NEW, loaded.classes, labelled=False)
        example = next(iter(first_inputs(source.loader(), _EXAMPLE)), None)
        if example is None:
            raise DataError(f"The data {data} are empty: expected at least one batch.")
        names = None if only is None else [options.argument_of(choice) for choice in only]
        loaded.classifier.export(
            output,
            example=example,
            samples=samples,
            seed=seed,
            risk=thresholds,
            draws=draws,
            outputs=names,
            level=level,
        )
        here.answer(
            {
                "output": output,
                "inputs": _inputs(example),
                "outputs": names or [name for name in OUTPUTS if thresholds or name != "risk"],
                **vars(loaded.classifier.calibration),
                "samples": samples,
                "seed": seed,
                "checked_with": len(example),
                "bytes": output.stat().st_size,
            }
        )


def _inputs(batch: Batch) -> dict[str, str]:
    """Names, types and shapes of what the graph takes; the batch size is free."""
    from errbar._export.chain import named_inputs

    return {
        name: f"{str(value.dtype).removeprefix('torch.')} ({', '.join(('batch', *map(str, value.shape[1:])))})"
        for name, value in named_inputs(batch).items()
    }
