"""`errbar outliers`: the data ranked by suspicion."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import errbar
from errbar.cli import options

if TYPE_CHECKING:
    from torch import Tensor

# Rows of an output that are made at a time.
_ROWS = 4096


def outliers(
    posterior: options.PosteriorArgument,
    data: options.DataArgument,
    model: options.Model,
    weights: options.Weights = None,
    by: Annotated[
        options.SuspicionName | None, typer.Option("--by", help="Without it label-suspicion, where there are labels.")
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="The data were not part of the fit; without it they were.")
    ] = False,
    top: Annotated[int, typer.Option("--top", min=1, help="How many to print.")] = 20,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="All of them, ranked: .jsonl, .csv, .parquet or .npz."),
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
    """Rank the data by suspicion: unusual inputs, and labels that the model finds hard to believe."""
    from errbar.cli.inputs import TRAINING, DataRequest, Recorded
    from errbar.cli.output import require_format, require_new, writing
    from errbar.cli.posteriors import PosteriorRequest
    from errbar.cli.session import session, table

    with session("outliers", as_json=as_json, progress=progress, device=device) as here:
        if output is not None:
            require_new(output, force)
            require_format(output)
        loaded = PosteriorRequest(posterior, model, weights).load(here.device)
        source = DataRequest(data, batch_size, transform, image_size).open(TRAINING, loaded.classes)
        recorded = Recorded(source.loader())
        scores = errbar.outlier_scores(
            loaded.posterior, recorded, leave_out=not held_out, samples=samples, seed=seed, progress=here.progress
        )
        default = "label_suspicion" if scores.label_suspicion is not None else "mutual_information"
        score = default if by is None else options.argument_of(by)
        order = scores.ranking(score).cpu()
        # All at once and in order: a .parquet file would be read again for each name in the order of suspicion.
        names = source.names(0, len(order))

        def columns(rows: Tensor) -> dict[str, Any]:
            """Columns of the inputs with these numbers."""
            inputs: dict[str, Any] = {"input": [names[row] for row in rows.tolist()]}
            if scores.label_suspicion is not None:
                labels = [int(recorded.labels[row]) for row in rows.tolist()]
                inputs["label"] = labels
                if loaded.classes is not None:
                    inputs["class"] = [loaded.classes[label] for label in labels]
                inputs["label_suspicion"] = scores.label_suspicion.cpu()[rows]
            return inputs | {
                "mutual_information": scores.mutual_information.cpu()[rows],
                "contrast_variance": scores.contrast_variance.cpu()[rows],
            }

        if output is not None:
            with writing(output, loaded.classes) as writer:
                for part in order.split(_ROWS):
                    writer.add(columns(part))
        first = {
            name: values if isinstance(values, list) else values.tolist()
            for name, values in columns(order[:top]).items()
        }
        rows = [dict(zip(first, row, strict=True)) for row in zip(*first.values(), strict=True)]
        facts = {"inputs": len(order), "by": score, "output": output, "outliers": rows}
        headings = [name.replace("_", " ") for name in first]
        title = f"The most suspicious of {len(order):,} inputs by {score.replace('_', ' ')}"
        here.answer(facts, table(title, headings, [tuple(row.values()) for row in rows]))
