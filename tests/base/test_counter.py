"""Random numbers that are functions of a counter."""

from __future__ import annotations

import torch
from scipy import stats

from errbar._base.counter import normal_row

CPU = torch.device("cpu")


def test_rows_are_standard_normal_and_independent() -> None:
    rows = torch.stack([normal_row(3, row, 20_000, CPU) for row in range(4)])
    for row in rows:
        assert stats.kstest(row.numpy(), "norm").pvalue > 1e-3
    between = torch.corrcoef(torch.cat([rows, rows.square()]))
    assert float((between - torch.eye(8, dtype=torch.float64)).abs().max()) < 0.035
    # The two halves of a row come from the same radius and angle.
    halves = torch.corrcoef(torch.stack([rows[0, :10_000], rows[0, 10_000:]]).square())
    assert abs(float(halves[0, 1])) < 0.05


def test_rows_depend_on_the_seed_and_their_number_alone() -> None:
    first = normal_row(0, 0, 7, CPU)
    assert torch.equal(normal_row(0, 0, 7, CPU), first)
    assert len(first) == 7
    others = [normal_row(1, 0, 7, CPU), normal_row(0, 1, 7, CPU)]
    assert all(not torch.isclose(other, first).any() for other in others)
    assert bool(torch.isfinite(normal_row(0, 2, 1, CPU)).all())
