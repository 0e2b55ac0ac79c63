"""`errbar evaluate`: how good a posterior is, as a table or as a page."""

from __future__ import annotations

import shlex
from collections.abc import Generator, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import errbar
from errbar.cli import options
from errbar.errors import ArgumentError

if TYPE_CHECKING:
    from errbar._distributed.order import Columns, Place
    from errbar.cli.inputs import Source
    from errbar.cli.posteriors import LoadedClassifier
    from errbar.cli.session import Session
    from errbar.report.values import Estimate, Facts, Variant


def evaluate(
    context: typer.Context,
    posterior: options.ClassifierArgument,
    data: options.DataArgument,
    model: options.NetworkModels,
    weights: options.NetworkWeights = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write a page about it too: an .html file.")
    ] = None,
    outliers: Annotated[
        str | None, typer.Option("--outliers", metavar="DATA", help="For the report: inputs that do not belong here.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option("--picture-shape", metavar="SHAPE", help="For the report: inputs are pictures of 8x8 or 3x32x32."),
    ] = None,
    bins: Annotated[int, typer.Option("--bins", min=1, help="Bins of the expected calibration error.")] = 10,
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
    """Measure accuracy, NLL, Brier score and ECE on data with labels, before and after calibration; of classes AURC."""
    from errbar import report as pages
    from errbar.cli.inputs import NEW, DataRequest
    from errbar.cli.label_scores import evaluate_labels
    from errbar.cli.position_scores import evaluate_positions
    from errbar.cli.posteriors import ClassifierRequest, notice_if_uncalibrated
    from errbar.cli.session import session

    with session("evaluate", as_json=as_json, progress=progress, device=device, ranks=True) as here:

        def prepared() -> tuple[tuple[int, int, int] | None, LoadedClassifier, Source, Source | None]:
            pictures = _required(report, outliers, shape, force, here.team.size)
            loaded = ClassifierRequest(posterior, tuple(model), tuple(weights or ())).load(here.device)
            source = DataRequest(data, batch_size, transform, image_size).open(NEW, loaded.classes)
            second = None
            if outliers is not None:
                second = DataRequest(outliers, batch_size, transform, image_size).open(NEW, None, labelled=False)
            _try(loaded, [source, *([second] if second is not None else [])], pictures)
            return pictures, loaded, source, second

        pictures, loaded, source, second = here.together(prepared)
        page = None
        if report is not None:
            page = pages.assess(
                loaded.classifier,
                source.loader(),
                outliers=None if second is None else second.loader(),
                classes=loaded.classes,
                bins=bins,
                samples=samples,
                seed=seed,
                picture_shape=pictures,
                name_of=lambda index: str(source.names(index, 1)[0]),
                outliers_name=outliers or "",
                subject=f"{posterior.name} on {data}",
                choice=errbar.info(posterior).choice,
                provenance=(_command(context, posterior, model, weights or [], data, outliers),),
                progress=here.progress,
            )
            pages.write(page, report)
        if isinstance(loaded.classifier, errbar.Posterior) and loaded.classifier.information.outputs != "classes":
            notice_if_uncalibrated(here, loaded.classifier)
            if loaded.classifier.information.outputs == "positions":
                evaluate_positions(here, loaded.classifier, source, samples, bins, seed, report)
            else:
                evaluate_labels(here, loaded.classifier, loaded.classes, source, samples, bins, seed, report)
            return
        if page is None:
            scores = _scored(here, loaded.classifier, source, samples, bins, seed)
            if scores is None:
                return
            inputs = sum(bin_.count for bin_ in scores[0].diagram)
        else:
            scores, inputs = page.variants, page.inputs
        notice_if_uncalibrated(here, loaded.classifier)
        _answer(here, loaded, scores, inputs, bins, report)


def _scored(
    here: Session,
    posterior: errbar.Posterior | errbar.FusedClassifier,
    source: Source,
    samples: int,
    bins: int,
    seed: int,
) -> tuple[Variant, ...] | None:
    """The scores on all data; None on all ranks but the first."""
    from errbar._distributed.order import concatenated, share_of, used_in_order
    from errbar.report.observing import Observation, observe
    from errbar.report.scoring import variants

    posterior.require_ready(here.team)
    share = share_of(here.together(source.loader), here.team, title="Predicting", progress=here.progress)

    def results() -> Generator[tuple[Place, Columns], None, None]:
        for placed in share.stream:
            part = observe(posterior, [placed.batch], samples, seed)
            yield placed.place, {**part.pmfs, "labels": part.labels}

    def score(rows: Iterator[Columns]) -> tuple[Variant, ...]:
        pmfs = concatenated(rows)
        labels = pmfs.pop("labels")
        return variants(Observation(pmfs, labels), bins, seed)

    return used_in_order(score, results(), share, here.team)


def _required(
    report: Path | None, outliers: str | None, shape: str | None, force: bool, processes: int
) -> tuple[int, int, int] | None:
    """Refuse a report that could not be written before anything is computed; the shape of its pictures, if given."""
    from errbar.cli.output import require_new
    from errbar.report.pictures import picture_shape

    if report is None:
        for option, value in (("--outliers", outliers), ("--picture-shape", shape)):
            if value is not None:
                raise ArgumentError(f"{option} is for the report; expected --report FILE with it.")
        return None
    if processes > 1:
        raise ArgumentError(
            f"errbar evaluate --report was started {processes} times by torchrun; expected one process, because the "
            "page looks at all inputs together. Leave torchrun out, or --report: the scores are the same."
        )
    if report.suffix.lower() not in (".html", ".htm"):
        raise ArgumentError(f"The report {report} ends in {report.suffix!r}; expected .html.")
    require_new(report, force)
    return None if shape is None else picture_shape(shape)


def _try(loaded: LoadedClassifier, sources: Sequence[Source], shape: tuple[int, int, int] | None) -> None:
    """Two inputs of each set: what is wrong with the second set, or with pictures, is not to cost a whole pass."""
    from errbar.cli.inputs import first_inputs
    from errbar.report.pictures import picture_of

    for source in sources:
        for batch in first_inputs(source.loader(), 2):
            loaded.classifier.predict(batch, samples=2)
            picture_of(batch, shape)


def _command(
    context: typer.Context,
    posterior: Path,
    models: Sequence[str],
    weights: Sequence[Path],
    data: str,
    outliers: str | None,
) -> Facts:
    """What was typed, when, and which files it named."""
    from errbar.report.values import Facts

    typed = context.obj if isinstance(context.obj, tuple) else ("evaluate",)
    rows = [
        ("command", shlex.join(("errbar", *typed))),
        ("time", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),
        ("posterior", str(posterior)),
        ("its content (SHA-256)", errbar.info(posterior).content),
        ("model", ", ".join(models) + (f", weights {', '.join(map(str, weights))}" if weights else "")),
        ("data", data),
    ]
    return Facts("Command", (*rows, *([("second set", outliers)] if outliers is not None else [])))


def _answer(
    here: Session, loaded: LoadedClassifier, scores: tuple[Variant, ...], inputs: int, bins: int, report: Path | None
) -> None:
    from rich.console import Group, RenderableType

    from errbar.cli.session import table
    from errbar.report.verdict import headline

    verdict = headline(scores[0], scores[-1])
    facts: dict[str, Any] = {
        "inputs": inputs,
        **vars(loaded.classifier.calibration),
        "bins": bins,
        "scores": {variant.key: _scores(variant) for variant in scores},
        "verdict": verdict,
    }
    if report is not None:
        facts |= {"report": report, "bytes": report.stat().st_size}
    headings = ("", "accuracy", "NLL", "Brier", "ECE", "95 %", "AURC")
    rows = [
        (
            variant.key.replace("_", " "),
            *(estimate.value for estimate in (variant.accuracy, variant.nll, variant.brier, variant.ece)),
            f"{variant.ece.low:.3f}–{variant.ece.high:.3f}",
            variant.aurc,
        )
        for variant in scores
    ]
    parts: list[RenderableType] = [table(f"{inputs:,} inputs", headings, rows), verdict]
    if report is not None:
        parts.append(f"The page: {report}")
    here.answer(facts, Group(*parts))


def _scores(variant: Variant) -> dict[str, Any]:
    estimates: dict[str, Estimate] = {
        "accuracy": variant.accuracy,
        "nll": variant.nll,
        "brier": variant.brier,
        "ece": variant.ece,
        "overconfidence": variant.gap,
    }
    values = {name: estimate.value for name, estimate in estimates.items()}
    intervals = {f"{name}_interval": (estimate.low, estimate.high) for name, estimate in estimates.items()}
    return values | intervals | {"aurc": variant.aurc}
