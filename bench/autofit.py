"""`autofit` against temperature scaling on the networks of `docs/results.md`: what it chooses, and what that is worth.

    python bench/autofit.py --data DIR [mnist digits gtsrb cifar10 resnet20 resnet32] [--runs 3] [--only SEED]
                            [--device cuda] [--seconds 900] [--exact] [-o docs/results/autofit.json]

Networks are trained as `errbar reproduce` trains them, and kept beside the output; the halves of the ResNets' test data
are those of the runs there, and their training data, which are the same in all of them, are collected once. With
`--exact` the last layer, the last two and all vectors are tried by the exact Fisher information, and nothing else.
Results of earlier calls stay in the file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from errbar.experiments import automatic
from errbar.experiments.pretrained import DEPTHS, load_network, pretrained_problem
from errbar.experiments.problem import Problem
from errbar.experiments.problems import build
from errbar.experiments.reproduce import tracks, trained

_RUN = 1000
_EXACT: dict[str, dict[str, Any]] = {
    "last layer": {"last_layers": 1},
    "last two layers": {"last_layers": 2},
    "last layer and vectors": {"parameters": "vectors"},
}


def prepared(
    name: str, data: Path | None, seed: int, device: torch.device, folder: Path
) -> tuple[nn.Module, Problem, list[int] | None]:
    """A network, its problem, and which validation samples belong together."""
    if name in DEPTHS:
        if data is None:
            raise SystemExit("The ResNets need --data.")
        return load_network(data, name, device), pretrained_problem(name, data, seed, device), None
    experiment = build(name, data, quick=False, device=device)
    problem = experiment.problem
    network, _ = trained(problem, problem.train, folder / name, seed * _RUN)
    return network, problem, tracks(experiment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["digits"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("-o", "--output", type=Path, default=Path("autofit.json"))
    options = parser.parse_args()
    device, folder = torch.device(options.device), options.output.parent / "networks"
    for name in options.names:
        collected: Mapping[str, Any] | None = _EXACT if options.exact else None
        for seed in range(options.runs) if options.only is None else [options.only]:
            network, problem, groups = prepared(name, options.data, seed, device, folder)
            if name in DEPTHS and options.only is None and not options.exact:
                collected = collected or automatic.collected(network, problem, progress=True)
                network = next(iter(collected.values())).model
            study = automatic.study(
                network,
                problem,
                candidates=collected,
                groups=groups,
                seconds=options.seconds,
                title=f"{name} {seed}",
                progress=True,
            )
            print(name, seed, study["reason"], f"{study['seconds']:.0f} s", flush=True)
            results: dict[str, Any] = {}
            if options.output.exists():
                results = json.loads(options.output.read_text(encoding="utf-8"))
            results.setdefault(name, {})[str(seed)] = {"device": str(device), **study}
            options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            for what, difference in automatic.differences(list(results[name].values())).items():
                print(f"  {what:28} {difference['mean']:+.4f} {difference['interval'] or ''}", flush=True)


if __name__ == "__main__":
    main()
