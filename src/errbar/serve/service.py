"""What is served: posteriors with the names of their classes, what inputs look like, and scores of training inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

import errbar
from errbar._base.digest import digest_of
from errbar._base.quantiles import quantiles
from errbar._distributions.calibration import Calibration
from errbar._distributions.covariance import DrawnCovariance
from errbar._distributions.logits import LogitGaussian
from errbar._model.batch import batches
from errbar._posterior.pushing import keeps_draws, pushed_draws
from errbar.errors import ArgumentError, DataError
from errbar.serve.engine import LEVEL, SAMPLES, SEED, TORCH, Engine, engine_for, example_inputs
from errbar.serve.pictures import PictureRule, rule_for

# Number of training inputs that show what is usual, and of those that the page shows.
REFERENCE_INPUTS = 2000
_EXAMPLES = 10
# Most values of an input for which the page has sliders.
_SLIDERS = 200
_SCORE_SAMPLES = 1000

Classifier = errbar.Posterior | errbar.FusedClassifier


@dataclass(frozen=True)
class ValueRange:
    """What one value of an input is among the training inputs: the smallest, the median, and the largest."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, eq=False)
class Reference:
    """What is known from training inputs: sorted outlier scores, some of the inputs with their labels, and ranges.

    `ends` are the smallest and the largest value of all; `values` are the ranges of each, of inputs that are vectors.
    """

    scores: Float[Tensor, " N"]
    examples: tuple[tuple[Tensor, str], ...] = ()
    ends: tuple[float, float] = (0.0, 1.0)
    values: tuple[ValueRange, ...] | None = None


@dataclass(frozen=True, eq=False)
class Served:
    """One posterior, or several networks fused as one.

    `shape` is that of one input, None if unknown; `integers` is for models that take tokens. `reference` are sorted
    outlier scores of training inputs; `examples` are inputs with their labels, and `values` the ranges of each value
    of an input, for the page.
    """

    name: str
    posterior: Classifier
    classes: tuple[str, ...]
    shape: tuple[int, ...] | None
    pictures: PictureRule | None = None
    integers: bool = False
    reference: Float[Tensor, " N"] | None = None
    examples: tuple[tuple[Tensor, str], ...] = ()
    about: str = ""
    values: tuple[ValueRange, ...] | None = None
    engine: Engine = TORCH

    @cached_property
    def posteriors(self) -> tuple[errbar.Posterior, ...]:
        """That of each network."""
        return (self.posterior,) if isinstance(self.posterior, errbar.Posterior) else self.posterior.posteriors

    @cached_property
    def of_labels(self) -> bool:
        """Whether the outputs are several labels, each true or false by itself, and not one of M classes."""
        return not self.posteriors[0].information.task.kind.has_gauge

    @cached_property
    def _plain(self) -> Classifier:
        return self.posterior.uncalibrated() if isinstance(self.posterior, errbar.Posterior) else self.posterior

    @cached_property
    def identity(self) -> str:
        """A digest of what answers depend on: the posteriors with T, T_c and c, and how they are fused."""
        fused = None if isinstance(self.posterior, errbar.Posterior) else self.posterior
        numbers = [] if fused is None else [fused.scales, fused.discrepancies, str(fused.calibration)]
        return digest_of([*(posterior.fingerprint for posterior in self.posteriors), *map(repr, numbers)])

    @property
    def score_samples(self) -> int:
        """The number of samples of an outlier score."""
        if isinstance(self.posterior, errbar.Posterior):
            return pushed_draws(self.posterior.information.task, _SCORE_SAMPLES)
        return _SCORE_SAMPLES

    def plain_logits(self, x: Any) -> LogitGaussian:
        """The logits without calibration, which a request may choose."""
        plain = self._plain
        return plain.unrounded_logits(x) if isinstance(plain, errbar.Posterior) else plain.plain_logits(x)

    def drawn_logits(self, x: Any, samples: int, seed: int = 0) -> LogitGaussian:
        """The same by draws, where the parameters are drawn for so many samples, and else as they are."""
        plain = self._plain
        if not isinstance(plain, errbar.Posterior) or not self.draws_parameters(samples):
            return self.plain_logits(x)
        return plain.drawn_logits(x, samples, seed)

    def calibrated(self, plain: LogitGaussian, calibration: Calibration) -> LogitGaussian:
        """Logits without calibration at this one; where labels have factors of T and T_c of their own, with these."""
        calibrated = plain.calibrated(calibration)
        factors = self.posterior.label_factors if isinstance(self.posterior, errbar.Posterior) else None
        return calibrated if factors is None else calibrated.with_label_factors(factors)

    def draws_parameters(self, samples: int) -> bool:
        """Whether `predict` would draw parameters for as many samples."""
        return isinstance(self.posterior, errbar.Posterior) and keeps_draws(self.posterior.information.task, samples)

    def calibration(
        self, temperature: float | None, covariance_scale: float | None, softening: float | None
    ) -> Calibration:
        """The calibration with what a request chooses; where that is None, the posterior's own."""
        if isinstance(self.posterior, errbar.Posterior):
            return self.posterior.with_calibration(
                temperature=temperature, covariance_scale=covariance_scale, softening=softening
            ).calibration
        if softening:
            raise ArgumentError(f"softening is {softening:g}; a fused classifier has none: expected 0, or none at all.")
        scales = {"temperature": temperature, "covariance_scale": covariance_scale}
        return self.posterior.with_calibration(**scales).calibration

    def tensor(self, values: Any) -> Tensor:
        """Inputs from nested lists of numbers, which must not be ragged."""
        try:
            # Not by torch.tensor, which gives the interpreter's lock away: to a batch that has been computed, for long.
            x = torch.from_numpy(np.array(values, dtype=np.float64))
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise DataError("The inputs are ragged; expected the same number of values in each.") from error
        if x.ndim < 2 or (self.shape is not None and tuple(x.shape[1:]) != self.shape):
            layout = "(inputs, …)" if self.shape is None else str(("inputs", *self.shape)).replace("'", "")
            raise DataError(f"The inputs have shape {tuple(x.shape)}; expected {layout}, a list of inputs.")
        if not self.integers:
            return x
        if bool((x != x.round()).any()) or bool((x.abs() > 2**53).any()):
            raise DataError("The model takes whole numbers; expected inputs without fractions.")
        return x.long()

    def outlier_scores(self, x: Tensor, plain: LogitGaussian) -> Float[Tensor, " B"]:
        """The mutual information of inputs, at the posterior's own calibration, whatever the request.

        `plain` are their logits as the request needs them; other draws than those of the scores are not used.
        """
        samples = self.score_samples
        if isinstance(plain.form, DrawnCovariance) or self.draws_parameters(samples):
            plain = self.drawn_logits(x, samples)
        return self.mutual_information(plain)

    def mutual_information(self, plain: LogitGaussian) -> Float[Tensor, " B"]:
        """From the logits without calibration, at the posterior's own; of several labels their sum."""
        calibrated = self.calibrated(plain, self.posterior.calibration)
        information = calibrated.predict(self.score_samples).mutual_information.double()
        return information.sum(1) if self.of_labels else information

    def with_engine(self, kind: str) -> Served:
        """The same with the engine of this kind, "auto", "onnx" or "torch"."""
        if kind == "auto" and self.draws_parameters(SAMPLES):
            reason = "With so many classes parameters are drawn and pushed forward, which no graph does."
            return replace(self, engine=Engine("torch", reason))

        def by_torch(x: Tensor) -> object:
            prediction = self.calibrated(self.plain_logits(x), self.posterior.calibration).predict(SAMPLES, SEED)
            return prediction.std, prediction.interval(LEVEL), prediction.mutual_information

        known = [x for x, _ in self.examples]
        example = example_inputs(self.shape, known, integers=self.integers)
        engine = engine_for(kind, self.posterior, example, by_torch)
        if engine.graph is None and example is not None:
            # No client waits for what a first prediction prepares. If it fails, requests are told why.
            with suppress(Exception):
                by_torch(example)
        return replace(self, engine=engine)

    @cached_property
    def usual_limit(self) -> float | None:
        """The score that 5 % of the training inputs exceed; None where none were given."""
        return None if self.reference is None else float(quantiles(self.reference, (0.95,)))

    def outlier(self, score: float) -> dict[str, float | int] | None:
        """How unusual a mutual information is among those of training inputs."""
        if self.reference is None:
            return None
        count = len(self.reference)
        below = int(torch.searchsorted(self.reference, torch.tensor(score, dtype=self.reference.dtype)))
        middle = float(self.reference[count // 2])
        return {
            "mutual_information": score,
            "percentile": 100 * below / count,
            "times_the_median": score / middle if middle > 0 else 0.0,
            "training_inputs": count,
        }


@dataclass(frozen=True, eq=False)
class Service:
    """The posteriors by name; the first is the default."""

    members: tuple[Served, ...]

    def __post_init__(self) -> None:
        names = [member.name for member in self.members]
        if not names or len(set(names)) != len(names):
            raise ArgumentError(f"The posteriors served are named {names}; expected one or more with different names.")
        if len({member.of_labels for member in self.members}) > 1:
            raise ArgumentError(
                "Some of the posteriors served are of outputs='labels' and others of outputs='classes', whose answers "
                "differ; expected the same of all. Start a service for each."
            )

    @property
    def first(self) -> Served:
        return self.members[0]

    @property
    def of_labels(self) -> bool:
        """Whether all posteriors are of several labels; none is where one is not."""
        return self.first.of_labels

    def member(self, name: str | None) -> Served:
        for member in self.members:
            if name is None or member.name == name:
                return member
        names = ", ".join(member.name for member in self.members)
        raise ArgumentError(f"There is no posterior with that name; expected one of {names}.")


def served(
    name: str,
    posterior: Classifier,
    *,
    classes: Sequence[str] | None = None,
    shape: tuple[int, ...] | None = None,
    reference: Any = None,
    about: str = "",
    layout: tuple[int, int, int] | None = None,
) -> Served:
    """A posterior ready to serve; `reference` are batches of its training data, of which only a part is read.

    `layout` is (channels, height, width) of inputs that are pictures in another shape.
    """
    network = posterior if isinstance(posterior, errbar.Posterior) else posterior.posteriors[0]
    network.information.task.require_inputs("errbar serve")
    count = network.information.n_classes
    names = tuple(str(number) for number in range(count)) if classes is None else tuple(classes)
    known = None if reference is None else training_reference(posterior, reference, names)
    first = _first_layer(network.model)
    if shape is None and known is not None and known.examples:
        shape = tuple(known.examples[0][0].shape)
    if shape is None and isinstance(first, nn.Linear):
        shape = (first.in_features,)
    integers = isinstance(first, nn.Embedding)
    rule = rule_for(shape, layout, (0.0, 1.0) if known is None else known.ends)
    made = Served(name, posterior, names, shape, rule, integers, about=about)
    if known is None:
        return made
    return replace(made, reference=known.scores, examples=known.examples, values=known.values)


def training_reference(posterior: Classifier, data: Any, classes: Sequence[str]) -> Reference:
    """What the first inputs of `data` say about its inputs; the examples are of as many classes as possible."""
    scored = Served("", posterior, tuple(classes), None)
    samples = scored.score_samples
    scores: list[Tensor] = []
    inputs: list[Tensor] = []
    by_class: dict[str, list[Tensor]] = {}
    ends = (math.inf, -math.inf)
    count = 0
    for batch in batches(data, posterior.unpack):
        scores.append(scored.mutual_information(scored.drawn_logits(batch, samples)).cpu())
        x = batch.args[0] if batch.args else None
        if isinstance(x, Tensor):
            labels = None if batch.labels is None else torch.as_tensor(batch.labels)
            names = [""] * len(x) if labels is None else [_label_name(label, classes) for label in labels]
            for row, name in zip(x, names, strict=True):
                if name in by_class or len(by_class) < _EXAMPLES:
                    by_class.setdefault(name, [])
                    if len(by_class[name]) < _EXAMPLES:
                        by_class[name].append(row)
            ends = min(ends[0], float(x.min())), max(ends[1], float(x.max()))
            if x.ndim == 2 and x.shape[1] <= _SLIDERS:
                inputs.append(x.detach().cpu().double())
        count += len(batch)
        if count >= REFERENCE_INPUTS:
            break
    if not scores:
        raise DataError("The reference data are empty: expected training inputs to compare with.")
    order = [*by_class] if scored.of_labels else [name for name in (*classes, "") if name in by_class]
    rounds = zip_longest(*(by_class[name] for name in order))
    turns = [(row, name) for turn in rounds for row, name in zip(turn, order, strict=True) if row is not None]
    examples = sorted(turns[:_EXAMPLES], key=lambda example: order.index(example[1]))
    sorted_scores = torch.cat(scores)[:REFERENCE_INPUTS].sort().values
    return Reference(sorted_scores, tuple(examples), ends, _ranges(inputs))


def _label_name(label: Tensor, classes: Sequence[str]) -> str:
    """The class of an input, or those of its several labels that are known to be true; empty if none is given."""
    if label.ndim == 0:
        return classes[int(label)]
    if bool((label < 0).all()):
        return ""
    return ", ".join(name for name, value in zip(classes, label.tolist(), strict=True) if value == 1) or "none"


def _ranges(inputs: Sequence[Tensor]) -> tuple[ValueRange, ...] | None:
    if not inputs:
        return None
    x = torch.cat(list(inputs))
    columns = (x.amin(0), x.median(0).values, x.amax(0))
    return tuple(ValueRange(*row) for row in zip(*(column.tolist() for column in columns), strict=True))


def _first_layer(model: nn.Module) -> nn.Module | None:
    """The first module with parameters, in order of definition."""
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            return module
    return None
