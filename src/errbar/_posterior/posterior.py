"""`Posterior`: N(θ̂, P) over the selected parameters, and what it says about the logits of an input."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from errbar._base.checks import Checks
from errbar._base.execution import graph_execution, plain_execution
from errbar._curvature.registry import structure_called
from errbar._curvature.structure import Factor
from errbar._derivative.trace import TopClasses
from errbar._distributed.shards import opened
from errbar._distributed.team import Team, team_of
from errbar._distributions.calibration import Calibration, LabelFactors, checked_label_factors
from errbar._distributions.covariance import DrawnCovariance
from errbar._distributions.logits import JointLogits, LogitGaussian
from errbar._distributions.positions import PositionLogits
from errbar._distributions.prediction import Prediction, prediction_of, require_level
from errbar._distributions.sampling import (
    GivenSampler,
    probabilities_,
    require_samples,
    require_seed,
    standard_normal,
)
from errbar._model.batch import Batch, KeptUnpack, Unpack, input_batch, input_batches, is_stream
from errbar._model.fixed import fixed
from errbar._model.network import require_finite_logits, unwrap
from errbar._model.outputs import CLASSES
from errbar._model.positions import HeadNetwork, with_shapes_of_model
from errbar._planning.notice import tell_of_factorisation, tell_of_prediction
from errbar._posterior.collect import accumulate_over
from errbar._posterior.information import Information
from errbar._posterior.positions import (
    DRAWS,
    leading_shape,
    logits_of_positions,
    not_for_positions,
    prediction_by_parameters,
)
from errbar._posterior.prior import Prior
from errbar._posterior.pushing import keeps_draws, pushed_deviations, require_top
from errbar.errors import ArgumentError, LabelError, WeightsChangedError

# Rounding of the information above this share of the prior gives a warning.
_NOTICEABLE_ROUNDING = 0.02


@dataclass(frozen=True, eq=False)
class Posterior:
    """The Laplace approximation N(θ̂, P), P = (information + prior precision)⁻¹ (eq:PN approx).

    `temperature` T, `covariance_scale` T_c and `softening` c calibrate it: the logits are N(ĝ/T(x), T_c P^g/T(x)²)
    with T(x) = T √(1 + c v̄(x)), v̄(x) the mean variance of the contrasts of P^g. T(x) = T unless c is set or fitted.
    Of several labels, `label_factors` multiply T and T_c of each, where `calibrate(per_label=True)` has fitted them.
    """

    information: Information
    prior: Prior
    factor: Factor
    temperature: float = 1.0
    covariance_scale: float = 1.0
    softening: float = 0.0
    label_factors: LabelFactors | None = None

    @property
    def calibration(self) -> Calibration:
        """T, T_c and c together, as `LogitGaussian.calibrated` takes them."""
        return Calibration(self.temperature, self.covariance_scale, self.softening)

    @property
    def label_temperatures(self) -> tuple[float, ...]:
        """T of each of several labels; of classes, T alone."""
        return tuple(self.temperature * factor for factor, _ in self._factors())

    @property
    def label_covariance_scales(self) -> tuple[float, ...]:
        """T_c of each of several labels; of classes, T_c alone."""
        return tuple(self.covariance_scale * factor for _, factor in self._factors())

    def _factors(self) -> LabelFactors:
        one_each = 1 if self.information.task.kind.has_gauge else self.information.n_classes
        return ((1.0, 1.0),) * one_each if self.label_factors is None else self.label_factors

    @property
    def model(self) -> nn.Module:
        return self.information.model

    @property
    def unpack(self) -> KeptUnpack | None:
        """How batches are read where no other `unpack` is given: that of the fit, or of `load`."""
        return self.information.task.unpack

    @property
    def jitter(self) -> float:
        """What had to be added to the precision, as a share of its mean diagonal, to factorise it; usually 0."""
        return self.factor.jitter

    @property
    def is_calibrated(self) -> bool:
        """Whether T or T_c were fitted or set: as `fit` leaves them, both are 1."""
        return self.calibration != Calibration() or self.label_factors is not None

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what the posterior is: weights, parameters, structure, prior, calibration and amount of data.

        Its logits carry it, so that those of another posterior are not taken for its own. The sums themselves are not
        hashed: they can be large, and loading or moving them must not change who they are.
        """
        information, task = self.information, self.information.task
        facts = {
            "weights": task.network.fingerprint,
            "parameters": task.selection.names,
            "structure": task.structure,
            "fisher": task.fisher,
            **({} if task.outputs == CLASSES.name else {"outputs": task.outputs}),
            "dtype": str(task.dtype),
            "prior": self.prior.described(),
            "calibration": str(self.calibration.described()),
            **({} if self.label_factors is None else {"label factors": str(self.label_factors)}),
            "data": f"{float(information.n_samples)!r} {information.log_likelihood!r}",
        }
        return hashlib.sha256(str(sorted(facts.items())).encode()).hexdigest()

    def __repr__(self) -> str:
        precision = self.prior.precision
        prior = f"{precision:.3g}" if isinstance(precision, float) else f"of {len(precision)} numbers"
        softening = f", c {self.softening:.2g}" * bool(self.softening)
        scales = f"T {self.temperature:.2g}, T_c {self.covariance_scale:.2g}{softening}"
        if self.label_factors is not None:
            by_label = {"T": self.label_temperatures, "T_c": self.label_covariance_scales}
            spans = (f"{name} {min(values):.2g} to {max(values):.2g}" for name, values in by_label.items())
            scales = f"{', '.join(spans)} by label"
        return f"Posterior: {self.information.described()}, prior {prior}, {scales}"

    def covariance(self) -> Float[Tensor, "n n"]:
        """P in float64, without calibration."""
        return self.factor.covariance.clone()

    def logits(
        self, x: Any, *, top: int | None = None, unpack: Unpack | None = None, differentiable: bool = False
    ) -> LogitGaussian:
        """N(ĝ/T(x), T_c P^g/T(x)²) for each input (eq:linearize); the arguments are as in `predict`.

        With `outputs="positions"` these are `PositionLogits`, with a Gaussian for each position.

        With `top`, of that many classes of each input alone, those with the largest means in falling order, which
        `classes` of the result names: exactly those rows and columns, at the cost of that many backward passes; with
        softening at the cost of all classes, on which T(x) depends.
        """
        if self.information.task.positions is not None:
            if top is not None:
                raise not_for_positions("top= is")
            of_positions: Any = self.position_logits(x, DRAWS, unpack=unpack, differentiable=differentiable)
            return of_positions  # type: ignore[no-any-return]
        if differentiable:
            return self._logits_with_graph(x, top, unpack).rounded()
        return self.unrounded_logits(x, top=top, unpack=unpack).rounded()

    def position_logits(
        self, x: Any, samples: int, seed: int = 0, *, unpack: Unpack | None = None, differentiable: bool = False
    ) -> PositionLogits:
        """N(ĝ/T(x), T_c P^g/T(x)²) of every position; behind the last layer by so many draws of the parameters."""
        return logits_of_positions(
            self.information.task,
            self.factor,
            self.calibration,
            x,
            unpack,
            samples,
            seed,
            differentiable=differentiable,
        )

    def _logits_with_graph(self, x: Any, top: int | None, unpack: Unpack | None) -> LogitGaussian:
        """`unrounded_logits` that lead back to the inputs, and not to the weights."""
        task, device = self.information.task, self.information.task.network.device
        if top is not None:
            require_top(top, task.n_classes)
        constant = replace(self, information=self.information.to(device, fixed(task.network)))
        with graph_execution(device):
            checks, batch = constant._prepared(x, unpack)
            parts = list(constant._checked(batch, checks, top))
            checks.finish()
        return LogitGaussian.concatenated(parts).of_origin(self.fingerprint)

    def unrounded_logits(self, x: Any, *, top: int | None = None, unpack: Unpack | None = None) -> LogitGaussian:
        """`logits` with the covariance still in the dtype of products.

        The variance of the common shift of the logits can be orders of magnitude above that of the contrasts, so
        samples are drawn before the covariance is rounded to the dtype of results.
        """
        task = self.information.task
        task.require_no_positions()
        if top is not None:
            require_top(top, task.n_classes)
        if is_stream(x):
            stream = input_batches(x, unpack or self.unpack)
            return LogitGaussian.concatenated([self.unrounded_logits(batch, top=top) for batch in stream])
        with plain_execution(task.network.device):
            checks, batch = self._prepared(x, unpack)
            tell_of_prediction(task, len(batch) if top is None else 0, None)
            parts = list(self._checked(batch, checks, top))
            checks.finish()
        return LogitGaussian.concatenated(parts).of_origin(self.fingerprint)

    def joint_logits(self, frames: Any, *, unpack: Unpack | None = None) -> JointLogits:
        """The logits of several frames of one object together, R_ij = T_c J_i P J_jᵀ/(T(x_i) T(x_j)).

        `frames` are one batch; `unpack` as in `predict`. The mean is in the dtype of results; the covariance, and
        everything after the network itself that it is computed from, is always float64.
        """
        task = self.information.task
        task.require_classes("joint_logits")
        with plain_execution(task.network.device):
            checks, batch = self._prepared(frames, unpack)
            joint = structure_called(task.structure).joint(task, self.factor, batch)
            require_finite_logits(joint.mean, checks)
            checks.finish()
        return joint.calibrated(self.calibration)

    def predict(
        self,
        x: Any,
        samples: int = 1000,
        seed: int = 0,
        *,
        draws: str = "random",
        unpack: Unpack | None = None,
        differentiable: bool = False,
    ) -> Prediction:
        """The PMF of each input, with its error bars (eq:gmarg).

        Args:
            x: one batch: a tensor, a mapping, or a list or tuple (x, …), of which labels are ignored. Or a DataLoader,
                a Dataset or an iterator of batches, whose inputs follow one another; their logits are held in memory,
                the inputs are not.
            samples: Monte Carlo draws.
            seed: of those draws.
            draws: as in `LogitGaussian.predict`. "random" ones are of the logits, by P^g; or, where there are so many
                classes that it is quicker, of the parameters (`_posterior.pushing`), with the same distribution.
            unpack: a function from a batch to (args, kwargs, labels), whose labels are ignored. Unless given, that of
                the fit reads batches like those of the fit, and all lists and tuples, which may lack the labels at the
                end. A tensor or a mapping of another form goes to the model as it is.
            differentiable: keep the graph from `x`, one batch with a tensor that requires a gradient, to the mean, P^g,
                PMF and all statistics of the samples. It takes memory for the inputs, logits and samples together, so
                it is for a few inputs at a time; the samples are always of the logits, by P^g, or of positions as they
                are without a graph. The weights are constants: gradients of them are neither computed nor left in the
                model.
        """
        of_positions = self.information.task.positions is not None
        if differentiable:
            with graph_execution(self.information.network.device):
                if of_positions:
                    logits = self.position_logits(x, samples, seed, unpack=unpack, differentiable=True)
                    return logits.predict(samples, seed, draws=draws)
                return self._logits_with_graph(x, None, unpack).predict(samples, seed, draws=draws)
        if of_positions:
            return self.position_logits(x, samples, seed, unpack=unpack).predict(samples, seed, draws=draws)
        if draws == "random":
            return self.sampling_logits(x, samples, seed, unpack=unpack).predict(samples, seed)
        return self.unrounded_logits(x, unpack=unpack).predict(samples, seed, draws=draws)

    def sampling_logits(self, x: Any, samples: int, seed: int = 0, *, unpack: Unpack | None = None) -> LogitGaussian:
        """What so many samples are taken from: `unrounded_logits`, or where that is quicker `drawn_logits`."""
        if keeps_draws(self.information.task, require_samples(samples)):
            return self.drawn_logits(x, samples, seed, unpack=unpack)
        return self.unrounded_logits(x, unpack=unpack)

    def drawn_logits(self, x: Any, samples: int = 100, seed: int = 0, *, unpack: Unpack | None = None) -> LogitGaussian:
        """N(ĝ/T(x), T_c P^g/T(x)²) by draws: ĝ, and K samples J δ of what the logits deviate from it, δ ~ N(0, P).

        They have the distribution of `logits`, for all classes at once, and nothing of size M × M is made unless
        `covariance` is read. The draws of the parameters are the same for all inputs, and follow from the seed;
        `predict` of the result takes up to K of them as they are. With a softening, T(x) is from the contrast variance
        of these draws. `x` and `unpack` as in `predict`.
        """
        require_samples(samples)
        require_seed(seed)
        self.information.task.require_no_positions()
        if is_stream(x):
            stream = input_batches(x, unpack or self.unpack)
            return LogitGaussian.concatenated([self.drawn_logits(batch, samples, seed) for batch in stream])
        task = self.information.task
        with plain_execution(task.network.device):
            checks, batch = self._prepared(x, unpack)
            tell_of_prediction(task, len(batch), samples)
            mean = task.network.logits(batch).to(task.network.dtype)
            require_finite_logits(mean, checks)
            checks.finish()
            deviations = pushed_deviations(task, self.factor, batch, samples, seed).to(mean.dtype)
        drawn = self._calibrated(LogitGaussian(mean, DrawnCovariance(deviations), kind=task.kind))
        return drawn.of_origin(self.fingerprint)

    def _checked(self, batch: Batch, checks: Checks, top: int | None) -> Iterator[LogitGaussian]:
        task = self.information.task
        structure = structure_called(task.structure)
        if top is None or self.softening > 0 or self.label_factors is not None:
            gaussians = structure.gaussians(task, self.factor, batch)
        else:
            gaussians = structure.top_gaussians(task, self.factor, batch, top)
        for gaussian in gaussians:
            require_finite_logits(gaussian.mean, checks)
            calibrated = self._calibrated(gaussian.of_kind(task.kind))
            if top is not None and gaussian.classes is None:
                calibrated = calibrated.of_classes(TopClasses(top).classes(gaussian.mean))
            yield calibrated

    def _calibrated(self, gaussian: LogitGaussian) -> LogitGaussian:
        calibrated = gaussian.calibrated(self.calibration)
        return calibrated if self.label_factors is None else calibrated.with_label_factors(self.label_factors)

    def _prepared(self, x: Any, unpack: Unpack | None = None) -> tuple[Checks, Batch]:
        task = self.information.task
        task.network.require_unchanged()
        checks = Checks(task.network.device)
        return checks, task.network.prepare(input_batch(x, unpack or task.unpack), checks)

    def prepared(self, x: Any) -> Batch:
        """An input as the network takes it: on its device, in its dtype."""
        return self._prepared(x)[1]

    def sample_parameters(self, samples: int = 1, seed: int = 0) -> dict[str, Tensor]:
        """Draws from N(θ̂, P), without calibration: name → (samples, …) in the parameter's dtype."""
        network = self.information.network
        network.require_unchanged()
        values = self.information.selection.values(network.module)
        draws = self.information.selection.unflatten(self._drawn_vectors(samples, seed, scale=1.0))
        in_shape = with_shapes_of_model(draws, network)
        return {name: in_shape[name].to(value.dtype) for name, value in values.items()}

    def _drawn_vectors(self, samples: int, seed: int, *, scale: float) -> Float[Tensor, "K n"]:
        center = self.information.selection.flatten(self.information.network.module)
        normal = standard_normal(require_samples(samples), self.information.n_parameters, seed, center)
        return center + math.sqrt(scale) * self.factor.sample(normal)

    def predict_by_parameters(
        self, x: Any, samples: int = 100, seed: int = 0, *, unpack: Unpack | None = None
    ) -> Prediction:
        """The expensive alternative: θ⁽ᵏ⁾ ~ N(θ̂, T_c P), f⁽ᵏ⁾ = softmax(g(x; θ⁽ᵏ⁾)/T(x)), whole network (eq:genMC).

        The reference for the delta method: nothing is linearised here, except v̄(x) of the softening, if there is any,
        so that T(x) is that of `predict`. `x` is one batch; `unpack` as in `predict`.
        """
        network, selection = self.information.network, self.information.selection
        network.require_unchanged()
        if self.label_factors is not None:
            raise ArgumentError(
                "predict_by_parameters scales the covariance of the parameters by T_c, and this posterior has a T_c "
                "for each label; expected one for all (calibrate without per_label). Use predict."
            )
        vectors = self._drawn_vectors(samples, seed, scale=self.covariance_scale)
        dtypes = {name: value.dtype for name, value in selection.values(network.module).items()}
        with plain_execution(network.device):
            checks = Checks(network.device)
            whole = network.prepare_whole(input_batch(x, unpack or self.unpack), checks)
            batch = network.rows(whole)[0] if isinstance(network, HeadNetwork) else whole
            network.logits(batch)  # an input that the model cannot take is reported by this call
            T: float | Tensor = self.temperature
            if self.softening > 0:
                self.information.task.require_classes("predict_by_parameters with softening")
                spread = self.uncalibrated().unrounded_logits(batch).contrast_variance
                T = self.calibration.temperatures(spread).to(network.dtype)
                T = T[:, None] if network.kind.has_gauge else T
            draws = []
            for vector in vectors:
                values = selection.unflatten(vector[None])
                logits = network.logits(batch, {name: v[0].to(dtypes[name]) for name, v in values.items()})
                require_finite_logits(logits, checks)
                draws.append(logits.to(network.dtype) / T)
            checks.finish()
            if self.information.task.positions is not None:
                leading = leading_shape(self.information.task, whole)
                return prediction_by_parameters(self.information.task, torch.stack(draws, 2), leading)
        samples_of_all = probabilities_(torch.stack(draws, 2), network.kind)
        return prediction_of(GivenSampler(samples_of_all, network.kind))

    def update(self, data: Any, *, unpack: Unpack | None = None, group: Any = None) -> Posterior:
        """The posterior after more data: the recursion of eq:recUpdate_all, equal to a fit on all of them.

        θ̂ does not move: the model is not trained on these data, only their information counts. `unpack` is that of the
        fit unless given; `group` as in `collect`; several ranks together always refactorise.
        """
        team = team_of(group)
        self.require_ready(team)
        is_short, stream = self._few(opened(data, unpack or self.unpack, team), team)
        rows: list[Tensor] | None = [] if is_short else None
        information = self.information + accumulate_over(team, self.information.task, stream, rows)
        if rows is None:
            return self._with_information(information)
        return replace(self, information=information, factor=self.factor.recursion(torch.cat(rows), information.total))

    def forget(self, data: Any, *, unpack: Unpack | None = None, group: Any = None) -> Posterior:
        """The posterior without some of its data, equal to a fit on the others.

        This is not unlearning: θ̂ was estimated with these data and does not move; only their information is removed
        from the covariance. Always refactorises, because the check that the data had been seen (no negative eigenvalue
        may remain) costs as much. `unpack` and `group` as in `update`.
        """
        team = team_of(group)
        self.require_ready(team)
        part = accumulate_over(team, self.information.task, opened(data, unpack or self.unpack, team))
        return self._with_information(self.information - part)

    def require_ready(self, team: Team) -> None:
        """Refuse changed weights, and ranks of a team whose posteriors are not the same."""
        team.together(self.information.network.require_unchanged)
        if not team.is_alone:
            facts = self.information.task.facts() | {"prior": self.prior.described()}
            team.require_same(facts | {"number of samples in the posterior": str(self.information.n_samples)})

    def _few(self, stream: Iterator[Batch], team: Team) -> tuple[bool, Iterator[Batch]]:
        """Whether the stream is so short that the recursion is cheaper than a factorisation; and the stream itself."""
        batches: list[Batch] = []
        count = 0
        has_rows = self.information.task.positions is None
        while has_rows and team.is_alone and self.factor.can_recurse(count):
            batch = next(stream, None)
            if batch is None:
                return bool(batches), iter(batches)
            batches.append(batch)
            count += len(batch) * self.information.n_classes
        return False, chain(batches, stream)

    def _with_information(self, information: Information) -> Posterior:
        return condition(information, self.prior)._with(self.calibration).with_label_factors(self.label_factors)

    def log_evidence(self) -> float:
        """ln p(T) ≈ L_N(θ̂) + ln N(θ̂; 0, P_0) + (n/2) ln 2π + ½ ln det P, the Laplace approximation.

        With the constants cancelled: L_N(θ̂) − ½ Σ λθ̂² + ½ Σ ln λ − ½ ln det(information + diag λ).
        """
        information = self.information
        information.network.require_unchanged()
        if information.log_likelihood is None:
            raise LabelError(
                "log_evidence needs Σ ln f_y, and the data of the fit had no labels; collect from batches (x, labels)."
            )
        theta = information.selection.flatten(information.network.module).cpu()
        precision = self.prior.diagonal(information.selection)
        penalty = float((precision * theta.square()).sum() - precision.log().sum())
        return information.log_likelihood - 0.5 * (penalty + self.factor.log_determinant_of_precision())

    def with_prior(self, prior: Prior) -> Posterior:
        """The same information and calibration with another prior; no pass over data."""
        return condition(self.information, prior)._with(self.calibration).with_label_factors(self.label_factors)

    def with_calibration(
        self,
        *,
        temperature: float | None = None,
        covariance_scale: float | None = None,
        softening: float | None = None,
    ) -> Posterior:
        """The same posterior with T, T_c or c replaced. T_c = 0 with c = 0 is plain temperature scaling.

        Where each of several labels has a T and T_c of its own, these are `label_factors` times T and T_c, so all
        change in proportion; `with_label_factors(None)` leaves T and T_c alone.
        """
        return self._with(
            Calibration(
                self.temperature if temperature is None else temperature,
                self.covariance_scale if covariance_scale is None else covariance_scale,
                self.softening if softening is None else softening,
            )
        )

    def uncalibrated(self) -> Posterior:
        """The same posterior with T = 1, T_c = 1 and c = 0."""
        return self._with(Calibration()).with_label_factors(None)

    def with_label_factors(self, factors: LabelFactors | None) -> Posterior:
        """The same posterior with other factors of T and T_c for each of several labels, or with none."""
        checked = checked_label_factors(factors, self.information.task.kind, self.information.n_classes)
        return replace(self, label_factors=checked)

    def _with(self, calibration: Calibration) -> Posterior:
        return replace(self, **vars(calibration))

    def to(self, device: torch.device | str) -> Posterior:
        """The same posterior on `device`: with the user's model if that is there already, otherwise with a copy."""
        target = torch.empty(0, device=device).device
        network = self.information.network
        is_there = next(network.module.parameters()).device == target
        target_network = network.on_other(
            network.model if is_there else copy.deepcopy(unwrap(network.model)).to(target)
        )
        if not target_network.same_weights(network):
            raise WeightsChangedError(
                "The model's weights changed since the fit, so the posterior cannot follow it. Fit again."
            )
        information = self.information.to(target, target_network)
        return replace(self, information=information, factor=self.factor.to(target))

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        example: Any,
        samples: int = 1000,
        seed: int = 0,
        risk: Any = (),
        draws: str = "random",
        outputs: Sequence[str] | None = None,
        level: float = 0.95,
    ) -> None:
        """Write an `.onnx` or `.pt2` file that predicts by itself, for any batch size, with T, T_c and c in it.

        Its outputs are "pmf", "std", "covariance" (P^f), "logits", "logit_covariance" (P^g) and, where `risk` has
        thresholds, "risk" (B, thresholds, M); or those named in `outputs`, which may be "lower" and "upper" too, the
        interval of this `level`, and "mutual_information". They are what `predict(x, samples, seed)` gives by P^g, with
        the same draws. `example` is one batch as for `predict`; it is not kept. The network in front
        of the selected layers may be anything; these and what follows must be linear layers with activations between
        them.
        """
        from errbar._export.write import (
            ExportRequest,
            WorkedExample,
            checked_outputs,
            checked_path,
            checked_thresholds,
            write_export,
        )

        checked_path(path)
        self.information.task.require_inputs("export")
        prediction = self.predict(example, samples, seed, draws=draws)
        thresholds = checked_thresholds(risk, prediction)
        require_level(level)
        names = checked_outputs(outputs, risk=len(thresholds) > 0)
        request = ExportRequest(
            self.calibration,
            require_samples(samples),
            require_seed(seed),
            draws,
            thresholds,
            names,
            level,
            self.label_factors,
        )
        batch = self.prepared(example)
        # The batch size is free in the file, so the file must be right for one row as well as for several.
        parts = [batch, batch.rows(0, 1)] if len(batch) > 1 else [batch]
        examples = [WorkedExample.of(part, self.unrounded_logits(part), request) for part in parts]
        write_export(path, self.information.task, self.factor, examples, request)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles carry the model and the information; the factorisation, which has locks, is made again."""
        numbers = (self.temperature, self.covariance_scale, self.softening, self.label_factors)
        return _restored, (self.information, self.prior, *numbers)

    def save(
        self, path: str | os.PathLike[str], *, factors: bool = False, classes: Sequence[str] | None = None
    ) -> None:
        """Write a safetensors file for `errbar.load`: information, prior, T, T_c and c; no data, no code.

        With `factors` the factorisation goes into the file too, which makes it about three times as large for the
        exact structure and loading instant. `classes` are names for people. The file is replaced as a whole: if the
        disk is full or the process is killed, the previous file stays intact.
        """
        from errbar._files.save import save_posterior

        save_posterior(self, path, classes, factors=factors)


def _restored(
    information: Information,
    prior: Prior,
    temperature: float,
    covariance_scale: float,
    softening: float = 0.0,
    label_factors: LabelFactors | None = None,
) -> Posterior:
    """The last two may be missing: pickles of before there were any have fewer values."""
    posterior = condition(information, prior)._with(Calibration(temperature, covariance_scale, softening))
    return posterior.with_label_factors(label_factors)


def condition(information: Information, prior: Prior, *, model: nn.Module | None = None) -> Posterior:
    """Information and a prior make a posterior; no pass over data.

    `model` is only for information from a file, which holds no model.
    """
    if not isinstance(information, Information):
        raise ArgumentError(f"Expected Information, as errbar.collect returns it, got {type(information).__name__}.")
    if not isinstance(prior, Prior):
        raise ArgumentError(f"prior is {prior!r}; expected errbar.Prior, for example errbar.Prior(1.0).")
    if model is not None:
        information = information.with_model(model)
    elif not information.task.network.has_model:
        raise ArgumentError(
            "This information came from a file, and files hold no model; expected condition(information, prior, "
            "model=model) with the model of the fit."
        )
    task = information.task
    precision = prior.diagonal(task.selection).to(task.network.device)
    tell_of_factorisation(task)
    factor = information.total.condition(precision, jitter_limit(task.dtype))
    if factor.jitter > 0:
        warnings.warn(
            f"The posterior precision needed jitter of {factor.jitter:.0e} of its mean diagonal: the prior "
            "is smaller than the rounding of the information. Use precision='float64' or a larger prior precision.",
            UserWarning,
            stacklevel=2,
        )
    elif task.dtype != torch.float64:
        _warn_of_rounding(factor, precision)
    return Posterior(information, prior, factor)


def _warn_of_rounding(factor: Factor, precision: Float[Tensor, "n"]) -> None:
    """Float32 products of samples that are alike round alike, and their errors add up like the samples."""
    share = factor.rounding_share(precision)
    if share > _NOTICEABLE_ROUNDING:
        warnings.warn(
            f"Rounding of float32 products has changed the information by about {share:.0%} of the prior precision in "
            "directions that the prior decides, and variances there by as much: many samples are alike, and have "
            "rounded alike. Use precision='float64' or a larger prior precision.",
            UserWarning,
            stacklevel=3,
        )


def jitter_limit(dtype: torch.dtype) -> float:
    """Rounding of float32 products can leave eigenvalues below zero; the prior usually lifts them, jitter if not."""
    return 1e-12 if dtype == torch.float64 else 1e-6


def logits_of_each(posteriors: Sequence[Posterior], x: Any) -> list[LogitGaussian]:
    """`unrounded_logits` without calibration of posteriors that differ in their prior alone: one differentiation."""
    first = posteriors[0]
    task = first.information.task
    factors = [posterior.factor for posterior in posteriors]
    with plain_execution(task.network.device):
        checks, batch = first._prepared(x)
        parts = list(structure_called(task.structure).gaussians_of_each(task, factors, batch))
        for part in parts:
            require_finite_logits(part[0].mean, checks)
        checks.finish()
    whole = [LogitGaussian.concatenated(own) for own in zip(*parts, strict=True)]
    return [gaussian.of_kind(task.kind) for gaussian in whole]


def require_posterior(value: object, classes_for: str | None = None) -> None:
    """Refuse what is no posterior; and for what is only made for classes, in its name, one of other outputs."""
    if not isinstance(value, Posterior):
        raise ArgumentError(f"Expected a Posterior, as errbar.fit returns it, got {type(value).__name__}.")
    if classes_for is not None:
        value.information.task.require_classes(classes_for)
