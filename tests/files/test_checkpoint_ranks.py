"""Fits of several ranks that are interrupted: each rank continues where it was, and only as many ranks as before do."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint_worker
import errbar
import ranks_worker
from places import SUPPORT
from processes import environment


def ranks(world: int, folder: Path, structure: str, when: int | None = None) -> tuple[list[int], list[dict[str, Any]]]:
    """What the ranks of a job returned, and what those found that were not killed."""
    command = [sys.executable, str(SUPPORT / "checkpoint_worker.py")]
    last = [] if when is None else [str(when)]
    for old in folder.glob("*.pt"):
        old.unlink()
    processes = [
        subprocess.Popen([*command, str(rank), str(world), str(folder), structure, *last], env=environment())
        for rank in range(world)
    ]
    codes = [process.wait(timeout=200) for process in processes]
    return codes, [torch.load(file) for file in sorted(folder.glob("*.pt"))]


def positions(folder: Path) -> dict[str, int | None]:
    return {file.name: errbar.verify(file).batches for file in sorted(folder.glob("checkpoint*"))}


# Of 53 samples rank 0 reads 26 and rank 1 the others: seven batches of four, of which four are stored when the
# sixth is read: one is read ahead.
@pytest.mark.parametrize(("structure", "killed", "when"), [("dense", 1, 26 + 20), ("lowrank", 0, 21)])
def test_a_killed_job_continues_and_ends_as_one_that_was_not(
    structure: str, killed: int, when: int, tmp_path: Path
) -> None:
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    cut.mkdir()
    whole.mkdir()
    codes, found = ranks(2, cut, structure, when)
    assert codes == [-signal.SIGKILL if rank == killed else 0 for rank in range(2)]
    assert found[0]["refused"][0] == "RankError"
    before = positions(cut)
    assert before == {f"checkpoint.rank-{rank}-of-2": 4 if rank == killed else 7 for rank in range(2)}

    # Three ranks would read other parts of the data, and so would one.
    codes, found = ranks(3, cut, structure)
    assert codes == [0, 0, 0]
    for values in found:
        kind, sentence = values["refused"]
        assert kind == "MismatchError"
        assert "checkpoint.rank-0-of-2 is from a fit by 2 ranks, and this one is by 3" in sentence
    with pytest.raises(errbar.MismatchError, match=r"by 2 ranks, and this one is by 1\. Expected as many .* delete"):
        checkpoint_worker.collected(cut / "checkpoint", structure, checkpoint_worker.Killing(None))
    assert positions(cut) == before

    continued, uninterrupted = ranks(2, cut, structure)[1], ranks(2, whole, structure)[1]
    for values in continued:
        kind, sentence, _ = values["backwards"]
        assert kind == "MismatchError"
        assert "holds other data" in sentence
    assert positions(cut) == positions(whole) == {f"checkpoint.rank-{rank}-of-2": 7 for rank in range(2)}
    for values in (*continued, *uninterrupted):
        assert torch.equal(values["matrix"], uninterrupted[0]["matrix"])
        assert values["n_samples"] == ranks_worker.SAMPLES
        assert values["log_likelihood"] == uninterrupted[0]["log_likelihood"]
    if structure == "dense":
        alone = errbar.collect(ranks_worker.network(), ranks_worker.data_set(), parameters="all").dense()
        torch.testing.assert_close(continued[0]["matrix"], alone, rtol=1e-9, atol=1e-9 * float(alone.abs().max()))


def test_a_checkpoint_of_one_process_is_not_continued_by_several(tmp_path: Path) -> None:
    checkpoint_worker.collected(tmp_path / "checkpoint", "diag", checkpoint_worker.Killing(None))
    before = (tmp_path / "checkpoint").read_bytes()
    for values in ranks(2, tmp_path, "diag")[1]:
        kind, sentence = values["refused"]
        assert kind == "MismatchError"
        assert "checkpoint is from a fit by 1 rank, and this one is by 2" in sentence
    assert (tmp_path / "checkpoint").read_bytes() == before
    assert positions(tmp_path) == {"checkpoint": 14}


def test_what_only_looks_like_a_checkpoint_of_other_ranks_is_no_obstacle(tmp_path: Path) -> None:
    """A name that begins alike, and, for several ranks, another kind of file at the name of the checkpoint itself."""
    (tmp_path / "checkpoint.rank-0-of-2.old").write_text("")
    (tmp_path / "my-checkpoint.rank-0-of-2").write_text("")
    checkpoint_worker.collected(tmp_path / "checkpoint", "diag", checkpoint_worker.Killing(None)).save(
        tmp_path / "other"
    )
    (tmp_path / "other").replace(tmp_path / "checkpoint")
    found = ranks(2, tmp_path, "diag")[1]
    assert [values["n_samples"] for values in found] == [ranks_worker.SAMPLES] * 2
