"""`assess`: from a posterior and labelled data to a `Report`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
import torch

from errbar._base.progress import track
from errbar._curvature.mixture import described_structure
from errbar._files.choice_table import ChoiceTable
from errbar._fusion.fused import FusedClassifier
from errbar._model.batch import Batch, Unpack, batches, count_batches
from errbar._model.outputs import CLASSES
from errbar._posterior.posterior import Posterior, require_posterior
from errbar.errors import ArgumentError, ErrbarError
from errbar.report import checking, scoring
from errbar.report.decided import decided, label_rows, scores_of
from errbar.report.examples import examples
from errbar.report.numbers import count
from errbar.report.observing import (
    NETWORK,
    Classifier,
    Doubts,
    Fingerprint,
    Leaders,
    Spread,
    draws_of,
    gaussian_and_label,
    input_of,
    observe,
)
from errbar.report.values import Facts, Linearisation, Report, ScaleCurves
from errbar.report.verdict import verdict
from errbar.version import __version__

_EXAMPLES = 6
_CHECKED_INPUTS = 64
# Inputs for the curves over T and T_c: many for few classes, but never more numbers in their covariances than this.
_CURVE_INPUTS, _LEAST_CURVE_INPUTS, _CURVE_LOGITS, _CURVE_NUMBERS = 1000, 200, 10_000, 2**26


def assess(
    posterior: Classifier,
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
    choice: ChoiceTable | None = None,
    unpack: Unpack | None = None,
    progress: bool = False,
) -> Report:
    """Everything that a report says about `posterior` on labelled `data`.

    Args:
        posterior: with its T, T_c and c; the report compares it with none of them, and with the network alone. Or a
            `FusedClassifier`, whose network alone is the fused mean of the logits; T_c of the page is then its q. Of
            several labels and of positions every one that is given counts, of positions at most 100,000.
        data: held-out batches with labels, used neither for the fit nor for the calibration.
        outliers: batches of inputs that do not belong with `data`, to see how well they can be told apart.
        classes: names of the classes.
        bins: number of bins of the expected calibration error.
        samples: Monte Carlo draws per input; where there are so many classes M that the parameters are drawn, at most
            100,000/M, or 100.
        seed: for the draws and the resampling.
        picture_shape: (channels, height, width) of pictures that are stored in another shape.
        name_of: the name to show for the input with a given number.
        outliers_name: the name to show for the second set.
        subject: what the report is about, shown at the top of the page.
        provenance: further facts, about files and commands, say.
        choice: the table of `autofit` or of `calibrate_fusion`, if that made it: `errbar.info(path).choice`.
        unpack: as in `fit`; by default that of the fit.
        progress: show a progress bar.
    """
    if not isinstance(posterior, FusedClassifier):
        require_posterior(posterior)
    size = _first(posterior).information.n_classes
    if isinstance(posterior, Posterior) and posterior.information.outputs != CLASSES.name:
        unpack = unpack or posterior.unpack
        given, elsewhere = (
            None if one is None else track(batches(one, unpack), title, total=count_batches(one), enabled=progress)
            for one, title in ((data, "Predicting"), (outliers, "Second set"))
        )
        assert given is not None
        return _of_decisions(
            posterior, given, elsewhere, _names(classes, size), bins, samples, seed, outliers_name, subject, provenance
        )
    samples = draws_of(posterior, samples)
    names = _names(classes, size)
    doubts, fingerprint = Doubts(), Fingerprint()
    uncertain, wrong = Leaders(_EXAMPLES, wrong=False), Leaders(_EXAMPLES, wrong=True)
    spread = Spread(_curve_inputs(size) or 1, gaussian_and_label)
    check_inputs = Spread(_CHECKED_INPUTS, input_of)
    unpack = unpack or posterior.unpack
    stream = track(batches(data, unpack), "Predicting", total=count_batches(data), enabled=progress)
    watchers = (doubts, fingerprint, uncertain, wrong, spread, check_inputs)
    observation = observe(posterior, stream, samples, seed, watchers)

    missing: list[str] = []
    curves = _curves(posterior, spread, seed, missing)
    check = None
    if isinstance(posterior, FusedClassifier):
        missing.append("The linearisation was not checked: it is that of each network, and in the report of its own.")
    else:
        check = _linearisation(posterior, check_inputs, samples, seed, missing)
    comparison = None
    if outliers is not None:
        others = track(batches(outliers, unpack), "Second set", total=count_batches(outliers), enabled=progress)
        inside = checking.score_columns(
            observation.pmfs[NETWORK], observation.final, doubts.mutual_information, doubts.contrast_variance
        )
        outside = checking.scores_of(posterior, others, samples, seed)
        comparison = checking.compare_outliers(outliers_name, inside, outside)
    variants = scoring.variants(observation, bins, seed)
    effect = scoring.scale_effect(observation, doubts.logits, doubts.std, seed)
    input_lists = [
        examples(leaders.items, names, name_of, picture_shape, samples, seed) for leaders in (uncertain, wrong)
    ]
    return Report(
        subject=subject or f"{count(size)} classes, {count(len(observation.labels))} inputs",
        inputs=len(observation.labels),
        classes=size,
        **vars(posterior.calibration),
        verdict=verdict(len(observation.labels), variants, effect, posterior.calibration, check, comparison),
        variants=variants,
        effect=effect,
        curves=curves,
        class_rows=scoring.class_rows(observation.final, observation.labels, doubts.std, names),
        uncertain=input_lists[0],
        wrong=input_lists[1],
        outliers=comparison,
        linearisation=check,
        missing=tuple(missing),
        provenance=(*provenance, *_facts(posterior, len(observation.labels), fingerprint, samples, seed)),
        choice=choice,
    )


def _of_decisions(
    posterior: Posterior,
    stream: Iterable[Batch],
    outliers: Iterable[Batch] | None,
    names: list[str],
    bins: int,
    samples: int,
    seed: int,
    outliers_name: str,
    subject: str,
    provenance: Sequence[Facts],
) -> Report:
    """The same of several labels or of positions, whose decisions take the place of inputs."""
    fingerprint, is_of_labels = Fingerprint(), posterior.information.task.positions is None
    found = decided(posterior, stream, samples, seed, fingerprint)
    comparison = None
    if outliers is not None:
        others = scores_of(posterior, outliers, samples, seed)
        comparison = checking.compare_outliers(outliers_name, found.scores, others)
    observation = found.observation
    variants = scoring.variants(observation, bins, seed, are_labels=is_of_labels)
    effect = scoring.scale_effect(observation, found.logits, found.std, seed)
    noun = "labels" if is_of_labels else "positions"
    by_label: tuple[tuple[float, float], ...] = ()
    if posterior.label_factors is not None:
        by_label = tuple(zip(posterior.label_temperatures, posterior.label_covariance_scales, strict=True))
    decisions = f"{count(len(observation.labels))} {noun} of {count(found.inputs)} inputs"
    class_rows = () if is_of_labels else scoring.class_rows(observation.final, observation.labels, found.std, names)
    return Report(
        subject=subject or f"{count(len(names))} {'labels' if is_of_labels else 'classes'}, {decisions}",
        inputs=found.inputs,
        classes=len(names),
        **vars(posterior.calibration),
        verdict=verdict(found.inputs, variants, effect, posterior.calibration, None, comparison, decisions, by_label),
        variants=variants,
        effect=effect,
        curves=None,
        class_rows=class_rows,
        uncertain=(),
        wrong=(),
        outliers=comparison,
        linearisation=None,
        missing=(
            f"The curves over T and T_c are made for one of several classes, not for {noun}.",
            f"The linearisation is checked for one of several classes, not for {noun}"
            + ("." if by_label else "; predict_by_parameters draws whole networks."),
        ),
        provenance=(*provenance, *_facts(posterior, found.inputs, fingerprint, samples, seed)),
        decisions=decisions,
        label_rows=label_rows(found, names, bins) if is_of_labels else (),
    )


def _names(classes: Sequence[str] | None, size: int) -> list[str]:
    if classes is None:
        return [str(number) for number in range(size)]
    if len(classes) != size:
        raise ArgumentError(f"There are {len(classes)} class names; expected {size}, one per class.")
    return list(classes)


def _curve_inputs(classes: int) -> int:
    """How many inputs to use for the curves over T and T_c; zero if too few would fit into memory."""
    target = min(_CURVE_INPUTS, max(_LEAST_CURVE_INPUTS, _CURVE_LOGITS // classes))
    return target if target * classes**2 <= _CURVE_NUMBERS else 0


def _first(classifier: Classifier) -> Posterior:
    """The posterior itself, or the first of those that are fused."""
    return classifier.posteriors[0] if isinstance(classifier, FusedClassifier) else classifier


def _curves(posterior: Classifier, spread: Spread[Any], seed: int, missing: list[str]) -> ScaleCurves | None:
    classes = _first(posterior).information.n_classes
    if not _curve_inputs(classes):
        missing.append(f"The curves over T and T_c are omitted: {count(classes)} classes would take too much memory.")
        return None
    return scoring.scale_curves(spread.items, posterior.calibration, seed)


def _linearisation(
    posterior: Posterior, inputs: Spread[Any], samples: int, seed: int, missing: list[str]
) -> Linearisation | None:
    draws = checking.draws_that_fit(posterior.information.n_parameters)
    if not draws:
        parameters = count(posterior.information.n_parameters)
        missing.append(
            f"The linearisation was not checked: draws of {parameters} parameters would take too much memory."
        )
        return None
    try:
        return checking.linearisation(posterior, inputs.items, draws, samples, seed)
    except ErrbarError as error:
        missing.append(f"The linearisation was not checked: {error}")
        return None


def _facts(posterior: Classifier, inputs: int, fingerprint: Fingerprint, samples: int, seed: int) -> list[Facts]:
    """How the report was made, and from what; nothing about the person, nor about the machine except its kind."""
    shape = "×".join(map(str, fingerprint.shape or ()))
    fits = [Facts("Posterior", _fit_facts(posterior))] if isinstance(posterior, Posterior) else _fusion_facts(posterior)
    data = (
        ("inputs", f"{count(inputs)} of shape {shape or 'one number'}"),
        ("inputs and labels (SHA-256)", fingerprint.digest()),
        ("Monte Carlo", f"{samples} draws per input, seed {seed}"),
    )
    versions = (
        ("errbar", __version__),
        ("torch, numpy", f"{torch.__version__}, {numpy.__version__}"),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("device", str(_first(posterior).information.network.device)),
    )
    return [*fits, Facts("Data", data), Facts("Versions", versions)]


def _fit_facts(posterior: Posterior) -> tuple[tuple[str, str], ...]:
    information = posterior.information
    precision = posterior.prior.precision
    return (
        (
            "parameters",
            f"{count(information.n_parameters)}: {', '.join(information.parameter_names[:6])}"
            + (" …" if len(information.parameter_names) > 6 else ""),
        ),
        ("samples of the fit", f"{information.n_samples:,.6g}"),
        ("structure, Fisher information", f"{described_structure(information.structure)}, {information.fisher}"),
        ("prior precision", "one per parameter" if isinstance(precision, torch.Tensor) else str(precision)),
        ("T, T_c, c", ", ".join(f"{number:.6g}" for number in vars(posterior.calibration).values())),
        *_label_facts(posterior),
        ("weights (SHA-256)", information.network.fingerprint),
    )


def _label_facts(posterior: Posterior) -> list[tuple[str, str]]:
    """T and T_c of each of several labels, where they have been fitted by label."""
    if posterior.label_factors is None:
        return []
    columns = {"T of each label": posterior.label_temperatures, "T_c of each label": posterior.label_covariance_scales}
    return [(name, ", ".join(f"{number:.4g}" for number in numbers)) for name, numbers in columns.items()]


def _fusion_facts(fused: FusedClassifier) -> list[Facts]:
    """The numbers of the fusion, and each of its posteriors."""
    numbers = (
        ("scales a", ", ".join(f"{a:.6g}" for a in fused.scales)),
        ("discrepancies s", ", ".join(f"{s:.6g}" for s in fused.discrepancies)),
        ("T, q", f"{fused.temperature:.6g}, {fused.covariance_scale:.6g}"),
    )
    each = [Facts(f"Posterior {c}", _fit_facts(posterior)) for c, posterior in enumerate(fused.posteriors)]
    return [Facts("Fusion", numbers), *each]
