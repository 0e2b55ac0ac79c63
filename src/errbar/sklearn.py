"""`ErrbarClassifier`: a scikit-learn classifier whose probabilities have error bars.

>>> from sklearn.datasets import make_blobs
>>> X, y = make_blobs(200, centers=[[0, 0], [2, 0], [0, 2]], random_state=0)
>>> classifier = ErrbarClassifier(epochs=20).fit(X, y)
>>> classifier.predict_proba(X[:2]).shape, classifier.predict_std(X[:2]).shape
((2, 3), (2, 3))

All imports are absolute: `sklearn` is scikit-learn here too, and this module is `errbar.sklearn`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import errbar
from errbar._distributions.sampling import require_samples
from errbar._model.batch import Batch
from errbar._model.network import as_logits, run
from errbar.errors import ArgumentError, DataError, LabelError, MissingExtraError, ModelError, how_to_install

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, check_X_y, validate_data
except ImportError as missing:
    raise MissingExtraError(
        f"errbar.sklearn needs scikit-learn 1.6 or newer, which is not installed: {how_to_install('sklearn')}."
    ) from missing

# Inputs predicted at a time: the covariances of their logits are in memory together.
_BLOCK = 1024
# The layers of a posterior that `autofit` does not choose, and the held-out samples that it needs for its folds.
_USUAL_LAYERS, _ENOUGH_TO_CHOOSE = 2, 100

Factory = Callable[[int, int], nn.Module]


class ErrbarClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A network that is trained, gets a posterior over some layers, and is calibrated, all in `fit`.

    Part of the data is held out of the training for the calibration. Inputs should be scaled, as for any network: put a
    `StandardScaler` before it in a pipeline. Labels may be anything that scikit-learn takes for classes.

    Args:
        hidden_layer_sizes: widths of the hidden layers of the network that is trained if `module` is None.
        module: None; or a function (number of features, number of classes) → module that returns logits, to be trained
            here; or a trained module, which is used as it is: then nothing is held out, X and y in `fit` should be the
            data that it was trained on, and it is calibrated only with `fit(..., calibration=(X, y))`.
        epochs: passes over the training part, with Adam.
        learning_rate: of Adam.
        weight_decay: of Adam.
        batch_size: of Adam.
        validation_fraction: the share of each class that is held out for the calibration; 0 for no calibration, which
            leaves everything to the prior: that of a weak weight decay washes the PMFs out.
        last_layers: the posterior is over the parameters of this many last layers; None leaves it to `calibrate`.
        prior: a precision, or `errbar.Prior`; "evidence" for the one that the evidence chooses; None for the one that
            `weight_decay` amounts to (`Prior.from_weight_decay`), and for "evidence" with a module that was trained
            elsewhere.
        fisher: as in `errbar.fit`.
        structure: as in `errbar.fit`.
        calibrate: "auto": `errbar.autofit` chooses layers, structure, prior, T, T_c and the softening on the held-out
            part, where that has 100 samples or more and `last_layers`, `prior`, `fisher`, `structure` and `objective`
            are as they are by default; otherwise it is "covariance_scale" (the paper's method). That, "temperature",
            "softening", or several of them, are fitted to the last two layers, or as many as `last_layers` says. The
            covariance scale makes up for a prior that is too wide or too narrow, which the temperature cannot; more
            than one of them need some hundred held-out samples.
        objective: what the calibration minimises on the held-out part: "nll", "brier" or "ece".
        samples: Monte Carlo samples of a prediction.
        random_state: of the initial weights, the order of the samples, what is held out, and the Monte Carlo samples. A
            number or a `RandomState`; with None, scikit-learn's habit, every fit is another one.

    Attributes:
        classes_: the class labels, in the order of the columns of `predict_proba`.
        n_features_in_: the number of features.
        posterior_: the `errbar.Posterior`; its model is the trained network.
        choice_: the `errbar.Choice` of `autofit`, whose table can be printed; None where it did not choose.
        calibrated_: whether there were data to calibrate with.
    """

    def __init__(
        self,
        hidden_layer_sizes: Sequence[int] = (32, 32),
        *,
        module: nn.Module | Factory | None = None,
        epochs: int = 100,
        learning_rate: float = 1e-2,
        weight_decay: float = 1e-3,
        batch_size: int = 64,
        validation_fraction: float = 0.2,
        last_layers: int | None = None,
        prior: float | str | errbar.Prior | None = None,
        fisher: str = "ggn",
        structure: str | Mapping[str, str] = "dense",
        calibrate: str | Sequence[str] = "auto",
        objective: str = "nll",
        samples: int = 1000,
        random_state: Any = 0,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.module = module
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.validation_fraction = validation_fraction
        self.last_layers = last_layers
        self.prior = prior
        self.fisher = fisher
        self.structure = structure
        self.calibrate = calibrate
        self.objective = objective
        self.samples = samples
        self.random_state = random_state

    def fit(
        self, X: ArrayLike, y: ArrayLike, *, calibration: tuple[ArrayLike, ArrayLike] | None = None
    ) -> ErrbarClassifier:
        """Train, fit the posterior, calibrate. `calibration` are held-out data to use instead of a part of X."""
        inputs, labels = validate_data(self, X, y, dtype=np.float64)
        self._require_settings()
        check_classification_targets(labels)
        classes, codes = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise LabelError(f"y has one class only, {classes[0]!r}; a classifier needs two classes or more.")
        self.classes_ = classes
        random = check_random_state(self.random_state)
        seed = int(random.randint(2**31 - 1))
        is_trained = isinstance(self.module, nn.Module)
        held_out = np.zeros(len(codes), dtype=bool)
        if calibration is None and not is_trained:
            held_out = _held_out(codes, self.validation_fraction, random)

        network = self.module if isinstance(self.module, nn.Module) else self._new_network(len(classes), seed)
        dtype = _dtype_of(network)
        training = _data_set(inputs[~held_out], codes[~held_out], dtype)
        if not is_trained:
            self._train(network, training, seed)
        if calibration is not None:
            rest = self._calibration_data(calibration, dtype)
        else:
            rest = _data_set(inputs[held_out], codes[held_out], dtype)
        self.calibrated_ = len(rest) > 0
        self.choice_ = errbar.autofit(network, training, rest, seed=seed, group=False) if self._chooses(rest) else None
        posterior = self._posterior(network, training, is_trained) if self.choice_ is None else self.choice_.posterior
        _require_outputs(posterior.information.n_classes, len(classes))
        if self.choice_ is None and self.calibrated_:
            posterior = self._calibrated(posterior, rest, seed)
        self.posterior_ = posterior
        self._seed = seed
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most likely class of each input."""
        probability = self._columns(X, lambda prediction: prediction.pmf)
        labels: NDArray[Any] = self.classes_[probability.argmax(1)]
        return labels

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """(inputs, classes): the PMF, with the uncertainty of the parameters averaged in."""
        probability = self._columns(X, lambda prediction: prediction.pmf)
        # In float64 the sums of float32 probabilities are off by 1e-7, and scikit-learn's metrics would warn.
        probability /= probability.sum(1, keepdims=True)
        return probability

    def predict_std(self, X: ArrayLike) -> NDArray[np.float64]:
        """(inputs, classes): the standard deviation of each probability, √diag P^f: its error bar."""
        return self._columns(X, lambda prediction: prediction.std)

    def predict_full(self, X: ArrayLike) -> errbar.Prediction:
        """Everything that is known about the PMFs of the inputs: intervals, risks, covariances, `errbar.decide`."""
        return self._predict(self._inputs(X))

    def _columns(self, X: ArrayLike, statistic: Callable[[errbar.Prediction], Tensor]) -> NDArray[np.float64]:
        inputs = self._inputs(X)
        parts = [statistic(self._predict(block)).double() for block in inputs.split(_BLOCK)]
        columns: NDArray[np.float64] = torch.cat(parts).cpu().numpy()
        return columns

    def _inputs(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self, "posterior_")
        values = validate_data(self, X, dtype=np.float64, reset=False)
        return _tensor(values, _dtype_of(self.posterior_.model))

    def _predict(self, inputs: Tensor) -> errbar.Prediction:
        posterior: errbar.Posterior = self.posterior_
        return posterior.predict(inputs, samples=self.samples, seed=self._seed)

    # ------------------------------------------------------------------------------------------------ parts of `fit`

    def _require_settings(self) -> None:
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ArgumentError(f"{name} is {value!r}; expected a whole number of one or more.")
        if not isinstance(self.validation_fraction, Real) or not 0 <= self.validation_fraction < 1:
            raise ArgumentError(f"validation_fraction is {self.validation_fraction!r}; expected 0 up to less than 1.")
        if not isinstance(self.learning_rate, Real) or not 0 < self.learning_rate < math.inf:
            raise ArgumentError(f"learning_rate is {self.learning_rate!r}; expected a positive number.")
        if not isinstance(self.weight_decay, Real) or not 0 <= self.weight_decay < math.inf:
            raise ArgumentError(f"weight_decay is {self.weight_decay!r}; expected zero or a positive number.")
        require_samples(self.samples)
        if isinstance(self.prior, str) and self.prior != "evidence":
            raise ArgumentError(f"prior is {self.prior!r}; expected a number, errbar.Prior, 'evidence' or None.")
        if self.module is None:
            _require_widths(self.hidden_layer_sizes)
        if self.module is not None and not callable(self.module):
            raise ArgumentError(
                f"module is {self.module!r}; expected None, a trained torch.nn.Module, or a function (number of "
                "features, number of classes) → torch.nn.Module."
            )

    def _new_network(self, classes: int, seed: int) -> nn.Module:
        """Initial weights by each layer's own rule, from `seed`; the global generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.module is None:
                return _perceptron((self.n_features_in_, *self.hidden_layer_sizes, classes))
            network = self.module(self.n_features_in_, classes)
        if not isinstance(network, nn.Module):
            raise ModelError(
                f"module(features, classes) returned a {type(network).__name__}; expected a torch.nn.Module."
            )
        return network

    def _train(self, network: nn.Module, training: TensorDataset, seed: int) -> None:
        """Adam on the mean cross-entropy, in batches whose order depends on the seed; so does dropout."""
        optimizer = torch.optim.Adam(network.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        shuffling = torch.Generator().manual_seed(seed)
        device = next(network.parameters()).device
        x, y = (tensor.to(device) for tensor in training.tensors)
        network.eval()
        with torch.no_grad():
            _require_outputs(as_logits(run(network, Batch((x[:1],))), 1).shape[1], len(self.classes_))
        network.train()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            for _ in range(self.epochs):
                for rows in _batches(torch.randperm(len(x), generator=shuffling), int(self.batch_size)):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(as_logits(network(x[rows]), len(rows)), y[rows]).backward()
                    optimizer.step()
        optimizer.zero_grad()
        network.eval()

    def _posterior(self, network: nn.Module, training: TensorDataset, is_trained: bool) -> errbar.Posterior:
        information = errbar.collect(
            network,
            training,
            last_layers=_USUAL_LAYERS if self.last_layers is None else self.last_layers,
            fisher=self.fisher,
            structure=self.structure,
            group=False,
        )
        prior = self.prior
        if prior is None and not is_trained and self.weight_decay > 0:
            return errbar.condition(information, errbar.Prior.from_weight_decay(self.weight_decay, len(training)))
        if prior is None or prior == "evidence":
            return errbar.condition(information, errbar.choose_prior(information))
        assert not isinstance(prior, str)
        return errbar.condition(information, prior if isinstance(prior, errbar.Prior) else errbar.Prior(prior))

    def _chooses(self, held_out: TensorDataset) -> bool:
        """Whether `autofit` does, by what was left open and by the number of held-out samples."""
        is_open = self.last_layers is None and self.prior is None and self.objective == "nll"
        is_usual = self.fisher == "ggn" and self.structure == "dense"
        is_auto = isinstance(self.calibrate, str) and self.calibrate == "auto"
        return is_auto and is_open and is_usual and len(held_out) >= _ENOUGH_TO_CHOOSE

    def _calibrated(self, posterior: errbar.Posterior, held_out: TensorDataset, seed: int) -> errbar.Posterior:
        return errbar.calibrate(
            posterior,
            held_out,
            objective=self.objective,
            fit="covariance_scale" if self.calibrate == "auto" else self.calibrate,
            samples=self.samples,
            seed=seed,
            group=False,
        )

    def _calibration_data(self, calibration: tuple[ArrayLike, ArrayLike], dtype: torch.dtype) -> TensorDataset:
        try:
            inputs, labels = calibration
        except (TypeError, ValueError) as error:
            raise DataError("calibration is not a pair; expected (X, y), held-out data.") from error
        inputs, labels = check_X_y(inputs, labels, dtype=np.float64)
        if inputs.shape[1] != self.n_features_in_:
            raise DataError(f"The calibration data have {inputs.shape[1]} features; expected {self.n_features_in_}.")
        unknown = np.setdiff1d(labels, self.classes_)
        if len(unknown):
            raise LabelError(f"The calibration data have the class {unknown[0]!r}, which y does not have.")
        codes = np.searchsorted(self.classes_, labels)
        return _data_set(inputs, codes, dtype)


def _perceptron(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers of these widths with ReLU between them, in float64: results then do not depend on the batch."""

    def layers() -> Iterator[nn.Module]:
        for inner, outer in pairwise(sizes[:-1]):
            yield nn.Linear(inner, outer, dtype=torch.float64)
            yield nn.ReLU()
        yield nn.Linear(sizes[-2], sizes[-1], dtype=torch.float64)

    return nn.Sequential(*layers())


def _held_out(codes: NDArray[np.intp], fraction: float, random: np.random.RandomState) -> NDArray[np.bool_]:
    """Which samples are held out: of each class `fraction` of its samples, rounded down, so that none is used up."""
    is_held_out = np.zeros(len(codes), dtype=bool)
    for code in np.unique(codes):
        rows = random.permutation(np.flatnonzero(codes == code))
        is_held_out[rows[: int(fraction * len(rows))]] = True
    return is_held_out


def _data_set(inputs: NDArray[np.float64], codes: NDArray[np.intp], dtype: torch.dtype) -> TensorDataset:
    return TensorDataset(_tensor(inputs, dtype), torch.as_tensor(codes))


def _tensor(inputs: NDArray[np.float64], dtype: torch.dtype) -> Tensor:
    """A copy, because torch has no tensors that run backwards (X[::-1]) or cannot be written to (shared by joblib)."""
    return torch.from_numpy(np.array(inputs, dtype=np.float64, order="C")).to(dtype)


def _batches(order: Tensor, size: int) -> list[Tensor]:
    """The order in batches. One sample that is left over joins the batch before it: batch norms cannot train on one."""
    parts = list(order.split(size))
    if len(parts) > 1 and len(parts[-1]) == 1 < size:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def _dtype_of(network: nn.Module) -> torch.dtype:
    return next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.get_default_dtype())


def _require_widths(sizes: Any) -> None:
    widths = list(sizes) if isinstance(sizes, Iterable) else [None]
    if any(isinstance(width, bool) or not isinstance(width, Integral) or width < 1 for width in widths):
        raise ArgumentError(
            f"hidden_layer_sizes is {sizes!r}; expected the widths of the hidden layers, for example (32, 32)."
        )


def _require_outputs(outputs: int, classes: int) -> None:
    if outputs != classes:
        raise ModelError(f"The module tells {outputs} classes apart; expected {classes}, as many as y has.")
