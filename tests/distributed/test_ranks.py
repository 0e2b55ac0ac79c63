"""Several processes give what one gives: real torchrun, gloo, and the same calls as in one process.

One torchrun for each number of ranks makes all results (`ranks_worker.py`); the tests compare them.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import errbar
import ranks_worker
from comparison import FLOAT32_ROUNDING, ROUNDING, assert_close, assert_same_bits
from errbar._distributed.reduce import triangle_summed
from errbar._distributed.shards import opened
from errbar._distributed.team import Team, team_of
from places import ROOT, SUPPORT
from processes import environment, torchrun

# A job of one takes the same way as no job.
WORLDS = [pytest.param(1, marks=pytest.mark.slow), 2, 3]
SEVERAL = [2, 3]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank found, for a number of ranks; run once, also where several pytest processes share the tests."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared

    @cache
    def of(world: int) -> list[dict[str, Any]]:
        output = shared / f"ranks{world}"
        output.mkdir(exist_ok=True)
        files = [output / f"rank{rank}.pt" for rank in range(world)]
        with (output / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not all(file.exists() for file in files):
                run = torchrun(world, str(SUPPORT / "ranks_worker.py"), str(output))
                assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-12000:]
        return [torch.load(file) for file in files]

    return of


@cache
def in_one_process(case: str) -> dict[str, Any]:
    return ranks_worker.CASES[case](0, 1)


# ------------------------------------------------------------------------------------------------------ agreement


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "case",
    [
        "a_data_set",
        "a_float32_model",
        "uneven_batches",
        "a_rank_without_data",
        "weighted_samples",
        "arguments_of_other_kinds",
        "fewer_samples_than_ranks",
        "distributed_samplers",
        "loaders",
        "a_posterior",
    ],
)
def test_several_ranks_give_what_one_process_gives(results: Any, world: int, case: str) -> None:
    found = [ranks[case] for ranks in results(world)]
    expected = in_one_process(case)
    assert expected
    assert [list(values) for values in found] == [list(expected)] * world
    for what, value in expected.items():
        assert_same_bits([values[what] for values in found])
        tolerance = FLOAT32_ROUNDING if case == "a_float32_model" else ROUNDING
        assert_close(found[0][what], value, tolerance, what)


@pytest.mark.parametrize("world", WORLDS)
def test_calibration_is_the_same_on_all_ranks_and_that_of_one_process(results: Any, world: int) -> None:
    found = [ranks["calibration"] for ranks in results(world)]
    for what, value in in_one_process("calibration").items():
        assert_same_bits([values[what] for values in found])
        # The search stops where gradients are below 1e-5; rounding decides in which of its last steps.
        assert_close(found[0][what], value, 1e-6, what)


@pytest.mark.parametrize("world", WORLDS)
def test_a_fusion_is_the_same_on_all_ranks_and_that_of_one_process(results: Any, world: int) -> None:
    found = [ranks["fusions"] for ranks in results(world)]
    for what, value in in_one_process("fusions").items():
        assert_same_bits([values[what] for values in found])
        # As above, with slopes below 3e-5.
        assert_close(found[0][what], value, 1e-4, what)


@pytest.mark.parametrize("world", SEVERAL)
def test_data_without_labels_on_one_rank_are_data_without_labels(results: Any, world: int) -> None:
    expected = in_one_process("a_data_set")["dense, matrix"]
    for ranks in results(world):
        found = ranks["labels_missing_on_one_rank"]
        assert found["log_likelihood"] is None
        assert_close(found["matrix"], expected, ROUNDING, "matrix")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("data", ["whole", "empty"])
def test_merged_sketches_keep_their_bound_and_are_the_same_on_all_ranks(results: Any, world: int, data: str) -> None:
    found = [ranks["sketches"] for ranks in results(world)]
    for what in found[0]:
        assert_same_bits([values[what] for values in found])
    exact = in_one_process("a_data_set")["dense, matrix"]
    sketch = {what.removeprefix(f"{data} "): value for what, value in found[0].items() if what.startswith(data)}
    assert sketch["n_samples"] == ranks_worker.SAMPLES
    assert len(sketch["rows"]) <= 12
    assert_close(sketch["diagonal"], exact.diagonal(), ROUNDING, "diagonal")
    gone = torch.linalg.eigvalsh(exact - sketch["rows"].T @ sketch["rows"])
    rounding = 1e-9 * float(exact.diagonal().max())
    assert float(gone[0]) >= -rounding
    assert 0 < float(gone[-1]) <= sketch["bound"] + rounding


def test_a_group_and_a_process_alone_are_told_from_all_ranks(results: Any) -> None:
    expected = in_one_process("a_data_set")["dense, matrix"]
    found = [ranks["groups"] for ranks in results(3)]
    assert [values["n"] for values in found] == [10, 11, 12]
    assert_same_bits([values["pair"] for values in found[:2]])
    assert_close(found[0]["pair"], expected, ROUNDING, "pair")
    kind, sentence, _ = found[2]["refused"]
    assert kind == "ArgumentError"
    assert "group does not contain this process" in sentence


@pytest.mark.parametrize("world", SEVERAL)
def test_data_that_probably_count_twice_or_not_at_all_are_announced(results: Any, world: int) -> None:
    for ranks in results(world):
        found = ranks["warned"]
        assert found["counted"] == world * ranks_worker.SAMPLES
        assert len(found["same"]) == len(found["other"]) == len(found["stream"]) == 1
        assert "Several ranks read the same first batch" in found["same"][0]
        assert "Several ranks read the same first batch" in found["stream"][0]
        assert "first sample of the data set is not the same on rank 0 and rank 1" in found["other"][0]


# ------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("world", SEVERAL)
@pytest.mark.parametrize(
    ("mistake", "kind", "sentence"),
    [
        ("not_a_number", "DataError", "An input holds NaN or infinite values"),
        ("infinite_logits", "ModelError", "NaN or infinite logits"),
        ("a_label_out_of_range", "LabelError", "expected 0 to 3"),
        ("a_file_that_is_missing", "FileNotFoundError", "picture 52 is not there"),
        ("a_mistake_while_others_are_busy", "ValueError", "the disk is gone"),
        ("a_checkpoint_without_a_name", "ArgumentError", "path is 5; expected the name of a file"),
    ],
)
def test_a_mistake_on_one_rank_is_raised_on_all(
    results: Any, world: int, mistake: str, kind: str, sentence: str
) -> None:
    found = [ranks[mistake] for ranks in results(world)]
    last = world - 1
    assert found[last][0] == kind
    assert sentence in found[last][1]
    assert "rank" not in found[last][1].lower()
    elsewhere = kind if issubclass(getattr(errbar, kind, object), errbar.ErrbarError) else "RankError"
    for what, text, seconds in found[:last]:
        assert what == elsewhere
        assert sentence in text
        assert text.startswith((f"On rank {last}: ", f"Rank {last} failed with {kind}: "))
        # 30 seconds of work are left to the others in one of them; it takes them longer to start up than to stop.
        assert seconds < 15


@pytest.mark.parametrize("world", SEVERAL)
@pytest.mark.parametrize(
    ("mistake", "kind", "sentence"),
    [
        ("other_weights", "MismatchError", "disagree about the weights (fingerprint)"),
        ("other_options", "MismatchError", "disagree about the fisher: rank 0 has ggn, rank 1 has eta"),
        ("an_unknown_option_on_one_rank", "ArgumentError", "structure is 'dens'"),
        ("other_lengths", "DataError", "Rank 0 has a data set of 53 samples, rank 1 one of 52"),
        ("other_kinds", "DataError", "The data of rank 0 are a whole data set, those of rank 1 are its own batches"),
        ("nothing_at_all", "DataError", "The data are empty"),
        ("nothing_to_calibrate_on", "DataError", "The data for calibration are empty"),
        ("nothing_to_forget", "DataError", "The data are empty on all ranks"),
        ("other_seeds", "DataError", "The DistributedSampler of rank 1 has"),
        ("one_part_twice", "DataError", "The DistributedSamplers of ranks 0 and 1 both take part 0"),
        ("parts_that_nobody_reads", "DataError", "ranks, so 2 would not be read"),
        ("draws_with_replacement", "DataError", "RandomSampler with replacement"),
        ("draws_by_weight", "DataError", "WeightedRandomSampler"),
        ("no_length", "DataError", "The data set Endless has no length"),
        ("other_posteriors", "MismatchError", "disagree about the number of samples in the posterior"),
        ("other_priors", "MismatchError", "disagree about the prior: rank 0 has 1.0, rank 1 has 2.0"),
        ("forgetting_what_was_not_seen", "ForgetError", "Cannot forget 53 samples: the information holds only 10."),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused_alike(
    results: Any, world: int, mistake: str, kind: str, sentence: str
) -> None:
    for ranks in results(world):
        what, text, _ = ranks[mistake]
        assert (what, sentence in text) == (kind, True), text


@pytest.mark.parametrize("world", SEVERAL)
def test_nobody_waits_for_a_first_batch_that_cannot_be_sent(results: Any, world: int) -> None:
    first, *others = [ranks["a_first_batch_without_a_tensor"] for ranks in results(world)]
    assert first[0] == "DataError"
    assert first[1].startswith("A batch holds no tensor to count its samples by")
    for what, text, seconds in others:
        assert what == "DataError"
        assert text == f"On rank 0: {first[1]}"
        assert seconds < 15


@pytest.mark.parametrize("world", SEVERAL)
def test_memory_is_planned_for_the_largest_batch_of_all_ranks(results: Any, world: int) -> None:
    assert [ranks["planned_batches"]["size"] for ranks in results(world)] == [30 + max(0, world - 2)] * world
    assert in_one_process("planned_batches")["size"] == 30


@pytest.mark.parametrize("world", SEVERAL)
def test_a_rank_without_data_cannot_learn_from_arguments_that_cannot_be_sent(results: Any, world: int) -> None:
    for ranks in results(world):
        what, text, _ = ranks["arguments_that_cannot_be_sent"]
        assert what == "DataError"
        assert f"Rank {world - 1} has no data, and cannot learn the layers from a batch of rank 0" in text


SURVIVOR = """
import os, signal, sys
from datetime import timedelta
from torch import distributed as dist
import errbar, ranks_worker

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2,
                        timeout=timedelta(seconds=60))

def batches():
    yield ranks_worker.samples(3, seed=rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

print(*ranks_worker.failure(lambda: errbar.collect(ranks_worker.network(), batches(), parameters="all")), sep="|")
sys.stdout.flush()
os._exit(0)
"""


def test_the_others_are_told_when_a_rank_is_killed(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", SURVIVOR]
    processes = [
        subprocess.Popen([*arguments, str(rank), str(tmp_path / "store")], env=environment(), stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    printed, killed = (process.communicate(timeout=200)[0].decode() for process in processes)
    assert processes[1].returncode == -signal.SIGKILL
    assert killed == ""
    kind, *sentence, seconds = printed.strip().split("|")
    assert kind == "RankError"
    assert "Rank 0 of 2 could not exchange values: another rank died" in "|".join(sentence)
    assert float(seconds) < 60


# ---------------------------------------------------------------------------------------- without a job; the example


@pytest.mark.parametrize("group", [True, 3, "all", -100])
def test_a_group_that_is_none_is_refused(group: Any) -> None:
    model, data = ranks_worker.network(), ranks_worker.data_set()
    posterior = errbar.fit(model, data, last_layers=1)
    calls = [
        lambda: errbar.collect(model, data, last_layers=1, group=group),
        lambda: errbar.fit(model, data, last_layers=1, group=group),
        lambda: errbar.calibrate(posterior, data, group=group),
        lambda: posterior.update(data, group=group),
        lambda: posterior.forget(data, group=group),
    ]
    for call in calls:
        with pytest.raises(errbar.ArgumentError, match="expected None for all ranks of the job, False for this"):
            call()


def test_without_a_job_a_process_is_alone() -> None:
    assert team_of(None).is_alone
    assert team_of(False).is_alone
    assert Team().exchange(5) == [5]
    assert Team().broadcast(5) == 5


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [1, 5, 12])
def test_the_parts_of_distributed_samplers_hold_each_sample_once(count: int, shuffle: bool) -> None:
    """Also without a job, where the parts may be added up by `+`."""
    data = torch.utils.data.TensorDataset(torch.arange(count))
    seen: list[int] = []
    for rank in range(5):
        sampler = DistributedSampler(data, num_replicas=5, rank=rank, shuffle=shuffle, seed=1)
        loader = DataLoader(data, batch_size=2, sampler=sampler)
        seen += [int(value) for batch in opened(loader, None, Team()) for value in batch.args[0]]
    assert sorted(seen) == list(range(count))


def test_a_sampler_that_drops_the_last_samples_drops_no_more_than_it_says() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(11))
    for rank in range(3):
        sampler = DistributedSampler(data, num_replicas=3, rank=rank, shuffle=False, drop_last=True)
        loader = DataLoader(data, batch_size=2, sampler=sampler)
        found = [int(value) for batch in opened(loader, None, Team()) for value in batch.args[0]]
        assert found == [rank, rank + 3, rank + 6]


@pytest.mark.parametrize("size", [1, 7, 64])
def test_the_triangle_of_a_symmetric_matrix_is_enough(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A team whose ranks all hold the same: the sum is twice that, symmetric, and half of it was sent."""

    class Twice(Team):
        sent = 0

        def summed(self, values: Tensor) -> Tensor:
            Twice.sent += values.numel()
            return 2 * values

    monkeypatch.setattr("errbar._distributed.reduce._STRIP_BYTES", 8 * size)
    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = matrix + matrix.T
    made = triangle_summed(matrix, Twice())
    assert torch.equal(made, 2 * matrix)
    assert torch.equal(made, made.T)
    assert Twice.sent <= size * (size + 1) // 2 + size * 4


def test_the_example_runs_under_torchrun_and_says_what_one_process_says(capsys: pytest.CaptureFixture[str]) -> None:
    script = str(ROOT / "examples" / "ranks.py")
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(script, run_name="__main__")
    alone = capsys.readouterr().out.splitlines()
    run = torchrun(2, script)
    assert run.returncode == 0, run.stderr[-4000:]
    together = run.stdout.splitlines()
    assert (alone[0], together[0]) == ("1 processes", "2 processes")
    assert "1000 samples" in alone[1]
    assert together[1:] == alone[1:]


def test_weights_of_a_wrapped_model_are_looked_through() -> None:
    """`group=False` and a wrapper make no difference to a plain call."""
    model = ranks_worker.network()
    wrapped = errbar.collect(nn.DataParallel(model), ranks_worker.data_set(), parameters="all", group=False)
    assert torch.equal(wrapped.dense(), in_one_process("a_data_set")["dense, matrix"])
