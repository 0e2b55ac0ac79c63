"""Requests and answers as pydantic models; the OpenAPI document is made from them.

The models of the requests are made for each service, because they depend on the number of values of an input, on the
limits, and on the names of the posteriors: what the document allows is accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, RootModel, create_model
from typing_extensions import TypeAliasType

from errbar.serve.limits import Limits
from errbar.serve.service import Service

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# FailFast: of a million wrong values, reporting the first is enough. Unions do not allow it, so the parts have names.
Row = TypeAliasType("Row", Annotated[list[Number], FailFast(), Field(min_length=1)])
Rows = TypeAliasType("Rows", Annotated[list["Row | Rows"], FailFast(), Field(min_length=1)])  # type: ignore[misc]
Probability = Annotated[float, Field(strict=True, ge=0, le=1)]
Include = Literal["covariance", "logits", "points", "outlier", "input"]


# Labels in one request.
MOST_LABELS = 10_000


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    seed: int = Field(
        0, ge=0, lt=2**63, description="Seed of the Monte Carlo draws: the same seed gives the same answer."
    )
    temperature: float | None = Field(
        None,
        ge=1e-3,
        le=1e3,
        description="T in place of the posterior's own: N(ĝ/T(x), T_c P^g/T(x)²), T(x) = T √(1 + c v̄(x)).",
    )
    covariance_scale: float | None = Field(
        None, ge=0, le=1e6, description="T_c in place of the posterior's own; 0 is plain temperature scaling."
    )
    softening: float | None = Field(
        None,
        ge=0,
        le=1e6,
        description="c in place of the posterior's own; with 0, T(x) is T for every input.",
    )
    level: float = Field(0.95, gt=0, lt=1, description="Probability that the intervals contain.")


class GivenGaussian(BaseModel):
    """Logits of one object, N(mean, covariance): for example `logits` of an answer of another service."""

    model_config = ConfigDict(extra="forbid", strict=True)
    mean: Annotated[list[Number], FailFast(), Field(min_length=2, max_length=1000)]
    covariance: Annotated[
        list[Annotated[list[Number], FailFast(), Field(min_length=2, max_length=1000)]],
        FailFast(),
        Field(min_length=2, max_length=1000),
    ]


class GivenLabelGaussian(GivenGaussian):
    """The same of several labels, of which one is enough."""

    mean: Annotated[list[Number], FailFast(), Field(min_length=1, max_length=1000)]
    covariance: Annotated[
        list[Annotated[list[Number], FailFast(), Field(min_length=1, max_length=1000)]],
        FailFast(),
        Field(min_length=1, max_length=1000),
    ]


class Problem(BaseModel):
    """Why there is no answer: what was wrong, what was expected, and what to do."""

    error: str = Field(description="One or two sentences for people.")
    kind: str = Field(description="A word for programs.")


class Logits(BaseModel):
    """N(mean, covariance) of the logits, minus their mean over the classes, which softmax ignores.

    Those of several labels are as they are.
    """

    mean: list[float]
    covariance: list[list[float]]


class Points(BaseModel):
    """Draws of the logits of the two leading classes, as `logits` has them."""

    classes: list[int]
    logits: list[list[float]]


class Outlier(BaseModel):
    """How much of the doubt about an input is the model's own, compared with the training inputs."""

    mutual_information: float = Field(
        description="In nats, at the T, T_c and c that the posterior was calibrated to; of several labels their sum."
    )
    percentile: float = Field(description="Percentage of training inputs with a lower value.")
    times_the_median: float
    training_inputs: int


class PredictionAnswer(BaseModel):
    """The PMF of one input with its error bars; each list has one number per class."""

    model_config = ConfigDict(populate_by_name=True)
    id: str | None = Field(None, description="Names this answer, for POST /v1/labels; parts of a fusion have none.")
    name: str = Field(alias="class", description="The most likely class.")
    label: int = Field(description="Its number, from 0.")
    confidence: float
    entropy: float = Field(description="In nats.")
    mutual_information: float = Field(description="The part of the entropy due to the parameters.")
    pmf: list[float]
    std: list[float] = Field(description="Standard deviations of the PMF: √diag P^f.")
    standard_error: list[float] | None = Field(
        description="Monte Carlo error of the PMF itself; null with one sample, which does not suffice to estimate it."
    )
    lower: list[float]
    upper: list[float]
    risk: list[float] | None = Field(None, description="Pr{f_m > γ_m}, if thresholds were given.")
    covariance: list[list[float]] | None = Field(None, description="P^f, if requested.")
    logits: Logits | None = None
    points: Points | None = None
    outlier: Outlier | None = None


class LabelPredictionAnswer(BaseModel):
    """The probabilities of several labels of one input with their error bars; lists have one number per label.

    Each label is true or false by itself, so `pmf` does not sum to one.
    """

    id: str | None = Field(None, description="Names this answer, for POST /v1/labels; parts of a fusion have none.")
    names: list[str] = Field(description="The labels, in the order of all lists.")
    likely: list[str] = Field(description="Those that are more likely true than not: none, some or all.")
    entropy: list[float] = Field(description="In nats, of each label.")
    mutual_information: list[float] = Field(description="The part of each entropy due to the parameters.")
    pmf: list[float] = Field(description="The probability that each label is true.")
    std: list[float] = Field(description="Standard deviations of these probabilities: √diag P^f.")
    standard_error: list[float] | None = Field(
        description="Monte Carlo error of the probabilities; null with one sample, which does not suffice to estimate "
        "it."
    )
    lower: list[float]
    upper: list[float]
    risk: list[float] | None = Field(None, description="Pr{f_l > γ_l}, if thresholds were given.")
    covariance: list[list[float]] | None = Field(None, description="P^f, between the labels, if requested.")
    logits: Logits | None = None
    outlier: Outlier | None = None


class PredictAnswer(BaseModel):
    """One prediction per input, in order."""

    posterior: str
    samples: int
    seed: int
    temperature: float
    covariance_scale: float
    softening: float
    level: float
    predictions: list[PredictionAnswer]
    inputs: list[Any] | None = Field(None, description="The inputs of the network, if requested.")


class LabelPredictAnswer(PredictAnswer):
    """One prediction of several labels per input, in order."""

    predictions: list[LabelPredictionAnswer]  # type: ignore[assignment]


class FusedObject(BaseModel):
    """One object: all sources fused, and each source alone; with `joint` also frames fused as a track fuses them."""

    fused: PredictionAnswer
    single: list[PredictionAnswer]
    independent: PredictionAnswer | None
    rank: int | None = Field(description="With joint: rank of the covariance between the frames that was inverted.")


class FuseAnswer(BaseModel):
    """One object for frames and for gaussians; one per input, in order, for posteriors."""

    over: Literal["frames", "posteriors", "gaussians"]
    samples: int
    seed: int
    level: float
    objects: list[FusedObject]


class FusedLabels(FusedObject):
    """One object with several labels: all sources fused, and each source alone."""

    fused: LabelPredictionAnswer  # type: ignore[assignment]
    single: list[LabelPredictionAnswer]  # type: ignore[assignment]
    independent: None = None
    rank: None = None


class FuseLabelsAnswer(FuseAnswer):
    """One object with several labels for frames and for gaussians; one per input, in order, for posteriors."""

    objects: list[FusedLabels]  # type: ignore[assignment]


class InputRisk(BaseModel):
    """Pr{f_m > γ_m} for each class, or label, m of one input."""

    risk: list[float]
    pmf: list[float]
    worst: str = Field(description="The class, or label, with the highest risk; the first in case of a tie.")


class RiskAnswer(BaseModel):
    """The risks of each input, in order."""

    posterior: str
    thresholds: list[float]
    samples: int
    seed: int
    risks: list[InputRisk]


class Example(BaseModel):
    """A training or test input for the page to show."""

    input: list[Any]
    label: str


class PictureLayout(BaseModel):
    """An input as a picture: its channels, height and width, and the values that are black and white."""

    shape: list[int]
    low: float
    high: float


class ValueRange(BaseModel):
    """The smallest, middle and largest value among the training inputs."""

    low: float
    middle: float
    high: float


class ModelAnswer(BaseModel):
    """What is served."""

    posterior: str
    posteriors: list[str]
    about: str
    version: str
    outputs: Literal["classes", "labels"] = Field(
        description="One of the classes, or several labels that are true or false by themselves."
    )
    classes: list[str] = Field(description="The names of the classes, or of the labels.")
    input_shape: list[int] | None
    pictures: str | None = Field(description="How pictures are prepared; null if the model takes none.")
    digits: bool
    picture: PictureLayout | None = Field(description="How an input is shown as a picture; null if it is none.")
    values: list[ValueRange] | None = Field(
        description="What each value of an input is among the training inputs; null if unknown, or if it has many."
    )
    integers: bool = Field(description="Whether the model takes whole numbers only.")
    networks: int = Field(description="How many are fused; 1 for a posterior.")
    parameters: int
    layers: list[str]
    structure: str
    fisher: str
    samples: float = Field(
        description="Number of training inputs whose information the posterior holds; of several, the most."
    )
    temperature: float
    covariance_scale: float
    softening: float
    label_temperatures: list[float] | None = Field(
        description="T of each label, where labels have their own; a T of a request is multiplied as theirs are."
    )
    label_covariance_scales: list[float] | None = Field(description="The same of T_c.")
    calibrated: bool = Field(description="False where T and T_c are both 1, as a fit leaves them.")
    reference: list[float] | None = Field(description="101 percentiles of the training inputs' mutual informations.")
    examples: list[Example]
    engine: Literal["onnx", "torch"] = Field(
        description="What computes requests that leave T, T_c, c, samples, seed and level as they are and ask for no "
        "risk, covariance, logits or points; all others, and fusion, are computed by torch."
    )
    engine_reason: str = Field(description="Why it is this engine, in a sentence.")
    monitor: bool = Field(description="Whether answers are monitored: GET /v1/monitor.")
    limits: dict[str, float]


class GivenLabel(BaseModel):
    """The label of an input that was answered: the `id` of its answer, and the class by number or by name."""

    model_config = ConfigDict(extra="forbid", strict=True)
    id: str = Field(min_length=1, max_length=100)
    label: Annotated[int, Field(ge=0)] | Annotated[str, Field(min_length=1, max_length=1000)]


class GivenLabels(BaseModel):
    """The labels of an input that was answered, 0, 1, or −1 for a missing one, in the order of GET /v1/model."""

    model_config = ConfigDict(extra="forbid", strict=True)
    id: str = Field(min_length=1, max_length=100)
    labels: Annotated[list[Annotated[int, Field(ge=-1, le=1)]], FailFast(), Field(min_length=1)]


class LabelLists(RootModel[list[GivenLabels]]):
    """The several labels of inputs that were answered, each input once."""

    model_config = ConfigDict(strict=True)
    root: Annotated[list[GivenLabels], FailFast(), Field(min_length=1, max_length=MOST_LABELS)]


class Labels(RootModel[list[GivenLabel]]):
    """Labels of inputs that were answered, each input once."""

    model_config = ConfigDict(strict=True)
    root: Annotated[list[GivenLabel], FailFast(), Field(min_length=1, max_length=MOST_LABELS)]


class MonitorAlarm(BaseModel):
    """An alarm of one test. `at` and `since` count the inputs that were monitored, from 1."""

    test: str
    side: str = Field(description="In which direction, for example 'higher' or 'more of class 3'.")
    at: int = Field(description="The input whose score or label raised the alarm.")
    since: int = Field(description="The input at which the change probably began.")
    observations: int = Field(description="The scores or labels that the test had used.")
    capital: float = Field(description="What its bets had made of 1; the alarm is raised at 1/rate.")
    rate: float
    time: float | None = Field(description="When `at` was answered, or labelled, in seconds since 1970 (UTC).")
    since_time: float | None = Field(description="About when `since` was answered.")
    sentence: str


class MonitorTest(BaseModel):
    """One test: `kind` says whether it looks at inputs or at labels."""

    name: str = Field(
        description="mutual_information, entropy, classes (of inputs), overconfidence, underconfidence, innovation."
    )
    kind: Literal["inputs", "labels"]
    rate: float = Field(description="Its share of the false-alarm rate.")
    evidence: float = Field(description="Its capital as a share of that which raises the alarm: an alarm is at 1.")
    alarm: MonitorAlarm | None


class MonitorHistory(BaseModel):
    """The evidence over time: lists of equal lengths, at most 500 points, thinned as the stream grows.

    `evidence` has a list for each test, for a logarithmic axis: 1 is the alarm, and below 1e-6 it is told as 1e-6.
    """

    input: list[int] = Field(description="How many inputs had been monitored.")
    labels: list[int] = Field(description="How many labels had come.")
    time: list[float] = Field(description="Seconds since 1970 (UTC).")
    evidence: dict[str, list[float]]


class MonitorAgreement(BaseModel):
    """How labels and predictions agree; null where there are no labels yet."""

    labels: int
    confidence: float | None
    accuracy: float | None
    gap: float | None = Field(description="Confidence minus accuracy: positive where there is too much of it.")
    interval: list[float] = Field(description="Of the gap, valid at all times at once with probability `level`.")
    level: float
    ece: float | None
    innovation: float | None = Field(description="Mean of ν/(M−1): 1 or less for a calibrated PMF.")


class MonitorAnswer(BaseModel):
    """What the monitor has seen of the answers: counts, tests with their evidence, alarms, and the evidence over time.

    Monitored are the answers of `/v1/predict` of one posterior, with its own T, T_c and c, and with the samples and the
    seed of the reference, unless the request has `"monitor": false`.
    """

    posterior: str
    reference: str = Field(description="The held-out data that the stream is compared with.")
    reference_inputs: int
    engine: str = Field(description="What predicted the reference, as /v1/model names it.")
    samples: int
    seed: int
    started: float = Field(description="When the run began, in seconds since 1970 (UTC).")
    rate: float = Field(description="The false-alarm rate of all tests together, over the whole run.")
    tolerance: float = Field(description="How far apart mean confidence and accuracy may be.")
    inputs: int = Field(description="Inputs that were monitored.")
    skipped: int = Field(description="Inputs that were answered and not monitored.")
    labels: int = Field(description="Labels that came for monitored inputs.")
    waiting: int = Field(description="Inputs that wait for their labels.")
    dropped: int = Field(description="Inputs whose labels are no longer waited for, because too many wait.")
    unmatched: int = Field(description="Labels without an input that waits.")
    tests: list[MonitorTest]
    alarms: list[MonitorAlarm] = Field(description="In the order in which they were raised.")
    agreement: MonitorAgreement
    history: MonitorHistory


class LabelsAnswer(BaseModel):
    """What became of labels: `matched` were waited for, and `unmatched` were not."""

    matched: int
    unmatched: int
    alarms: list[MonitorAlarm] = Field(description="Those that these labels raised.")


class Health(BaseModel):
    """Whether requests are being computed."""

    status: Literal["ok", "stopped"]
    queued_inputs: int


def input_type(shape: tuple[int, ...] | None, most: int) -> Any:
    """A list of inputs, with the number of values of each if it is known."""
    if shape is None:
        return Annotated[list[Row | Rows], FailFast(), Field(min_length=1, max_length=most)]
    kind: Any = Number
    for size in (*shape[::-1], None):
        low, high = (1, most) if size is None else (size, size)
        kind = Annotated[list[kind], FailFast(), Field(min_length=low, max_length=high)]
    return kind


def _absent() -> None:
    """A default that the document does not show: the field is omitted, never null."""


def _either(*names: str) -> dict[str, Any]:
    return {"oneOf": [{"required": [name]} for name in names]}


def request_models(service: Service, limits: Limits) -> tuple[type[BaseModel], type[BaseModel], type[BaseModel]]:
    """The models of the requests to predict, to fuse and for risk, for this service."""
    shapes = {member.shape for member in service.members}
    shape = shapes.pop() if len(shapes) == 1 else None
    classes = {len(member.classes) for member in service.members}
    names: list[Any] = [member.name for member in service.members]
    count = classes.pop() if len(classes) == 1 else None
    each = Field(min_length=2) if count is None else Field(min_length=count, max_length=count)
    one_each: Any = TypeAliasType("Thresholds", Annotated[list[Probability], FailFast(), each])
    thresholds: Any = Probability | one_each
    samples = (int, Field(1000, ge=1, le=limits.samples, description="Monte Carlo draws K."))
    posterior = (
        str,
        Field(names[0], json_schema_extra={"enum": [*names]}, description="Which of the posteriors served."),
    )
    risk = (thresholds, Field(default_factory=_absent, description="γ, one for all classes or one per class."))

    def input_fields(most: int) -> dict[str, Any]:
        text = "Values of each input. Expected is exactly one of inputs and images."
        fields: dict[str, Any] = {"inputs": (input_type(shape, most), Field(default_factory=_absent, description=text))}
        pictures = Annotated[list[str], Field(min_length=1, max_length=most)]
        text = "Pictures in base64 or as data URLs; GET /v1/model says how they are prepared."
        fields["images"] = (pictures, Field(default_factory=_absent, description=text))
        return fields

    def model_of(name: str, alternatives: tuple[str, ...], text: str, **fields: Any) -> type[BaseModel]:
        config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_either(*alternatives))
        base = type("_Base", (_Request,), {"model_config": config, "__module__": __name__})
        model: type[BaseModel] = create_model(name, __base__=base, __doc__=text, **fields)
        return model

    extras: Any = (list[Include], Field(default_factory=list, max_length=10, description="What else to return."))
    predict = model_of(
        "PredictRequest",
        ("inputs", "images"),
        "Inputs whose PMFs are requested.",
        **input_fields(limits.inputs),
        samples=samples,
        posterior=posterior,
        risk=risk,
        include=extras,
        monitor=(
            bool,
            Field(
                True, description="Whether this input is part of the stream that is monitored, if there is a monitor."
            ),
        ),
    )
    some = Field(min_length=1, max_length=limits.frames)
    of_labels: Any = Annotated[list[GivenLabelGaussian], some]
    gaussians: Any = of_labels if service.of_labels else Annotated[list[GivenGaussian], some]
    fuse = model_of(
        "FuseRequest",
        ("inputs", "images", "gaussians"),
        "Frames of one object, inputs for several posteriors, or logits from several services.",
        **input_fields(limits.frames),
        gaussians=(gaussians, Field(default_factory=_absent, description="Independent sources for one object.")),
        over=(
            Literal["frames", "posteriors"],
            Field(
                "frames",
                description="Whether inputs are frames of one object, or each is an object for all posteriors.",
            ),
        ),
        joint=(
            bool,
            Field(
                False,
                description="Fuse frames with the covariance R between them, which assumes that only the parameters "
                "make them differ, and not as errbar.Track does.",
            ),
        ),
        samples=samples,
        posterior=posterior,
        risk=risk,
    )
    risks = model_of(
        "RiskRequest",
        ("inputs", "images"),
        "Inputs whose classes may be more probable than is acceptable.",
        **input_fields(limits.inputs),
        thresholds=(thresholds, Field(description="γ, one for all classes or one per class.")),
        samples=samples,
        posterior=posterior,
    )
    return predict, fuse, risks
