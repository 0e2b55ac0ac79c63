"""The linearisation against sampling parameters, and a second set of inputs against the first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from errbar import metrics
from errbar._base.quantiles import quantiles
from errbar._model.batch import Batch, joined
from errbar._posterior.posterior import Posterior
from errbar.errors import DataError
from errbar.report.observing import Classifier, draws_of, plain_logits
from errbar.report.resampling import area
from errbar.report.values import Curve, Estimate, Linearisation, OutlierRow, Outliers

DRAWS = 100
_LEAST_DRAWS = 20
# Numbers in all draws of the parameters: half a gigabyte in float64.
_DRAWN_NUMBERS = 2**26
_ROC_POINTS = 100


def draws_that_fit(parameters: int) -> int:
    """How many networks to draw; zero where too few fit into memory to be of use."""
    draws = min(DRAWS, _DRAWN_NUMBERS // max(1, parameters))
    return draws if draws >= _LEAST_DRAWS else 0


def linearisation(posterior: Posterior, inputs: Sequence[Batch], draws: int, samples: int, seed: int) -> Linearisation:
    """The delta method and `posterior.predict_by_parameters` on the same inputs, one network per draw.

    With K₁ and K₂ samples the means of class m differ by chance, with standard deviation s_m = √(σ_m²/K₁ + σ'_m²/K₂);
    so a total variation of ½ Σ_m s_m √(2/π) is noise.
    """
    batch = joined(inputs)
    delta = posterior.predict(batch, samples, seed)
    by_parameters = posterior.predict_by_parameters(batch, draws, seed)
    distance = (delta.pmf - by_parameters.pmf).abs().sum(1) / 2
    error = (delta.std.square() / samples + by_parameters.std.square() / draws).sqrt()
    winner = delta.label[:, None]
    first, second = (prediction.std.gather(1, winner)[:, 0].double().cpu() for prediction in (delta, by_parameters))
    # Where all draws agree there is no spread to compare.
    is_uncertain = first > 1e-6
    ratios = (second / first)[is_uncertain]
    middle = quantiles(ratios, (0.25, 0.5, 0.75)).tolist() if is_uncertain.any() else [math.nan] * 3
    return Linearisation(
        inputs=len(batch),
        draws=draws,
        distance=float(distance.mean()),
        noise=float(error.sum(1).mean()) / 2 * math.sqrt(2 / math.pi),
        ratio=Estimate(middle[1], middle[0], middle[2]),
        points=tuple(zip(first.tolist(), second.tolist(), strict=True)),
    )


def scores_of(posterior: Classifier, stream: Iterable[Batch], samples: int, seed: int) -> dict[str, Float[Tensor, "K"]]:
    """The outlier scores of each input; higher is more unusual. Labels are ignored."""
    samples = draws_of(posterior, samples)
    columns: dict[str, list[Tensor]] = {}
    for batch in stream:
        gaussian = plain_logits(posterior, batch, samples, seed)
        calibrated = gaussian.calibrated(posterior.calibration)
        prediction = calibrated.predict(samples, seed)
        scores = score_columns(
            torch.softmax(gaussian.mean, 1),
            prediction.pmf,
            prediction.mutual_information,
            calibrated.contrast_variance,
        )
        for name, values in scores.items():
            columns.setdefault(name, []).append(values.cpu())
    if not columns:
        raise DataError("The second set is empty: expected at least one batch.")
    return {name: torch.cat(parts) for name, parts in columns.items()}


def score_columns(
    network: Float[Tensor, "N M"],
    pmf: Float[Tensor, "N M"],
    information: Float[Tensor, "N"],
    variance: Float[Tensor, "N"],
) -> dict[str, Float[Tensor, "N"]]:
    """The scores by name, from what was computed for each input."""
    return {
        "doubt of the network alone, 1 − max softmax": 1 - network.amax(1),
        "doubt with error bars, 1 − max f": 1 - pmf.amax(1),
        "mutual information (nats)": information,
        "variance of the logits’ contrasts": variance,
    }


def compare_outliers(
    name: str, inside: Mapping[str, Float[Tensor, "N"]], outside: Mapping[str, Float[Tensor, "K"]]
) -> Outliers:
    """How well each score tells the second set from the first."""
    rows = [
        OutlierRow(
            score,
            area(inside[score], outside[score]),
            float(inside[score].double().median()),
            float(outside[score].double().median()),
            _roc(inside[score], outside[score]),
        )
        for score in outside
    ]
    return Outliers(name, len(next(iter(outside.values()))), tuple(rows))


def _roc(inside: Float[Tensor, "N"], outside: Float[Tensor, "K"]) -> Curve:
    both = torch.cat([inside, outside])
    x, y = metrics.roc(both, torch.arange(len(both)) >= len(inside), _ROC_POINTS)
    return Curve(tuple(x), tuple(y))
