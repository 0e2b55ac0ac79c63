"""Tasks and information as descriptions and arrays, and back.

They say which parameters of which weights are meant, and how the logits are differentiated. The first batch of the fit
decided that; a file keeps the decision, so that a loaded posterior computes what the saved one did. The layers that it
names are compared with those of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, get_args

import torch

from errbar._base.container import Contents
from errbar._base.json_fields import Fields
from errbar._curvature.fisher import Fisher
from errbar._curvature.mixture import is_mixture
from errbar._curvature.positions import Positions, scores_of_positions
from errbar._curvature.registry import require_structure, structure_called, structure_names
from errbar._curvature.scores import ScoreDraws
from errbar._curvature.structure import Description, Tensors
from errbar._curvature.task import AbsentNetwork, Task, UnknownFunction
from errbar._derivative.columns import GroupedConvolution, norm_layer_in
from errbar._derivative.layers import LinearLayer, Patches, SharedLayer
from errbar._derivative.layerwise import LayerwiseRoute
from errbar._derivative.route import Route
from errbar._model.batch import FORMS, Form
from errbar._model.network import Output
from errbar._model.outputs import CLASSES, KINDS, OutputKind
from errbar._model.selection import Selection
from errbar._posterior.information import Information
from errbar._posterior.seen import KEY_BITS, MOST_KEYS, Seen
from errbar.errors import ArgumentError, DamagedFileError

_NO_LAYERS: Description = {
    "layers": [],
    "norms": [],
    "grouped": [],
    "factored": False,
    "identity": False,
    "inner_size": 0,
    "outer_size": 0,
    "widest": 0,
}


def route_description(route: Route | None) -> Description:
    """What the first batch decided, in a form that can be read without a model."""
    if route is None:
        return dict(_NO_LAYERS)
    if route.by_layer is None:
        layers = [asdict(layer) for layer in route.layers]
        return _NO_LAYERS | {"layers": layers, "factored": True, "identity": route.identity}
    by_layer = route.by_layer
    return _NO_LAYERS | {
        "layers": [asdict(layer) for layer in by_layer.layers],
        "norms": [norm.name for norm in by_layer.norms],
        "grouped": [asdict(layer) for layer in by_layer.grouped],
        "inner_size": by_layer.inner_size,
        "outer_size": by_layer.outer_size,
        "widest": by_layer.widest,
    }


def task_description(task: Task) -> Description:
    """A task without its network, of which only the fingerprint and the dtype of results are kept."""
    scores = {} if task.scores is None else {"scores": {"draws": task.scores.draws, "seed": task.scores.seed}}
    kind = {} if task.kind == CLASSES else {"outputs": task.kind.name}
    by_class = {} if task.class_weights is None else {"class_weights": _described_weights(task.class_weights)}
    plans = [route_description(part.route) | {"rank": part.rank} for part in task.parts]
    parts = {"parts": plans} if plans else {}
    positions = {} if task.positions is None else {"positions": asdict(task.positions)}
    return (
        scores
        | kind
        | by_class
        | parts
        | positions
        | {
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
            "plan": route_description(task.route) | {"rank": task.rank},
        }
    )


def read_task(fields: Fields) -> Task:
    """The task of a file, about an absent network."""
    dtype = {"float32": torch.float32, "float64": torch.float64}[fields.choice("dtype", ("float32", "float64"))]
    # Older files have classes.
    kind = KINDS[fields.choice("outputs", tuple(KINDS)) if "outputs" in fields else CLASSES.name]
    network = AbsentNetwork(fields.digest("weights"), dtype, _read_output(fields), kind)
    precision: Any = fields.choice("precision", ("float64",)) if "precision" in fields else None
    structure = _read_structure(fields)
    fisher: Any = fields.choice("fisher", get_args(Fisher))
    n_classes = fields.whole("n_classes", 2 if kind.has_gauge else 1)
    parameters = fields.parts("parameters")
    names = tuple(part.text("name") for part in parameters)
    shapes = tuple(part.wholes("shape") for part in parameters)
    # The product of half a million dimensions would take hours; torch has 64 at most.
    if any(len(shape) > 64 for shape in shapes):
        raise DamagedFileError(f"{fields.where} has parameters of more than 64 dimensions.")
    selection = Selection(names, shapes)
    if not names or len(set(names)) != len(names) or not 1 <= selection.n_parameters < 2**50:
        raise DamagedFileError(f"{fields.where} names a parameter twice, no parameters, or parameters without a size.")
    task = Task(
        network,
        selection,
        structure,
        fisher,
        n_classes,
        precision,
        batch_form=_read_form(fields),
        scores=_read_scores(fields, fisher, kind),
        positions=_read_positions(fields),
        class_weights=_read_class_weights(fields, n_classes),
    )
    task = replace(task, scores=scores_of_positions(task.scores, task.positions, n_classes, task.class_weights))
    plan = fields.part("plan")
    return _with_parts(task, fields) if is_mixture(structure) else _with_route(task, plan)


def _read_structure(fields: Fields) -> str:
    """The name of a structure, or the text of a mixture."""
    text = fields.text("structure")
    if not is_mixture(text):
        return fields.choice("structure", structure_names())
    try:
        return require_structure(text)
    except ArgumentError as error:
        raise DamagedFileError(f"{fields.where} holds an invalid structure: {error}") from error


def _with_route(task: Task, plan: Fields) -> Task:
    route = _read_route(plan, task.selection, task.structure, task.n_classes)
    return replace(task, rank=plan.whole("rank", 1), route=route)


def _with_parts(task: Task, fields: Fields) -> Task:
    """The parts of a mixture, each with its own route."""
    plans = fields.parts("parts")
    try:
        parts = structure_called(task.structure).divided(task)
    except ArgumentError as error:
        raise DamagedFileError(f"{fields.where} holds an invalid structure: {error}") from error
    if len(plans) != len(parts):
        raise DamagedFileError(f"{fields.where} has {len(plans)} plans for {len(parts)} structures.")
    return replace(task, parts=tuple(_with_route(*pair) for pair in zip(parts, plans, strict=True)))


def _read_scores(fields: Fields, fisher: str, kind: OutputKind) -> ScoreDraws | None:
    """The draws of a sampled Fisher information; files of before there was one say nothing."""
    if fisher != "sampled":
        return None
    part = fields.part("scores")
    return ScoreDraws(part.whole("draws", 1), part.whole("seed"), kind)


def _read_positions(fields: Fields) -> Positions | None:
    """How positions count; files of other outputs have no such field."""
    if "positions" not in fields:
        return None
    part = fields.part("positions")
    head = part.text("head") if "head" in part else None
    share = part.number("share", least=0)
    if not 0 < share <= 1:
        raise DamagedFileError(f"{fields.where} counts a share of {share!r} of the positions.")
    return Positions(head, share, part.whole("seed"), part.whole("ignore_index", -(2**63)))


def _described_weights(weights: Sequence[float]) -> list[Description]:
    return [{"weight": weight} for weight in weights]


def _read_class_weights(fields: Fields, n_classes: int) -> tuple[float, ...] | None:
    """The weights of the classes; None where the fit had none."""
    if "class_weights" not in fields:
        return None
    weights = tuple(part.number("weight", least=0) for part in fields.parts("class_weights"))
    if len(weights) != n_classes or not any(weights):
        raise DamagedFileError(f"{fields.where} holds class weights that do not fit its {n_classes} classes.")
    return weights


def _saved_output(output: Output) -> Description | None:
    """Where the logits are in what the model returns. Of a function, a file only records that there was one."""
    if output is None:
        return None
    if callable(output):
        return {"function": True}
    return {"key": output} if isinstance(output, str) else {"position": output}


def _read_output(fields: Fields) -> Output:
    """What `_saved_output` wrote; older files have no such field."""
    if "output" not in fields:
        return None
    output = fields.part("output")
    if "function" in output:
        return UnknownFunction()
    if "key" in output:
        return output.text("key")
    return output.whole("position", -(2**31))


def _read_form(fields: Fields) -> Form | None:
    """The form of the batches of a fit with `unpack`; None if it had none, or in older files."""
    return fields.choice("unpack", FORMS) if "unpack" in fields else None  # type: ignore[return-value]


def _read_route(fields: Fields, selection: Selection, structure: str, n_classes: int) -> Route | None:
    factored, identity = fields.flag("factored"), fields.flag("identity")
    layers = _read_layers(fields.parts("layers"), selection, shared=not factored)
    # Older files name no norm layers.
    names = fields.texts("norms") if "norms" in fields else ()
    norms = tuple(norm for norm in (norm_layer_in(selection, name) for name in names) if norm is not None)
    layer_parameters = sum(layer.size for layer in layers)
    is_head = len(layers) == 1 and layers[0].outputs == n_classes
    can_be_factored = layer_parameters == selection.n_parameters and structure != "kron"
    if (identity and not is_head) or (factored and not can_be_factored) or len(norms) < len(names):
        raise DamagedFileError(f"{fields.where} describes layers that do not fit its parameters and classes.")
    if factored:
        return Route(layers, identity)
    # Older files name no convolutions in groups, and say nothing of the widest output.
    grouped = _read_grouped(fields.parts("grouped"), selection) if "grouped" in fields else ()
    widest = fields.whole("widest") if "widest" in fields else 0
    sizes = fields.whole("inner_size"), fields.whole("outer_size"), widest
    if structure == "lowrank":
        return None
    shared = tuple(layer for layer in layers if isinstance(layer, SharedLayer))
    return Route((), by_layer=LayerwiseRoute.of(selection, n_classes, shared, norms, grouped, sizes))


def _read_layers(fields: Sequence[Fields], selection: Selection, *, shared: bool) -> tuple[LinearLayer, ...]:
    """Layers whose parameters are among the selected ones, each in one layer at most."""
    sizes = {where.start: where.stop - where.start for where in selection.slices().values()}
    layers = []
    for part in fields:
        starts = {kind: part.whole(kind) if kind in part else None for kind in ("weight_start", "bias_start")}
        name, outputs, inputs = part.text("name"), part.whole("outputs", 1), part.whole("inputs", 1)
        # Older files have no such layers.
        transposed = part.flag("transposed") if "transposed" in part else False
        layer = LinearLayer(name, outputs, inputs, starts["weight_start"], starts["bias_start"], transposed)
        if shared:
            patches = _read_patches(part.part("patches")) if "patches" in part else None
            layer = SharedLayer(name, outputs, inputs, layer.weight_start, layer.bias_start, transposed, patches)
        own_sizes = {layer.weight_start: outputs * inputs, layer.bias_start: outputs}
        own_sizes.pop(None, None)
        if not own_sizes or any(
            sizes.pop(start, None) != size for start, size in own_sizes.items() if start is not None
        ):
            raise DamagedFileError(
                f"{part.where} describes layer {name[:60]!a}, whose size does not match its parameters."
            )
        layers.append(layer)
    return tuple(layers)


def _read_grouped(fields: Sequence[Fields], selection: Selection) -> tuple[GroupedConvolution, ...]:
    """Convolutions in groups, whose parameters are among the selected ones."""
    sizes = {where.start: where.stop - where.start for where in selection.slices().values()}
    layers = []
    for part in fields:
        weight, bias = (part.whole(kind) if kind in part else None for kind in ("weight_start", "bias_start"))
        outputs, inputs, groups = (part.whole(name, 1) for name in ("outputs", "inputs", "groups"))
        patches = _read_patches(part.part("patches"))
        layer = GroupedConvolution(part.text("name"), outputs, inputs, groups, weight, bias, patches)
        if not layer.spans or any(sizes.pop(start, None) != where.stop - where.start for where, start in layer.spans):
            raise DamagedFileError(
                f"{part.where} describes layer {layer.name[:60]!a}, whose size does not match its parameters."
            )
        layers.append(layer)
    return tuple(layers)


def _read_patches(fields: Fields) -> Patches:
    kernel, stride, dilation, padding = (fields.wholes(name) for name in ("kernel", "stride", "dilation", "padding"))
    return Patches(kernel, stride, dilation, padding, fields.text("mode"))


def information_record(information: Information, classes: tuple[str, ...] | None) -> tuple[Description, Tensors]:
    """What `container.write` takes; refuses names that `read_task` would refuse."""
    hidden = [name for name in information.selection.names if not name.isprintable()]
    if hidden:
        raise ArgumentError(
            f"The parameter {hidden[0]!a} has a name with characters that cannot be printed, which files do not hold. "
            "Give its module another name."
        )
    output = information.network.output
    if isinstance(output, str) and not output.isprintable():
        raise ArgumentError(
            f"output is {output!a}, with characters that cannot be printed, which files do not hold. Give a position "
            "or a function."
        )
    small, tensors = information.total.written()
    description = task_description(information.task) | {
        "classes": None if classes is None else list(classes),
        "n_samples": information.n_samples,
        "log_likelihood": information.log_likelihood,
        "sum": small,
        "seen": _saved_seen(information.seen),
    }
    return description, tensors


def read_information(contents: Contents) -> tuple[Information, tuple[str, ...] | None]:
    """The information of a file, about an absent network, and the names of the classes."""
    fields = contents.description
    task = read_task(fields)
    classes = fields.texts("classes") if "classes" in fields else None
    if classes is not None and len(classes) != task.n_classes:
        raise DamagedFileError(f"{contents.path} names {len(classes)} classes of {task.n_classes}.")
    total = structure_called(task.structure).read_sum(contents, task)
    likelihood = fields.number("log_likelihood") if "log_likelihood" in fields else None
    return Information(task, total, fields.number("n_samples", least=0), likelihood, _read_seen(fields)), classes


def _saved_seen(seen: Seen | None) -> Description | None:
    if seen is None:
        return None
    return {"limit": seen.limit, "keys": list(seen.counts), "counts": list(seen.counts.values())}


def _read_seen(fields: Fields) -> Seen | None:
    """The keys of the samples; older files have none."""
    if "seen" not in fields:
        return None
    part = fields.part("seen")
    limit, keys, counts = part.whole("limit"), part.wholes("keys"), part.wholes("counts")
    are_keys = list(keys) == sorted(set(keys)) and all(key < limit for key in keys) and limit <= 2**KEY_BITS
    if not are_keys or len(keys) > MOST_KEYS or len(counts) != len(keys) or 0 in counts:
        raise DamagedFileError(f"{fields.where} holds keys of its samples that do not fit together.")
    return Seen(dict(zip(keys, counts, strict=True)), limit)


def checked_classes(classes: Sequence[str] | None, n_classes: int) -> tuple[str, ...] | None:
    """The names of the classes, checked; None if none are given."""
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
