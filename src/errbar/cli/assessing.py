"""`errbar outliers` and `errbar plan`: what looks wrong, and what would fit."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import errbar
from errbar._model.batch import Batch, batches
from errbar.cli import options
from errbar.cli.choices import FisherChoice, PrecisionChoice, SuspicionChoice
from errbar.cli.models import model_of
from errbar.cli.posteriors import PosteriorRequest
from errbar.cli.session import session, table
from errbar.cli.source import TRAINING, DataRequest, Recorded
from errbar.cli.writers import require_format, require_new, writing
from errbar.errors import ArgumentError, DataError

# Rows of an output that are made at a time.
_ROWS = 4096
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "t": 10**12}


def outliers(
    posterior: options.PosteriorArgument,
    data: options.DataArgument,
    model: options.Model,
    weights: options.Weights = None,
    by: Annotated[
        SuspicionChoice | None, typer.Option("--by", help="Without it label-suspicion, where there are labels.")
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
    """The data ranked by suspicion: unusual inputs, and labels that the model finds hard to believe."""
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
        chosen = default if by is None else by.value.replace("-", "_")
        order = scores.ranking(chosen).cpu()
        # All at once and in order: a .parquet file would be read again for each name in the order of suspicion.
        names = source.names(0, len(order))

        def columns(rows: Tensor) -> dict[str, Any]:
            """Columns of the inputs with these numbers."""
            made: dict[str, Any] = {"input": [names[row] for row in rows.tolist()]}
            if scores.label_suspicion is not None:
                labels = [int(recorded.labels[row]) for row in rows.tolist()]
                made["label"] = torch.tensor(labels)
                if loaded.classes is not None:
                    made["class"] = [loaded.classes[label] for label in labels]
                made["label_suspicion"] = scores.label_suspicion.cpu()[rows]
            return made | {
                "mutual_information": scores.mutual_information.cpu()[rows],
                "contrast_variance": scores.contrast_variance.cpu()[rows],
            }

        if output is not None:
            with writing(output, loaded.classes) as writer:
                for part in order.split(_ROWS):
                    writer.add(columns(part))
        first = {
            name: values.tolist() if isinstance(values, Tensor) else values
            for name, values in columns(order[:top]).items()
        }
        listed = [dict(zip(first, row, strict=True)) for row in zip(*first.values(), strict=True)]
        facts = {"inputs": len(order), "by": chosen, "output": output, "outliers": listed}
        headings = [name.replace("_", " ") for name in first]
        title = f"The most suspicious of {len(order):,} inputs by {chosen.replace('_', ' ')}"
        here.answer(facts, table(title, headings, [tuple(row.values()) for row in listed]))


def plan(
    model: options.ModelArgument,
    data: options.DataArgument,
    weights: options.Weights = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="BYTES", help="What a fit may take, for example 8GiB.")
    ] = None,
    fisher: options.Fisher = FisherChoice.GGN,
    rank: options.Rank = 100,
    precision: options.Precision = PrecisionChoice.MODEL,
    samples: options.Samples = 1000,
    transform: options.Transform = None,
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = 256,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """What each structure and number of layers would cost; the first batch of the data is the example."""
    with session("plan", as_json=as_json, device=device) as here:
        limit = None if memory is None else byte_count(memory)
        source = DataRequest(data, batch_size, transform, image_size).open(TRAINING)
        network = model_of(model, weights, here.device)
        example = next(batches(source.loader()), None)
        if example is None:
            raise DataError(f"The data {data} are empty: expected at least one batch.")
        made = errbar.plan(
            network,
            example,
            limit,
            fisher=fisher.value,
            rank=rank,
            precision="float64" if precision is PrecisionChoice.FLOAT64 else None,
            samples=samples,
            unpack=_as_call,
        )
        best = None if made.best is None else asdict(made.best)
        here.answer({**asdict(made), "best": best}, str(made))


def _as_call(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    return batch.args, batch.kwargs, batch.labels


def byte_count(text: str) -> int:
    """Bytes of a number with a unit.

    >>> byte_count("8GiB"), byte_count("500 MB"), byte_count("1024")
    (8589934592, 500000000, 1024)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None or float(match[1]) <= 0:
        raise ArgumentError(f"The memory is {text!r}; expected bytes, for example 8GiB or 500MB.")
    return int(float(match[1]) * _UNITS[match[2] or ""])
