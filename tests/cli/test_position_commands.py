"""Posteriors of positions on the command line: fitted, calibrated, measured, and written as arrays."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import errbar
from command_line import run, said
from errbar.cli.output import writing
from errbar.errors import DataError


def told(*words: str) -> str:
    """What a command that succeeds prints."""
    result = run(*words)
    assert result.code == 0, result
    return result.out


def refused(*words: str) -> str:
    """Why a command is refused."""
    result = run(*words)
    assert result.code == 1, result
    return result.err


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module with the tagger, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("tokens_of_test.py").write_text(TAGGER, encoding="utf-8")
    sys.modules.pop("tokens_of_test", None)
    return importlib.import_module("tokens_of_test")


NETWORK = """
import torch
from torch import nn
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 3, 1))
"""


def test_pixels_are_fitted_calibrated_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pixels_of_test.py").write_text(NETWORK, encoding="utf-8")
    namespace: dict[str, object] = {}
    exec(NETWORK, namespace)
    model = namespace["network"]()  # type: ignore[operator]
    torch.save(model.state_dict(), "weights.pt")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(45, 1, 4, 5, generator=generator)
    pmf = torch.softmax(3 * model(x).movedim(1, -1), -1).detach()
    y = torch.multinomial(pmf.flatten(0, 2), 1, generator=generator).reshape(45, 4, 5)
    parts = {"train": slice(0, 20), "validation": slice(20, 35), "test": slice(35, 45)}
    arrays = {f"x_{name}": x[rows].numpy() for name, rows in parts.items()}
    np.savez("data.npz", **arrays, **{f"y_{name}": y[rows].numpy() for name, rows in parts.items()})
    of_model = ["--model", "pixels_of_test:network", "--weights", "weights.pt"]
    first = ["fit", "pixels_of_test:network", "data.npz", "--weights", "weights.pt", "--last-layers", "1"]
    told(*first, "--outputs", "positions", "--class-names", "sky,sea,land", "-o", "fitted.safetensors")
    assert errbar.info("fitted.safetensors").classes == ("sky", "sea", "land")
    two = refused(*first, "--outputs", "positions", "--class-names", "sky,sea", "-o", "other.safetensors")
    assert "classes are 2 names; expected 3 printable texts" in two
    told("calibrate", "fitted.safetensors", "data.npz", *of_model, "-o", "calibrated.safetensors")
    measured = ["evaluate", "calibrated.safetensors", "data.npz", *of_model, "--samples", "50"]
    shown = told(*measured, "--report", "page.html")
    assert "200 positions of 10 inputs" in Path("page.html").read_text()
    assert "200 positions with a label" in shown
    assert "after calibration" in shown
    told("predict", "calibrated.safetensors", "data.npz", *of_model, "--samples", "50", "-o", "found.npz")
    with np.load("found.npz") as found:
        assert found["pmf"].shape == found["std"].shape == (10, 4, 5, 3)
        assert found["label"].shape == found["mutual_information"].shape == (10, 4, 5)
    for name in ("found.csv", "found.xlsx"):
        reason = refused("predict", "calibrated.safetensors", "data.npz", *of_model, "-o", name)
        assert "--outputs positions" in reason
        assert "expected an .npz file" in reason


TAGGER = """
import torch
from torch import nn

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids, attention_mask=None):
        return self.head(self.embedding(ids))

def network():
    torch.manual_seed(0)
    return Tagger()

def sentences():
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(9, (6, 5), generator=generator), torch.randint(3, (6, 5), generator=generator)
    mask = torch.ones(6, 5, dtype=torch.long)
    mask[:, 3:] = 0
    labels[0, 0] = 255
    return [{"ids": ids, "attention_mask": mask, "labels": labels}]
"""


def test_positions_that_are_masked_are_not_measured(tokens: ModuleType) -> None:
    model, data = tokens.network(), tokens.sentences()
    posterior = errbar.fit(model, data, last_layers=1, outputs="positions", ignore_index=255)
    posterior.save("fitted.safetensors")
    of_model = ["--model", "tokens_of_test:network"]
    facts = said("evaluate", "fitted.safetensors", "tokens_of_test:sentences", *of_model, "--samples", "50")
    assert facts["positions"] == 6 * 3 - 1
    batch = data[0]
    truth = batch["labels"].masked_fill(batch["attention_mask"] == 0, 255)
    expected = errbar.metrics.nll(posterior.predict(batch, 50), truth)
    assert facts["scores"]["posterior"]["nll"] == pytest.approx(expected, rel=1e-6)


def test_the_label_to_ignore_is_an_option_of_fit(tokens: ModuleType) -> None:
    model, data = tokens.network(), tokens.sentences()
    fit = ["fit", "tokens_of_test:network", "tokens_of_test:sentences", "--last-layers", "1"]
    positions = [*fit, "--outputs", "positions"]
    assert "give --ignore-index to errbar fit" in refused(*positions, "-o", "a.safetensors")
    told(*positions, "--ignore-index", "255", "-o", "fitted.safetensors")
    expected = errbar.fit(model, data, last_layers=1, outputs="positions", ignore_index=255)
    torch.testing.assert_close(errbar.load("fitted.safetensors", model).covariance(), expected.covariance())
    description = errbar.info("fitted.safetensors")
    assert isinstance(description, errbar.FileDescription)
    assert description.ignore_index == 255
    assert "ignore index      255" in told("info", "fitted.safetensors")
    unlabelled = [{name: part for name, part in batch.items() if name != "labels"} for batch in data]
    errbar.fit(model, unlabelled, last_layers=1, outputs="positions").save("usual.safetensors")
    assert "ignore index" not in told("info", "usual.safetensors")
    reason = refused(*fit, "--ignore-index", "-1", "-o", "b.safetensors")
    assert "--ignore-index is -1 with --outputs classes; expected it with --outputs positions" in reason
    assert not list(Path().glob("[ab].safetensors"))


@pytest.mark.parametrize("options", [{"last_layers": 1}, {"parameters": "all", "fisher": "sampled"}])
def test_positions_are_updated_and_forgotten_as_in_python(options: dict[str, object], tokens: ModuleType) -> None:
    model, data = tokens.network(), tokens.sentences()
    before = errbar.fit(model, data, outputs="positions", ignore_index=255, **options)  # type: ignore[arg-type]
    before.save("before.safetensors")
    words = ["tokens_of_test:sentences", "--model", "tokens_of_test:network"]
    facts = said("update", "before.safetensors", *words, "-o", "after.safetensors")
    after = before.update(data)
    torch.testing.assert_close(errbar.load("after.safetensors", model).covariance(), after.covariance())
    counted = (data[0]["attention_mask"] == 1) & (data[0]["labels"] != 255)
    for name, posterior in {"before": before, "after": after}.items():
        expected = float(posterior.logits(data[0]).contrast_variance[counted].mean())
        assert facts[f"mean_variance_{name}"] == pytest.approx(expected)
    assert facts["mean_variance_change"] < 0
    facts = said("forget", "after.safetensors", *words, "-o", "forgotten.safetensors")
    torch.testing.assert_close(errbar.load("forgotten.safetensors", model).covariance(), before.covariance())
    assert facts["mean_variance_change"] > 0
    said("update", "before.safetensors", *words, "--discount", "0.5", "-o", "discounted.safetensors")
    discounted = errbar.condition(before.information * 0.5, before.prior).update(data)
    torch.testing.assert_close(errbar.load("discounted.safetensors", model).covariance(), discounted.covariance())


SIZES = """
import torch
from torch import nn

class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.features(x)))

def network():
    torch.manual_seed(0)
    return Convolution()

def pictures(sizes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 1, h, w, generator=generator) for n, h, w in sizes]

def different():
    return pictures([(3, 4, 4), (1, 2, 6), (2, 2, 6), (1, 5, 1)])

def alike():
    return pictures([(3, 4, 5), (1, 4, 5)])
"""


def test_inputs_of_different_sizes_are_padded_in_an_npz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("sizes_of_test.py").write_text(SIZES, encoding="utf-8")
    pictures = importlib.import_module("sizes_of_test")
    posterior = errbar.fit(pictures.network(), pictures.different(), last_layers=1, outputs="positions")
    posterior.save("fitted.safetensors", classes=["a", "b", "c"])
    asked = ["--model", "sizes_of_test:network", "--samples", "20", "--covariance", "--risk", "0.5"]
    told("predict", "fitted.safetensors", "sizes_of_test:different", *asked, "-o", "different.npz")
    with np.load("different.npz") as found:
        assert found["positions"].tolist() == [[4, 4]] * 3 + [[2, 6]] * 3 + [[5, 1]]
        assert found["pmf"].shape == found["risk_0.5"].shape == (7, 5, 6, 3)
        assert found["covariance"].shape == (7, 5, 6, 3, 3)
        start = 0
        for batch in pictures.different():
            prediction = posterior.predict(batch, 20)
            rows, (height, width) = slice(start, start + len(batch)), batch.shape[2:]
            for name in ("label", "confidence", "entropy", "mutual_information", "pmf", "std", "covariance"):
                column, expected = found[name][rows], getattr(prediction, name).numpy()
                assert column.dtype == expected.dtype
                np.testing.assert_array_equal(column[:, :height, :width], expected)
                padding = np.concatenate([column[:, height:].ravel(), column[:, :height, width:].ravel()])
                assert (padding == -1).all() if name == "label" else np.isnan(padding).all()
            start += len(batch)
    told("predict", "fitted.safetensors", "sizes_of_test:alike", *asked, "-o", "alike.npz")
    with np.load("alike.npz") as found:
        assert "positions" not in found
        assert found["pmf"].shape == (4, 4, 5, 3)


def write(path: Path, batches: list[dict[str, torch.Tensor]], *, of_positions: bool) -> None:
    with writing(path, None, of_positions=of_positions) as writer:
        for columns in batches:
            writer.add(columns)


@pytest.mark.parametrize(
    "later",
    [
        {"label": torch.zeros(1, 4, 2, dtype=torch.long), "pmf": torch.zeros(1, 4, 2, 3)},
        {"label": torch.zeros(1, 4, dtype=torch.long), "pmf": torch.zeros(1, 4, 2)},
        {"label": torch.zeros(1, 4, dtype=torch.long), "pmf": torch.zeros(1, 4, 3).double()},
    ],
    ids=["dimensions", "classes", "dtype"],
)
def test_what_cannot_be_padded_is_refused_and_leaves_no_file(tmp_path: Path, later: dict[str, torch.Tensor]) -> None:
    first = {"label": torch.zeros(2, 5, dtype=torch.long), "pmf": torch.zeros(2, 5, 3)}
    with pytest.raises(DataError, match="expected only other numbers of positions"):
        write(tmp_path / "a.npz", [first, later], of_positions=True)
    assert not list(tmp_path.iterdir())


def test_columns_without_positions_have_one_shape_in_an_npz(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected the same for all"):
        write(tmp_path / "a.npz", [{"label": torch.zeros(2, 5)}, {"label": torch.zeros(2, 4)}], of_positions=False)
    assert not list(tmp_path.iterdir())
