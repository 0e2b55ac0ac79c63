"""A posterior as one file that predicts without errbar: ONNX (`.onnx`) or a program of `torch.export` (`.pt2`).

The file goes from an input to PMF, standard deviations, P^f, logits, P^g and risk. T, T_c and the draws are constants
in it, the batch size is free, and no Python runs. Before it is written, what it says about the example is compared with
what `posterior.predict` says.
"""

from __future__ import annotations

import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.export import ExportedProgram

from errbar._base.atomic import require_writable_folder, write_file
from errbar._base.execution import plain_execution
from errbar._curvature.structure import Factor
from errbar._curvature.task import Task
from errbar._derivative.layers import LinearLayer
from errbar._distributions.calibration import Calibration, LabelFactors
from errbar._distributions.logits import LogitGaussian
from errbar._distributions.prediction import Prediction
from errbar._distributions.sampling import standard_normal
from errbar._export.chain import ChainedNetwork, Linear, Sample, chained, exported, named_inputs
from errbar._export.graph import Draws, GaussianGraph, Head, PredictionGraph, head
from errbar._export.numbers import exact_numbers
from errbar._model.batch import Batch
from errbar.errors import ArgumentError, ExportError, MissingExtraError, how_to_install
from errbar.version import __version__

OUTPUTS = ("pmf", "std", "covariance", "logits", "logit_covariance", "risk")
# Only those who name them get them: they take as long as everything else.
ON_REQUEST = ("lower", "upper", "mutual_information")
KINDS = (".onnx", ".pt2")
# How far the graph may be from `predict`, as a share of the largest number (at least 1) of an output.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
# Protocol buffers, of which an ONNX file is one, cannot be larger.
_ONNX_LIMIT = 2**31 - 2**20


@dataclass(frozen=True, eq=False)
class ExportRequest:
    """What is to be in the file."""

    calibration: Calibration
    samples: int
    seed: int
    draws: str
    thresholds: Float[Tensor, "R M"]
    outputs: tuple[str, ...]
    level: float = 0.95
    label_factors: LabelFactors | None = None


@dataclass(frozen=True, eq=False)
class WorkedExample:
    """A batch, prepared for the network, and what `predict` says about it, by the names of the outputs."""

    batch: Batch
    expected: Mapping[str, Tensor]

    @staticmethod
    def of(batch: Batch, gaussian: LogitGaussian, request: ExportRequest, temperature: float = 1.0) -> WorkedExample:
        """`gaussian` is what the posterior says about the logits of the batch; PMFs are of it over `temperature`."""
        tempered = gaussian if temperature == 1 else gaussian.tempered(temperature)
        prediction, rounded = tempered.predict(request.samples, request.seed, draws=request.draws), gaussian.rounded()
        makers: dict[str, Callable[[], Tensor]] = {
            "pmf": lambda: prediction.pmf,
            "std": lambda: prediction.std,
            "covariance": lambda: prediction.covariance,
            "logits": lambda: rounded.mean,
            "logit_covariance": lambda: rounded.covariance,
            "lower": lambda: prediction.interval(request.level)[0],
            "upper": lambda: prediction.interval(request.level)[1],
            "mutual_information": lambda: prediction.mutual_information,
        }
        return WorkedExample(batch, {name: maker() for name, maker in makers.items() if name in request.outputs})


def checked_path(path: str | os.PathLike[str]) -> str:
    """The ending of the file, which determines its kind."""
    kind = Path(path).suffix
    if kind not in KINDS:
        raise ArgumentError(f"The path is {os.fspath(path)}; expected a name that ends in .onnx or .pt2.")
    if kind == ".onnx":
        try:
            import onnx  # noqa: F401 - only checks that it is installed; torch.onnx uses it
            import onnxscript  # noqa: F401
        except ImportError as missing:
            raise MissingExtraError(
                f"Writing ONNX files needs {missing.name}, which is not installed: {how_to_install('export')}."
            ) from missing
    require_writable_folder(path)
    return kind


def checked_thresholds(risk: Any, prediction: Prediction) -> Float[Tensor, "R M"]:
    """One row for each threshold, which is one probability or one for each class; a single one may come as it is."""
    thresholds = list(risk) if isinstance(risk, (list, tuple)) else [risk]
    for threshold in thresholds:
        prediction.risk(threshold)
    classes = prediction.pmf.shape[1]
    rows = [torch.as_tensor(threshold, dtype=prediction.pmf.dtype).expand(classes) for threshold in thresholds]
    return torch.stack(rows) if rows else prediction.pmf.new_zeros(0, classes)


def checked_outputs(outputs: Sequence[str] | None, *, risk: bool) -> tuple[str, ...]:
    """The outputs asked for, in the order of `OUTPUTS` and `ON_REQUEST`; `OUTPUTS` unless some are named."""
    if outputs is None:
        return OUTPUTS if risk else OUTPUTS[:-1]
    names = [outputs] if isinstance(outputs, str) else list(outputs)
    known = OUTPUTS + ON_REQUEST
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ArgumentError(f"outputs is {outputs!r}; expected one or more of {', '.join(known)}.")
    if "risk" in names and not risk:
        raise ArgumentError(
            "outputs has 'risk', but there is no threshold for it; expected, for example, risk=(0.05,)."
        )
    return tuple(name for name in known if name in names)


def write_export(
    path: str | os.PathLike[str],
    task: Task,
    factor: Factor,
    examples: Sequence[WorkedExample],
    request: ExportRequest,
) -> None:
    """Make the graph, compare it with what `predict` says about the examples, and write the file."""
    batch = examples[0].batch
    write_graph(path, lambda: graph_of(task, factor, batch, request), examples, request, _description(task, request))


def write_graph(
    path: str | os.PathLike[str],
    make: Callable[[], PredictionGraph],
    examples: Sequence[WorkedExample],
    request: ExportRequest,
    description: Mapping[str, Any],
) -> None:
    """Write what `make` makes, once it says about the examples what `predict` says."""
    batch = examples[0].batch
    kind = checked_path(path)
    with plain_execution(torch.device("cpu")), warnings.catch_warnings():
        # Deprecations inside torch, and changes in later versions: nothing that a caller can act on.
        warnings.simplefilter("ignore")
        program = program_of(make(), batch)
        module = program.module()
        for example in examples:
            results = module(*example.batch.args, **example.batch.kwargs)
            _require_agreement(results, example.expected, "The graph")
        about = {name: json.dumps(value) for name, value in description.items()}
        if kind == ".pt2":
            buffer = io.BytesIO()
            torch.export.save(program, buffer, extra_files={f"{name}.json": value for name, value in about.items()})
            data = buffer.getvalue()
        else:
            data = _onnx(program, list(named_inputs(batch)), request.outputs, about)
            _require_agreement_of_onnx_runtime(data, examples, request.outputs)
    write_file(path, data)


def program_of(graph: PredictionGraph, batch: Batch) -> ExportedProgram:
    """The whole way from input to outputs as one exported program whose batch size is free."""
    program = exported(graph.eval(), Sample.of(batch))
    for node in program.graph.nodes:
        # The files and folders in which operations were written: private.
        node.meta.pop("stack_trace", None)
    return program


def graph_of(task: Task, factor: Factor, batch: Batch, request: ExportRequest) -> PredictionGraph:
    """The whole way from input to outputs as a module of elementary operations."""
    gaussian, part = gaussian_of(task, factor, batch, request.calibration, request.label_factors)
    like = torch.empty(0, dtype=task.network.dtype)
    normal = standard_normal(request.samples, part.width, request.seed, like, request.draws).T
    if part.basis is not None and gaussian.form == "factored":
        normal = part.basis.T.to(normal.dtype) @ normal
    draws = Draws(normal.contiguous(), request.thresholds, level=request.level)
    return PredictionGraph(gaussian, draws, dtype=task.dtype, outputs=request.outputs)


def gaussian_of(
    task: Task, factor: Factor, batch: Batch, calibration: Calibration, label_factors: LabelFactors | None = None
) -> tuple[GaussianGraph, Head]:
    """The way from input to the Gaussian over the logits, and the part of it that the structure decides."""
    layers, identity = _selected(task)
    _require_exportable(task, batch)
    network = chained(task.network, layers, Sample.of(batch))
    order = [step.layer for step in network.steps if isinstance(step, Linear) and step.layer is not None]
    part = head(factor.in_graph(order, task.dtype), task.dtype, task.n_classes, identity=identity, kind=task.kind)
    graph = GaussianGraph(
        network,
        part.covariance,
        calibration,
        form=part.form,
        start=_start(network, task, identity=identity, single=len(order) == 1),
        basis=part.basis,
        dtype=task.dtype,
        kind=task.kind,
        label_factors=None if label_factors is None else torch.tensor(label_factors, dtype=torch.float64).T,
    )
    return graph, part


def _start(network: ChainedNetwork, task: Task, *, identity: bool, single: bool) -> Float[Tensor, "M c"] | None:
    """∂g/∂(output of the model): the identity, and (0, 1) for two classes by one logit, which is read as (0, g)."""
    if network.columns == 1 and task.kind.has_gauge:
        return torch.tensor([[0.0], [1.0]])
    return torch.eye(task.n_classes) if single and not identity else None


def _selected(task: Task) -> tuple[Sequence[LinearLayer], bool]:
    """The selected layers, and whether they are one that returns the logits themselves."""
    route = task.route
    if route is not None and route.by_layer is None:
        return route.layers, route.identity
    if route is not None and route.by_layer is not None and not len(route.by_layer.rest_spans):
        layers = route.by_layer.layers
        are_used_once = route.by_layer.inner_size == sum(layer.width for layer in layers)
        if are_used_once and all(layer.patches is None for layer in layers):
            return layers, len(layers) == 1 and route.by_layer.outer_size == 0
    raise ExportError(
        f"The posterior is about {', '.join(task.selection.names[:4])}{' …' if len(task.selection.names) > 4 else ''} "
        f"(structure '{task.structure}'), which an exported graph cannot differentiate by. Expected linear layers that "
        "are used once for each input, with structure 'dense', 'block', 'kron' or 'diag'. Fit the last linear layers "
        "only (last_layers=1), or serve posterior.predict.",
        arguments={"last_layers": 1},
    )


def _require_exportable(task: Task, batch: Batch) -> None:
    network = task.network
    if network.device.type != "cpu":
        raise ExportError(
            f"The posterior is on {network.device}; expected the CPU. Use posterior.to('cpu').export(...)."
        )
    if network.input_dtype not in _TOLERANCE:
        kind = "of several dtypes" if network.input_dtype is None else str(network.input_dtype)
        raise ExportError(f"The parameters of the model are {kind}; expected all of them float32, or all float64.")
    for value in (*batch.args, *batch.kwargs.values()):
        if not isinstance(value, Tensor):
            raise ExportError(f"The example holds a {type(value).__name__}; expected tensors only.")


def _description(task: Task, request: ExportRequest) -> dict[str, Any]:
    """What the file is, for anyone who finds it."""
    factors = {} if request.label_factors is None else {"label_factors": request.label_factors}
    calibration = {**vars(request.calibration), **factors}
    return {"errbar": __version__, **described_task(task), **calibration, **described_request(request)}


def described_task(task: Task) -> dict[str, Any]:
    """Which network a graph is of, and what its posterior is about."""
    return {
        "weights": task.network.fingerprint,
        "parameters": list(task.selection.names),
        "structure": task.structure,
        "fisher": task.fisher,
        "logits_of": task.outputs,
    }


def described_request(request: ExportRequest) -> dict[str, Any]:
    return {
        "samples": request.samples,
        "seed": request.seed,
        "draws": request.draws,
        "thresholds": request.thresholds.tolist(),
        "outputs": list(request.outputs),
        **({"level": request.level} if {"lower", "upper"} & set(request.outputs) else {}),
    }


def _require_agreement(results: Mapping[str, Tensor], expected: Mapping[str, Tensor], who: str) -> None:
    """Refuse a graph whose results differ from those of `predict`."""
    for name, truth in expected.items():
        error = float((results[name] - truth).abs().max() / truth.abs().max().clamp_min(1))
        limit = _TOLERANCE[truth.dtype]
        if not error <= limit:
            raise ExportError(
                f"{who} and posterior.predict differ by {error:.1e} in '{name}' of the example; expected at most "
                f"{limit:.0e}. {_cause(who, truth.dtype)} A model that behaves differently for a batch of one cannot "
                "be exported.",
                arguments={"precision": "float64"},
            )


def _cause(who: str, dtype: torch.dtype) -> str:
    """Why a graph may differ from `predict`, and what to do about it."""
    if who == "ONNX Runtime" and dtype == torch.float64:
        return (
            "ONNX has some operations (Celu, attention) with numbers in float32 only: a .pt2 file has them as they are."
        )
    return "Where the prior is weak, that is rounding: fit with precision='float64' or a larger prior precision."


def _onnx(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], about: Mapping[str, str]) -> bytes:
    """The program as the bytes of an ONNX file."""
    constant_bytes = sum(value.numel() * value.element_size() for value in program.state_dict.values())
    if constant_bytes > _ONNX_LIMIT:
        raise ExportError(
            f"The constants take {constant_bytes:,} bytes; an ONNX file has room for {_ONNX_LIMIT:,}. Use .pt2."
        )
    try:
        with _quiet(logging.getLogger("torch.onnx")):
            onnx_program = torch.onnx.export(
                program,
                dynamo=True,
                input_names=list(inputs),
                output_names=list(outputs),
                verbose=False,
                optimize=True,
                custom_translation_table=exact_numbers(),
            )
    except Exception as error:
        raise ExportError(
            f"torch.onnx cannot write the model: {' '.join(str(error).split())[:300]}. Expected operations that ONNX "
            "has; a .pt2 file has no such limit."
        ) from error
    assert onnx_program is not None
    proto = onnx_program.model_proto
    # The output has the batch size first, under the name that torch gave it; an input may have no size at all.
    free = proto.graph.output[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if free and size.dim_param == free:
                size.dim_param = "batch"
    for name, value in about.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = (name if name == "errbar" else f"errbar.{name}"), value
    data: bytes = proto.SerializeToString()
    return data


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Silence the notes of torch.onnx about packages that would add operations."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _require_agreement_of_onnx_runtime(data: bytes, examples: Sequence[WorkedExample], outputs: Sequence[str]) -> None:
    """Refuse a file that ONNX Runtime, if installed, cannot run or runs with different results."""
    try:
        import onnxruntime
    except ImportError:
        return
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    feeds = [{name: value.numpy() for name, value in named_inputs(example.batch).items()} for example in examples]
    try:
        session = onnxruntime.InferenceSession(data, settings, providers=["CPUExecutionProvider"])
        results = [session.run(list(outputs), inputs) for inputs in feeds]
    except Exception as error:
        raise ExportError(
            f"ONNX Runtime cannot run the graph: {' '.join(str(error).split())[:300]}. It lacks some operations in "
            "float64; expected a float32 model, or a .pt2 file."
        ) from error
    for example, values in zip(examples, results, strict=True):
        named_results = {name: torch.as_tensor(value) for name, value in zip(outputs, values, strict=True)}
        _require_agreement(named_results, example.expected, "ONNX Runtime")
