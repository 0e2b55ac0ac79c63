"""How time grows with N, n, M, batch size, threads and dtype; and the literal recursion of the paper."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from common import alternate, features, head, in_batches, save, show

import errbar


def _measured(widths: list[int], count: int, **options: Any) -> dict[str, float]:
    batch = options.pop("batch", 512)
    model = head(widths)
    x, y = features(count, widths[0], widths[-1])
    batches = in_batches(x, y, batch)
    last = len(widths) - 1
    fisher = options.get("fisher", "ggn")
    precision = options.get("precision")

    def collect() -> errbar.Information:
        return errbar.collect(model, batches, last_layers=last, fisher=fisher, precision=precision)

    start = time.perf_counter()
    information = collect()
    collected = time.perf_counter()
    posterior = errbar.condition(information, errbar.Prior(6.0))
    conditioned = time.perf_counter()
    inputs = x[:512]
    posterior.predict(inputs)
    # Above this many parameters a factorisation takes half a minute, and is timed once.
    if information.n_parameters > 15_000:
        seconds = {"collect": {"median": collected - start}, "condition": {"median": conditioned - collected}}
        seconds |= alternate({"predict": lambda: posterior.predict(inputs).pmf}, 2)
    else:
        seconds = alternate(
            {
                "collect": collect,
                "condition": lambda: errbar.condition(information, errbar.Prior(6.0)),
                "predict": lambda: posterior.predict(inputs).pmf,
            },
            5 if information.n_parameters < 6000 else 2,
        )
    return {
        "N": count,
        "n": information.n_parameters,
        "M": widths[-1],
        "batch": batch,
        "threads": torch.get_num_threads(),
        "dtype": precision or "float32",
        "collect, µs per sample": seconds["collect"]["median"] / count * 1e6,
        "condition, s": seconds["condition"]["median"],
        "predict, µs per input": seconds["predict"]["median"] / len(inputs) * 1e6,
    }


def recursion(widths: list[int], count: int) -> float:
    """Seconds per sample of eq:recUpdate_all as written, one sample at a time, in float64."""
    model = head(widths).double()
    x, y = features(count, widths[0], widths[-1])
    x = x.double()
    posterior = errbar.fit(model, in_batches(x[:8], y[:8], 8), parameters="all", prior=errbar.Prior(6.0))
    jacobians = torch.func.vmap(
        torch.func.jacrev(lambda p, v: torch.func.functional_call(model, p, (v[None],))[0]), in_dims=(None, 0)
    )({name: value.detach() for name, value in model.named_parameters()}, x)
    J = torch.cat([part.flatten(2) for part in jacobians.values()], 2)
    f = torch.softmax(model(x).detach(), 1)
    U = (f * (1 - f)).sqrt()[:, :, None] * J
    start = posterior.covariance()
    identity = torch.eye(widths[-1], dtype=torch.float64)

    def run() -> torch.Tensor:
        P = start.clone()
        for rows in U:
            PU = P @ rows.T
            P -= PU @ torch.linalg.solve(identity + rows @ PU, PU.T)
        return P

    return alternate({"recursion": run}, 5)["recursion"]["median"] / count


def main() -> None:
    measure_recursion()
    threads = torch.get_num_threads()
    paper = [100, 40, 10]
    runs: list[tuple[int, list[int], int, dict[str, Any]]] = [
        *((threads, paper, count, {}) for count in (1000, 4000, 16000, 60000)),
        *((threads, [width, 40, 10], 4096, {}) for width in (4, 30)),
        *((threads, [60, classes], 4096, {}) for classes in (2, 10, 50)),
        (threads, [128, 1000], 4096, {"fisher": "eta"}),
        *((threads, paper, 8192, {"batch": batch}) for batch in (16, 64, 4096)),
        (threads, paper, 8192, {"precision": "float64"}),
        *((1, paper, 8192, {"precision": precision}) for precision in (None, "float64")),
        (threads, [60, 150], 4096, {}),
        (threads, [240, 40, 10], 4096, {}),
        (threads, [480, 40, 10], 1024, {}),
    ]
    rows = []
    for used, widths, count, options in runs:
        torch.set_num_threads(used)
        rows.append(_measured(widths, count, **options))
        torch.set_num_threads(threads)
        save("scaling", rows)  # after each row: the large ones take minutes
    show("Scaling of errbar (exact; the 128→1000 row with fisher='eta')", rows)


def measure_recursion() -> None:
    literal = []
    for widths, count in (
        ([30, 20, 10], 64),
        ([62, 30, 10], 32),
        ([100, 40, 10], 16),
        ([62, 30, 5], 32),
        ([62, 30, 20], 32),
    ):
        n = sum((a + 1) * b for a, b in pairwise(widths))
        seconds = recursion(widths, count)
        operations = 4 * widths[-1] * n**2
        literal.append({"n": n, "M": widths[-1], "µs per sample": seconds * 1e6, "GFLOP/s": operations / seconds / 1e9})
    show("The paper's recursion, sample by sample, float64: 4 M n² operations per sample", literal)
    save("recursion", literal)


if __name__ == "__main__":
    main()
