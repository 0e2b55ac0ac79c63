"""Schemathesis on the OpenAPI document: thousands of requests made from it, right and wrong ones."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

import serving
from errbar.serve import schemas
from serving import Running

# Without positive_data_acceptance: a document cannot say that a text is a picture, or a matrix a covariance.
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


@pytest.fixture(scope="module")
def document(running: Running) -> Any:
    return schemathesis.openapi.from_url(f"{running.url}/openapi.json")


OPERATIONS = [
    *((path, "POST", mode) for path in ("/v1/predict", "/v1/fuse", "/v1/risk") for mode in GenerationMode),
    # Right labels name classes, which the document does not list.
    ("/v1/labels", "POST", GenerationMode.NEGATIVE),
    *((path, "GET", GenerationMode.POSITIVE) for path in ("/v1/model", "/v1/monitor", "/healthz", "/metrics")),
]


# Not by the plugin of Schemathesis, which wants other versions of pytest than are used here.
@pytest.mark.parametrize(("path", "method", "mode"), OPERATIONS)
def test_the_service_keeps_to_its_document(document: Any, path: str, method: str, mode: GenerationMode) -> None:
    statuses: Counter[int] = Counter()

    @settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=document[path][method].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        response = case.call_and_validate(checks=CHECKS)
        statuses[response.status_code] += 1
        if response.status_code >= 400:
            told = response.json()
            assert set(told) == {"error", "kind"}
            assert len(told["error"]) > 10

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check()
    right = mode is GenerationMode.POSITIVE
    assert statuses[200] > 0 if right else statuses[422] > 0, statuses


def test_answers_are_what_the_document_says(running: Running) -> None:
    x = serving.data()[0][:2].tolist()
    everything = {"inputs": x, "risk": 0.1, "include": ["covariance", "logits", "points", "outlier", "input"]}
    for path, body, model in (
        ("/v1/predict", everything, schemas.PredictAnswer),
        ("/v1/fuse", {"inputs": x}, schemas.FuseAnswer),
        ("/v1/risk", {"inputs": x, "thresholds": 0.2}, schemas.RiskAnswer),
    ):
        strict = model.model_validate(running.told(path, body), strict=True)
        assert strict.model_dump(by_alias=True, exclude_none=True) != {}


def test_the_document_knows_the_model(running: Running) -> None:
    document = httpx.get(f"{running.url}/openapi.json").json()
    inputs = document["components"]["schemas"]["PredictRequest"]["properties"]["inputs"]
    assert (inputs["minItems"], inputs["maxItems"]) == (1, 64)
    assert (inputs["items"]["minItems"], inputs["items"]["maxItems"]) == (4, 4)
    assert set(document["paths"]) == {"/v1/predict", "/v1/fuse", "/v1/risk", "/v1/model", "/healthz", "/metrics"} | {
        "/v1/labels",
        "/v1/monitor",
    }
    references = set(_references(document))
    assert all(text.removeprefix("#/components/schemas/") in document["components"]["schemas"] for text in references)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, part in value.items():
            if key == "$ref":
                yield part
            else:
                yield from _references(part)
    elif isinstance(value, list):
        for part in value:
            yield from _references(part)
