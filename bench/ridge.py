"""What `calibrate` gives up in NLL to keep T_c as near to 1 as the data allow, on a third-party network.

ResNet-20 for CIFAR-10, last layer, prior by evidence; one half of the test pictures calibrates, the other evaluates.

    python bench/ridge.py --data DIR
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from common import in_batches, save, show
from torch import Tensor, nn

import errbar
from errbar import metrics
from errbar._calibration import search
from errbar.experiments import datasets
from errbar.experiments.pretrained import find_weights
from errbar.experiments.problem import Samples, halves
from errbar.experiments.resnet import load_pretrained, normalise


def through(network: nn.Module, pictures: Tensor) -> tuple[nn.Linear, Tensor]:
    """The last layer and its inputs."""
    last = next(module for module in reversed(list(network.modules())) if isinstance(module, nn.Linear))
    seen: list[Tensor] = []
    hook = last.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    with torch.no_grad():
        for part in pictures.split(500):
            network(normalise(part))
    hook.remove()
    return last, torch.cat(seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    folder = parser.parse_args().data
    network = load_pretrained(find_weights(folder, "resnet20")).eval()
    split = datasets.read_cifar10(folder)
    last, train = through(network, split.train.pixels())
    _, test = through(network, split.test.pixels())
    information = errbar.collect(last, in_batches(train, split.train.y, 512), last_layers=1)
    posterior = errbar.condition(information, errbar.choose_prior(information))
    certain = posterior.with_calibration(covariance_scale=0.0)
    usual = search._NEGLIGIBLE_NATS
    rows: list[dict[str, Any]] = []
    for seed in range(3):
        held_out, shown = halves(Samples(test, split.test.y), seed)
        for name, begin, fit, nats in (
            ("T alone, T_c = 0", certain, ["temperature"], usual),
            ("T and T_c, the default", posterior, ["temperature", "covariance_scale"], usual),
            ("T and T_c, the bare minimum", posterior, ["temperature", "covariance_scale"], 0.0),
        ):
            search._NEGLIGIBLE_NATS = nats
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", errbar.CalibrationWarning)  # T_c at its lower bound
                found = errbar.calibrate(begin, [tuple(held_out)], fit=fit)
            rows.append({"half": seed, "fitted": name, "T": found.temperature, "T_c": found.covariance_scale})
            for part, (x, y) in (("NLL, held out", held_out), ("NLL, test", shown)):
                rows[-1][part] = metrics.nll(found.predict(x).pmf, y)
    show("NLL of ResNet-20 on both halves", rows)
    save("ridge", rows)


if __name__ == "__main__":
    main()
