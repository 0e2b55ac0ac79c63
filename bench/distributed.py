"""The fit over one and two processes with one thread each: strong and weak scaling, and what is sent.

Starts torchrun on itself. Strong: the same 16 384 samples for all; weak: 8192 for each process. The paper's head.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import features, head, save, show
from torch import distributed as dist
from torch.utils.data import TensorDataset

import errbar
from errbar._distributed.reduce import reduced
from errbar._distributed.team import team_of

STRONG, WEAK = 16_384, 8_192
REPETITIONS = 7


def _batches(count: int, rank: int, world: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of the data in batches of 512, so that reading single samples is not measured."""
    x, y = features(count, 100, 10)
    part = slice(count * rank // world, count * (rank + 1) // world)
    return list(zip(x[part].split(512), y[part].split(512), strict=True))


def _seconds(function: Any) -> list[float]:
    """Seconds of several calls, each started by all ranks at once and finished when the last rank is."""
    taken = []
    for _ in range(REPETITIONS + 1):
        dist.barrier()
        start = time.perf_counter()
        function()
        dist.barrier()
        taken.append(time.perf_counter() - start)
    return taken[1:]


def _sent(function: Any) -> int:
    """The bytes of the tensors that the first rank sums, sends or receives in a call."""
    names = ("all_reduce", "broadcast", "send", "recv")
    originals = {name: getattr(dist, name) for name in names}
    total = 0

    def counting(name: str) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return originals[name](tensor, *args, **kwargs)

        return call

    try:
        for name in names:
            setattr(dist, name, counting(name))
        function()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return total


def worker(output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = head([100, 40, 10])
    found: dict[str, Any] = {}
    for name, count in (("strong", STRONG), ("weak", WEAK * world)):
        mine = _batches(count, rank, world)
        found[name] = _seconds(lambda mine=mine: errbar.collect(model, iter(mine), last_layers=2))
    small = TensorDataset(*features(64, 100, 10))
    found["agreement"] = _seconds(
        lambda: errbar.collect(head([4, 3]), TensorDataset(*features(64, 4, 3)), last_layers=1)
    )
    if world > 1:
        team = team_of()
        for structure in ("dense", "block", "kron", "diag", "lowrank"):
            total = errbar.collect(model, small, last_layers=2, structure=structure, group=False).total

            def run(total: Any = total) -> Any:
                return reduced(total, [True] * world, team)

            found[f"reduce {structure}"] = _seconds(run)
            found[f"bytes {structure}"] = _sent(run)
    if rank == 0:
        output.write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2):
            output = Path(folder) / f"{world}.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
            subprocess.run([*command, __file__, str(output)], check=True)
            found[world] = json.loads(output.read_text())
    rows: list[dict[str, Any]] = []
    for name in ("strong", "weak"):
        for world in (1, 2):
            count = STRONG if name == "strong" else WEAK * world
            median = statistics.median(found[world][name])
            alone = statistics.median(found[1][name])
            rows.append(
                {
                    "scaling": name,
                    "processes": world,
                    "N": count,
                    "collect, s": median,
                    "least": min(found[world][name]),
                    "most": max(found[world][name]),
                    "µs per sample": median / count * 1e6,
                    "efficiency": alone / median / (world if name == "strong" else 1),
                }
            )
    show("The pass over the data, paper's head, n = 4450, one thread a process", rows)
    sent: list[dict[str, Any]] = [
        {
            "structure": structure,
            "MB summed or sent": found[2][f"bytes {structure}"] / 1e6,
            "reduce, ms": statistics.median(found[2][f"reduce {structure}"]) * 1e3,
            "least": min(found[2][f"reduce {structure}"]) * 1e3,
        }
        for structure in ("dense", "block", "kron", "diag", "lowrank")
    ]
    for world in (1, 2):
        taken = [value * 1e3 for value in found[world]["agreement"]]
        sent.append(
            {
                "structure": f"a fit of 15 parameters, {world}",
                "reduce, ms": statistics.median(taken),
                "least": min(taken),
            }
        )
    show("What two processes send to make one sum of two, and what the agreement costs a small fit", sent)
    save("distributed", rows + sent)


if __name__ == "__main__":
    worker(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
