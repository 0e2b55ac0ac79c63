"""Metrics of several labels against loops, with missing labels left out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from errbar import metrics
from errbar.errors import DataError, LabelError


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    f = torch.rand(60, 4, generator=generator, dtype=torch.float64).mul(20).round() / 20  # with ties
    y = (torch.rand(60, 4, generator=generator, dtype=torch.float64) < f).long()
    y[torch.rand(60, 4, generator=generator) < 0.3] = -1
    y[:, 3].clamp_(max=0)  # never true
    return f, y


def test_means_are_over_the_labels_that_are_given() -> None:
    f, y = example()
    f = f.clamp(0.01, 0.99)
    pairs = [(float(f[n, m]), int(y[n, m])) for n in range(60) for m in range(4) if y[n, m] >= 0]
    losses = [-math.log(p if truth else 1 - p) for p, truth in pairs]
    assert metrics.label_nll(f, y) == pytest.approx(sum(losses) / len(pairs), rel=1e-12)
    assert metrics.label_brier(f, y) == pytest.approx(sum((t - p) ** 2 for p, t in pairs) / len(pairs), rel=1e-12)
    assert metrics.label_accuracy(f, y) == pytest.approx(sum((p > 0.5) == t for p, t in pairs) / len(pairs))


def test_ece_of_each_label_is_that_of_its_bins() -> None:
    f, y = example()
    for label, value in enumerate(metrics.label_ece(f, y, bins=5)):
        given = [(float(f[n, label]), int(y[n, label])) for n in range(60) if y[n, label] >= 0]
        total = 0.0
        for j in range(5):
            inside = [(p, t) for p, t in given if j / 5 <= p < (j + 1) / 5 or (j == 4 and p == 1)]
            total += abs(sum(t - p for p, t in inside))
        assert value == pytest.approx(total / len(given), rel=1e-9)


def test_ranking_of_each_label() -> None:
    f, y = example()
    auroc, precision = metrics.label_auroc(f, y), metrics.label_average_precision(f, y)
    for label in range(3):
        given = [(float(f[n, label]), int(y[n, label])) for n in range(60) if y[n, label] >= 0]
        positives, negatives = [p for p, t in given if t], [p for p, t in given if not t]
        wins = sum((p > q) + (p == q) / 2 for p in positives for q in negatives)
        assert auroc[label] == pytest.approx(wins / len(positives) / len(negatives), rel=1e-12)
        total, recall = 0.0, 0.0
        for threshold in sorted({p for p, _ in given}, reverse=True):
            hits = sum(p >= threshold for p in positives)
            there = hits / len(positives)
            total += (there - recall) * hits / sum(p >= threshold for p, _ in given)
            recall = there
        assert precision[label] == pytest.approx(total, rel=1e-12)
    assert math.isnan(auroc[3])
    assert math.isnan(precision[3])
    assert metrics.label_map(f, y) == pytest.approx(sum(precision[:3]) / 3, rel=1e-12)


def test_mistakes() -> None:
    f, y = example()
    with pytest.raises(LabelError, match=r"All labels are missing"):
        metrics.label_nll(f, torch.full_like(y, -1))
    with pytest.raises(LabelError, match="No label is ever true"):
        metrics.label_map(f, y.clamp(max=0))
    with pytest.raises(LabelError, match=r"shape \(60,\); expected \(60, 4\) for outputs='labels'"):
        metrics.label_ece(f, y[:, 0])
    with pytest.raises(DataError, match="are not all from 0 to 1"):
        metrics.label_brier(f + 1, y)
    with pytest.raises(DataError, match="that is not a matrix of numbers"):
        metrics.label_auroc("f", y)


def test_the_probability_that_a_label_is_false_may_have_digits_of_its_own() -> None:
    f, truth = torch.tensor([[1.0, 0.25]]), torch.tensor([[0, 0]])
    assert metrics.label_nll(f, truth) == float("inf")
    own = metrics.label_nll(f, truth, complement=torch.tensor([[1e-12, 0.75]]))
    assert own == pytest.approx(-(math.log(1e-12) + math.log(0.75)) / 2)
    with pytest.raises(DataError, match=r"complement has shape \(1, 1\), or is not all from 0 to 1; expected \(1, 2\)"):
        metrics.label_nll(f, truth, complement=torch.tensor([[0.5]]))
    with pytest.raises(DataError, match="or is not all from 0 to 1"):
        metrics.label_nll(f, truth, complement=torch.tensor([[0.5, math.nan]]))
