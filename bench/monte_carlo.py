"""The error of the PMF against K for each kind of draws, and that of the closed form, at equal cost."""

from __future__ import annotations

from typing import Any

import torch
from common import save, show

import errbar


def gaussian(scale: float, classes: int = 10, count: int = 256) -> errbar.LogitGaussian:
    generator = torch.Generator().manual_seed(3)
    root = torch.randn(count, classes, classes, generator=generator, dtype=torch.float64) * (scale / classes**0.5)
    mean = 3 * torch.randn(count, classes, generator=generator, dtype=torch.float64)
    return errbar.LogitGaussian(mean, root @ root.mT)


def main() -> None:
    rows: list[dict[str, Any]] = []
    for scale in (0.3, 1.0, 3.0):
        logits = gaussian(scale)
        reference = logits.predict(2**18, seed=1234, draws="sobol").pmf

        def error(pmf: torch.Tensor, reference: torch.Tensor = reference) -> float:
            return float((pmf - reference).square().mean().sqrt())

        for samples in (100, 1000, 10_000):
            row: dict[str, Any] = {"logit std": scale, "K": samples}
            for draws in ("random", "antithetic", "sobol"):
                errors = [error(logits.predict(samples, seed=seed, draws=draws).pmf) for seed in range(10)]
                row[draws] = sum(errors) / len(errors)
            row["mean field"] = error(logits.mean_field_pmf())
            row["softmax of the mean"] = error(torch.softmax(logits.mean, 1))
            rows.append(row)
    show("Root mean square error of the PMF (10 classes, 256 inputs, mean of 10 seeds)", rows)
    save("monte_carlo", rows)


if __name__ == "__main__":
    main()
