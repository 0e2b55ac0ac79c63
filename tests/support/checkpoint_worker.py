"""A rank of `test_checkpoint_ranks.py`: `python checkpoint_worker.py RANK WORLD FOLDER STRUCTURE [WHEN]`.

Each of the ranks fits its part of the same data with a checkpoint in FOLDER. With WHEN, a number of a sample, the rank
that reads this sample is killed then; without it, where there is a checkpoint, the data are tried backwards first.
What it found, or what was refused, is written to FOLDER/RANK.pt.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader, Dataset

import errbar
import ranks_worker

EVERY, BATCH = 2, 4


class Killing(Dataset[Any]):
    """Samples, one of which kills who reads it."""

    def __init__(self, when: int | None, *, backwards: bool = False) -> None:
        self.x, self.y = ranks_worker.samples()
        self.when, self.backwards = when, backwards

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        if index == self.when:
            os.kill(os.getpid(), signal.SIGKILL)
        place = len(self) - 1 - index if self.backwards else index
        return self.x[place], self.y[place]


def collected(path: Path, structure: str, data: Killing) -> errbar.Information:
    model, loader = ranks_worker.network(), DataLoader(data, batch_size=BATCH)
    options: dict[str, Any] = {"parameters": "all", "structure": structure, "rank": 6}
    return errbar.collect(model, loader, checkpoint=path, every=EVERY, **options)


def main(rank: int, world: int, folder: Path, structure: str, when: int | None) -> None:
    store = f"file://{folder / f'store-{world}-{when}'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    path = folder / "checkpoint"
    found: dict[str, Any] = {}
    if when is None and any(folder.glob(f"checkpoint.rank-*-of-{world}")):
        found["backwards"] = ranks_worker.failure(lambda: collected(path, structure, Killing(None, backwards=True)))
    try:
        found |= ranks_worker.told(collected(path, structure, Killing(when)))
    except errbar.ErrbarError as error:
        found["refused"] = (type(error).__name__, str(error))
    torch.save(found, folder / f"{rank}.pt")
    # Without a farewell: another rank may be dead.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]) if sys.argv[5:] else None)
