"""Inputs to look at: the prediction for each, with its PMF, its logits, and its picture or numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from errbar._distributions.prediction import Prediction
from errbar.plots.single import plane_of
from errbar.report.observing import Leader
from errbar.report.pictures import numbers_of, picture_of
from errbar.report.values import Bar, Ellipse, ShownInput

# Classes whose bars are drawn, and draws in the plane of two logits.
_BARS = 5
_DOTS = 80


def examples(
    leaders: Sequence[Leader],
    classes: Sequence[str],
    name_of: Callable[[int], str],
    shape: tuple[int, int, int] | None,
    samples: int,
    seed: int,
) -> tuple[ShownInput, ...]:
    """The leaders of a list, in their order."""
    return tuple(_example(leader, classes, name_of(leader.index), shape, samples, seed) for leader in leaders)


def _example(
    leader: Leader,
    classes: Sequence[str],
    name: str,
    shape: tuple[int, int, int] | None,
    samples: int,
    seed: int,
) -> ShownInput:
    prediction = leader.gaussian.predict(samples, seed)
    winner = int(prediction.label[0])
    picture = picture_of(leader.batch, shape)
    return ShownInput(
        name=name,
        label=classes[leader.label],
        predicted=classes[winner],
        confidence=float(prediction.confidence[0]),
        std=float(prediction.std[0, winner]),
        entropy=float(prediction.entropy[0]),
        mutual_information=float(prediction.mutual_information[0]),
        bars=_bars(prediction, leader.label, classes),
        ellipse=_ellipse(leader, prediction, classes, seed),
        picture=picture,
        numbers="" if picture is not None else numbers_of(leader.batch),
    )


def _bars(prediction: Prediction, label: int, classes: Sequence[str]) -> tuple[Bar, ...]:
    """The most likely classes, always including the label's; the roles determine the colours."""
    pmf = prediction.pmf[0]
    numbers = pmf.topk(min(_BARS, len(pmf))).indices.tolist()
    if label not in numbers:
        numbers[-1] = label
    lower, upper = prediction.interval(0.95)
    winner = int(prediction.label[0])

    def role(number: int) -> str:
        return "predicted" if number == winner else "label" if number == label else "other"

    return tuple(
        Bar(classes[number], float(pmf[number]), float(lower[0, number]), float(upper[0, number]), role(number))
        for number in numbers
    )


def _ellipse(leader: Leader, prediction: Prediction, classes: Sequence[str], seed: int) -> Ellipse:
    """The predicted class against the label, or against the runner-up where the prediction is right."""
    first, second = prediction.pmf[0].topk(2).indices.tolist()
    pair = (first, second if leader.label == first else leader.label)
    plane = plane_of(leader.gaussian, 0, pair)
    x, y = plane.sample(_DOTS, seed)
    return Ellipse(
        names=(classes[pair[0]], classes[pair[1]]),
        mean=plane.mean,
        major=plane.major,
        minor=plane.minor,
        angle=plane.angle,
        draws=tuple(zip(x, y, strict=True)),
    )
