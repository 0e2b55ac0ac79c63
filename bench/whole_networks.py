"""Whole networks with drawn labels and drawn parameters, against two peers, in the same run.

    fit       `kron`, fisher="sampled", one draw, per sample, against the KFAC of curvlinops with one Monte Carlo
              sample and the *expand* convention, which is errbar's. Both are sums of Kronecker factors, without a
              factorisation; what a call takes apart from its samples cancels. curvlinops leaves out the norm layers,
              which errbar takes in.
    predict   100 draws of all parameters for a batch: errbar's linearised logits, against the sampling of whole
              networks of laplace-torch (`pred_type="nn"`), a forward pass for each draw, both with `diag`.

ResNet-20 and a plain convolutional network without norm layers, random pictures, on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import PRIOR, alternate, save, show
from peers import fitted
from torch import Tensor, nn

import errbar
from errbar.experiments.resnet import cifar_resnet

DRAWS = 100
BATCH = 64
# Batches of the shorter of two fits, and inputs of a prediction.
FEW, INPUTS = 2, 16


def convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for channels, width in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-20": lambda: cifar_resnet(20),
    "convolutional": convolutional,
}


def forward(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(x)
    return logits


def of_curvlinops(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Any:
    from curvlinops import KFACLinearOperator

    known = (nn.Linear, nn.Conv2d)
    parameters = [p for module in model.modules() if isinstance(module, known) for p in module.parameters()]
    operator = KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(reduction="sum"),
        parameters,
        data,
        fisher_type="mc",
        mc_samples=1,
        kfac_approx="expand",
        separate_weight_and_bias=False,
        # It would pass over the data for each of these.
        check_deterministic=False,
        num_data=sum(len(x) for x, _ in data),
        num_per_example_loss_terms=1,
    )
    operator.compute_kronecker_factors()
    return operator


def fits(name: str, model: nn.Module, data: list[tuple[Tensor, Tensor]], repetitions: int) -> dict[str, Any]:
    theirs = copy.deepcopy(model)

    def ours(batches: list[tuple[Tensor, Tensor]]) -> errbar.Information:
        return errbar.collect(model, batches, parameters="all", structure="kron", fisher="sampled")

    found = alternate(
        {
            "forward": lambda: forward(model, data[0][0]),
            "short": lambda: ours(data[:FEW]),
            "long": lambda: ours(data),
            "short of curvlinops": lambda: of_curvlinops(theirs, data[:FEW]),
            "long of curvlinops": lambda: of_curvlinops(theirs, data),
        },
        repetitions,
    )
    seconds = {key: times["median"] for key, times in found.items()}
    samples = sum(len(x) for x, _ in data[FEW:])
    own = (seconds["long"] - seconds["short"]) / samples
    peer = (seconds["long of curvlinops"] - seconds["short of curvlinops"]) / samples
    return {
        "network": name,
        "n": sum(p.numel() for p in model.parameters()),
        "forward, ms per sample": 1e3 * seconds["forward"] / BATCH,
        "fit, errbar, ms": 1e3 * own,
        "curvlinops, ms": 1e3 * peer,
        "ratio": peer / own,
        "errbar, passes": own * BATCH / seconds["forward"],
        "curvlinops, passes": peer * BATCH / seconds["forward"],
        "whole call, errbar, s": seconds["long"],
        "whole call, curvlinops, s": seconds["long of curvlinops"],
    }


def predictions(name: str, model: nn.Module, data: list[tuple[Tensor, Tensor]], repetitions: int) -> dict[str, Any]:
    from laplace.curvature import BackPackGGN
    from laplace.curvature.asdl import AsdlGGN

    x, y = data[0][0][:INPUTS], data[0][1][:INPUTS]
    posterior = errbar.fit(
        model, [(x, y)], parameters="all", structure="diag", fisher="sampled", prior=errbar.Prior(PRIOR)
    )
    backend = AsdlGGN if any(isinstance(m, nn.BatchNorm2d) for m in model.modules()) else BackPackGGN
    peer = fitted(model, x, y, subset="all", structure="diag", backend=backend, batch=INPUTS)

    def sampled() -> Tensor:
        with torch.no_grad():
            result: Tensor = peer(x, pred_type="nn", link_approx="mc", n_samples=DRAWS)
        return result

    found = alternate(
        {
            "forward": lambda: forward(model, x),
            "draws": lambda: posterior.drawn_logits(x, DRAWS).predict(DRAWS).pmf,
            "predict": lambda: posterior.predict(x, DRAWS).pmf,
            "laplace-torch": sampled,
        },
        repetitions,
    )
    seconds = {key: times["median"] for key, times in found.items()}
    return {
        "network": name,
        "inputs": INPUTS,
        "draws": DRAWS,
        **{f"{key}, passes per input": seconds[key] / seconds["forward"] for key in list(found)[1:]},
        "laplace-torch / draws": seconds["laplace-torch"] / seconds["draws"],
        "laplace-torch / predict": seconds["laplace-torch"] / seconds["predict"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, help="in place of bench/results/whole-networks.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    rows, predicted = [], []
    for name, make in NETWORKS.items():
        torch.manual_seed(0)
        model = make().eval()
        pictures = torch.rand(2 * FEW * BATCH, 3, 32, 32, generator=generator)
        labels = torch.randint(0, 10, (len(pictures),), generator=generator)
        data = list(zip(pictures.split(BATCH), labels.split(BATCH), strict=True))
        rows.append(fits(name, model, data, options.repetitions))
        show("kron with drawn labels, per sample", rows[-1:])
        predicted.append(predictions(name, model, data, options.repetitions))
        show("Predictions with as many draws", predicted[-1:])
    save("whole-networks", rows, predictions=predicted, batch=BATCH, path=options.output)


if __name__ == "__main__":
    main()
