"""What was asked of the data, as JSON, and back: which parameters of which weights, and how they are differentiated.

How to differentiate was decided by the first batch of the fit. A file keeps what was decided (`WayPlan`), so that a
loaded posterior computes what the saved one did; the layers it names are compared with those of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from errbar._base.container import Contents
from errbar._base.json_fields import Fields
from errbar._curvature.fisher import Fisher
from errbar._curvature.workload import Structure
from errbar._derivative.layerwise import LayerwiseRoute
from errbar._derivative.norms import norm_layers
from errbar._derivative.route import Route
from errbar._derivative.shared import SharedLayer, shared_layers
from errbar._derivative.trace import LinearLayer, linear_layers
from errbar._distributions.logits import JointLogits, LogitGaussian
from errbar._files.sums import Description, Tensors, put_together, read_layers, take_apart
from errbar._model.batch import FORMS, Batch, Form
from errbar._model.network import Network, Output
from errbar._model.selection import Selection
from errbar._posterior.differentiate import STRUCTURES, Accumulator, ByDerivative, ByLayer, ByRows, Rows, Sum, Way
from errbar._posterior.task import AbsentNetwork, Task, UnknownFunction
from errbar.errors import ArgumentError, DamagedFileError, MismatchError


@dataclass(frozen=True)
class WayPlan:
    """What `errbar._posterior.differentiate.way` decided: the fields of `Route`, of `LayerwiseRoute`, and the rank of a sketch."""

    layers: tuple[LinearLayer, ...] = ()
    norms: tuple[str, ...] = ()
    factored: bool = False
    identity: bool = False
    inner_size: int = 0
    outer_size: int = 0
    rank: int = 1


@dataclass(frozen=True)
class SavedWay:
    """A way without a network: nothing can be differentiated until `on` gives it one."""

    plan: WayPlan
    absent: AbsentNetwork
    selection: Selection
    structure: Structure
    fisher: Fisher
    n_classes: int
    dtype: torch.dtype

    def on(self, network: Network) -> Way:
        """The same way through a model that must have these parameters, in these layers."""
        available = dict(network.module.named_parameters())
        order = [name for name in available if name in self.selection.names]
        shapes = [tuple(available[name].shape) for name in order]
        if (tuple(order), tuple(shapes)) != (self.selection.names, self.selection.shapes):
            raise MismatchError(
                f"The file is about the parameters {_listed(self.selection.names)}, which the model does not have with "
                "these names, shapes and in this order. Give the model of the fit."
            )
        plan, selection = self.plan, self.selection
        if self.structure == "lowrank":
            return ByRows(network, selection, self.fisher, self.dtype, plan.rank)
        if plan.factored:
            _require_layers(plan.layers, linear_layers(network, selection))
            route = Route(plan.layers, plan.identity)
            return ByDerivative(self.structure, network, selection, route, self.fisher, self.n_classes, self.dtype)
        shared = [layer for layer in plan.layers if isinstance(layer, SharedLayer)]
        norms = [norm for norm in norm_layers(network, selection) if norm.name in plan.norms]
        _require_layers(shared, shared_layers(network, selection))
        _require_none([name for name in plan.norms if name not in {norm.name for norm in norms}])
        sizes = plan.inner_size, plan.outer_size
        by_layer = LayerwiseRoute.of(selection, self.n_classes, tuple(shared), tuple(norms), *sizes)
        if self.structure in ("kron", "diag"):
            return ByLayer(self.structure, network, selection, by_layer, self.fisher, self.dtype)
        route = Route((), by_layer=by_layer)
        return ByDerivative(self.structure, network, selection, route, self.fisher, self.n_classes, self.dtype)

    def accumulator(self, keep: Rows | None) -> Accumulator:
        raise self.absent.refusal()

    def gaussians(self, factor: Any, batch: Batch) -> Iterator[LogitGaussian]:
        raise self.absent.refusal()

    def joint(self, factor: Any, batch: Batch) -> JointLogits:
        raise self.absent.refusal()


def _require_layers(wanted: Sequence[LinearLayer], available: Sequence[LinearLayer]) -> None:
    _require_none([layer.name for layer in wanted if layer not in available])


def _require_none(missing: Sequence[str]) -> None:
    if missing:
        names = _listed([name or "(the model itself)" for name in missing])
        raise MismatchError(
            f"The file was made with the layers {names}, which the model does not have as they were: the "
            "weights are the same, the modules around them are not. Give the model of the fit."
        )


def plan_of(way: Way) -> WayPlan:
    by_layer = way.route.by_layer if isinstance(way, ByDerivative) else way.route if isinstance(way, ByLayer) else None
    if by_layer is not None:
        norms = tuple(norm.name for norm in by_layer.norms)
        return WayPlan(by_layer.layers, norms, inner_size=by_layer.inner_size, outer_size=by_layer.outer_size)
    if isinstance(way, ByDerivative):
        return WayPlan(way.route.layers, factored=True, identity=way.route.identity)
    if isinstance(way, ByRows):
        return WayPlan(rank=int(way.rank))
    assert isinstance(way, SavedWay)
    return way.plan


def task_description(task: Task) -> Description:
    """Everything of a task but the network itself, of which the fingerprint and the dtype of results stay."""
    return {
        "weights": task.network.fingerprint,
        "dtype": _name(task.network.dtype),
        "precision": task.precision,
        "structure": task.structure,
        "fisher": task.fisher,
        "n_classes": task.n_classes,
        "output": _saved_output(task.network.output),
        "unpack": task.batch_form,
        "parameters": [
            {"name": name, "shape": list(shape)}
            for name, shape in zip(task.selection.names, task.selection.shapes, strict=True)
        ],
        "plan": asdict(plan_of(task.way)),
    }


def read_task(fields: Fields) -> Task:
    """The task of a file, about an absent network."""
    dtype = {"float32": torch.float32, "float64": torch.float64}[fields.choice("dtype", ("float32", "float64"))]
    network = AbsentNetwork(fields.digest("weights"), dtype, _read_output(fields))
    precision: Any = fields.choice("precision", ("float64",)) if "precision" in fields else None
    structure: Any = fields.choice("structure", STRUCTURES)
    fisher: Any = fields.choice("fisher", ("ggn", "eta"))
    n_classes = fields.whole("n_classes", 2)
    parameters = fields.parts("parameters")
    names = tuple(part.text("name") for part in parameters)
    selection = Selection(names, tuple(part.wholes("shape") for part in parameters))
    # The product of half a million dimensions would take hours; torch has 64 at most.
    if any(len(shape) > 64 for shape in selection.shapes):
        raise DamagedFileError(f"{fields.where} has parameters of more than 64 dimensions.")
    if not names or len(set(names)) != len(names) or not 1 <= _size(selection) < 2**50:
        raise DamagedFileError(f"{fields.where} names parameters twice, none, or such without a size.")
    plan = _read_plan(fields.part("plan"), selection, structure, n_classes)
    products = torch.float64 if precision == "float64" else dtype
    way = SavedWay(plan, network, selection, structure, fisher, n_classes, products)
    return Task(network, selection, structure, way, fisher, n_classes, precision, batch_form=_read_form(fields))


def _saved_output(output: Output) -> Description | None:
    """Where the logits are in what the model returns. Of a function it is only said that there was one."""
    if output is None:
        return None
    if callable(output):
        return {"function": True}
    return {"key": output} if isinstance(output, str) else {"position": output}


def _read_output(fields: Fields) -> Output:
    """What `_saved_output` wrote; files of before there was a choice say nothing."""
    if "output" not in fields:
        return None
    output = fields.part("output")
    if "function" in output:
        return UnknownFunction()
    if "key" in output:
        return output.text("key")
    return output.whole("position", -(2**31))


def _read_form(fields: Fields) -> Form | None:
    """What the batches of a fit with `unpack` were; None where it had none, or the file is older."""
    return fields.choice("unpack", FORMS) if "unpack" in fields else None  # type: ignore[return-value]


def _size(selection: Selection) -> int:
    """The number of parameters in whole numbers of any size; `torch.Size` would overflow."""
    return sum(math.prod(shape) for shape in selection.shapes)


def _read_plan(fields: Fields, selection: Selection, structure: str, n_classes: int) -> WayPlan:
    factored = fields.flag("factored")
    plan = WayPlan(
        read_layers(fields.parts("layers"), selection, shared=not factored),
        # Files of before norms were taken apart do not name any.
        fields.texts("norms") if "norms" in fields else (),
        factored,
        fields.flag("identity"),
        fields.whole("inner_size"),
        fields.whole("outer_size"),
        fields.whole("rank", 1),
    )
    covered = sum(layer.outputs * layer.width for layer in plan.layers)
    lone = len(plan.layers) == 1 and plan.layers[0].outputs == n_classes
    factorable = covered == selection.n_parameters and structure != "kron"
    if (plan.identity and not lone) or (plan.factored and not factorable):
        raise DamagedFileError(f"{fields.where} describes layers that do not fit its parameters and classes.")
    return plan


def form(task: Task) -> str:
    """The form of the sums of a task: the structure, or one matrix a class where the exact one comes apart so."""
    plan = plan_of(task.way)
    returns_logits = plan.factored and plan.identity
    return "per_class" if task.structure == "dense" and task.fisher == "eta" and returns_logits else task.structure


@dataclass(frozen=True, eq=False)
class SavedInformation:
    """The fields of an `Information`, and the names of the classes, as a file has them."""

    task: Task
    total: Sum
    n_samples: float
    log_likelihood: float | None
    classes: tuple[str, ...] | None


def information_record(saved: SavedInformation) -> tuple[Description, Tensors]:
    """What `errbar._base.container.write` takes; refuses names that `read_task` would refuse."""
    hidden = [name for name in saved.task.selection.names if not name.isprintable()]
    if hidden:
        raise ArgumentError(
            f"The parameter {hidden[0]!a} has a name with characters that cannot be printed, which files do not hold. "
            "Give its module another name."
        )
    output = saved.task.network.output
    if isinstance(output, str) and not output.isprintable():
        raise ArgumentError(
            f"output is {output!a}, with characters that cannot be printed, which files do not hold. Give a position "
            "or a function."
        )
    small, tensors = take_apart(saved.total)
    description = task_description(saved.task) | {
        "classes": None if saved.classes is None else list(saved.classes),
        "n_samples": saved.n_samples,
        "log_likelihood": saved.log_likelihood,
        "sum": small,
    }
    return description, tensors


def read_information(contents: Contents) -> SavedInformation:
    fields = contents.description
    task = read_task(fields)
    classes = fields.texts("classes") if "classes" in fields else None
    if classes is not None and len(classes) != task.n_classes:
        raise DamagedFileError(f"{contents.path} names {len(classes)} classes of {task.n_classes}.")
    layers, kind = plan_of(task.way).layers, form(task)
    total = put_together(contents, task.selection, layers, form=kind, n_classes=task.n_classes, dtype=task.dtype)
    likelihood = fields.number("log_likelihood") if "log_likelihood" in fields else None
    return SavedInformation(task, total, fields.number("n_samples", least=0), likelihood, classes)


def checked_classes(classes: Sequence[str] | None, n_classes: int) -> tuple[str, ...] | None:
    """Names of the classes, one each; None where there are none."""
    if classes is None:
        return None
    names = [classes] if isinstance(classes, str) else list(classes)
    if len(names) != n_classes or not all(isinstance(name, str) and name.isprintable() for name in names):
        raise ArgumentError(
            f"classes are {len(names)} names; expected {n_classes} printable texts, one for each class of the model."
        )
    return tuple(names)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: Sequence[str]) -> str:
    more = "" if len(names) <= 4 else f" and {len(names) - 4} more"
    return ", ".join(name[:60] for name in names[:4]) + more
