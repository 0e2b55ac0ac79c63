"""What may be asked and what is answered, as pydantic models: the OpenAPI document is made of them.

Requests are models of their own for each service, because how many values an input has, how many inputs and samples
are allowed, and the names of the posteriors are facts of it: what the document allows is accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, create_model
from typing_extensions import TypeAliasType

from errbar.serve.limits import Limits
from errbar.serve.service import Service

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# FailFast: of a million wrong values the first is enough. It cannot stand in a union, so the parts have names.
Row = TypeAliasType("Row", Annotated[list[Number], FailFast(), Field(min_length=1)])
Rows = TypeAliasType("Rows", Annotated[list["Row | Rows"], FailFast(), Field(min_length=1)])  # type: ignore[misc]
Probability = Annotated[float, Field(strict=True, ge=0, le=1)]
Include = Literal["covariance", "logits", "points", "outlier", "input"]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    seed: int = Field(0, ge=0, lt=2**63, description="Of the Monte Carlo draws: the same seed, the same answer.")
    temperature: float | None = Field(
        None, ge=1e-3, le=1e3, description="T in place of the posterior's own: N(ĝ/T, T_c P^g/T²)."
    )
    covariance_scale: float | None = Field(
        None, ge=0, le=1e6, description="T_c in place of the posterior's own; 0 is plain temperature scaling."
    )
    level: float = Field(0.95, gt=0, lt=1, description="Probability that the intervals hold.")


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
    """Why there is no answer: what was wrong, what was expected, what to do."""

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

    mutual_information: float = Field(description="In nats, at the T and T_c that the posterior was calibrated to.")
    percentile: float = Field(description="Per cent of training inputs with a smaller one.")
    times_the_median: float
    training_inputs: int


class PredictionAnswer(BaseModel):
    """The PMF of one input with its error bars; each list has one number for each class."""

    model_config = ConfigDict(populate_by_name=True)
    name: str = Field(alias="class", description="The most likely class.")
    label: int = Field(description="Its number, from 0.")
    confidence: float
    entropy: float = Field(description="In nats.")
    mutual_information: float = Field(description="The part of the entropy that the parameters are to blame for.")
    pmf: list[float]
    std: list[float] = Field(description="Standard deviations of the PMF: √diag P^f.")
    standard_error: list[float] | None = Field(
        description="Monte Carlo error of the PMF itself; null with one sample, from which it cannot be told."
    )
    lower: list[float]
    upper: list[float]
    risk: list[float] | None = Field(None, description="Pr{f_m > γ_m}, where thresholds were given.")
    covariance: list[list[float]] | None = Field(None, description="P^f, where it was asked for.")
    logits: Logits | None = None
    points: Points | None = None
    outlier: Outlier | None = None


class PredictAnswer(BaseModel):
    """One prediction for each input, in their order."""

    posterior: str
    samples: int
    seed: int
    temperature: float
    covariance_scale: float
    level: float
    predictions: list[PredictionAnswer]
    inputs: list[Any] | None = Field(None, description="What the network was given, where it was asked for.")


class FusedObject(BaseModel):
    """One object: all that is known together, each source alone, and frames as if they were independent."""

    fused: PredictionAnswer
    single: list[PredictionAnswer]
    independent: PredictionAnswer | None
    rank: int | None = Field(description="Rank of the covariance between the frames that could be inverted.")


class FuseAnswer(BaseModel):
    """One object for frames and for gaussians; one for each input, in their order, for posteriors."""

    over: Literal["frames", "posteriors", "gaussians"]
    samples: int
    seed: int
    level: float
    objects: list[FusedObject]


class InputRisk(BaseModel):
    """Pr{f_m > γ_m} for each class m of one input."""

    risk: list[float]
    pmf: list[float]
    worst: str = Field(description="The class with the highest risk, the first of several.")


class RiskAnswer(BaseModel):
    """Risks of each input, in their order."""

    posterior: str
    thresholds: list[float]
    samples: int
    seed: int
    risks: list[InputRisk]


class Example(BaseModel):
    """A training or test input for the page to show."""

    input: list[Any]
    label: str


class ModelAnswer(BaseModel):
    """What is served."""

    posterior: str
    posteriors: list[str]
    about: str
    version: str
    classes: list[str]
    input_shape: list[int] | None
    pictures: str | None = Field(description="What is done with pictures; null where the model takes none.")
    digits: bool
    parameters: int
    layers: list[str]
    structure: str
    fisher: str
    samples: float = Field(description="Training inputs whose information the posterior holds.")
    temperature: float
    covariance_scale: float
    reference: list[float] | None = Field(description="101 percentiles of the training inputs' mutual informations.")
    examples: list[Example]
    limits: dict[str, float]


class Health(BaseModel):
    """Whether requests are computed."""

    status: Literal["ok", "stopped"]
    queued_inputs: int


def input_type(shape: tuple[int, ...] | None, most: int) -> Any:
    """A list of inputs, of so many values each where that is known."""
    if shape is None:
        return Annotated[list[Row | Rows], FailFast(), Field(min_length=1, max_length=most)]
    kind: Any = Number
    for size in (*shape[::-1], None):
        low, high = (1, most) if size is None else (size, size)
        kind = Annotated[list[kind], FailFast(), Field(min_length=low, max_length=high)]
    return kind


def _absent() -> None:
    """A default that the document does not show: the field is left out, never null."""


def _either(*names: str) -> dict[str, Any]:
    return {"oneOf": [{"required": [name]} for name in names]}


def request_models(service: Service, limits: Limits) -> tuple[type[BaseModel], type[BaseModel], type[BaseModel]]:
    """Requests to predict, to fuse and for risk of this service."""
    shapes = {member.shape for member in service.members}
    shape = shapes.pop() if len(shapes) == 1 else None
    classes = {len(member.classes) for member in service.members}
    names: list[Any] = [member.name for member in service.members]
    count = classes.pop() if len(classes) == 1 else None
    each = Field(min_length=2) if count is None else Field(min_length=count, max_length=count)
    one_each: Any = TypeAliasType("Thresholds", Annotated[list[Probability], FailFast(), each])
    thresholds: Any = Probability | one_each
    samples = (int, Field(1000, ge=1, le=limits.samples, description="Monte Carlo draws K."))
    posterior = (str, Field(names[0], json_schema_extra={"enum": [*names]}, description="Which of those served."))
    risk = (thresholds, Field(default_factory=_absent, description="γ, one or one for each class."))

    def given(most: int) -> dict[str, Any]:
        text = "Values, an input each: exactly one of inputs and images."
        fields: dict[str, Any] = {"inputs": (input_type(shape, most), Field(default_factory=_absent, description=text))}
        pictures = Annotated[list[str], Field(min_length=1, max_length=most)]
        text = "Pictures in base64, also as data URLs; GET /v1/model says how they are prepared."
        fields["images"] = (pictures, Field(default_factory=_absent, description=text))
        return fields

    def made(name: str, alternatives: tuple[str, ...], text: str, **fields: Any) -> type[BaseModel]:
        config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_either(*alternatives))
        base = type("_Base", (_Request,), {"model_config": config, "__module__": __name__})
        model: type[BaseModel] = create_model(name, __base__=base, __doc__=text, **fields)
        return model

    asked: Any = (list[Include], Field(default_factory=list, max_length=10, description="What else to tell."))
    predict = made(
        "PredictRequest",
        ("inputs", "images"),
        "Inputs whose PMFs are wanted.",
        **given(limits.inputs),
        samples=samples,
        posterior=posterior,
        risk=risk,
        include=asked,
    )
    gaussians = Annotated[list[GivenGaussian], Field(min_length=1, max_length=limits.frames)]
    fuse = made(
        "FuseRequest",
        ("inputs", "images", "gaussians"),
        "Frames of one object, inputs for several posteriors, or logits that several services have told.",
        **given(limits.frames),
        gaussians=(gaussians, Field(default_factory=_absent, description="Independent sources about one object.")),
        over=(
            Literal["frames", "posteriors"],
            Field("frames", description="Inputs are frames of one object, or each an object for all posteriors."),
        ),
        samples=samples,
        posterior=posterior,
        risk=risk,
    )
    risks = made(
        "RiskRequest",
        ("inputs", "images"),
        "Inputs whose classes may be more probable than can be accepted.",
        **given(limits.inputs),
        thresholds=(thresholds, Field(description="γ, one or one for each class.")),
        samples=samples,
        posterior=posterior,
    )
    return predict, fuse, risks
