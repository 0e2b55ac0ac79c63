"""The report of several labels and of positions: decisions in place of inputs, with intervals by resampling inputs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import errbar
from errbar import metrics, report
from errbar.report import decided
from errbar.report.resampling import means, shares

NAMES = ("cat", "<dog>", "fish & chips")


def labelled(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    y = (x[:, :3] + torch.randn(count, 3, generator=generator) > 0.3).long()
    y[torch.rand(count, 3, generator=generator) < 0.2] = -1
    return x, y


def tagger() -> errbar.Posterior:
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.copy_(3 * torch.eye(3, 4))
        model.bias.fill_(-0.5)
    posterior = errbar.fit(model, [labelled(60, 0)], last_layers=1, outputs="labels", prior=errbar.Prior(1.0))
    return posterior.with_calibration(temperature=1.7, covariance_scale=0.5)


def test_labels_are_scored_one_by_one() -> None:
    posterior, (x, y) = tagger().with_label_factors(((1.0, 1.0), (1.2, 0.5), (0.9, 2.0))), labelled(300, 1)
    batches = [(x[:170], y[:170]), (x[170:], y[170:])]
    made = report.assess(posterior, batches, classes=NAMES, samples=200, outliers=[5 * torch.randn(40, 4)])
    prediction, given = posterior.predict(x, 200), y >= 0
    assert made.decisions == f"{int(given.sum())} labels of 300 inputs"
    final = made.variants[-1]
    assert final.accuracy.value == pytest.approx(metrics.label_accuracy(prediction, y))
    assert final.nll.value == pytest.approx(metrics.label_nll(prediction, y), rel=1e-5)
    pmf = torch.stack([1 - prediction.pmf[given], prediction.pmf[given]], 1)
    assert final.ece.value == pytest.approx(metrics.ece(pmf, y[given]), rel=1e-4)
    assert made.variants[0].nll.value == pytest.approx(metrics.label_nll(posterior.model(x).detach().sigmoid(), y))
    assert final.nll.low < final.nll.value < final.nll.high
    assert final.brier.value == pytest.approx(metrics.label_brier(prediction, y), rel=1e-5)
    assert math.isnan(final.ece.low)
    assert [row.given for row in made.label_rows] == given.sum(0).tolist()
    assert [row.auroc for row in made.label_rows] == pytest.approx(metrics.label_auroc(prediction, y))
    assert [row.ece for row in made.label_rows] == pytest.approx(metrics.label_ece(prediction, y), rel=1e-4)
    assert made.label_rows[0].std == pytest.approx(float(prediction.std[:, 0][given[:, 0]].mean()), rel=1e-4)
    assert made.outliers is not None
    assert made.outliers.rows[2].inside == pytest.approx(float(prediction.mutual_information.double().mean(1).median()))
    page = report.page(made)
    assert "Label by label" in page
    assert "&lt;dog&gt;" in page
    assert "Inputs to look at" not in page
    assert "T of each label" in page
    assert "T_c of the labels is 0.25 to 1 and T is 1.53 to 2.04" in " ".join(made.verdict.sentences)
    assert "predict_by_parameters" not in page
    assert "which depend on each other" in page
    assert "NaN" not in page
    assert ">nan" not in page


def test_a_sure_mistake_about_a_label_has_a_finite_loss() -> None:
    """σ(g) of these logits is 1 in float32, of the network alone too."""
    posterior, x = tagger().with_calibration(covariance_scale=0.0), 20 * torch.ones(30, 4)
    y = torch.zeros(30, 3, dtype=torch.long)
    made = report.assess(posterior, [(x, y)], classes=NAMES, samples=20)
    logits = posterior.model(x).detach().double()
    for variant, temperature in zip(made.variants, (1.0, 1.0, 1.7), strict=True):
        truth = float(torch.nn.functional.softplus(logits / temperature).mean())
        if variant is not made.variants[1]:
            assert variant.nll.value == pytest.approx(truth, rel=1e-5)
    assert all(math.isfinite(row.nll) for row in made.label_rows)


def test_positions_with_a_label_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(4, 3)
    words = {"input": torch.randn(30, 6, 4, generator=generator)}
    words["attention_mask"] = (torch.arange(6) < torch.randint(1, 7, (30, 1), generator=generator)).long()
    words["labels"] = torch.randint(-1, 3, (30, 6), generator=generator)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = model

        def forward(self, input: Tensor, attention_mask: Tensor) -> Tensor:  # noqa: A002 - a keyword of the batch
            logits: Tensor = self.out(input)
            return logits

    posterior = errbar.fit(Masked(), [words], last_layers=1, outputs="positions", ignore_index=-1)
    made = report.assess(posterior, [words], classes=NAMES, samples=100)
    keep = (words["labels"] >= 0) & (words["attention_mask"] == 1)
    prediction = posterior.predict(words, 100)
    assert made.decisions == f"{int(keep.sum())} positions of 30 inputs"
    assert made.variants[-1].nll.value == pytest.approx(
        metrics.nll(prediction.pmf[keep], words["labels"][keep]), rel=1e-5
    )
    assert sum(row.inputs for row in made.class_rows) == int(keep.sum())
    page = report.page(made)
    assert "Class by class" in page
    assert f"Of {int(keep.sum())} positions of 30 inputs the network is right" in page
    monkeypatch.setattr(decided, "MOST_POSITIONS", 20)
    halves = [{name: value[rows] for name, value in words.items()} for rows in (slice(0, 11), slice(11, 30))]
    some, other = (report.assess(posterior, data, samples=50) for data in ([words], halves[::-1]))
    assert some.decisions.startswith("20 positions")
    assert some.variants[-1].nll.value == pytest.approx(other.variants[-1].nll.value, rel=1e-5)


def test_intervals_know_that_decisions_of_one_input_are_the_same() -> None:
    once = torch.randn(200, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (plain,) = means(once, 0)
    (of_inputs,) = means(once.repeat_interleave(9, 0), 0, torch.arange(200).repeat_interleave(9))
    (blind,) = means(once.repeat_interleave(9, 0), 0)
    assert of_inputs.value == pytest.approx(plain.value)
    assert of_inputs.high - of_inputs.low == pytest.approx(plain.high - plain.low, rel=0.1)
    assert blind.high - blind.low < 0.5 * (plain.high - plain.low)
    values, counts = torch.tensor([[1.0], [0.0], [3.0]]), torch.tensor([[2.0], [1.0], [3.0]])
    assert shares(values, counts, torch.tensor([0, 0, 4]), 0)[0].value == pytest.approx(4 / 6)


def test_data_without_labels_are_refused() -> None:
    posterior, (x, y) = tagger(), labelled(20, 1)
    with pytest.raises(errbar.LabelError, match="All labels of the data are missing"):
        report.assess(posterior, [(x, torch.full_like(y, -1))])
    with pytest.raises(errbar.LabelError, match="Labels are missing"):
        report.assess(posterior, [x])
    with pytest.raises(errbar.DataError, match="The data are empty"):
        report.assess(posterior, [])
    with pytest.raises(errbar.DataError, match="The second set is empty"):
        report.assess(posterior, [(x, y)], outliers=[])
    words = errbar.fit(nn.Linear(4, 3), [torch.randn(3, 5, 4)], last_layers=1, outputs="positions")
    with pytest.raises(errbar.LabelError, match="Labels are missing: expected batches"):
        report.assess(words, [torch.randn(3, 5, 4)])
