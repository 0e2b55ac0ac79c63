"""The service with several labels: what the library says is what it answers, and what is for classes is refused."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import torch

import errbar
import serving
from errbar.errors import ArgumentError
from errbar.serve import schemas
from errbar.serve.compute import AnswerOptions, Predict, compute
from errbar.serve.monitoring import monitor_for
from errbar.serve.service import Served, Service, served
from serving import Running, member, service

NAMES = ("red", "round", "ripe")
X = serving.data()[0].double()
Y = torch.nn.functional.one_hot(serving.data()[1], 3).index_fill(0, torch.arange(0, 90, 7), -1)
FACTORS = ((0.8, 1.5), (1.2, 0.5), (1.1, 2.0))


def posterior(seed: int = 0) -> errbar.Posterior:
    network = serving.network(seed, torch.float64)
    fitted = errbar.fit(network, [(X, Y)], last_layers=2, prior=errbar.Prior(2.0), outputs="labels")
    return fitted.with_calibration(temperature=1.3, covariance_scale=0.7, softening=0.2).with_label_factors(FACTORS)


def labelled(name: str = "tiny", seed: int = 0) -> Served:
    return served(name, posterior(seed), classes=NAMES, reference=[(X, Y)], about="Several labels.")


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    first = labelled()
    with service(first, labelled("other", 1), monitor=monitor_for(first, [(X, Y)], "held.npz", None)) as made:
        yield made


def test_an_answer_is_the_prediction(running: Running) -> None:
    """To the rounding of matrix products, with options of the request and without, by label and between labels."""
    usual = {"inputs": X[:5].tolist(), "include": ["covariance", "logits", "outlier"], "risk": [0.2, 0.5, 0.8]}
    for options in ({}, {"temperature": 2.0, "covariance_scale": 0.3, "softening": 0.0, "samples": 300, "seed": 4}):
        told = running.told("/v1/predict", {**usual, **options})
        assert schemas.LabelPredictAnswer.model_validate(told, strict=True)
        scales = {name: options[name] for name in ("temperature", "covariance_scale", "softening") if name in options}
        own = posterior().with_calibration(**scales)
        expected = own.predict(X[:5], told["samples"], told["seed"])
        lower, upper = expected.interval(0.95)
        logits = own.logits(X[:5])
        for row, answer in enumerate(told["predictions"]):
            assert not answer.keys() & {"class", "label", "confidence"}
            assert answer["names"] == list(NAMES)
            assert answer["likely"] == [name for name, f in zip(NAMES, expected.pmf[row], strict=True) if f > 0.5]
            close = {"rel": 0, "abs": 1e-12}
            for name in ("pmf", "std", "standard_error", "entropy", "mutual_information"):
                assert answer[name] == pytest.approx(getattr(expected, name)[row].tolist(), **close), name
            assert answer["lower"] == pytest.approx(lower[row].tolist(), **close)
            assert answer["upper"] == pytest.approx(upper[row].tolist(), **close)
            assert answer["risk"] == expected.risk(torch.tensor([0.2, 0.5, 0.8]).double())[row].tolist()
            for name, matrix in (("mean", logits.mean), ("covariance", logits.covariance)):
                assert torch.tensor(answer["logits"][name]).sub(matrix[row]).abs().max() < 1e-6
            assert torch.tensor(answer["covariance"]).sub(expected.covariance[row]).abs().max() < 1e-6
            total = posterior().predict(X[row : row + 1]).mutual_information.sum()
            assert answer["outlier"]["mutual_information"] == pytest.approx(float(total), rel=0, abs=1e-12)


def test_risk_and_fusion(running: Running) -> None:
    own, other = posterior(), posterior(1)
    x = X[:4]
    risks = running.told("/v1/risk", {"inputs": x.tolist(), "thresholds": 0.3})["risks"]
    assert [one["risk"] for one in risks] == own.predict(x).risk(0.3).tolist()
    frames = own.logits(x)
    together = errbar.fuse([frames[row : row + 1] for row in range(4)]).predict()
    told = running.told("/v1/fuse", {"inputs": x.tolist()})
    assert schemas.FuseLabelsAnswer.model_validate(told, strict=True)
    assert told["objects"][0]["fused"]["pmf"] == pytest.approx(together.pmf[0].tolist(), rel=0, abs=1e-10)
    both = errbar.fuse([own.logits(x), other.logits(x)]).predict()
    told = running.told("/v1/fuse", {"inputs": x.tolist(), "over": "posteriors"})["objects"]
    assert [one["fused"]["pmf"] for one in told] == [pytest.approx(row, rel=0, abs=1e-10) for row in both.pmf.tolist()]
    sources = [
        running.told("/v1/predict", {"inputs": x[:1].tolist(), "include": ["logits"], "posterior": name})
        for name in ("tiny", "other")
    ]
    gaussians = [source["predictions"][0]["logits"] for source in sources]
    told = running.told("/v1/fuse", {"gaussians": gaussians})["objects"][0]
    assert told["fused"]["pmf"] == pytest.approx(both.pmf[0].tolist(), rel=0, abs=1e-10)


def test_gaussians_of_one_label_are_fused() -> None:
    """What a posterior of one label answers can be sent as it is."""
    model = torch.nn.Linear(X.shape[1], 1).double()
    own = errbar.fit(model, [(X, Y[:, :1])], last_layers=1, outputs="labels")
    one = served("one", own, reference=[(X, Y[:, :1])])
    with service(one) as running:
        answer = running.told("/v1/predict", {"inputs": X[:2].tolist(), "include": ["logits"]})
        gaussians = [each["logits"] for each in answer["predictions"]]
        told = running.told("/v1/fuse", {"gaussians": gaussians})["objects"][0]
        logits = own.logits(X[:2])
        expected = errbar.fuse([logits[:1], logits[1:]]).predict().pmf[0].tolist()
        assert told["fused"]["pmf"] == pytest.approx(expected, rel=0, abs=1e-10)
        empty = running.ask("/v1/fuse", {"gaussians": [{"mean": [], "covariance": []}]})
        assert empty.status_code == 422


def test_what_is_only_for_classes_is_refused_in_a_sentence(running: Running) -> None:
    x = X[:2].tolist()
    for path, body, words in (
        ("/v1/predict", {"inputs": x, "include": ["points"]}, "points are of the two leading classes"),
        ("/v1/fuse", {"inputs": x, "joint": True}, "expected joint=false"),
        ("/v1/predict", {"inputs": x, "risk": [0.5, 0.5]}, "risk"),
        ("/v1/labels", [{"id": "a", "label": 1}], "labels"),
        ("/v1/labels", [{"id": "a", "labels": [1, 0]}], "An input has 2 labels; expected 3"),
        ("/v1/labels", [{"id": "a", "labels": [1, 0, 2]}], "labels"),
    ):
        response = running.ask(path, body)
        assert response.status_code == 422
        assert words in response.json()["error"]
    with pytest.raises(ArgumentError, match="expected the same of all"):
        Service((labelled(), member("classes")))


def test_the_model_and_the_document_say_labels(running: Running) -> None:
    told = running.told("/v1/model")
    assert schemas.ModelAnswer.model_validate(told, strict=True)
    assert (told["outputs"], told["classes"]) == ("labels", list(NAMES))
    assert told["label_temperatures"] == list(posterior().label_temperatures)
    assert told["label_covariance_scales"] == list(posterior().label_covariance_scales)
    assert {example["label"] for example in told["examples"]} == {*NAMES, ""}  # some have no labels
    document = running.told("/openapi.json")
    answer = document["paths"]["/v1/predict"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert answer["$ref"].endswith("/LabelPredictAnswer")
    body = document["paths"]["/v1/labels"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["$ref"].rpartition("/")[2] in document["components"]["schemas"]
    with service(member()) as classes:
        told = classes.told("/v1/model")
        assert (told["outputs"], told["label_temperatures"]) == ("classes", None)


def test_the_monitor_takes_lists_of_labels_and_the_counters_each_label(running: Running) -> None:
    before = running.told("/v1/monitor")
    assert before["reference_inputs"] == len(X)
    answers = running.told("/v1/predict", {"inputs": X[:6].tolist()})["predictions"]
    lists = [{"id": answer["id"], "labels": row} for answer, row in zip(answers, Y[:6].tolist(), strict=True)]
    assert running.told("/v1/labels", lists) == {"matched": 6, "unmatched": 0, "alarms": []}
    after = running.told("/v1/monitor")
    assert schemas.MonitorAnswer.model_validate(after, strict=True)
    assert after["inputs"] == before["inputs"] + 6
    assert after["labels"] == before["labels"] + 5, "the first of these inputs has no labels, which says nothing"
    text = httpx.get(f"{running.url}/metrics").text
    likely = [name for answer in answers for name in answer["likely"]]
    assert likely
    assert all(f'errbar_answers_total{{class="{name}",posterior="tiny"}}' in text for name in likely)


def test_both_engines_answer_alike() -> None:
    plain = labelled()
    graph = plain.with_engine("onnx")
    options = AnswerOptions(include=frozenset({"outlier"}))
    found, expected = (compute([Predict(one, X[:20], options)])[0] for one in (graph, plain))
    assert graph.engine.graph is not None
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        assert mine["likely"] == other["likely"]
        for name in ("entropy", "mutual_information", "pmf", "std", "standard_error", "lower", "upper"):
            assert mine[name] == pytest.approx(other[name], rel=1e-6, abs=1e-9), name
