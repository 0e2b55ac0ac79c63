"""`assess`: from a posterior and labelled data to a `Report`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from errbar._base.progress import track
from errbar._model.batch import Unpack, batches, count_batches
from errbar._posterior.posterior import Posterior, require_posterior
from errbar.errors import ArgumentError, ErrbarError
from errbar.report import checking, scoring
from errbar.report.examples import examples
from errbar.report.numbers import count
from errbar.report.observing import (
    NETWORK,
    Doubts,
    Fingerprint,
    Leaders,
    Observation,
    Spread,
    gaussian_and_label,
    input_of,
    observe,
)
from errbar.report.values import Facts, Linearisation, Report, ScaleCurves
from errbar.report.verdict import verdict
from errbar.version import __version__

_EXAMPLES = 6
_CHECKED_INPUTS = 64
# Inputs of the curves over T and T_c: many for few classes, and never more numbers in their covariances than this.
_CURVE_INPUTS, _LEAST_CURVE_INPUTS, _CURVE_LOGITS, _CURVE_NUMBERS = 1000, 200, 10_000, 2**26


def assess(
    posterior: Posterior,
    data: Any,
    *,
    outliers: Any = None,
    classes: Sequence[str] | None = None,
    bins: int = 10,
    samples: int = 1000,
    seed: int = 0,
    picture_shape: tuple[int, int, int] | None = None,
    name_of: Callable[[int], str] = str,
    outliers_name: str = "the second set",
    subject: str = "",
    provenance: Sequence[Facts] = (),
    unpack: Unpack | None = None,
    progress: bool = False,
) -> Report:
    """Everything that a report says about `posterior` on `data`, which need labels.

    Args:
        posterior: with T and T_c as they are; before-and-after compares with both at 1, and with the network alone.
        data: held-out batches with labels, of which neither the fit nor the calibration has seen any.
        outliers: batches of inputs that do not belong to the first, to see how well they are told from these.
        classes: names of the classes.
        bins: of the expected calibration error.
        samples: Monte Carlo draws for each input.
        seed: of the draws and of the resampling.
        picture_shape: (channels, height, width) of inputs that are pictures but do not have this shape.
        name_of: what people call the input of a number.
        outliers_name: what people call the second set.
        subject: what the page says it is about.
        provenance: facts about files and commands that the posterior does not know.
        unpack: as in `fit`; that of the fit unless given.
        progress: show how long it still takes.
    """
    require_posterior(posterior)
    size = posterior.information.n_classes
    names = _names(classes, size)
    doubts, fingerprint = Doubts(), Fingerprint()
    uncertain, wrong = Leaders(_EXAMPLES, wrong=False), Leaders(_EXAMPLES, wrong=True)
    spread = Spread(_curve_inputs(size) or 1, gaussian_and_label)
    checked = Spread(_CHECKED_INPUTS, input_of)
    unpack = unpack or posterior.unpack
    stream = track(batches(data, unpack), "Predicting", total=count_batches(data), enabled=progress)
    watchers = (doubts, fingerprint, uncertain, wrong, spread, checked)
    seen = observe(posterior, stream, samples, seed, watchers)

    missing: list[str] = []
    curves = _curves(posterior, spread, seed, missing)
    check = _linearisation(posterior, checked, samples, seed, missing)
    compared = None
    if outliers is not None:
        others = track(batches(outliers, unpack), "Second set", total=count_batches(outliers), enabled=progress)
        inside = checking.score_columns(
            seen.pmfs[NETWORK], seen.final, doubts.mutual_information, doubts.contrast_variance
        )
        outside = checking.scores_of(posterior, others, samples, seed)
        compared = checking.compare_outliers(outliers_name, inside, outside)
    made = scoring.variants(seen, bins, seed)
    effect = scoring.scale_effect(seen, doubts.logits, doubts.std, seed)
    scales = (posterior.temperature, posterior.covariance_scale)
    shown = [examples(leaders.held, names, name_of, picture_shape, samples, seed) for leaders in (uncertain, wrong)]
    return Report(
        subject=subject or f"{count(size)} classes, {count(len(seen.labels))} inputs",
        inputs=len(seen.labels),
        classes=size,
        temperature=scales[0],
        covariance_scale=scales[1],
        verdict=verdict(len(seen.labels), made, effect, scales, check, compared),
        variants=made,
        effect=effect,
        curves=curves,
        class_rows=scoring.class_rows(seen.final, seen.labels, doubts.std, names),
        uncertain=shown[0],
        wrong=shown[1],
        outliers=compared,
        linearisation=check,
        missing=tuple(missing),
        provenance=(*provenance, *_facts(posterior, seen, fingerprint, samples, seed)),
    )


def _names(classes: Sequence[str] | None, size: int) -> list[str]:
    if classes is None:
        return [str(number) for number in range(size)]
    if len(classes) != size:
        raise ArgumentError(f"There are {len(classes)} class names; expected {size}, one for each class.")
    return list(classes)


def _curve_inputs(classes: int) -> int:
    """How many inputs the curves over T and T_c are made of; none where too few of them would fit into memory."""
    wanted = min(_CURVE_INPUTS, max(_LEAST_CURVE_INPUTS, _CURVE_LOGITS // classes))
    return wanted if wanted * classes**2 <= _CURVE_NUMBERS else 0


def _curves(posterior: Posterior, spread: Spread[Any], seed: int, missing: list[str]) -> ScaleCurves | None:
    classes = posterior.information.n_classes
    if not _curve_inputs(classes):
        missing.append(f"The curves over T and T_c are left out: {count(classes)} classes would take too much memory.")
        return None
    return scoring.scale_curves(spread.held, posterior.temperature, posterior.covariance_scale, seed)


def _linearisation(
    posterior: Posterior, checked: Spread[Any], samples: int, seed: int, missing: list[str]
) -> Linearisation | None:
    draws = checking.draws_that_fit(posterior.information.n_parameters)
    if not draws:
        parameters = count(posterior.information.n_parameters)
        missing.append(
            f"The linearisation was not checked: draws of {parameters} parameters would take too much memory."
        )
        return None
    try:
        return checking.linearisation(posterior, checked.held, draws, samples, seed)
    except ErrbarError as error:
        missing.append(f"The linearisation was not checked: {error}")
        return None


def _facts(posterior: Posterior, seen: Observation, fingerprint: Fingerprint, samples: int, seed: int) -> list[Facts]:
    """What made the report, and of what; nothing about the person or the machine but its kind."""
    information = posterior.information
    precision = posterior.prior.precision
    shape = "×".join(map(str, fingerprint.shape or ()))
    fit = (
        (
            "parameters",
            f"{count(information.n_parameters)}: {', '.join(information.parameter_names[:6])}"
            + (" …" if len(information.parameter_names) > 6 else ""),
        ),
        ("samples of the fit", f"{information.n_samples:,.6g}"),
        ("structure, Fisher information", f"{information.structure}, {information.fisher}"),
        ("prior precision", "one for each parameter" if isinstance(precision, torch.Tensor) else str(precision)),
        ("T, T_c", f"{posterior.temperature:.6g}, {posterior.covariance_scale:.6g}"),
        ("weights (SHA-256)", information.network.fingerprint),
    )
    data = (
        ("inputs", f"{count(len(seen.labels))} of shape {shape or 'one number'}"),
        ("inputs and labels (SHA-256)", fingerprint.digest()),
        ("Monte Carlo", f"{samples} draws for each input, seed {seed}"),
    )
    versions = (
        ("errbar", __version__),
        ("torch, numpy", f"{torch.__version__}, {numpy.__version__}"),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("device", str(information.network.device)),
    )
    return [Facts("Posterior", fit), Facts("Data", data), Facts("Versions", versions)]
