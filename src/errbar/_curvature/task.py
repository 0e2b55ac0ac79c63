"""The task of a fit: sums of which structure, for which parameters of which network, and how to differentiate.

A file holds no model. A task from a file has an `AbsentNetwork`, of which only the weights' fingerprint is known;
`Task.on` puts a model in its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar._curvature.fisher import Fisher, RootedWeights, ScoreWeights, Weights, fisher_form, logit_weights
from errbar._curvature.layout import Layout
from errbar._curvature.positions import Positions
from errbar._curvature.scores import ScoreDraws
from errbar._derivative.route import Route
from errbar._model.batch import Form, KeptUnpack, Unpack, kept_unpack
from errbar._model.network import Network, Output, described_output, require_output
from errbar._model.outputs import CLASSES, POSITIONS, OutputKind
from errbar._model.positions import HeadNetwork, PositionsNetwork
from errbar._model.selection import Selection, require_selection_on
from errbar.errors import ArgumentError, MismatchError, ModelError

Precision = Literal["float64"]


@dataclass(frozen=True, eq=False)
class Task:
    """What to compute from the data, and what the first batch decided.

    `route` says how the logits are differentiated; None for structures that need no layers. `rank` is that of a sketch,
    and 1 for structures without one. `layout` is what the first pass showed, and `batch_size` the expected size of
    batches; a file has neither. `unpack` reads later batches as it read those of the fit, and `batch_form` is the form
    that these had; files keep only the latter. `dtype`, that of products, follows from the network and `precision`.
    `scores` are the draws of `fisher="sampled"`. `parts` are the tasks of a mixed structure (`_curvature.mixed`), each
    about some of the parameters, with a route of its own. `positions` say how those of an input count, if it has any.
    `class_weights` multiply the weights of the samples, each by its label.
    """

    network: Network
    selection: Selection
    structure: str
    fisher: Fisher
    n_classes: int
    precision: Precision | None
    rank: int = 1
    route: Route | None = None
    layout: Layout | None = None
    batch_size: int = 1
    unpack: KeptUnpack | None = None
    batch_form: Form | None = None
    scores: ScoreDraws | None = None
    parts: tuple[Task, ...] = ()
    positions: Positions | None = None
    class_weights: tuple[float, ...] | None = None
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", product_dtype(self.network, self.precision))

    @property
    def routes(self) -> tuple[Route | None, ...]:
        """How the logits are differentiated: one route, or one for each part."""
        return tuple(part.route for part in self.parts) or (self.route,)

    @property
    def kind(self) -> OutputKind:
        """What the outputs of the network mean."""
        return self.network.kind

    @property
    def fisher_form(self) -> Fisher:
        """The form that Λ has: "eta" where it is diagonal, "ggn" where the logits have a gauge, or "sampled"."""
        return fisher_form(self.kind, self.fisher)

    def weights(self, logits: Float[Tensor, "B M"], labels: Int[Tensor, "B *L"] | None = None) -> Weights:
        """Λ of some samples, in what is differentiated: the logits, or with `sampled` the drawn scores.

        `labels` are those of these samples, as `kind` reads them.
        """
        if self.scores is None:
            return self.logit_weights(logits, labels)
        return ScoreWeights(len(logits), self.scores.draws, logits.device)

    def logit_weights(self, logits: Float[Tensor, "B M"], labels: Int[Tensor, "B *L"] | None = None) -> RootedWeights:
        """Λ in the logits themselves, which is not drawn."""
        return logit_weights(self.kind, self.fisher, logits, labels)

    @property
    def outputs(self) -> str:
        """What the outputs are, as `outputs=` names it."""
        return self.kind.name if self.positions is None else POSITIONS

    def require_classes(self, name: str) -> None:
        """Refuse, in the name of what has only been made for one of M classes."""
        if self.outputs != CLASSES.name:
            raise ArgumentError(
                f"{name} is for one of M classes, and this posterior was fitted with outputs='{self.outputs}'; "
                "expected one that was fitted with outputs='classes'."
            )

    def require_inputs(self, name: str) -> None:
        """Refuse positions, in the name of what has only been made for inputs with one class or some labels each."""
        if self.positions is not None:
            raise ArgumentError(
                f"{name} is for inputs with one class or some labels each, and this posterior was fitted with "
                f"outputs='{self.outputs}'; expected one that was fitted with outputs='classes' or 'labels'."
            )

    def require_no_positions(self) -> None:
        """Refuse what gives each input one Gaussian."""
        if self.positions is not None:
            raise ArgumentError(
                "With outputs='positions' every position of an input has a Gaussian of its own; expected "
                "posterior.logits(x) or predict(x), which have all of them, or a posterior of outputs='classes'."
            )

    def on(self, network: Network) -> Task:
        """The same task about a model that must have these parameters, in these layers."""
        network = positions_view(network, self.positions)
        require_selection_on(network, self.selection)
        if self.route is not None:
            self.route.require_on(network, self.selection)
        return replace(self, network=network, parts=tuple(part.on(network) for part in self.parts))

    def reading(self, unpack: Unpack | None) -> Task:
        """The same task, with `unpack` for later batches."""
        return self if unpack is None else replace(self, unpack=kept_unpack(unpack, self.batch_form))

    def facts(self) -> dict[str, str]:
        """What must be the same on all ranks whose sums are added."""
        return {
            "weights (fingerprint)": self.network.fingerprint,
            "parameters": ", ".join(self.selection.names),
            "structure": self.structure,
            "fisher": self.fisher_form,
            "kind of outputs": self.outputs,
            "draws and seed": str(self.scores),
            "class weights": str(self.class_weights),
            "number of classes": str(self.n_classes),
            "positions": str(self.positions),
            "output of the model": described_output(self.network.output),
            "dtype of products": str(self.dtype),
            "rank of the sketch": str(self.rank),
            "layers": str(self.routes),
        }

    def require_same_kind(self, other: Task) -> None:
        """Raise `MismatchError` unless sums of the two can be added."""
        for name, first, second in (
            ("outputs", self.outputs, other.outputs),
            ("fisher", self.fisher_form, other.fisher_form),
            ("draws and seed", self.scores, other.scores),
            ("class weights", self.class_weights, other.class_weights),
            ("structure", self.structure, other.structure),
            ("parameters", self.selection, other.selection),
            ("number of classes", self.n_classes, other.n_classes),
            ("positions", self.positions, other.positions),
            ("weights (fingerprint)", self.network.fingerprint, other.network.fingerprint),
            ("outputs of the model", described_output(self.network.output), described_output(other.network.output)),
        ):
            if first != second:
                values = "" if name == "parameters" else f": {first} and {second}"
                raise MismatchError(f"Information of different {name} cannot be combined{values}.")


def positions_view(network: Network, positions: Positions | None) -> Network:
    """A network as what is known of its positions says that it is looked at."""
    if positions is None or not network.has_model or isinstance(network, HeadNetwork):
        return network
    whole = network if isinstance(network, PositionsNetwork) else PositionsNetwork(network.model, network.output)
    return whole if positions.head is None else HeadNetwork(whole, positions.head)


def product_dtype(network: Network, precision: Precision | None) -> torch.dtype:
    return torch.float64 if precision == "float64" else network.dtype


class AbsentNetwork(Network):
    """The network of a file: its fingerprint, its dtype and where its logits are; no model to run."""

    has_model = False

    def __init__(self, fingerprint: str, dtype: torch.dtype, output: Output = None, kind: OutputKind = CLASSES) -> None:
        self.fingerprint = fingerprint
        self.dtype = dtype
        self.output = output
        self.kind = kind
        self.device = torch.device("cpu")

    def __getattr__(self, name: str) -> NoReturn:
        """Anything that only a real network has: the model, its modules, its weights."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.refusal()

    def refusal(self) -> ModelError:
        return ModelError(
            "This information came from a file, and files hold no model. Give one: condition(information, prior, "
            "model=model), or information.with_model(model)."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint, "dtype": self.dtype, "output": self.output, "kind": self.kind}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class UnknownFunction:
    """Stands for a function that picked the logits: a file records that there was one, but does not hold it."""

    def __call__(self, result: Any) -> NoReturn:
        raise AssertionError("an absent network does not run")


def output_given(file_output: Output, output: Output) -> Output:
    """Where the logits are, according to the file and the user."""
    if isinstance(file_output, UnknownFunction):
        if output is None:
            raise ArgumentError(
                "The fit had output=, a function that picks the logits out of what the model returns, and files hold "
                "no functions. Give it again: errbar.load(path, model, output=function), or "
                "information.with_model(model, output=function)."
            )
        return output
    if output is not None and described_output(require_output(output)) != described_output(file_output):
        raise MismatchError(
            f"output is {described_output(require_output(output))}, and the file says {described_output(file_output)}. "
            "Leave output= out, or give what the fit had."
        )
    return file_output
