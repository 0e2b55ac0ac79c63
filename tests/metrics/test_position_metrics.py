"""Scores of tokens and pixels: position by position, without those that have no label."""

from __future__ import annotations

import pytest
import torch

from errbar import metrics
from errbar.errors import LabelError


@pytest.mark.parametrize("score", [metrics.accuracy, metrics.nll, metrics.brier, metrics.ece, metrics.log_likelihood])
def test_positions_without_a_label_do_not_count(score: object) -> None:
    generator = torch.Generator().manual_seed(0)
    pmf = torch.softmax(torch.randn(3, 4, 5, 6, generator=generator), -1)
    labels = torch.randint(0, 6, (3, 4, 5), generator=generator)
    labels[0, 1], labels[2, :, 3] = -100, -100
    named = labels >= 0
    assert score(pmf, labels) == pytest.approx(score(pmf[named], labels[named]), abs=1e-12)  # type: ignore[operator]


def test_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(LabelError, match=r"Labels have shape \(3, 5\); expected \(3, 4\)"):
        metrics.nll(torch.full((3, 4, 2), 0.5), torch.zeros(3, 5, dtype=torch.long))
