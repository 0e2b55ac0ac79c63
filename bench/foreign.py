"""Why the contrast variance of a last layer is *smaller* for foreign pictures: these excite its features less.

P^g of a last layer is a quadratic form in its inputs h, so it shrinks with |h|². Third-party ResNets for CIFAR-10,
test pictures against SVHN: the length of h, and the contrast variance with h as it is and with all h of one length.

    python bench/foreign.py --data DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import in_batches, save, show
from ridge import through
from torch import Tensor
from torch.nn.functional import normalize

import errbar
from errbar import metrics
from errbar.experiments import datasets
from errbar.experiments.pretrained import DEPTHS, find_weights
from errbar.experiments.resnet import load_pretrained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    folder = parser.parse_args().data
    split, foreign = datasets.read_cifar10(folder), datasets.read_svhn(folder).pixels()
    rows: list[dict[str, Any]] = []
    for name in DEPTHS:
        network = load_pretrained(find_weights(folder, name)).eval()
        last, train = through(network, split.train.pixels())
        known, unknown = (through(network, pictures)[1] for pictures in (split.test.pixels(), foreign))
        h = torch.cat([known, unknown])
        is_foreign = torch.arange(len(h)) >= len(known)
        posterior = errbar.fit(last, in_batches(train, split.train.y, 512), last_layers=1, prior=errbar.Prior(1.0))

        def auroc(values: Tensor, positive: Tensor = is_foreign) -> float:
            return round(100 * metrics.auroc(values, positive), 1)

        rows.append(
            {
                "network": name,
                "|h|, test": known.norm(dim=1).mean().item(),
                "|h|, foreign": unknown.norm(dim=1).mean().item(),
                "AUROC %: |h|": auroc(h.norm(dim=1)),
                "contrast variance": auroc(posterior.logits(h).contrast_variance),
                "the same, |h| = 1": auroc(posterior.logits(normalize(h)).contrast_variance),
            }
        )
    show("Foreign pictures and the length of h", rows)
    save("foreign", rows)


if __name__ == "__main__":
    main()
