"""Mistakes on the command line: one sentence on standard error and exit code 1; usage errors have exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

import errbar
from command_line import CLASSES, Workspace, run, said
from errbar.cli import options
from processes import environment, torchrun

FIT = ["fit", "tiny_net:trained", "data.npz", "--last-layers", "1"]
MODEL = ["--model", "tiny_net:trained"]
ERRBAR = ["-m", "errbar"]


@pytest.fixture
def files(workspace: Workspace) -> Workspace:
    """A posterior, and files that are wrong in one way each."""
    if not Path("posterior.safetensors").exists():
        said(*FIT, "-o", "posterior.safetensors", "--class-names", ",".join(CLASSES))
        x, y = workspace.train[0].numpy(), workspace.train[1].numpy()
        np.savez("wide.npz", x=np.zeros((5, 7)))
        np.savez("labels.npz", x=x, y=y + 5)
        np.savez("short.npz", x=x, y=y[:-1])
        np.savez("words.npz", x=x, y=np.array(["dog"] * len(x)))
        np.savez("unlabelled.npz", x=x)
        np.savez("empty.npz", x=x[:0])
        np.savez("objects.npz", x=np.array([{}, {}], dtype=object))
        np.savez("odd.npz", x=x[:7])
        Path("text.npz").write_text("not an archive")
        Path("text.pt").write_text("not weights")
        Path("data.txt").write_text("text")
        Path("pictures").mkdir()
        Path("broken_module.py").write_text("1 / 0\n")
        Path("program.py").write_text("raise SystemExit(2)\n")
        torch.save([1, 2], "list.pt")
        torch.save({"epoch": 3}, "nothing.pt")
        torch.save(os.getcwd, "code.pt")
        torch.save(__import__("tiny_net").large().state_dict(), "large.pt")
        with Path("data.npz").open("rb") as stream:
            Path("cut.npz").write_bytes(stream.read()[:200])
    return workspace


PREDICT = ["predict", "posterior.safetensors"]

MISTAKES = {
    "no such model": (["fit", "nowhere:model", "data.npz", "--last-layers", "1"], "cannot be imported"),
    "no such callable": (["fit", "tiny_net:missing", "data.npz", "--last-layers", "1"], "has no attribute 'missing'"),
    "a misspelt callable": (["fit", "tiny_net:Traind", "data.npz", "--last-layers", "1"], "Did you mean trained?"),
    "no callable at all": (["fit", "tiny_net", "data.npz", "--last-layers", "1"], "expected package.module:callable"),
    "a module that fails": (["fit", "broken_module:model", "data.npz", "--last-layers", "1"], "ZeroDivisionError"),
    "a module that is a program": (["fit", "program:model", "data.npz", "--last-layers", "1"], "program that ended"),
    "a callable with arguments": (["fit", "tiny_net:needs", "data.npz", "--last-layers", "1"], "needs no arguments"),
    "a callable that fails": (["fit", "tiny_net:breaks", "data.npz", "--last-layers", "1"], "no disk in the drive"),
    "a number as model": (
        ["fit", "tiny_net:number", "data.npz", "--last-layers", "1"],
        "is a int; expected a callable",
    ),
    "a callable that returns data": (["fit", "tiny_net:dataset", "data.npz", "--last-layers", "1"], "torch.nn.Module"),
    "no such data": (["fit", "tiny_net:trained", "nowhere.npz", "--last-layers", "1"], "nowhere.npz do not exist"),
    "data of another kind": (["fit", "tiny_net:trained", "data.txt", "--last-layers", "1"], "end in '.txt'; expected"),
    "no such split": (["fit", "tiny_net:trained", "data.npz:dev", "--last-layers", "1"], "expected x_dev"),
    "no archive": (["fit", "tiny_net:trained", "text.npz", "--last-layers", "1"], "text.npz cannot be read"),
    "an archive cut off": (["fit", "tiny_net:trained", "cut.npz", "--last-layers", "1"], "cut.npz cannot be read"),
    "objects": (["fit", "tiny_net:trained", "objects.npz", "--last-layers", "1"], "objects"),
    "no inputs": (["fit", "tiny_net:trained", "empty.npz", "--last-layers", "1"], "expected at least one input"),
    "no batches": (["fit", "tiny_net:trained", "tiny_net:empty", "--last-layers", "1"], "data are empty"),
    "data that are a number": (["fit", "tiny_net:trained", "tiny_net:number", "--last-layers", "1"], "a callable"),
    "no pictures": (["fit", "tiny_net:trained", "pictures", "--last-layers", "1"], "holds no pictures"),
    "inputs of another shape": (["fit", "tiny_net:trained", "wide.npz", "--last-layers", "1"], "The model failed on"),
    "fewer labels than inputs": (["fit", "tiny_net:trained", "short.npz", "--last-layers", "1"], "a label for each"),
    "labels in words": (["fit", "tiny_net:trained", "words.npz", "--last-layers", "1"], "--class-names"),
    "labels out of range": (["fit", "tiny_net:trained", "labels.npz", "--last-layers", "1"], "expected 0 to 2"),
    "no parameters": (["fit", "tiny_net:trained", "data.npz"], "either --last-layers"),
    "too many layers": (["fit", "tiny_net:trained", "data.npz", "--last-layers", "7"], "last_layers is 7"),
    "no such parameter": (["fit", "tiny_net:trained", "data.npz", "--parameters", "head"], "head"),
    "a prior of words": ([*FIT, "--prior", "strong"], "The prior is 'strong'; expected a number"),
    "a negative prior": ([*FIT, "--prior", "-1"], "prior"),
    "a prior and a weight decay": ([*FIT, "--prior", "5", "--weight-decay", "0.1"], "expected one of them"),
    "a weight decay of nothing": ([*FIT, "--weight-decay", "0"], "(weight decay) is 0.0; expected a positive"),
    "no such device": ([*FIT, "--device", "abacus"], "The device 'abacus' cannot be used"),
    "too few class names": ([*FIT, "--class-names", "ant,bee"], "expected 3 printable texts"),
    "class names twice": ([*FIT, "--class-names", "ant,ant,bee"], "different names"),
    "pictures that are none": ([*FIT, "--image-size", "32"], "not a folder of pictures"),
    "a size of words": (["fit", "tiny_net:trained", "pictures", "--last-layers", "1", "--image-size", "big"], "'big'"),
    "a transform to text": ([*FIT, "--transform", "tiny_net:name"], "returned a str"),
    "no such weights": ([*FIT, "--weights", "nowhere.pt"], "nowhere.pt do not exist"),
    "weights of another kind": ([*FIT, "--weights", "data.txt"], "expected .safetensors"),
    "weights that are text": ([*FIT, "--weights", "text.pt"], "text.pt cannot be read"),
    "weights that are code": ([*FIT, "--weights", "code.pt"], "which could run code"),
    "weights that are a list": ([*FIT, "--weights", "list.pt"], "hold a list and not a state dict"),
    "weights without weights": ([*FIT, "--weights", "nothing.pt"], "not a state dict"),
    "weights of another model": ([*FIT, "--weights", "large.pt"], "are of another model: 0.weight is (9, 4) and not"),
    "no folder for the output": ([*FIT, "-o", "nowhere/p.safetensors"], "expected a folder"),
    "a folder as output": ([*FIT, "-o", "pictures"], "is a folder"),
    "an output that exists": ([*FIT, "-o", "posterior.safetensors"], "exists already"),
    "another model": ([*PREDICT, "data.npz", "--model", "tiny_net:other"], "other weights"),
    "no posterior": (["predict", "data.txt", "data.npz", *MODEL], "data.txt"),
    "no file": (["predict", "nowhere.safetensors", "data.npz", *MODEL], "nowhere.safetensors"),
    "results of another kind": ([*PREDICT, "data.npz", *MODEL, "-o", "out.xlsx"], "expected .jsonl, .csv"),
    "risk in words": ([*PREDICT, "data.npz", *MODEL, "--risk", "much"], "The risk threshold is 'much'"),
    "risk above one": ([*PREDICT, "data.npz", *MODEL, "--risk", "1.5"], "expected a probability"),
    "risk for other classes": (
        [*PREDICT, "data.npz", *MODEL, "--risk", "0.1,0.2"],
        "is '0.1,0.2'; expected a probability, or one for each of the 3",
    ),
    "no labels": (["evaluate", "posterior.safetensors", "unlabelled.npz", *MODEL], "Labels are missing"),
    "another class": (["evaluate", "posterior.safetensors", "words.npz", *MODEL], "label 'dog'; expected one of ant"),
    "calibration without labels": (["calibrate", "posterior.safetensors", "unlabelled.npz", *MODEL], "Labels are miss"),
    "more than was seen": (["forget", "posterior.safetensors", "data.npz:validation", *MODEL], "negative information"),
    "one to fuse": (["fuse", "data.npz", "-p", "posterior.safetensors", *MODEL], "expected two or more"),
    "frames left over": (
        ["fuse", "odd.npz", "-p", "posterior.safetensors", *MODEL, "--frames", "5"],
        "has 2 frames and not 5",
    ),
    "joint without frames": (
        ["fuse", "data.npz", "-p", "posterior.safetensors", *MODEL, "--joint"],
        "--joint is for frames of one object",
    ),
    "models left over": (
        ["fuse", "data.npz", "-p", "posterior.safetensors", "-p", "posterior.safetensors", *MODEL * 3],
        "2 posteriors, 3 models",
    ),
    "the same file twice": (["merge", "posterior.safetensors", "posterior.safetensors"], "the same information"),
    "memory in words": (["plan", "tiny_net:trained", "data.npz", "--memory", "plenty"], "expected bytes"),
    "more labels than inputs": (
        ["acquire", "posterior.safetensors", "data.npz:test", *MODEL, "--count", "100000"],
        "--count is 100,000, and the pool holds",
    ),
    "suspicion without labels": (
        ["outliers", "posterior.safetensors", "unlabelled.npz", *MODEL, "--by", "label-suspicion"],
        "needs labels",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_leaves_no_file(mistake: str, files: Workspace, tmp_path: Path) -> None:
    arguments, expected = MISTAKES[mistake]
    needs_output = arguments[0] not in ("evaluate", "plan", "outliers", "acquire") and "-o" not in arguments
    suffix = "jsonl" if arguments[0] in ("predict", "fuse") else "safetensors"
    output = ["-o", str(tmp_path / f"out.{suffix}")] if needs_output else []
    before = sorted(Path.cwd().iterdir())
    result = run(*arguments, *output, "--json")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("errbar: ")
    assert result.err.count("\n") == 1
    assert expected in result.err
    assert list(tmp_path.iterdir()) == []
    assert [path for path in sorted(Path.cwd().iterdir()) if path.name != "__pycache__"] == [
        path for path in before if path.name != "__pycache__"
    ]


@pytest.mark.parametrize("mistake", ["too few class names", "a weight decay of nothing", "a prior and a weight decay"])
def test_what_can_be_known_before_is_told_before_the_data_are_read(
    mistake: str, files: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errbar, "collect", None)
    arguments, expected = MISTAKES[mistake]
    result = run(*arguments, "-o", str(tmp_path / "out"))
    assert result.code == 1
    assert expected in result.err


def test_what_the_model_prints_is_not_in_the_way_of_programs(files: Workspace, tmp_path: Path) -> None:
    Path("chatty.py").write_text(
        "import tiny_net\nprint('hello')\ndef net():\n    print('loading')\n    return tiny_net.trained()\n"
    )
    arguments = ["fit", "chatty:net", "data.npz", "--last-layers", "1", "-o", str(tmp_path / "p"), "--json"]
    result = run(*arguments)
    assert (result.code, result.err) == (0, "hello\nloading\n")
    assert json.loads(result.out)["samples"] == len(files.train[0])


def test_labels_of_two_classes_may_be_a_column(files: Workspace, tmp_path: Path) -> None:
    Path("binary_net.py").write_text(
        "import torch\ndef net():\n    model = torch.nn.Linear(4, 1).double()\n    model.weight.data.fill_(0.5)\n"
        "    model.bias.data.fill_(0.0)\n    return model\n"
    )
    x, y = files.train
    np.savez(tmp_path / "column.npz", x=x.numpy(), y=(y == 0).double().numpy()[:, None])
    posterior, data = str(tmp_path / "p.safetensors"), str(tmp_path / "column.npz")
    said("fit", "binary_net:net", data, "--last-layers", "1", "-o", posterior)
    found = said("outliers", posterior, data, "--model", "binary_net:net")["outliers"]
    assert all(row["label"] == int(y[row["input"]] == 0) for row in found)


def test_an_output_is_replaced_by_force(files: Workspace, tmp_path: Path) -> None:
    output = tmp_path / "p.safetensors"
    output.write_text("before")
    said(*FIT, "-o", str(output), "--force")
    assert errbar.info(output).kind == "posterior"


@pytest.mark.parametrize("arguments", [FIT, [*PREDICT, "data.npz", "--model", "tiny_net:trained"]])
def test_a_pipe_is_not_replaced_by_force(arguments: list[str], files: Workspace, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    for force in ([], ["--force"]):
        result = run(*arguments, "-o", str(pipe), *force)
        assert result.code == 1
        assert "it is a pipe" in result.err
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fit", "tiny_net:trained", "data.npz", "--last-layers", "1"], "--output"),
        ([*FIT, "-o", "x", "--structure", "round"], "round"),
        ([*FIT, "-o", "x", "--structure", "2=round"], "'round'"),
        ([*FIT, "-o", "x", "--structure", "2=kron,kron"], "name=structure"),
        ([*FIT, "-o", "x", "--fisher", "empirical"], "empirical"),
        ([*FIT, "-o", "x", "--batch-size", "0"], "--batch-size"),
        ([*FIT, "-o", "x", "--last-layers", "two"], "--last-layers"),
        ([*PREDICT, "data.npz", "-o", "x.csv"], "--model"),
        (["outliers", "posterior.safetensors", "data.npz", *MODEL, "--by", "taste"], "taste"),
        (["acquire", "posterior.safetensors", "data.npz", *MODEL, "--count", "3", "--by", "taste"], "taste"),
        (["acquire", "posterior.safetensors", "data.npz", *MODEL], "--count"),
        (["fit", "--everything"], "--everything"),
    ],
)
def test_usage_errors_have_exit_code_two(arguments: list[str], expected: str, files: Workspace) -> None:
    result = run(*arguments)
    assert (result.code, result.out) == (2, "")
    assert expected in result.err
    assert "Traceback" not in result.err


def test_the_choices_are_those_of_the_library() -> None:
    scores = errbar.OutlierScores.__annotations__
    assert set(map(options.argument_of, get_args(options.SuspicionName))) == set(scores)


@pytest.mark.parametrize("package", ["pyarrow", "PIL"])
def test_without_an_extra_the_sentence_says_what_to_install(
    package: str, files: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "in.parquet").touch()
    data, extra = (str(tmp_path / "in.parquet"), "parquet") if package == "pyarrow" else ("pictures", "images")
    result = run("fit", "tiny_net:trained", data, "--last-layers", "1", "-o", str(tmp_path / "out"))
    assert result.code == 1
    assert f"pip install '.[{extra}]' in a clone of errbar" in result.err


# -------------------------------------------------------------------------------------------- processes of their own


def test_the_shell_completes_commands() -> None:
    asked = environment(_ERRBAR_COMPLETE="complete_bash", COMP_WORDS="errbar cal", COMP_CWORD="1")
    command = [sys.executable, *ERRBAR]
    result = subprocess.run(command, env=asked, capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.split() == ["calibrate", "calibrate-fusion"]


def test_a_fit_loads_no_report_and_no_plots(files: Workspace, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom errbar.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as left: assert not left.code\n"
        "print([name for name in sys.modules if name.startswith(('errbar.report', 'errbar.plots', 'errbar.serve'))])"
    )
    command = [sys.executable, "-c", script, *FIT, "-o", str(tmp_path / "p.safetensors")]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


LEFT_THREADS = """
import contextlib, os, sys, torch, errbar

@contextlib.contextmanager
def job():
    torch.distributed.init_process_group("gloo")
    yield
    torch.distributed.destroy_process_group()

if sys.argv[1] == "command":
    from errbar._distributed.team import job_of_torchrun as job
torch.manual_seed(0)
x = torch.randn(8, 4) + int(os.environ["RANK"])
before = len(os.listdir("/proc/self/task"))
with job(*[torch.device("cpu")] * (sys.argv[1] == "command")):
    posterior = errbar.fit(torch.nn.Linear(4, 3), [x], last_layers=1, prior=errbar.Prior(1.0))
    during = len(os.listdir("/proc/self/task"))
open(f"threads-{os.environ['RANK']}", "w").write(f"{during - before} {len(os.listdir('/proc/self/task')) - before}")
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
@pytest.mark.parametrize("who", ["command", "script"])
def test_no_thread_of_a_job_outlives_it(who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does aborts the process now and then, when the interpreter ends before it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(LEFT_THREADS)
    result = torchrun(2, "script.py", who)
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        during, after = map(int, (tmp_path / f"threads-{rank}").read_text().split())
        assert during > 0
        assert after == 0


def test_two_processes_fit_what_one_fits_and_one_of_them_speaks(files: Workspace, tmp_path: Path) -> None:
    both, alone = tmp_path / "both.safetensors", tmp_path / "alone.safetensors"
    said(*FIT, "-o", str(alone))
    result = torchrun(2, *ERRBAR, *FIT, "-o", str(both), "--json")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count('"command": "fit"') == 1
    assert result.stdout.count("\n") == 1
    first, second = (errbar.load(path, files.model) for path in (both, alone))
    assert first.information.n_samples == second.information.n_samples == len(files.train[0])
    torch.testing.assert_close(first.covariance(), second.covariance(), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_mistake_of_two_processes_is_told_once(files: Workspace, tmp_path: Path) -> None:
    result = torchrun(
        2, *ERRBAR, "fit", "tiny_net:trained", "wide.npz", "--last-layers", "1", "-o", str(tmp_path / "p")
    )
    assert result.returncode == 1
    assert result.stderr.count("errbar: The model failed on") == 1
    assert not (tmp_path / "p").exists()


@pytest.mark.slow
def test_what_cannot_be_shared_is_refused_in_several_processes(files: Workspace, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    result = torchrun(2, *ERRBAR, "export", "posterior.safetensors", "data.npz", *MODEL, "-o", str(output))
    assert result.returncode == 1
    assert "errbar: errbar export was started 2 times by torchrun; expected one process" in result.stderr
    assert not output.exists()
