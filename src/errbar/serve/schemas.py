"""Requests and answers as pydantic models; the OpenAPI document is made from them.

The models of the requests are made for each service, because they depend on the number of values of an input, on the
limits, and on the names of the posteriors: what the document allows is accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, create_model
from typing_extensions import TypeAliasType

from errbar.serve.limits import Limits
from errbar.serve.service import Service

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# FailFast: of a million wrong values, reporting the first is enough. Unions do not allow it, so the parts have names.
Row = TypeAliasType("Row", Annotated[list[Number], FailFast(), Field(min_length=1)])
Rows = TypeAliasType("Rows", Annotated[list["Row | Rows"], FailFast(), Field(min_length=1)])  # type: ignore[misc]
Probability = Annotated[float, Field(strict=True, ge=0, le=1)]
Include = Literal["covariance", "logits", "points", "outlier", "input"]


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


class Problem(BaseModel):
    """Why there is no answer: what was wrong, what was expected, and what to do."""

    error: str = Field(description="One or two sentences for people.")
    kind: str = Field(description="A word for programs.")


class Logits(BaseModel):
    """N(mean, covariance) of the logits, minus their mean over the classes, which softmax ignores."""

    mean: list[float]
    covariance: list[list[float]]


class Points(BaseModel):
    """Draws of the logits of the two leading classes, as `logits` has them."""

    classes: list[int]
    logits: list[list[float]]


class Outlier(BaseModel):
    """How much of the doubt about an input is the model's own, compared with the training inputs."""

    mutual_information: float = Field(description="In nats, at the T, T_c and c that the posterior was calibrated to.")
    percentile: float = Field(description="Percentage of training inputs with a lower value.")
    times_the_median: float
    training_inputs: int


class PredictionAnswer(BaseModel):
    """The PMF of one input with its error bars; each list has one number per class."""

    model_config = ConfigDict(populate_by_name=True)
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


class InputRisk(BaseModel):
    """Pr{f_m > γ_m} for each class m of one input."""

    risk: list[float]
    pmf: list[float]
    worst: str = Field(description="The class with the highest risk; the first in case of a tie.")


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
    classes: list[str]
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
    calibrated: bool = Field(description="False where T and T_c are both 1, as a fit leaves them.")
    reference: list[float] | None = Field(description="101 percentiles of the training inputs' mutual informations.")
    examples: list[Example]
    limits: dict[str, float]


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
    )
    gaussians = Annotated[list[GivenGaussian], Field(min_length=1, max_length=limits.frames)]
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
