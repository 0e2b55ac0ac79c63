"""What a monitor needs to know of predictions: a few numbers of each input, wherever they were computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from errbar._distributions.prediction import Prediction
from errbar.errors import ArgumentError, DataError


@dataclass(frozen=True, eq=False)
class Scores:
    """PMFs of B inputs with their scores; `deviation`, the standard deviation of the most likely class, is only
    needed of a reference.
    """

    pmf: Float[np.ndarray, "B M"]
    label: Int[np.ndarray, "B"]
    entropy: Float[np.ndarray, "B"]
    mutual_information: Float[np.ndarray, "B"]
    deviation: Float[np.ndarray, "B"] | None = None

    @staticmethod
    def of(prediction: Prediction | Scores, what: str, *, deviation: bool = False) -> Scores:
        """Those of a prediction, with `deviation` or without; `what` begins the sentence if it is none."""
        if isinstance(prediction, Scores):
            return prediction
        if not isinstance(prediction, Prediction):
            raise ArgumentError(
                f"{what} is {type(prediction).__name__}; expected a Prediction from `posterior.predict(x)`."
            )
        if not prediction.sampler.kind.has_gauge or prediction.pmf.ndim > 2:
            outputs = "positions" if prediction.pmf.ndim > 2 else prediction.sampler.kind.name
            raise ArgumentError(
                f"{what} is of outputs='{outputs}', and a monitor watches one of M classes; expected predictions of "
                "outputs='classes'."
            )
        if len(prediction) == 0:
            raise DataError(f"{what} holds no inputs; expected at least one.")
        if not bool(prediction.pmf.isfinite().all()):
            raise DataError(f"{what} holds NaN or infinite probabilities; expected finite ones.")
        return Scores(
            _numbers(prediction.pmf),
            prediction.label.cpu().numpy(),
            _numbers(prediction.entropy),
            _numbers(prediction.mutual_information),
            _numbers(prediction.std.gather(1, prediction.label[:, None])[:, 0]) if deviation else None,
        )

    def __len__(self) -> int:
        return len(self.pmf)

    @property
    def classes(self) -> int:
        return int(self.pmf.shape[1])


def _numbers(values: Tensor) -> Float[np.ndarray, "..."]:
    found: Float[np.ndarray, "..."] = values.detach().double().cpu().numpy()
    return found
