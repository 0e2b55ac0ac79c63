"""Kills processes that save or fit, at random moments: `python tests/support/kill_files.py save|fit COUNT SEED FOLDER`.

Each victim is a fork of this process, so that none of them has to import anything, and is killed by its own id. Prints
one JSON object: how many were killed, how many came to the end, and what went wrong.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

import errbar

BATCHES, EVERY = 30, 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 5)).eval()


def data() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(BATCHES):
        yield torch.randn(40, 6, generator=generator), torch.randint(0, 5, (40,), generator=generator)


def killed(work: Callable[[], None], delay: float) -> bool:
    """Run `work` in a fork and kill that after `delay` seconds; whether it was killed before it was done."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the victim failed by itself"
    return os.WIFSIGNALED(status)


def seconds(work: Callable[[], None]) -> float:
    """How long a second run takes; the first one loads and prepares."""
    work()
    start = time.monotonic()
    work()
    return time.monotonic() - start


def temporaries(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]


def kill_savers(count: int, random: Random, folder: Path) -> dict[str, object]:
    """Two posteriors take turns at one file: whatever is killed, one of the two is there, and whole."""
    network, path = model(), folder / "posterior.safetensors"
    first = errbar.fit(network, data(), last_layers=2)
    second = first.with_prior(errbar.Prior(3.0))
    contents = []
    for posterior in (second, first):
        posterior.save(path, factors=True)
        contents.append(path.read_bytes())

    def work() -> None:
        for posterior in (first, second) * 5:
            posterior.save(path, factors=True)

    duration = seconds(work)
    kills, wrong = 0, []
    for _ in range(count):
        kills += killed(work, random.random() * duration)
        errbar.load(path, network)
        if path.read_bytes() not in contents:
            wrong.append("the file is neither of the two")
        if len(temporaries(folder)) > 1:
            wrong.append(f"temporary files pile up: {temporaries(folder)}")
    first.save(path)
    if temporaries(folder):
        wrong.append(f"temporary files stay: {temporaries(folder)}")
    return {"kills": kills, "ends": count - kills, "wrong": wrong}


def kill_fits(count: int, random: Random, folder: Path) -> dict[str, object]:
    """A fit is started again until it comes to its end: then its result is that of an uninterrupted one."""
    network, checkpoint, result = model(), folder / "checkpoint", folder / "result"

    def fit(checkpoint: Path, result: Path) -> None:
        errbar.collect(network, data(), last_layers=2, checkpoint=checkpoint, every=EVERY).save(result)

    def whole() -> None:
        (folder / "whole").unlink(missing_ok=True)
        fit(folder / "whole", folder / "expected")

    duration = seconds(whole)
    expected = (folder / "expected").read_bytes()
    kills, ends, resumed = 0, 0, set()
    wrong: list[str] = []
    while kills < count:
        if killed(lambda: fit(checkpoint, result), random.random() * 1.2 * duration):
            kills += 1
            if checkpoint.exists():
                resumed.add(errbar.verify(checkpoint, network).batches)
        else:
            ends += 1
            if result.read_bytes() != expected:
                wrong.append(f"another result after {kills} kills")
            checkpoint.unlink()
            result.unlink()
        if len(temporaries(folder)) > 2:
            wrong.append(f"temporary files pile up: {temporaries(folder)}")
    fit(checkpoint, result)
    if result.read_bytes() != expected or temporaries(folder):
        wrong.append("another result, or temporary files, at the end")
    return {"kills": kills, "ends": ends, "resumed": sorted(resumed), "wrong": wrong}


def no_fsync(descriptor: int) -> None:
    """What a killed process has written is with the system already; a real disk would make this take minutes."""
    time.sleep(0.0005)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.fsync = no_fsync
    kind, count, seed, where = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    run = {"save": kill_savers, "fit": kill_fits}[kind]
    sys.stdout.write(json.dumps(run(count, Random(seed), where)))
