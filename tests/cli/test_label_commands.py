"""The commands with several labels: what the library says is what the files hold."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import errbar
from command_line import CLASSES, Workspace, run, said

MODEL = ("--model", "tiny_net:trained")
DRAWS = ("--samples", "100")


def test_several_labels_from_fit_to_evaluate(workspace: Workspace, tmp_path: Path) -> None:
    x, y = workspace.train
    labels = torch.nn.functional.one_hot(y, len(CLASSES))
    labels[::5, 0] = -1
    np.savez(
        tmp_path / "labels.npz",
        x_train=x,
        y_train=labels,
        x_validation=x + 0.25,
        y_validation=labels,
        x_test=x[:9],
        y_test=labels[:9],
    )
    data, first, second = (str(tmp_path / name) for name in ("labels.npz", "p.safetensors", "q.safetensors"))
    facts = said(
        *("fit", "tiny_net:trained", data, "--last-layers", "1", "--outputs", "labels", "-o", first),
        *("--class-names", ",".join(CLASSES)),
    )
    assert facts["outputs"] == "labels"
    facts = said("calibrate", first, data, *MODEL, *DRAWS, "--per-label", "--only", "temperature", "-o", second)
    posterior = errbar.load(second, workspace.model)
    assert facts["label_temperatures"] == list(posterior.label_temperatures)
    told = said("info", second)
    assert told["label_temperatures"] == list(posterior.label_temperatures)
    assert told["label_covariance_scales"] == list(posterior.label_covariance_scales)
    assert said("info", first)["label_temperatures"] is None
    prediction = posterior.predict(x[:9], 100)

    said("predict", second, data, *MODEL, *DRAWS, "--risk", "0.5", "-o", str(tmp_path / "out.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    np.testing.assert_allclose([row["pmf"] for row in rows], prediction.pmf, rtol=1e-5)
    np.testing.assert_allclose([row["mutual_information"] for row in rows], prediction.mutual_information, atol=1e-6)
    assert rows[0]["label"] == prediction.label[0].tolist()
    assert rows[0]["class"] == "|".join(name for name, flag in zip(CLASSES, prediction.label[0], strict=True) if flag)
    said("predict", second, data, *MODEL, *DRAWS, "-o", str(tmp_path / "out.csv"))
    with (tmp_path / "out.csv").open(newline="") as stream:
        assert f"pmf_{CLASSES[1]}" in next(csv.reader(stream))

    scores = said("evaluate", second, f"{data}:test", *MODEL, *DRAWS)
    nll = errbar.metrics.label_nll(prediction, labels[:9])
    assert scores["scores"]["posterior"]["nll"] == pytest.approx(nll, rel=1e-5)
    assert scores["labels_given"] == int((labels[:9] >= 0).sum())
    assert list(scores["by_label"]) == list(CLASSES)
    assert "By label" in run("evaluate", second, f"{data}:test", *MODEL, *DRAWS).out

    page = tmp_path / "page.html"
    facts = said("evaluate", second, f"{data}:test", *MODEL, *DRAWS, "--report", str(page))
    assert facts["bytes"] == page.stat().st_size
    assert "Label by label" in page.read_text()
    discounted = str(tmp_path / "u.safetensors")
    facts = said("update", second, f"{data}:test", *MODEL, "--discount", "0.5", "-o", discounted)
    assert facts["label_temperatures"] == list(posterior.label_temperatures)

    for command in (("fit", "--last-layers", "1"), ("autofit",)):
        words = (command[0], "tiny_net:trained", data, *command[1:])
        forgotten = run(*words, "-o", str(tmp_path / "a.safetensors"))
        assert "if each output is a label by itself, use errbar fit --outputs labels." in forgotten.err
    refused = run(
        "fit", "tiny_net:trained", data, "--auto", "--outputs", "labels", "-o", str(tmp_path / "a.safetensors")
    )
    assert refused.code == 1
    assert "--outputs was given with --auto, which is for one of M classes alone" in refused.err


SPAM = """
import torch
from torch import nn
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
"""


def test_a_single_label_has_a_single_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spam_of_test.py").write_text(SPAM, encoding="utf-8")
    np.savez("mail.npz", x=np.ones((6, 3), np.float32), y=np.ones((6, 1), np.int64))
    command = ("fit", "spam_of_test:network", "mail.npz", "--last-layers", "1", "-o", "p.safetensors")
    assert said(*command, "--outputs", "labels", "--class-names", "spam")["classes"] == ["spam"]
    assert errbar.info("p.safetensors").classes == ("spam",)
    refused = run(*command, "--force", "--outputs", "labels", "--class-names", "spam,ham")
    assert "classes are 2 names; expected 1 printable" in refused.err
    assert "expected two or more different names" in run(*command, "--force", "--class-names", "spam").err
    assert (
        "expected one or more different names"
        in run(*command, "--force", "--outputs", "labels", "--class-names", "spam,spam").err
    )
