"""Fit and prediction with errbar and laplace-torch: same model, data and number of threads; results compared."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from typing import Any

import peers
import torch
from common import PRIOR, alternate, features, head, in_batches, save, show
from first_prediction import in_a_fresh_process
from torch import Tensor, nn

import errbar

SAMPLES = 1000


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())


def bare_product(rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
    """FLOP/s of a plain matrix product of one shape, the best of several."""
    left, right = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype)
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        left @ right.T
        best = min(best, time.perf_counter() - start)
    return 2 * rows * inner * columns / best


def fit_flops(widths: list[int]) -> float:
    """Useful FLOP per sample of the packed fit: 2 d(d+1)/2 p(p+1)/2 within layers, 2 d d' p p' between them."""
    layers = [(outputs, inputs + 1) for inputs, outputs in pairwise(widths)]
    total = 0.0
    for index, (d, p) in enumerate(layers):
        total += 2 * (d * (d + 1) / 2) * (p * (p + 1) / 2)
        total += sum(2 * d * e * p * q for e, q in layers[:index])
    return total


def exact(name: str, widths: list[int], *, subset: str, count: int, repetitions: int) -> list[dict[str, Any]]:
    """An exact posterior of the given layers: fit, predict many, predict one."""
    model = head(widths)
    x, y = features(count, widths[0], widths[-1])
    batches = in_batches(x, y, 512)
    last = 1 if subset == "last_layer" else len(widths) - 1
    candidates = peers.best_fit(model, x, y, subset=subset, structure="full")
    show(f"{name}: laplace-torch fit, backends and batch sizes tried (512 samples)", candidates)
    best = candidates[0]
    backend = peers.backends()[best["backend"]]

    def fit_peer() -> Any:
        return peers.fitted(model, x, y, subset=subset, structure="full", backend=backend, batch=best["batch"])

    def collect(precision: str | None = None) -> errbar.Information:
        return errbar.collect(model, batches, last_layers=last, precision=precision)

    seconds = alternate(
        {"peer": fit_peer, "errbar": collect, "errbar float64": lambda: collect("float64")}, repetitions
    )
    note = f"{best['backend']}, batch {best['batch']}; the pass over {count} samples"
    unit = "microseconds per sample"
    rows = [row(f"{name} fit", unit, seconds, count, "peer", ours, note) for ours in ("errbar", "errbar float64")]
    peer, information = fit_peer(), collect("float64")
    factorise = alternate(
        {
            "peer": lambda: peers.factorised(peer),
            "errbar": lambda: errbar.condition(information, errbar.Prior(PRIOR)),
        }
    )
    rows.append(row(f"{name} factorisation", "microseconds in all", factorise, 1, "peer", "errbar", "once a fit"))
    posterior = errbar.condition(collect(), errbar.Prior(PRIOR))
    accurate = errbar.condition(information, errbar.Prior(PRIOR))
    theirs = peer.posterior_covariance.double()
    scale = float(theirs.abs().max())
    for label, ours in (("float32", posterior), ("float64", accurate)):
        relative = difference(ours.covariance(), theirs) / scale
        rows.append({"case": f"{name} covariance", "unit": "largest difference", "errbar": relative, "note": label})
    d, p = (widths[-1], widths[-2] + 1) if last == 1 else (widths[1], widths[0] + 1)
    for label, dtype in (("errbar", torch.float32), ("errbar float64", torch.float64)):
        used = fit_flops(widths[-last - 1 :]) * count / _collect_seconds(model, batches, last, dtype)
        bare = bare_product(p * (p + 1) // 2, 4096, d * (d + 1) // 2, dtype)
        rows.append(
            {
                "case": f"{name} fit",
                "unit": "GFLOP/s, useful",
                "errbar": used / 1e9,
                "bare product": bare / 1e9,
                "efficiency": used / bare,
                "note": f"{label}, the pass over the data",
            }
        )
    return rows


def _collect_seconds(model: nn.Module, batches: list[Any], last: int, dtype: torch.dtype) -> float:
    """Seconds of a pass without its fixed part: all batches twice, less all batches once."""
    precision = "float64" if dtype == torch.float64 else None
    runs = {
        "once": lambda: errbar.collect(model, batches, last_layers=last, precision=precision),
        "twice": lambda: errbar.collect(model, [*batches, *batches], last_layers=last, precision=precision),
    }
    seconds = alternate(runs, 5)
    return seconds["twice"]["median"] - seconds["once"]["median"]


def predictions(name: str, widths: list[int], *, subset: str) -> list[dict[str, Any]]:
    """PMFs from the same exact posterior, for many inputs and for one, whatever it was fitted on."""
    model = head(widths)
    x, y = features(1024, widths[0], widths[-1])
    last = 1 if subset == "last_layer" else len(widths) - 1
    backend = peers.backends()["backpack"]
    peer = peers.fitted(model, x, y, subset=subset, structure="full", backend=backend, batch=512)
    posterior = errbar.fit(model, in_batches(x, y, 512), last_layers=last, prior=errbar.Prior(PRIOR))
    batch = peers.best_predict_batch(peer, x, SAMPLES)
    few, many = x[: max(batch, 8)], x[:1024]
    rows = []
    seconds = alternate(
        {
            "peer": lambda: peers.predict(peer, few, batch, SAMPLES),
            "errbar": lambda: posterior.predict(many, samples=SAMPLES).pmf,
            "errbar with P^f": lambda: posterior.predict(many, samples=SAMPLES).covariance,
        }
    )
    pmf = difference(posterior.predict(few, samples=100_000).pmf, peers.predict(peer, few, batch, 100_000))
    per_input = {key: {**value} for key, value in seconds.items()}
    for key, value in per_input.items():
        size = len(few) if key == "peer" else len(many)
        for field in ("median", "least", "most"):
            value[field] /= size
    agreement = f"peer at batch {batch}; PMFs differ by {pmf:.1e} (K = 100 000)"
    for ours, note in (("errbar", agreement), ("errbar with P^f", "")):
        rows.append(row(f"{name} predict", "microseconds per input", per_input, 1, "peer", ours, note))
    one = x[:1]
    seconds = alternate(
        {
            "peer": lambda: peers.predict(peer, one, 1, SAMPLES),
            "errbar": lambda: posterior.predict(one, samples=SAMPLES),
        }
    )
    rows.append(row(f"{name} predict one", "microseconds per input", seconds, 1, "peer", "errbar", "batch of 1"))
    return rows


def row(
    case: str, unit: str, seconds: dict[str, dict[str, float]], count: int, theirs: str, ours: str, note: str
) -> dict[str, Any]:
    peer, own = seconds[theirs], seconds[ours]
    return {
        "case": case,
        "unit": unit,
        "method": ours,
        "errbar": own["median"] / count * 1e6,
        "errbar spread": [own["least"] / count * 1e6, own["most"] / count * 1e6],
        "laplace-torch": peer["median"] / count * 1e6,
        "laplace-torch spread": [peer["least"] / count * 1e6, peer["most"] / count * 1e6],
        "ratio": peer["median"] / own["median"],
        "note": note,
    }


def against_kron(widths: list[int], count: int) -> list[dict[str, Any]]:
    """Our exact last layer against their Kronecker approximation of it, with as many samples as CIFAR-10."""
    model = head(widths)
    x, y = features(count, widths[0], widths[-1])
    tried = peers.best_fit(model, x, y, subset="last_layer", structure="kron")
    show("512→10: laplace-torch kron fit, backends and batch sizes tried (512 samples)", tried)
    rows = []
    for best in (tried[0], next(row for row in tried if row["backend"] == "curvlinops")):
        rows += _one_kron(model, x, y, best)
    return rows


def _one_kron(model: nn.Module, x: Tensor, y: Tensor, best: dict[str, Any]) -> list[dict[str, Any]]:
    count, batches = len(x), in_batches(x, y, 512)
    backend = peers.backends()[best["backend"]]

    def fit_peer() -> Any:
        return peers.fitted(model, x, y, subset="last_layer", structure="kron", backend=backend, batch=best["batch"])

    def fit_ours() -> errbar.Posterior:
        return errbar.fit(model, batches, last_layers=1, prior=errbar.Prior(PRIOR))

    seconds = alternate({"peer": fit_peer, "errbar": fit_ours})
    note = f"theirs approximate; {best['backend']}, batch {best['batch']}; both with the factorisation"
    rows = [row("512→10 exact against kron, fit", "microseconds per sample", seconds, count, "peer", "errbar", note)]
    peer, posterior = fit_peer(), fit_ours()
    batch = peers.best_predict_batch(peer, x, SAMPLES)
    few, many = x[: max(batch, 8)], x[:1024]
    seconds = alternate(
        {
            "peer": lambda: peers.predict(peer, few, batch, SAMPLES),
            "errbar": lambda: posterior.predict(many, samples=SAMPLES).pmf,
        }
    )
    for key, size in (("peer", len(few)), ("errbar", len(many))):
        for field in ("median", "least", "most"):
            seconds[key][field] /= size
    case = "512→10 exact against kron, predict"
    rows.append(row(case, "microseconds per input", seconds, 1, "peer", "errbar", f"theirs approximate, batch {batch}"))
    return rows


def many_classes(inputs: int, classes: int, *, with_peer: bool) -> list[dict[str, Any]]:
    """One input: PMF and standard deviations of each class; theirs with the diagonal approximation."""
    model = head([inputs, classes])
    x, y = features(2048, inputs, classes)
    posterior = errbar.fit(model, in_batches(x, y, 512), last_layers=1, prior=errbar.Prior(PRIOR), fisher="eta")
    one = x[:1]

    def ours() -> Tensor:
        return posterior.predict(one, samples=SAMPLES).std

    memory = in_a_fresh_process(inputs, classes)
    runs: dict[str, Any] = {"errbar": ours}
    if with_peer:
        backend = peers.backends()["curvlinops"]
        peer = peers.fitted(model, x[:4], y[:4], subset="last_layer", structure="diag", backend=backend, batch=1)
        runs["peer"] = lambda: peers.predict(peer, one, 1, SAMPLES)
    seconds = alternate(runs)
    row = {
        "case": f"{inputs}→{classes} one input, PMF and std",
        "unit": "microseconds per input",
        "method": "eta, exact",
        "errbar": seconds["errbar"]["median"] * 1e6,
        "errbar spread": [seconds["errbar"]["least"] * 1e6, seconds["errbar"]["most"] * 1e6],
        "note": f"the first prediction takes {memory['first prediction, MiB']:.0f} MiB above the posterior's "
        f"{memory['posterior, MiB']:.0f}",
        **memory,
    }
    if with_peer:
        row["laplace-torch"] = seconds["peer"]["median"] * 1e6
        row["laplace-torch spread"] = [seconds["peer"]["least"] * 1e6, seconds["peer"]["most"] * 1e6]
        row["ratio"] = seconds["peer"]["median"] / seconds["errbar"]["median"]
        row["note"] += "; theirs diagonal, PMF only"
    return [row]


PARTS = {
    "many-classes-3100": lambda: many_classes(128, 3100, with_peer=False),
    "many-classes-1000": lambda: many_classes(128, 1000, with_peer=True),
    "paper-predict": lambda: predictions("paper 100→40→10", [100, 40, 10], subset="all"),
    "last-layer-predict": lambda: predictions("last layer 512→10", [512, 10], subset="last_layer"),
    "last-layer-kron": lambda: against_kron([512, 10], count=50_000),
    "last-layer-fit": lambda: exact("last layer 512→10", [512, 10], subset="last_layer", count=16384, repetitions=5),
    "paper-fit": lambda: exact("paper 100→40→10", [100, 40, 10], subset="all", count=16384, repetitions=5),
}


def main() -> None:
    """All parts, or those named on the command line; one result file each."""
    for name in sys.argv[1:] or PARTS:
        rows = PARTS[name]()
        show(f"Against laplace-torch: {name}", rows)
        save(name, rows, samples=SAMPLES, prior=PRIOR)


if __name__ == "__main__":
    main()
