"""Several networks fused on the command line: calibrate-fusion, and every command that takes its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import errbar
from command_line import CLASSES, Workspace, run, said

MODELS = ["--model", "tiny_net:trained", "--model", "tiny_net:other"]


PAIR = ["-p", "trained.safetensors", "-p", "other.safetensors", *MODELS]


@pytest.fixture
def files(workspace: Workspace) -> Workspace:
    """The workspace with two posteriors and their fusion."""
    if not Path("fused.safetensors").exists():
        names = ["--class-names", ",".join(CLASSES)]
        for name in ("trained", "other"):
            said("fit", f"tiny_net:{name}", "data.npz", "--last-layers", "1", *names, "-o", f"{name}.safetensors")
        said("calibrate-fusion", "data.npz", *PAIR, "--samples", "32", "-o", "fused.safetensors")
    return workspace


@pytest.fixture
def fused(files: Workspace) -> errbar.FusedClassifier:
    return errbar.load("fused.safetensors", [files.model, files.other])


def test_a_fusion_is_that_of_the_library(files: Workspace, fused: errbar.FusedClassifier) -> None:
    posteriors = [
        errbar.load(f"{name}.safetensors", model) for name, model in (("trained", files.model), ("other", files.other))
    ]
    expected = errbar.calibrate_fusion(posteriors, [files.validation], samples=32)
    assert fused.scales == expected.scales
    assert fused.discrepancies == pytest.approx(expected.discrepancies, rel=1e-6)
    assert fused.temperature == pytest.approx(expected.temperature, rel=1e-6)
    assert str(fused) == str(expected)


def test_the_answer_has_the_numbers_and_the_table(files: Workspace, tmp_path: Path) -> None:
    command = ["calibrate-fusion", "data.npz", *PAIR, "--samples", "16", "--folds", "3", "--no-progress"]
    facts = said(*command, "-o", str(tmp_path / "a.safetensors"))
    assert facts["networks"] == 2
    assert facts["classes"] == list(CLASSES)
    assert facts["table"]["folds"] == 3
    printed = run(*command, "-o", str(tmp_path / "b.safetensors")).out
    assert "2 networks fused, 3 classes" in printed
    assert "Chosen: " in printed


def test_predict_takes_a_fusion(files: Workspace, fused: errbar.FusedClassifier, tmp_path: Path) -> None:
    output = tmp_path / "out.npz"
    said("predict", "fused.safetensors", "data.npz", *MODELS, "--risk", "0.05", "-o", str(output), "--batch-size", "9")
    expected = fused.predict(files.test[0])
    np.testing.assert_allclose(np.load(output)["pmf"], expected.pmf, atol=1e-12)
    np.testing.assert_allclose(np.load(output)["risk_0.05"], expected.risk(0.05), atol=1e-12)


def test_models_of_one_architecture_have_weights_of_their_own(
    files: Workspace, fused: errbar.FusedClassifier, tmp_path: Path
) -> None:
    weights = []
    for name, model in (("trained", files.model), ("other", files.other)):
        torch.save(model.state_dict(), tmp_path / f"{name}.pt")
        weights += ["--weights", str(tmp_path / f"{name}.pt")]
    output = tmp_path / "out.npz"
    said("predict", "fused.safetensors", "data.npz", "--model", "tiny_net:untrained", *weights, "-o", str(output))
    np.testing.assert_allclose(np.load(output)["pmf"], fused.predict(files.test[0]).pmf, atol=1e-12)


def test_evaluate_takes_a_fusion(files: Workspace, fused: errbar.FusedClassifier, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    facts = said("evaluate", "fused.safetensors", "data.npz", *MODELS)
    x, y = files.test
    assert facts["scores"]["after_calibration"]["nll"] == pytest.approx(
        errbar.metrics.nll(fused.predict(x).pmf, y), rel=1e-6
    )
    assert facts["scores"]["network"]["nll"] == pytest.approx(
        errbar.metrics.nll(torch.softmax(fused.logits(x).mean, 1), y), rel=1e-6
    )
    assert facts["temperature"] == fused.temperature
    with_page = said("evaluate", "fused.safetensors", "data.npz", *MODELS, "--report", str(page))
    assert with_page["scores"]["after_calibration"]["nll"] == pytest.approx(
        facts["scores"]["after_calibration"]["nll"], rel=1e-6
    )
    text = page.read_text(encoding="utf-8")
    for word in ("Fusion", "Posterior 0", "Posterior 1", "discrepancies s", "What was tried", "Chosen: "):
        assert word in text


def test_info_and_verify_take_a_fusion(files: Workspace, fused: errbar.FusedClassifier) -> None:
    facts = said("info", "fused.safetensors")
    assert (facts["kind"], facts["n_classes"]) == ("fusion", 3)
    assert [network["weights"] for network in facts["networks"]] == [
        posterior.information.network.fingerprint for posterior in fused.posteriors
    ]
    printed = run("info", "fused.safetensors").out
    assert "network 1" in printed
    assert "Chosen: " in printed
    assert said("verify", "fused.safetensors", "tiny_net:trained", "tiny_net:other")["whole"]
    assert (
        "about the weights of tiny_net:trained, tiny_net:other"
        in run("verify", "fused.safetensors", "tiny_net:trained", "tiny_net:other").out
    )


MISTAKES = {
    "one to fuse": (
        ["calibrate-fusion", "data.npz", "-p", "trained.safetensors", "--model", "tiny_net:trained"],
        "There is one --posterior; expected two or more",
    ),
    "too many models": (
        ["calibrate-fusion", "data.npz", *PAIR, "--model", "tiny_net:other"],
        "There are 2 posteriors, 3 models",
    ),
    "a model too many": (
        ["predict", "fused.safetensors", "data.npz", *MODELS, "--model", "tiny_net:other"],
        "holds a fused classifier of 2 networks, and there are 3 models",
    ),
    "models in another order": (
        ["predict", "fused.safetensors", "data.npz", *MODELS[2:], *MODELS[:2]],
        "Give the weights of each with --weights",
    ),
    "two models of one": (
        ["predict", "trained.safetensors", "data.npz", *MODELS],
        "is about one network, and there are 2 models",
    ),
    "a fusion to calibrate": (
        ["calibrate", "fused.safetensors", "data.npz", *MODELS[:2]],
        "holds a fused classifier of 2 networks; expected a posterior of one",
    ),
    "a fusion to fuse": (
        ["fuse", "data.npz", "-p", "fused.safetensors", "-p", "other.safetensors", *MODELS],
        "of 2 networks, which are fused already; expected the posterior of one network. With this file errbar predict",
    ),
    "frames of a fusion": (
        ["fuse", "data.npz", "-p", "fused.safetensors", *MODELS[:2], "--frames", "5"],
        "expected the posterior of one network. With this file errbar serve fuses frames (POST /v1/fuse)",
    ),
    "other weights to verify": (
        ["verify", "fused.safetensors", "tiny_net:other", "tiny_net:trained"],
        "Give its weights with --weights",
    ),
    "weights for some": (
        ["verify", "fused.safetensors", "tiny_net:other", "tiny_net:trained", "--weights", "data.npz"],
        "There are 2 models and 1 weights",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_in_a_sentence(
    files: Workspace, fused: errbar.FusedClassifier, tmp_path: Path, mistake: str
) -> None:
    arguments, sentence = MISTAKES[mistake]
    kind = "npz" if arguments[0] in ("predict", "fuse") else "safetensors"
    output = [] if arguments[0] == "verify" else ["-o", str(tmp_path / f"out.{kind}")]
    result = run(*arguments, *output)
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert sentence in result.err
    assert list(tmp_path.iterdir()) == []
