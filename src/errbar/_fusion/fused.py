"""`FusedClassifier`: several classifiers of one object as one, with what each is wrong by beyond its parameters.

On contrasts, coordinates in 1⊥, the Gaussian of network c over the logits is N(ĝ_c, P_c), that of `posterior.logits(x)`
before rounding. The covariance P_c knows of the parameters only; networks differ by more. So

    Q_c = a_c P_c + s_c I,   P = (Σ_c Q_c⁻¹)⁻¹,   ĝ = P Σ_c Q_c⁻¹ ĝ_c.

The fused logits are N(ĝ, q P), what `logits` returns; a PMF is the mean softmax of N(ĝ/T, q P/T²), those logits over T.
With a = 1, s = 0, T = 1 and q = 1 this is the paper's fusion (`errbar.fuse`); as all s grow alike, ĝ becomes the mean
of the logits. An infinite s_c takes no part beside a finite one; where all are infinite, ĝ is the mean of the logits,
and q must be 0. A common factor of a and s is the same as one of q, so the geometric mean of a is 1 by convention.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base import linalg
from errbar._distributed.team import Team
from errbar._distributions.calibration import Calibration, require_covariance_scale, require_temperature
from errbar._distributions.covariance import FullCovariance
from errbar._distributions.logits import LogitGaussian
from errbar._distributions.prediction import Prediction, require_level
from errbar._distributions.sampling import require_samples, require_seed
from errbar._fusion.table import FusionTable
from errbar._model.batch import Batch, KeptUnpack, Unpack, is_stream, raw_batches, to_batch
from errbar._posterior.posterior import Posterior, require_posterior
from errbar.errors import ArgumentError, DataError, MismatchError, SingularCovarianceError

_CERTAIN = (
    "A network whose logits are certain cannot be weighed against the others: give it a discrepancy above zero, or "
    "let errbar.calibrate_fusion find one."
)


@dataclass(frozen=True, eq=False)
class FusedClassifier:
    """Several classifiers of the same classes, fused: logits N(ĝ, q P) with P = (Σ_c (a_c P_c + s_c I)⁻¹)⁻¹.

    `errbar.calibrate_fusion` finds the numbers; by hand, those left out are those of `errbar.fuse`. Networks may differ
    in architecture, in what they take as input and in the device; results are on the device of the first.

    `logits(x)` are without the temperature T, unlike those of a posterior: `predict(x)` is
    `logits(x).tempered(T).predict()`.

    Attributes:
        posteriors: one for each network, as calibrated.
        scales: a_c > 0, by which the covariance of each network is multiplied.
        discrepancies: s_c ≥ 0, the variance of what each network is wrong by beyond its parameters; may be infinite.
        temperature: T, by which the fused logits are divided before the softmax.
        covariance_scale: q ≥ 0, of the fused covariance.
        table: what `calibrate_fusion` compared; None for one that was made by hand.
    """

    posteriors: tuple[Posterior, ...]
    scales: tuple[float, ...] = ()
    discrepancies: tuple[float, ...] = ()
    temperature: float = 1.0
    covariance_scale: float = 1.0
    table: FusionTable | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        posteriors = require_posteriors(self.posteriors)
        count = len(posteriors)
        scales = _numbers("scales", self.scales, count, default=1.0)
        discrepancies = _numbers("discrepancies", self.discrepancies, count, default=0.0)
        if not all(0 < scale < math.inf for scale in scales):
            raise ArgumentError(f"scales are {scales}; expected a positive finite number for each network.")
        if not all(discrepancy >= 0 for discrepancy in discrepancies):
            raise ArgumentError(f"discrepancies are {discrepancies}; expected zero or more for each network.")
        q = require_covariance_scale(self.covariance_scale)
        if q > 0 and all(map(math.isinf, discrepancies)):
            raise ArgumentError(
                f"The discrepancies are all infinite and covariance_scale is {q:g}: the fused covariance would be "
                "infinite. Expected covariance_scale=0, which gives the mean of the logits, or finite discrepancies."
            )
        for name, value in (
            ("posteriors", posteriors),
            ("scales", scales),
            ("discrepancies", discrepancies),
            ("temperature", require_temperature(self.temperature)),
            ("covariance_scale", q),
        ):
            object.__setattr__(self, name, value)

    @property
    def n_classes(self) -> int:
        return self.posteriors[0].information.n_classes

    @property
    def calibration(self) -> Calibration:
        """T and q together, as `LogitGaussian.calibrated` takes them."""
        return Calibration(self.temperature, self.covariance_scale)

    @property
    def is_calibrated(self) -> bool:
        """Whether any number was fitted or set: without, this is the fusion of the paper."""
        plain = ((1.0,) * len(self), (0.0,) * len(self), Calibration())
        return (self.scales, self.discrepancies, self.calibration) != plain

    @property
    def unpack(self) -> KeptUnpack | None:
        """How batches that all networks see are read: as in the fit of the first."""
        return self.posteriors[0].unpack

    def __len__(self) -> int:
        return len(self.posteriors)

    def __str__(self) -> str:
        return described(self)

    def __repr__(self) -> str:
        return (
            f"FusedClassifier: {len(self)} networks of {self.n_classes:,} classes, "
            f"T {self.temperature:.2g}, q {self.covariance_scale:.2g}"
        )

    def logits(
        self, x: Any = None, *, each: Sequence[Any] | None = None, unpack: Unpack | None = None
    ) -> LogitGaussian:
        """N(ĝ, q P) for each input, with mean zero over the classes; `x`, `each` and `unpack` as in `predict`.

        The temperature is not in it: `logits(x).tempered(T).predict()` is `predict(x)`.
        """
        return self.unrounded_logits(x, each=each, unpack=unpack).rounded()

    def unrounded_logits(
        self, x: Any = None, *, each: Sequence[Any] | None = None, unpack: Unpack | None = None
    ) -> LogitGaussian:
        """`logits` with the covariance in float64."""
        return self.plain_logits(x, each=each, unpack=unpack).scaled(self.covariance_scale)

    def plain_logits(
        self, x: Any = None, *, each: Sequence[Any] | None = None, unpack: Unpack | None = None
    ) -> LogitGaussian:
        """N(ĝ, P), before T and q, with the covariance in float64; P is zero where all discrepancies are infinite."""
        if (x is None) == (each is None):
            raise ArgumentError("Expected x, an input that all networks see, or each=[x_1, ...] with one for each.")
        if each is None and is_stream(x):
            parts = [self._of_batch(value, unpack) for value in raw_batches(x)]
            if not parts:
                raise DataError("The data are empty: expected at least one batch.")
            return LogitGaussian.concatenated(parts)
        inputs = [x] * len(self) if each is None else _inputs(each, len(self))
        gaussians = [
            posterior.unrounded_logits(own, unpack=unpack)
            for posterior, own in zip(self.posteriors, inputs, strict=True)
        ]
        return self._fused(gaussians)

    def _of_batch(self, value: Any, unpack: Unpack | None) -> LogitGaussian:
        inputs = None if unpack is not None else inputs_of_each(value, self.posteriors)
        return self.plain_logits(value if inputs is None else None, each=inputs, unpack=unpack)

    def predict(
        self,
        x: Any = None,
        samples: int = 1000,
        seed: int = 0,
        *,
        each: Sequence[Any] | None = None,
        draws: str = "random",
        unpack: Unpack | None = None,
    ) -> Prediction:
        """The PMF of each input, with its error bars.

        Args:
            x: one batch that all networks see, or a DataLoader, a Dataset or an iterator of batches, as in
                `Posterior.predict`. Batches ([x_1, …], labels) or ([x_1, …],) hold an input for each network.
            samples: Monte Carlo draws.
            seed: of those draws.
            each: instead of x, one batch for each network: row i of all of them is one object.
            draws: as in `LogitGaussian.predict`.
            unpack: as in `Posterior.predict`, for all networks; by default each uses that of its fit.
        """
        gaussian = self.plain_logits(x, each=each, unpack=unpack).calibrated(self.calibration)
        return gaussian.predict(samples, seed, draws=draws)

    def require_ready(self, team: Team) -> None:
        """Refuse changed weights, and ranks of a team whose classifiers are not the same."""
        for posterior in self.posteriors:
            posterior.require_ready(team)
        numbers = {"scales": self.scales, "discrepancies": self.discrepancies, **self.calibration.described()}
        team.require_same({f"{name} of the fusion": str(value) for name, value in numbers.items()})

    def fused(self, gaussians: Iterable[LogitGaussian]) -> LogitGaussian:
        """`logits`, from the logits of each network in the order of `posteriors`."""
        return self._fused(gaussians).scaled(self.covariance_scale)

    def _fused(self, gaussians: Iterable[LogitGaussian]) -> LogitGaussian:
        """N(ĝ, P)."""
        sources = list(gaussians)
        _require_alike(sources, self)
        device = sources[0].mean.device
        dtype = torch.float64 if any(source.mean.dtype == torch.float64 for source in sources) else torch.float32
        basis = linalg.contrast_basis(self.n_classes, device)
        means = [source.mean.to(device).double() @ basis for source in sources]
        covariances = [linalg.contrast_covariance(source.covariance).to(device) for source in sources]
        mean, covariance = self._on_contrasts(means, covariances, [source.covariance.dtype for source in sources])
        spread = linalg.symmetric(basis @ covariance @ basis.mT)
        return LogitGaussian((mean @ basis.mT).to(dtype), FullCovariance(spread))

    def _on_contrasts(
        self,
        means: Sequence[Float[Tensor, "B d"]],
        covariances: Sequence[Float[Tensor, "B d d"]],
        dtypes: Sequence[torch.dtype],
    ) -> tuple[Float[Tensor, "B d"], Float[Tensor, "B d d"]]:
        """ĝ and P, before T and q."""
        taking_part = [c for c, s in enumerate(self.discrepancies) if math.isfinite(s)]
        if not taking_part:
            return torch.stack(list(means)).mean(0), torch.zeros_like(covariances[0])
        identity = torch.eye(covariances[0].shape[-1], dtype=torch.float64, device=covariances[0].device)
        widened = {c: self.scales[c] * covariances[c] + self.discrepancies[c] * identity for c in taking_part}
        if len(taking_part) == 1:
            (only,) = taking_part
            return means[only], widened[only]
        precisions = [self._precision(c, widened[c], dtypes[c]) for c in taking_part]
        information = torch.stack(precisions).sum(0)
        vectors = [(p @ means[c][..., None])[..., 0] for c, p in zip(taking_part, precisions, strict=True)]
        covariance = linalg.quick_inverse(information, name="The fused information")
        return (covariance @ torch.stack(vectors).sum(0)[..., None])[..., 0], covariance

    def _precision(self, c: int, widened: Float[Tensor, "B d d"], dtype: torch.dtype) -> Float[Tensor, "B d d"]:
        # With a discrepancy the smallest eigenvalue is s_c itself, whatever rounding has made of P_c.
        rounding = torch.finfo(dtype).eps if self.discrepancies[c] == 0 else 0.0
        try:
            return linalg.quick_inverse(widened, name=f"The covariance of network {c}", rounding=rounding)
        except SingularCovarianceError as error:
            raise SingularCovarianceError(f"{error} {_CERTAIN}") from None

    def weights(self, gaussians: Iterable[LogitGaussian]) -> Float[Tensor, "B C"]:
        """tr(P Q_c⁻¹)/(M − 1): the share of each network in each answer; they sum to one."""
        sources = list(gaussians)
        _require_alike(sources, self)
        device = sources[0].mean.device
        covariances = [linalg.contrast_covariance(source.covariance).to(device) for source in sources]
        finite = [c for c, s in enumerate(self.discrepancies) if math.isfinite(s)]
        rows, size = len(sources[0]), covariances[0].shape[-1]
        shares = torch.zeros(rows, len(self), dtype=torch.float64, device=device)
        if len(finite) < 2:
            shares[:, finite or slice(None)] = 1.0 / (len(finite) or len(self))
            return shares
        identity = torch.eye(size, dtype=torch.float64, device=device)
        precisions = {
            c: self._precision(
                c, self.scales[c] * covariances[c] + self.discrepancies[c] * identity, sources[c].covariance.dtype
            )
            for c in finite
        }
        covariance = linalg.inverse(torch.stack([*precisions.values()]).sum(0), name="The fused information")
        for c, precision in precisions.items():
            shares[:, c] = (covariance * precision).sum((1, 2)) / size
        return shares

    def with_calibration(
        self, *, temperature: float | None = None, covariance_scale: float | None = None
    ) -> FusedClassifier:
        """The same networks, scales and discrepancies with T or q replaced; what was measured does not hold for it."""
        return replace(
            self,
            temperature=self.temperature if temperature is None else temperature,
            covariance_scale=self.covariance_scale if covariance_scale is None else covariance_scale,
            table=None,
        )

    def to(self, device: torch.device | str) -> FusedClassifier:
        """The same with all networks on `device`, as `Posterior.to` does it."""
        return replace(self, posteriors=tuple(posterior.to(device) for posterior in self.posteriors))

    def save(
        self, path: str | os.PathLike[str], *, factors: bool = False, classes: Sequence[str] | None = None
    ) -> None:
        """Write all posteriors and the numbers to one file, for `errbar.load(path, [model, …])`.

        `factors` and `classes` as in `Posterior.save`. The table is in the file too.
        """
        from errbar._files.save import save_fusion

        numbers = (self.scales, self.discrepancies, self.temperature, self.covariance_scale)
        table = None if self.table is None else self.table.described()
        save_fusion(self.posteriors, *numbers, path, classes, factors=factors, table=table)

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        example: Any = None,
        each: Sequence[Any] | None = None,
        samples: int = 1000,
        seed: int = 0,
        risk: Any = (),
        draws: str = "random",
        outputs: Sequence[str] | None = None,
        level: float = 0.95,
    ) -> None:
        """Write an `.onnx` or `.pt2` file with all networks and their fusion, which predicts by itself.

        Arguments and outputs are those of `Posterior.export`; "logits" and "logit_covariance" are those of `logits`,
        before T. `example` is a batch that all networks see; or `each` has one for each network, whose inputs in the
        file are called network_0_x, network_1_x and so on.
        """
        from errbar._export.fusion import Member, separate_inputs, shared_inputs, write_fused_export
        from errbar._export.write import (
            ExportRequest,
            WorkedExample,
            checked_outputs,
            checked_path,
            checked_thresholds,
        )

        checked_path(path)
        prediction = self.predict(example, samples, seed, each=each, draws=draws)
        thresholds = checked_thresholds(risk, prediction)
        require_level(level)
        names = checked_outputs(outputs, risk=len(thresholds) > 0)
        request = ExportRequest(
            self.calibration, require_samples(samples), require_seed(seed), draws, thresholds, names, level
        )
        inputs = [example] * len(self) if each is None else list(each)
        batches = [posterior.prepared(x) for posterior, x in zip(self.posteriors, inputs, strict=True)]
        # As for a posterior, the file must be right for one row as well as for several.
        parts = [batches, [batch.rows(0, 1) for batch in batches]] if len(batches[0]) > 1 else [batches]
        examples = [
            WorkedExample.of(
                shared_inputs(part) if each is None else separate_inputs(part),
                self.unrounded_logits(each=part),
                request,
                self.temperature,
            )
            for part in parts
        ]
        members = [
            Member(p.information.task, p.factor, p.calibration, batch, a, s)
            for p, batch, a, s in zip(self.posteriors, batches, self.scales, self.discrepancies, strict=True)
        ]
        write_fused_export(path, members, examples, request, shared=each is None)


def require_posteriors(posteriors: object) -> tuple[Posterior, ...]:
    """At least two posteriors of the same number of classes."""
    if isinstance(posteriors, Posterior) or not isinstance(posteriors, Iterable):
        raise ArgumentError(
            f"posteriors is a {type(posteriors).__name__}; expected a list of two or more posteriors, one for each "
            "network."
        )
    all_posteriors = tuple(posteriors)
    for posterior in all_posteriors:
        require_posterior(posterior, "A fused classifier")
    if len(all_posteriors) < 2:
        count = "is one posterior" if all_posteriors else "are no posteriors"
        raise ArgumentError(f"There {count} to fuse; expected two or more, one for each network.")
    first = all_posteriors[0].information.n_classes
    for position, posterior in enumerate(all_posteriors):
        if posterior.information.n_classes != first:
            raise MismatchError(
                f"Posterior 0 has {first} classes and posterior {position} has {posterior.information.n_classes}; "
                "expected the same classes in the same order."
            )
    return all_posteriors


def _numbers(name: str, values: object, count: int, default: float) -> tuple[float, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ArgumentError(f"{name} is {values!r}; expected {count} numbers, one for each network.")
    given = tuple(values)
    if not given:
        return (default,) * count
    try:
        numbers = tuple(float(value) for value in given)
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) != count or any(math.isnan(number) for number in numbers):
        raise ArgumentError(f"{name} are {given!r}; expected {count} numbers, one for each network.")
    return numbers


def _inputs(each: object, count: int) -> list[Any]:
    if not isinstance(each, (list, tuple)) or len(each) != count:
        given = f"{len(each)} inputs" if isinstance(each, (list, tuple)) else f"a {type(each).__name__}"
        raise ArgumentError(f"each is {given}; expected a list of {count}, one for each network.")
    return list(each)


def batch_of_each(value: Any, posteriors: Sequence[Posterior], unpack: Unpack | None) -> list[Batch]:
    """The batch as each network reads it; ([x_1, …], labels) has an input for each, and the first gets the labels.

    Without labels, ([x_1, …],), it has none.
    """
    inputs = None if unpack is not None else inputs_of_each(value, posteriors)
    if inputs is None:
        return [to_batch(value, unpack or posterior.unpack) for posterior in posteriors]
    first, *others = (to_batch(x, posterior.unpack) for x, posterior in zip(inputs, posteriors, strict=True))
    return [Batch(first.args, first.kwargs, value[1] if len(value) == 2 else None, first.form), *others]


def inputs_of_each(value: Any, posteriors: Sequence[Posterior]) -> list[Any] | None:
    """[x_1, …] of a batch ([x_1, …], labels) or ([x_1, …],); None for one that all networks see."""
    kept = posteriors[0].unpack
    is_for_each = isinstance(value, (list, tuple)) and len(value) in (1, 2) and isinstance(value[0], (list, tuple))
    if not is_for_each or (kept is not None and kept.form == "sequence"):
        return None
    if len(value[0]) != len(posteriors):
        raise DataError(
            f"A batch has {len(value[0])} inputs for {len(posteriors)} networks; expected (x, labels), or "
            "([x_1, ...], labels) with one input for each network."
        )
    return list(value[0])


def _require_alike(sources: Sequence[LogitGaussian], classifier: FusedClassifier) -> None:
    if len(sources) != len(classifier):
        raise ArgumentError(f"There are {len(sources)} Gaussians; expected {len(classifier)}, one for each network.")
    for position, source in enumerate(sources):
        if not isinstance(source, LogitGaussian) or source.mean.shape[1] != classifier.n_classes:
            raise MismatchError(
                f"Item {position} to fuse is not a LogitGaussian of {classifier.n_classes} classes, as "
                "posterior.logits(x) of each network gives it."
            )
        if len(source) != len(sources[0]):
            raise MismatchError(
                f"Network 0 has {len(sources[0])} inputs and network {position} has {len(source)}; expected row i of "
                "each to be one object."
            )


def described(classifier: FusedClassifier) -> str:
    """The numbers, the weights and what each network adds, and the comparison."""
    table = classifier.table
    heads = ["network", "a", "s", *([] if table is None else ["weight", "adds"])]
    rows = [heads]
    for c in range(len(classifier)):
        cells = [str(c), f"{classifier.scales[c]:.3g}", f"{classifier.discrepancies[c]:.3g}"]
        if table is not None:
            cells += [f"{table.weights[c]:.1%}", f"{table.gains[c]:+.4f}"]
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(
        0,
        f"{len(classifier)} networks fused, {classifier.n_classes} classes: T = {classifier.temperature:.3g}, "
        f"q = {classifier.covariance_scale:.3g}",
    )
    return "\n".join([*lines, *([] if table is None else ["", str(table)])])
