"""The contents of a report as frozen values: computed by the modules beside this one, shown by `page`."""

from __future__ import annotations

from dataclasses import dataclass

from errbar._files.choice_table import ChoiceTable


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval; bounds are NaN where there is none."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Bin:
    """A bin of a reliability diagram: `accuracy` with its interval, and the mean confidence."""

    low: float
    high: float
    count: int
    accuracy: Estimate
    confidence: float


@dataclass(frozen=True)
class Curve:
    """Points of a curve."""

    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True)
class Histogram:
    """The number of predictions, and of wrong ones, in equally wide bins of the confidence."""

    count: tuple[int, ...]
    wrong: tuple[int, ...]


@dataclass(frozen=True)
class Variant:
    """One way to compute a PMF, with its scores. `gap` is the mean confidence minus the accuracy."""

    key: str
    name: str
    confidence: float
    accuracy: Estimate
    gap: Estimate
    nll: Estimate
    brier: Estimate
    ece: Estimate
    aurc: float
    diagram: tuple[Bin, ...]
    histogram: Histogram
    risk_coverage: Curve


@dataclass(frozen=True)
class ScaleEffect:
    """What the covariance does that a temperature alone cannot.

    `gain` is the NLL of plain temperature scaling (T_c = 0), at the `temperature` that is best on the data of the
    report itself, minus the NLL of the posterior, with a paired interval. This favours plain temperature scaling.
    `std` is the mean standard deviation of the probability of the most likely class.
    """

    temperature: float
    gain: Estimate
    std: float


@dataclass(frozen=True)
class ScaleCurves:
    """NLL against T and against T_c, of `inputs` inputs spread over the data.

    `by_temperature` keeps T_c, `without_covariance` has T_c = 0; `by_scale` keeps T, and `ridge`, where it was
    computed, has the best T for each T_c. The `softening` is kept in all of them.
    """

    inputs: int
    temperature: float
    covariance_scale: float
    softening: float
    by_temperature: Curve
    without_covariance: Curve
    by_scale: Curve
    ridge: Curve | None


@dataclass(frozen=True)
class ClassRow:
    """One class: `recall` is the accuracy among its inputs, `precision` that among the inputs predicted as it."""

    number: int
    name: str
    inputs: int
    predicted: int
    recall: float
    precision: float
    confidence: float
    std: float
    confused_with: str | None


@dataclass(frozen=True)
class LabelRow:
    """One of several labels: in how many inputs it is given, the share of them for which it is `true`, the mean
    `probability` that it is and its standard deviation, and its scores; `precision` is the average precision."""

    name: str
    given: int
    true: float
    probability: float
    std: float
    nll: float
    ece: float
    auroc: float
    precision: float


@dataclass(frozen=True)
class Bar:
    """The probability of one class, with its 95 % interval."""

    name: str
    probability: float
    low: float
    high: float
    role: str


@dataclass(frozen=True)
class Ellipse:
    """The centred logits of two classes: their mean, the half axes of 1 σ, the angle, and some draws."""

    names: tuple[str, str]
    mean: tuple[float, float]
    major: float
    minor: float
    angle: float
    draws: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Picture:
    """A PNG file; `stretched` says that its values were outside 0 … 1 and were rescaled."""

    png: bytes
    width: int
    height: int
    stretched: bool


@dataclass(frozen=True)
class ShownInput:
    """One input with its prediction, and its picture or else some of its numbers."""

    name: str
    label: str
    predicted: str
    confidence: float
    std: float
    entropy: float
    mutual_information: float
    bars: tuple[Bar, ...]
    ellipse: Ellipse
    picture: Picture | None
    numbers: str


@dataclass(frozen=True)
class OutlierRow:
    """One score: how well it separates the second set from the first, and its median in each."""

    name: str
    auroc: Estimate
    inside: float
    outside: float
    curve: Curve


@dataclass(frozen=True)
class Outliers:
    """A second set of inputs, which do not belong to the first."""

    name: str
    inputs: int
    rows: tuple[OutlierRow, ...]


@dataclass(frozen=True)
class Linearisation:
    """The delta method against sampling parameters, `draws` networks on `inputs` inputs.

    `distance` is the mean total variation between the two PMFs, `noise` the part of it that the draws explain. `ratio`
    is the median of (standard deviation by parameters)/(by the delta method) of the most likely class, with quartiles,
    and `points` are these two standard deviations for each input.
    """

    inputs: int
    draws: int
    distance: float
    noise: float
    ratio: Estimate
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Verdict:
    """The result in plain words: the headline and the sentences below it."""

    headline: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """Names and values under a heading."""

    heading: str
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Report:
    """A whole report. `subject` says what it is about, `missing` which parts were omitted and why, `choice` what
    `autofit` tried where it chose the posterior. `decisions` says what was decided, "870 labels of 300 inputs" say,
    where an input has several decisions, and is empty otherwise; `label_rows` are those of several labels."""

    subject: str
    inputs: int
    classes: int
    temperature: float
    covariance_scale: float
    softening: float
    verdict: Verdict
    variants: tuple[Variant, ...]
    effect: ScaleEffect
    curves: ScaleCurves | None
    class_rows: tuple[ClassRow, ...]
    uncertain: tuple[ShownInput, ...]
    wrong: tuple[ShownInput, ...]
    outliers: Outliers | None
    linearisation: Linearisation | None
    missing: tuple[str, ...]
    provenance: tuple[Facts, ...]
    choice: ChoiceTable | None = None
    decisions: str = ""
    label_rows: tuple[LabelRow, ...] = ()
