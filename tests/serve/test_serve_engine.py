"""The graph in ONNX Runtime answers what torch answers, and torch answers what the graph cannot."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import errbar
import serving
from errbar.errors import ArgumentError, ExportError, MissingExtraError
from errbar.serve import engine
from errbar.serve.compute import AnswerOptions, Predict, compute
from errbar.serve.service import Served, served
from serving import CLASSES, Running, member, service

X = serving.data()[0]


@pytest.fixture(scope="module")
def by_graph() -> Served:
    return member().with_engine("onnx")


@pytest.fixture(scope="module")
def running(by_graph: Served) -> Iterator[Running]:
    with service(by_graph) as made:
        yield made


class Counted:
    """A graph that counts its runs."""

    def __init__(self, graph: engine.Graph) -> None:
        self.graph, self.rows = graph, [0]

    def __call__(self, x: torch.Tensor) -> engine.Columns | None:
        self.rows.append(len(x))
        return self.graph(x)


def counted(by_graph: Served) -> tuple[Served, Counted]:
    assert by_graph.engine.graph is not None
    graph = Counted(by_graph.engine.graph)
    from dataclasses import replace

    return replace(by_graph, engine=engine.Engine("onnx", "", graph)), graph  # type: ignore[arg-type]


def by_torch(options: AnswerOptions, x: torch.Tensor = X) -> list[dict[str, Any]]:
    return compute([Predict(member(), x, options)])[0]


@pytest.mark.parametrize("include", [frozenset(), frozenset({"outlier"})])
def test_both_engines_answer_alike(by_graph: Served, include: frozenset[str]) -> None:
    options = AnswerOptions(include=include)
    watched, graph = counted(by_graph)
    (found,) = compute([Predict(watched, X, options)])
    assert sum(graph.rows) == len(X)
    for mine, plain in zip(found, by_torch(options), strict=True):
        assert mine.keys() == plain.keys()
        assert (mine["class"], mine["label"]) == (plain["class"], plain["label"])
        for name in ("confidence", "entropy", "pmf", "std", "standard_error", "lower", "upper"):
            assert mine[name] == pytest.approx(plain[name], rel=0, abs=1e-5), name
        # The monitor compares it on a logarithmic grid.
        assert mine["mutual_information"] == pytest.approx(plain["mutual_information"], rel=1e-3, abs=1e-7)
        if include:
            assert mine["outlier"]["percentile"] == pytest.approx(plain["outlier"]["percentile"], abs=1.2)


@pytest.mark.parametrize(
    "options",
    [
        AnswerOptions(samples=999),
        AnswerOptions(seed=1),
        AnswerOptions(level=0.9),
        AnswerOptions(temperature=2.0),
        AnswerOptions(covariance_scale=0.1),
        AnswerOptions(softening=1.0),
        AnswerOptions(thresholds=0.3),
        AnswerOptions(include=frozenset({"covariance"})),
        AnswerOptions(include=frozenset({"points", "logits"})),
    ],
)
def test_what_the_graph_cannot_do_is_done_by_torch(by_graph: Served, options: AnswerOptions) -> None:
    watched, graph = counted(by_graph)
    usual = Predict(watched, X[:3], AnswerOptions())
    found = compute([usual, Predict(watched, X[3:6], options), usual])
    assert graph.rows == [0, 6]
    assert found[1][0]["pmf"] == pytest.approx(by_torch(options, X[3:6])[0]["pmf"], abs=1e-6)
    assert found[0] == found[2]


def test_the_own_t_and_t_c_may_be_named(by_graph: Served) -> None:
    watched, graph = counted(by_graph)
    compute([Predict(watched, X[:2], AnswerOptions(temperature=1.3, covariance_scale=0.7))])
    assert graph.rows == [0, 2]


def test_inputs_without_a_finite_answer_are_refused_in_the_words_of_torch(running: Running) -> None:
    response = running.ask("/v1/predict", {"inputs": [[1e39, 0, 0, 0]]})
    assert response.status_code == 422
    assert "NaN or infinite" in response.text


def test_the_model_says_which_engine(running: Running, by_graph: Served) -> None:
    told = running.told("/v1/model")
    assert (told["engine"], told["engine_reason"]) == ("onnx", "ONNX Runtime was asked for.")
    answer = running.told("/v1/predict", {"inputs": X[:4].tolist()})
    (expected,) = compute([Predict(by_graph, X[:4], AnswerOptions())])
    assert [one["pmf"] for one in answer["predictions"]] == [one["pmf"] for one in expected]


def test_a_fused_classifier_has_a_graph_too() -> None:
    fused = errbar.FusedClassifier([serving.posterior(), serving.posterior(1)], discrepancies=(0.3, 0.8))
    plain = served("both", fused, classes=CLASSES)
    mine = compute([Predict(plain.with_engine("onnx"), X[:5], AnswerOptions())])[0]
    for one, other in zip(mine, compute([Predict(plain, X[:5], AnswerOptions())])[0], strict=True):
        assert one["pmf"] == pytest.approx(other["pmf"], abs=1e-5)


def test_without_onnx_runtime_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    made = member().with_engine("auto").engine
    assert (made.name, made.graph) == ("torch", None)
    assert "ONNX Runtime is not installed: pip install '.[export]'" in made.reason
    with pytest.raises(MissingExtraError, match="ONNX Runtime is not installed"):
        member().with_engine("onnx")


def test_a_model_without_a_graph_is_computed_by_torch() -> None:
    x, y = serving.data()
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    plain = served("it", errbar.fit(model, [(x, y)], parameters=["0.weight", "2.weight"]))
    made = plain.with_engine("auto").engine
    assert made.name == "torch"
    assert made.reason.startswith("There is no graph. On the way back from the logits")
    with pytest.raises(ExportError, match="On the way back"):
        plain.with_engine("onnx")


def test_an_engine_that_is_unknown_or_has_no_inputs_to_try() -> None:
    with pytest.raises(ArgumentError, match="The engine is 'tpu'; expected one of auto, onnx, torch"):
        member().with_engine("tpu")
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 3))
    flat = errbar.fit(model, [(torch.randn(5, 1, 3, 3),)], last_layers=1)
    assert "The shape of inputs is unknown" in served("it", flat).with_engine("auto").engine.reason


def test_auto_takes_the_graph_unless_it_is_much_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = engine.Graph(None, "x", float)
    monkeypatch.setattr(engine.Graph, "of", staticmethod(lambda classifier, example: graph))
    monkeypatch.setattr(engine.Graph, "__call__", lambda self, x: object())
    known = serving.posterior()
    for times, name in (((1.0, 2.0), "onnx"), ((2.9, 2.0), "onnx"), ((3.1, 2.0), "torch")):
        milliseconds = iter(times)
        monkeypatch.setattr(engine, "_milliseconds", lambda function, x, taken=milliseconds: next(taken))
        made = engine.engine_for("auto", known, X[:8], lambda x: None)
        assert made.name == name
        assert made.reason == f"8 inputs took {times[0]} ms in ONNX Runtime and {times[1]} ms in torch."
