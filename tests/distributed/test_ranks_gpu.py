"""Ranks whose networks are on a GPU: NCCL carries their tensors, or gloo by way of the CPU.

NCCL refuses two ranks on one GPU, so that a machine with a single one shows NCCL with a team of one rank, whose tensors
go through the same calls, and two ranks with gloo.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ranks_worker
from comparison import ROUNDING, assert_close, assert_same_bits
from processes import torchrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STRUCTURES = [*ranks_worker.STRUCTURES, "lowrank"]

WORKER = """
import sys
import torch
from torch import distributed as dist
import errbar, ranks_worker
from errbar._distributed.team import Team, job_of_torchrun
from errbar._distributed.reduce import reduced

device, output, *structures = sys.argv[1:]
carrier = torch.device(device)
with job_of_torchrun(carrier) if "nccl" in output else job_of_torchrun(torch.device("cpu")):
    rank, size = dist.get_rank(), dist.get_world_size()
    model = ranks_worker.network().to(carrier)
    found = {"carrier": str(Team(rank, size, dist.group.WORLD)._carrier(carrier).type)}
    for structure in structures:
        collected = errbar.collect(model, ranks_worker.data_set(), parameters="all", structure=structure)
        assert collected.total.device.type == carrier.type
        if size == 1:
            # `collect` sends nothing when it is alone; what it would send is sent here.
            total = reduced(collected.total, [True], Team(0, 1, dist.group.WORLD))
            assert total.device.type == carrier.type
        else:
            total = collected.total
        found[structure] = total.dense().cpu()
    torch.save(found, f"{output}-{rank}")
"""


def ranks_on_a_gpu(count: int, output: Path) -> list[dict[str, object]]:
    script = output.with_suffix(".py")
    script.write_text(WORKER)
    run = torchrun(count, str(script), "cuda", str(output), *STRUCTURES)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-8000:]
    return [torch.load(f"{output}-{rank}") for rank in range(count)]


@pytest.mark.parametrize(
    ("backend", "count", "carrier"),
    [pytest.param("nccl", 1, "cuda", id="nccl"), pytest.param("gloo", 2, "cpu", id="two ranks with gloo")],
)
def test_ranks_on_a_gpu_give_what_one_process_gives(backend: str, count: int, carrier: str, tmp_path: Path) -> None:
    ranks = ranks_on_a_gpu(count, tmp_path / backend)
    for structure in STRUCTURES:
        expected = ranks_worker.collected(ranks_worker.data_set(), structure=structure)["matrix"]
        assert_same_bits([rank[structure] for rank in ranks])
        assert_close(ranks[0][structure], expected, ROUNDING, structure)
    assert [rank["carrier"] for rank in ranks] == [carrier] * count
