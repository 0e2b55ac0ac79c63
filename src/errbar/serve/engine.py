"""What computes the usual answers: the exported graph in ONNX Runtime where it can, torch where it cannot.

The graph goes from an input to PMF, error bars and intervals in one call, which leaves Python's lock to the event loop;
the same steps in torch take and give it a hundred times. What is fixed in the graph are T, T_c and c, the draws and the
level, so requests that choose others are computed by torch.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import errbar
from errbar.errors import ArgumentError, ErrbarError, MissingExtraError, how_to_install

SAMPLES, SEED, LEVEL = 1000, 0, 0.95
KINDS = ("auto", "onnx", "torch")
_OUTPUTS = ("pmf", "std", "lower", "upper", "mutual_information")
# Inputs of the comparison of both engines, and by how much the graph may be slower: it still leaves the lock to others.
_TRIED, _SLOWER = 8, 1.5

Classifier = errbar.Posterior | errbar.FusedClassifier


# What answers have, by name: a list with what each of them has.
Columns = dict[str, list[Any]]


@dataclass(frozen=True, eq=False)
class Graph:
    """A session of ONNX Runtime with the exported graph of a classifier."""

    session: Any
    name: str
    dtype: Any
    of_labels: bool = False

    @staticmethod
    def of(classifier: Classifier, example: Tensor) -> Graph:
        """Raises `ExportError` where the classifier has no graph, or another one than it predicts."""
        onnxruntime = _onnx_runtime()
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = torch.get_num_threads()
        settings.inter_op_num_threads = 1
        settings.log_severity_level = 3
        # Threads that wait by spinning would take the processor from the event loop.
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        with tempfile.TemporaryDirectory(prefix="errbar-") as folder:
            path = Path(folder) / "graph.onnx"
            classifier.export(path, example=example, samples=SAMPLES, seed=SEED, outputs=_OUTPUTS, level=LEVEL)
            session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        (given,) = session.get_inputs()
        kinds = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64}
        # Fused classifiers are of classes.
        of_labels = isinstance(classifier, errbar.Posterior) and not classifier.information.task.kind.has_gauge
        return Graph(session, given.name, kinds[given.type], of_labels)

    def __call__(self, x: Tensor) -> Columns | None:
        """None where a number is not finite: torch then says what is wrong."""
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(x.numpy(), self.dtype)
        if not np.isfinite(values).all():
            return None
        found = self.session.run(list(_OUTPUTS), {self.name: values})
        # Lists from here on, for which the interpreter's lock is kept: each operation of torch gives it away, and while
        # requests are read, a batch would wait for it tens of times.
        pmf, std, lower, upper, information = (one.tolist() for one in found)
        shares = information if self.of_labels else (information,)
        if not math.isfinite(sum(sum(row) for row in chain(shares, pmf, std, lower, upper))):
            return None
        return {
            **(_labels_decided(pmf) if self.of_labels else _classes_decided(pmf)),
            "mutual_information": information,
            "pmf": pmf,
            "std": std,
            # Of independent draws: √(Σ_k (f⁽ᵏ⁾ − f̂)²/(K(K − 1))).
            "standard_error": [[one / math.sqrt(SAMPLES - 1) for one in row] for row in std],
            "lower": lower,
            "upper": upper,
        }


def _classes_decided(pmf: list[list[float]]) -> Columns:
    confidence = [max(row) for row in pmf]
    return {
        "label": [row.index(most) for row, most in zip(pmf, confidence, strict=True)],
        "confidence": confidence,
        "entropy": [_entropy(row) for row in pmf],
    }


def _labels_decided(pmf: list[list[float]]) -> Columns:
    return {"entropy": [[_entropy((f, 1 - f)) for f in row] for row in pmf]}


def _entropy(pmf: Iterable[float]) -> float:
    return -sum(f * math.log(f) for f in pmf if f > 0)


@dataclass(frozen=True, eq=False)
class Engine:
    """`name` is what computes the usual requests, `reason` why, in a sentence."""

    name: Literal["onnx", "torch"]
    reason: str
    graph: Graph | None = None


TORCH = Engine("torch", "No graph was asked for.")


def engine_for(
    kind: str, classifier: Classifier, example: Tensor | None, by_torch: Callable[[Tensor], object]
) -> Engine:
    """The engine of this kind; of "auto" the graph, where there is one that is not much slower than `by_torch`.

    `example` holds some inputs, None if their shape is unknown.
    """
    if kind not in KINDS:
        raise ArgumentError(f"The engine is {kind!r}; expected one of {', '.join(KINDS)}.")
    if kind == "torch":
        return Engine("torch", "torch was asked for.")
    try:
        if example is None:
            raise ArgumentError(
                "The shape of inputs is unknown, so there is no graph; expected --input-shape or --reference."
            )
        graph = Graph.of(classifier, example)
        if graph(example) is None:
            raise ArgumentError("The graph has no finite answer to the example, so it cannot be used.")
    except ErrbarError as error:
        if kind == "onnx":
            raise
        return Engine("torch", f"There is no graph. {' '.join(str(error).split())}")
    if kind == "onnx":
        return Engine("onnx", "ONNX Runtime was asked for.", graph)
    onnx, plain = _milliseconds(graph, example), _milliseconds(by_torch, example)
    told = f"{len(example)} inputs took {onnx:.1f} ms in ONNX Runtime and {plain:.1f} ms in torch."
    return Engine("torch", told) if onnx > _SLOWER * plain else Engine("onnx", told, graph)


def example_inputs(shape: tuple[int, ...] | None, known: list[Tensor], *, integers: bool) -> Tensor | None:
    """Some inputs to make and compare a graph with: those that are known, or drawn ones."""
    if known:
        return torch.stack([known[place % len(known)] for place in range(_TRIED)])
    if shape is None:
        return None
    if integers:
        return torch.zeros(_TRIED, *shape, dtype=torch.int64)
    return torch.rand(_TRIED, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _milliseconds(function: Callable[[Tensor], object], x: Tensor) -> float:
    """The least of three, since other work of the machine only adds."""
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        function(x)
        taken.append(1e3 * (time.perf_counter() - start))
    return min(taken)


def _onnx_runtime() -> Any:
    try:
        import onnxruntime
    except ImportError as missing:
        raise MissingExtraError(
            f"ONNX Runtime is not installed: {how_to_install('export')}. Without it torch computes."
        ) from missing
    return onnxruntime
