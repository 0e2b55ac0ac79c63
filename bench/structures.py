"""`kron` and `diag` of errbar and laplace-torch: the same prior, data and approximation, so the same PMF."""

from __future__ import annotations

import resource
from typing import Any

import peers
import torch
from against_peers import SAMPLES, difference, row
from common import PRIOR, alternate, features, head, in_batches, save, show
from torch import Tensor, nn

import errbar


def without_bias(model: nn.Sequential) -> nn.Sequential:
    """The peer approximates the bias of a layer separately from its weight; without biases both make the same sums."""
    for module in model:
        if isinstance(module, nn.Linear):
            module.bias = None
    return model


def compared(structure: str, widths: list[int], *, subset: str, count: int) -> list[dict[str, Any]]:
    model = without_bias(head(widths))
    x, y = features(count, widths[0], widths[-1])
    last = 1 if subset == "last_layer" else len(widths) - 1
    name = f"{'→'.join(map(str, widths))} {structure}"
    tried = peers.best_fit(model, x, y, subset=subset, structure=structure)
    show(f"{name}: laplace-torch fit, backends and batch sizes tried (512 samples)", tried)
    best = tried[0]
    backend, batches = peers.backends()[best["backend"]], in_batches(x, y, 512)

    def fit_peer() -> Any:
        return peers.fitted(model, x, y, subset=subset, structure=structure, backend=backend, batch=best["batch"])

    def fit_ours() -> errbar.Posterior:
        return errbar.fit(model, batches, last_layers=last, prior=errbar.Prior(PRIOR), structure=structure)

    seconds = alternate({"peer": fit_peer, "errbar": fit_ours})
    unit, note = "microseconds per sample", f"{best['backend']}, batch {best['batch']}, {count} samples"
    rows = [row(f"{name} fit", unit, seconds, count, "peer", "errbar", note)]
    peer, posterior = fit_peer(), fit_ours()
    size = peers.best_predict_batch(peer, x, SAMPLES)
    few, many = x[: max(size, 8)], x[:1024]
    runs = {
        "peer": lambda: peers.predict(peer, few, size, SAMPLES),
        "errbar": lambda: posterior.predict(many, samples=SAMPLES).pmf,
    }
    seconds = alternate(runs)
    for key, inputs in (("peer", few), ("errbar", many)):
        for field in ("median", "least", "most"):
            seconds[key][field] /= len(inputs)
    ours, (mean, covariance) = posterior.logits(few), peer._glm_predictive_distribution(few)
    gap = difference(with_same_draws(ours.mean, ours.covariance), with_same_draws(mean.detach(), covariance.detach()))
    note = f"peer at batch {size}; PMFs differ by {gap:.1e} with the same draws"
    rows.append(row(f"{name} predict", "microseconds per input", seconds, 1, "peer", "errbar", note))
    rows[-1]["difference of PMFs"] = gap
    return rows


def with_same_draws(mean: Tensor, covariance: Tensor) -> Tensor:
    """The PMF of a Gaussian over the logits from the same draws, in the same way, so that only the Gaussian differs."""
    return errbar.LogitGaussian(mean, covariance).predict(SAMPLES).pmf


def many_classes(inputs: int, classes: int, **options: Any) -> list[dict[str, Any]]:
    """A wide head with many classes: the whole fit, and PMF, standard deviations and risk of 16 inputs."""
    model = head([inputs, classes])
    x, y = features(4096, inputs, classes)
    batches, some = in_batches(x, y, 512), x[:16]

    def fit() -> errbar.Posterior:
        return errbar.fit(model, batches, last_layers=1, prior=errbar.Prior(PRIOR), **options)

    def predict() -> Tensor:
        prediction = posterior.predict(some, samples=SAMPLES)
        return prediction.std + prediction.risk(0.05)

    posterior = fit()
    predict()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    predict()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    seconds = alternate({"fit": fit, "predict": predict}, 3)
    return [
        {
            "case": f"{inputs}→{classes} {next(iter(options.values()))}",
            "fit of 4096, s": seconds["fit"]["median"],
            "PMF, std and risk, ms per input": seconds["predict"]["median"] / len(some) * 1e3,
            "note": f"peak memory grew by {grown:.0f} MiB at the second prediction",
        }
    ]


def main() -> None:
    torch.manual_seed(0)
    rows = []
    for structure in ("kron", "diag"):
        rows += compared(structure, [100, 40, 10], subset="all", count=8192)
        rows += compared(structure, [512, 10], subset="last_layer", count=8192)
    show("Structures against laplace-torch", rows)
    many = many_classes(2048, 1000, structure="kron") + many_classes(512, 1000, fisher="eta")
    show("Many classes", many)
    save("structures", rows, many=many, samples=SAMPLES, prior=PRIOR)


if __name__ == "__main__":
    main()
