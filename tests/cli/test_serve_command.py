"""`errbar serve` from the command line: what it starts, what it says, how it stops, and what it refuses."""

from __future__ import annotations

import json
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest
import torch

import errbar
from command_line import Workspace, run
from errbar import demo
from errbar.errors import ArgumentError
from errbar.experiments.networks import paper_network
from errbar.serve.digits import COPIES, SETTINGS, TEMPERATURE, VALIDATION_COPIES, digits, drawn
from errbar.serve.server import Address
from processes import service_process


@pytest.fixture
def fitted(workspace: Workspace) -> errbar.Posterior:
    for name, model in (("it", workspace.model), ("other", workspace.other)):
        made = errbar.fit(model, [workspace.train], last_layers=1, prior=errbar.Prior(2.0))
        made.save(f"{name}.safetensors", classes=["ant", "bee", "cat"])
    return errbar.load(Path("it.safetensors"), workspace.model)


def test_a_posterior_from_files_is_served_and_stops_gracefully(workspace: Workspace, fitted: errbar.Posterior) -> None:
    x = workspace.test[0][:3]
    arguments = ["it.safetensors", "other.safetensors", "--model", "tiny_net:trained", "--model", "tiny_net:other"]
    arguments += ["--reference", "data.npz", "--engine", "torch", "--monitor", "data.npz"]
    token = {"ERRBAR_TOKEN": "a-token-of-the-environment"}
    with service_process(workspace.folder, *arguments, **token) as (process, said):
        headers = {"authorization": "Bearer a-token-of-the-environment"}
        assert said["posteriors"] == ["it", "other"]
        assert said["url"].startswith("http://127.0.0.1:")
        assert httpx.get(f"{said['url']}/v1/model").status_code == 401
        told = httpx.get(f"{said['url']}/v1/model", headers=headers).json()
        assert told["classes"] == ["ant", "bee", "cat"]
        assert told["input_shape"] == [4]
        assert told["reference"] is not None
        assert (told["engine"], told["engine_reason"]) == ("torch", "torch was asked for.")
        body = {"inputs": x.tolist(), "samples": 100}
        answer = httpx.post(f"{said['url']}/v1/predict", json=body, headers=headers).json()
        found = torch.tensor([one["pmf"] for one in answer["predictions"]], dtype=torch.float64)
        torch.testing.assert_close(found, fitted.predict(x, 100).pmf, atol=1e-12, rtol=0)
        usual = httpx.post(f"{said['url']}/v1/predict", json={"inputs": x.tolist()}, headers=headers).json()
        label = {"id": usual["predictions"][1]["id"], "label": "bee"}
        assert httpx.post(f"{said['url']}/v1/labels", json=[label], headers=headers).json()["matched"] == 1
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    # Beside the posterior, with what was still to be written when the service stopped.
    state = json.loads(Path("it.monitor.json").read_text(encoding="utf-8"))
    assert (state["skipped"], state["monitor"]["inputs"], state["monitor"]["tally"]["labels"]) == (3, 3, 1)
    events = [json.loads(line) for line in err.splitlines()]
    assert [line["status"] for line in events if line["event"] == "request"] == [401, 200, 200, 200, 200]
    assert "a-token" not in err


def test_several_workers_answer_as_one_service(workspace: Workspace, fitted: errbar.Posterior) -> None:
    x = workspace.test[0][:4]
    arguments = ["it.safetensors", "--model", "tiny_net:trained", "--engine", "torch", "--workers", "2"]
    arguments += ["--monitor", "data.npz", "--monitor-state", "of-workers.json"]  # not that of another test's service
    with (
        service_process(workspace.folder, *arguments) as (process, said),
        httpx.Client(base_url=said["url"], timeout=60) as client,
    ):
        expected, names, asked = fitted.predict(x).pmf, [], 0
        while len({name.split("-")[0] for name in names}) < 2:  # each connection goes to one of the workers
            answer = httpx.post(f"{said['url']}/v1/predict", json={"inputs": x.tolist()}, timeout=60).json()
            found = torch.tensor([one["pmf"] for one in answer["predictions"]], dtype=torch.float64)
            torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
            names += [one["id"] for one in answer["predictions"]]
            asked += 1
            assert asked < 1000
        labels = [{"id": name, "label": 0} for name in names[-60:]]
        assert client.post("/v1/labels", json=labels).json()["matched"] == len(labels)
        assert client.get("/v1/monitor").json()["inputs"] == 4 * asked
        assert f"errbar_inputs_total {4 * asked}.0" in client.get("/metrics").text
        assert client.get("/v1/model").json()["engine_reason"] == "torch was asked for."
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, ""), err
    state = json.loads(Path("of-workers.json").read_text(encoding="utf-8"))
    assert state["monitor"]["inputs"] == 4 * asked
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{said['url']}/healthz")


def test_a_posterior_needs_its_model(fitted: errbar.Posterior) -> None:
    assert fitted is not None
    for arguments, sentence in (
        (("it.safetensors",), "There are 1 posteriors, 0 models and 0 weights; expected one --model"),
        (("it.safetensors", "--model", "tiny_net:untrained"), "weights"),
        (("missing.safetensors", "--model", "tiny_net:trained"), "missing.safetensors"),
        (("it.safetensors", "--model", "tiny_net:trained", "--input-shape", "3by4"), "The input shape is '3by4'"),
        (("it.safetensors", "--model", "tiny_net:trained", "--picture-shape", "8"), "The picture shape is '8'"),
        (
            ("it.safetensors", "--model", "tiny_net:trained", "--picture-shape", "8x8"),
            "An input has 4 numbers; expected 1 × 8 × 8 for a picture",
        ),
    ):
        result = run("serve", *arguments, "--port", "0")
        assert result.code == 1
        assert sentence in result.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--model", "tiny_net:trained"), "There is --model and no POSTERIOR"),
        (("--reference", "data.npz"), "There is --reference and no POSTERIOR"),
        (("--picture-shape", "8x8"), "There is --picture-shape and no POSTERIOR"),
        (("--monitor-state", "state.json"), "There is --monitor-state and no --monitor"),
        (("--token-file", "missing.txt"), "The token file missing.txt cannot be read"),
        (("--host", "256.0.0.1", "--insecure"), "Cannot listen on 256.0.0.1"),
        (("--host", "0.0.0.0"), "Whoever reaches 0.0.0.0 could ask, since there is no token; expected --token-file"),
        (("--host", "errbar.example"), "Whoever reaches errbar.example could ask"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(arguments: tuple[str, ...], sentence: str) -> None:
    result = run("serve", *arguments)
    assert result.code == 1
    assert sentence in result.err


def test_a_port_that_is_taken_is_told_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", "--port", str(port))
    assert result.code == 1
    assert f"Cannot listen on 127.0.0.1 port {port}: Address already in use." in result.err


@pytest.mark.parametrize("token", ["short", "", "two words here", "tab\tinside it", "naïveté-as-token"])
def test_tokens_that_cannot_be_used(token: str, tmp_path: Path) -> None:
    file = tmp_path / "token.txt"
    file.write_text(token, encoding="utf-8")
    result = run("serve", "--token-file", str(file))
    assert result.code == 1
    assert "expected 8 or more printable characters without spaces" in result.err
    assert token == "" or token not in result.err


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "prometheus_client"])
def test_what_serving_needs_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    result = run("serve")
    assert result.code == 1
    assert "pip install '.[serve]' in a clone of errbar" in result.err


def test_loopback_is_the_default_and_known_by_its_names() -> None:
    assert Address().is_loopback
    assert Address("localhost").is_loopback
    assert Address("::1").is_loopback
    assert not Address("0.0.0.0").is_loopback
    assert Address("0.0.0.0").hosts is None
    assert "127.0.0.2" in (Address("127.0.0.2").hosts or ())


def test_other_machines_need_a_token_unless_everybody_is_wanted() -> None:
    Address("0.0.0.0").require_protected("a-long-token", insecure=False)
    Address("0.0.0.0").require_protected(None, insecure=True)
    Address("127.0.0.1").require_protected(None, insecure=False)
    with pytest.raises(ArgumentError, match="or --insecure to serve everybody"):
        Address("::").require_protected(None, insecure=False)


@pytest.mark.slow
def test_t_and_t_c_of_the_digits_model_are_those_of_calibrate() -> None:
    made, data = digits(), demo.load(SETTINGS)
    validation = drawn(data.validation, VALIDATION_COPIES, SETTINGS.seed + 2)
    calibrated = errbar.calibrate(made.posterior, validation.data())
    found, best = (
        errbar.metrics.nll(posterior.predict(validation.x).pmf, validation.y)
        for posterior in (made.posterior, calibrated)
    )
    assert found < best + 1e-3
    assert errbar.metrics.accuracy(made.posterior.predict(data.test.x).pmf, data.test.y) > 0.96


def test_the_digits_model_has_the_layers_of_the_demo_and_is_the_same_every_time() -> None:
    settings = demo.DemoSettings(train_size=120, validation_size=60, epochs=1)
    made, again = digits(settings), digits(settings)
    assert (made.shape, made.classes) == ((64,), tuple("0123456789"))
    assert [part.shape for part in made.posterior.model.parameters()] == [
        part.shape for part in paper_network(64).parameters()
    ]
    for mine, same in zip(made.posterior.model.parameters(), again.posterior.model.parameters(), strict=True):
        assert torch.equal(mine, same)
    assert made.posterior.information.n_parameters == 4450
    assert made.posterior.information.n_samples == 120 * (1 + COPIES)
    assert made.posterior.temperature == TEMPERATURE
    assert made.reference is not None
    assert len(made.reference) == 120 * (1 + COPIES)
    assert [label for _, label in made.examples[:10]] == list("0123456789")
