"""`errbar outliers`: the data ranked by suspicion."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import errbar
from errbar.cli import options

if TYPE_CHECKING:
    from torch import Tensor

    from errbar._distributed.order import Columns, Place
    from errbar.cli.inputs import Source
    from errbar.cli.posteriors import Loaded
    from errbar.cli.session import Session

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
    from errbar.cli.inputs import TRAINING, DataRequest
    from errbar.cli.output import require_format, require_new
    from errbar.cli.posteriors import PosteriorRequest
    from errbar.cli.session import session

    with session("outliers", as_json=as_json, progress=progress, device=device, ranks=True) as here:

        def prepared() -> tuple[Loaded, Source]:
            if output is not None and here.team.leads:
                require_new(output, force)
                require_format(output)
            loaded = PosteriorRequest(posterior, model, weights).load(here.device)
            return loaded, DataRequest(data, batch_size, transform, image_size).open(TRAINING, loaded.classes)

        loaded, source = here.together(prepared)
        values = _scored(here, loaded.posterior, source, leave_out=not held_out, samples=samples, seed=seed)
        score = None if by is None else options.argument_of(by)
        here.leading(lambda: None if values is None else _tell(here, values, loaded, source, score, top, output))


def _scored(
    here: Session, posterior: errbar.Posterior, source: Source, *, leave_out: bool, samples: int, seed: int
) -> dict[str, Tensor] | None:
    """Scores, and labels where all inputs have one, in the order of the data; None on all ranks but the first."""
    import torch

    from errbar._distributed.order import concatenated, share_of, used_in_order

    posterior.require_ready(here.team)
    share = share_of(here.together(source.loader), here.team, title="Scoring", progress=here.progress)

    def results() -> Generator[tuple[Place, Columns], None, None]:
        for placed in share.stream:
            scores = errbar.outlier_scores(posterior, [placed.batch], leave_out=leave_out, samples=samples, seed=seed)
            columns = {
                "mutual_information": scores.mutual_information,
                "contrast_variance": scores.contrast_variance,
            }
            if scores.label_suspicion is not None:
                columns["label_suspicion"] = scores.label_suspicion
                # Those of two classes may be a column of floats.
                columns["label"] = torch.as_tensor(placed.batch.labels).reshape(-1).long()
            yield placed.place, {name: values.cpu() for name, values in columns.items()}

    return used_in_order(concatenated, results(), share, here.team)


def _tell(
    here: Session,
    values: dict[str, Tensor],
    loaded: Loaded,
    source: Source,
    by: str | None,
    top: int,
    output: Path | None,
) -> None:
    """Rank the inputs, write all of them if that is asked for, and print the first."""
    from errbar.cli.output import writing
    from errbar.cli.session import table

    suspicion = values.get("label_suspicion")
    scores = errbar.OutlierScores(values["mutual_information"], values["contrast_variance"], suspicion)
    score = by or ("mutual_information" if suspicion is None else "label_suspicion")
    order = scores.ranking(score)
    # All at once and in order: a .parquet file would be read again for each name in the order of suspicion.
    names = source.names(0, len(order))

    def columns(rows: Tensor) -> dict[str, Any]:
        """Columns of the inputs with these numbers."""
        inputs: dict[str, Any] = {"input": [names[row] for row in rows.tolist()]}
        if suspicion is not None:
            inputs["label"] = values["label"][rows].tolist()
            if loaded.classes is not None:
                inputs["class"] = [loaded.classes[label] for label in inputs["label"]]
            inputs["label_suspicion"] = suspicion[rows]
        return inputs | {name: values[name][rows] for name in ("mutual_information", "contrast_variance")}

    if output is not None:
        with writing(output, loaded.classes) as writer:
            for part in order.split(_ROWS):
                writer.add(columns(part))
    first = {
        name: values if isinstance(values, list) else values.tolist() for name, values in columns(order[:top]).items()
    }
    rows = [dict(zip(first, row, strict=True)) for row in zip(*first.values(), strict=True)]
    facts = {"inputs": len(order), "by": score, "output": output, "outliers": rows}
    headings = [name.replace("_", " ") for name in first]
    title = f"The most suspicious of {len(order):,} inputs by {score.replace('_', ' ')}"
    here.answer(facts, table(title, headings, [tuple(row.values()) for row in rows]))
