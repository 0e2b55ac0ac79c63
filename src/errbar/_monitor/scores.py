"""What a monitor needs to know of predictions: a few numbers of each input, wherever they were computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from errbar._distributions.prediction import Prediction
from errbar._model.outputs import CLASSES, LABELS
from errbar.errors import ArgumentError, DataError


@dataclass(frozen=True, eq=False)
class Scores:
    """PMFs of B inputs with their scores; `deviation`, the standard deviation of the most likely class, is only
    needed of a reference.

    Of several labels `pmf` has the probability of each, `entropy` and `mutual_information` are sums over them, and
    `deviation` is their mean; `label` is the most probable label + 1, or 0 where none is more likely true than not.
    """

    pmf: Float[np.ndarray, "B M"]
    label: Int[np.ndarray, "B"]
    entropy: Float[np.ndarray, "B"]
    mutual_information: Float[np.ndarray, "B"]
    deviation: Float[np.ndarray, "B"] | None = None
    outputs: str = CLASSES.name

    @staticmethod
    def of(prediction: Prediction | Scores, what: str, *, deviation: bool = False) -> Scores:
        """Those of a prediction, with `deviation` or without; `what` begins the sentence if it is none."""
        if isinstance(prediction, Scores):
            return prediction
        if not isinstance(prediction, Prediction):
            raise ArgumentError(
                f"{what} is {type(prediction).__name__}; expected a Prediction from `posterior.predict(x)`."
            )
        if prediction.pmf.ndim > 2:
            raise ArgumentError(
                f"{what} is of outputs='positions', and a monitor watches inputs with one class or some labels each; "
                "expected predictions of outputs='classes' or 'labels'."
            )
        if len(prediction) == 0:
            raise DataError(f"{what} holds no inputs; expected at least one.")
        if not bool(prediction.pmf.isfinite().all()):
            raise DataError(f"{what} holds NaN or infinite probabilities; expected finite ones.")
        if not prediction.sampler.kind.has_gauge:
            return Scores.of_labels(
                _numbers(prediction.pmf),
                _numbers(prediction.entropy),
                _numbers(prediction.mutual_information),
                _numbers(prediction.std) if deviation else None,
            )
        return Scores(
            _numbers(prediction.pmf),
            prediction.label.cpu().numpy(),
            _numbers(prediction.entropy),
            _numbers(prediction.mutual_information),
            _numbers(prediction.std.gather(1, prediction.label[:, None])[:, 0]) if deviation else None,
        )

    @staticmethod
    def of_labels(
        probability: Float[np.ndarray, "B L"],
        entropy: Float[np.ndarray, "B L"],
        mutual_information: Float[np.ndarray, "B L"],
        std: Float[np.ndarray, "B L"] | None,
    ) -> Scores:
        """Those of several labels, from the numbers of each."""
        most = np.where(probability.max(1) > 0.5, probability.argmax(1) + 1, 0)
        deviation = None if std is None else std.mean(1)
        return Scores(probability, most, entropy.sum(1), mutual_information.sum(1), deviation, LABELS.name)

    def __len__(self) -> int:
        return len(self.pmf)

    @property
    def classes(self) -> int:
        return int(self.pmf.shape[1])


def _numbers(values: Tensor) -> Float[np.ndarray, "..."]:
    found: Float[np.ndarray, "..."] = values.detach().double().cpu().numpy()
    return found
