"""One GPU: fit of 60 000 samples at the paper's size on given features, in float64 and with float32 products."""

from __future__ import annotations

import torch
from common import alternate, features, head, in_batches, save, show

import errbar


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench/gpu.py needs a CUDA device.")
    rows = []
    x, y = features(60_000, 100, 10)
    x, y = x.cuda(), y.cuda()
    model = head([100, 40, 10]).cuda()
    for precision in ("float64", None):
        for batch in (512, 4096, 60_000):
            batches = in_batches(x, y, batch)

            def fit(batches: list[object] = batches, precision: str | None = precision) -> errbar.Posterior:
                return errbar.fit(model, batches, last_layers=2, prior=errbar.Prior(6.0), precision=precision)

            posterior = fit()
            posterior.predict(x[:10_000])
            seconds = alternate(
                {
                    "fit": fit,
                    "predict": lambda posterior=posterior: posterior.predict(x[:10_000]).pmf,
                    "one": lambda posterior=posterior: posterior.predict(x[:1]).pmf,
                },
                5,
            )
            rows.append(
                {
                    "precision": precision or "float32 products",
                    "batch": batch,
                    "fit of 60 000, s": seconds["fit"]["median"],
                    "fit, least and most": [seconds["fit"]["least"], seconds["fit"]["most"]],
                    "predict, µs per input": seconds["predict"]["median"] / 10_000 * 1e6,
                    "predict one, µs": seconds["one"]["median"] * 1e6,
                }
            )
    show("One GPU, n = 4450, M = 10, K = 1000; the fit includes the factorisation", rows)
    save("gpu", rows)


if __name__ == "__main__":
    main()
