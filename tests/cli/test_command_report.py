"""`errbar evaluate --report` and `errbar export`: the files that they write, and what they say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import errbar
from command_line import CLASSES, Workspace, run, said
from errbar._export.write import ON_REQUEST, OUTPUTS
from errbar.cli import main, options

MODEL = ["--model", "tiny_net:trained"]
EVALUATE = ["evaluate", "calibrated.safetensors", "data.npz", *MODEL]


@pytest.fixture
def files(workspace: Workspace) -> Workspace:
    """A calibrated posterior with names of classes, and modules whose data fail on the way."""
    if not Path("calibrated.safetensors").exists():
        fit = ["fit", "tiny_net:trained", "data.npz", "--last-layers", "2", "--prior", "2"]
        said(*fit, "--class-names", ",".join(CLASSES), "-o", "posterior.safetensors")
        said("calibrate", "posterior.safetensors", "data.npz", *MODEL, "-o", "calibrated.safetensors")
        Path("bad_data.py").write_text(
            "from torch.utils.data import Dataset\n"
            "import torch\n\n\n"
            "class Broken(Dataset):\n"
            "    def __len__(self):\n"
            "        return 5\n\n"
            "    def __getitem__(self, index):\n"
            "        raise KeyError('no row')\n\n\n"
            "def stream():\n"
            "    yield torch.zeros(2, 4, dtype=torch.float64)\n"
            "    raise OSError('the disk is gone.\\nreally')\n\n\n"
            "def fails():\n"
            "    return 1 / 0\n\n\n"
            "def workers():\n"
            "    from torch.utils.data import DataLoader\n"
            "    return DataLoader(Broken(), num_workers=1)\n"
        )
    return workspace


def test_evaluate_writes_a_page_and_says_the_same_scores(files: Workspace, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    plain = said(*EVALUATE, "--samples", "200")
    facts = said(*EVALUATE, "--samples", "200", "--report", str(output), "--outliers", "data.npz:train")
    assert facts["scores"] == plain["scores"]
    assert facts["verdict"] == plain["verdict"]
    assert facts["bytes"] == output.stat().st_size
    page = output.read_text(encoding="utf-8")
    assert facts["verdict"] in page.replace("<i>T</i><sub>c</sub>", "T_c")
    assert (
        f"errbar evaluate calibrated.safetensors data.npz --model tiny_net:trained --samples 200 --report {output}"
        in page
    )
    assert errbar.info("calibrated.safetensors").content in page
    assert errbar.info("calibrated.safetensors").weights in page
    assert "Inputs from elsewhere" in page
    assert all(name in page for name in CLASSES)


def test_scores_come_with_intervals_and_the_verdict_is_printed(files: Workspace) -> None:
    facts = said(*EVALUATE)
    for found in facts["scores"].values():
        for name in ("accuracy", "nll", "brier", "overconfidence"):
            low, high = found[f"{name}_interval"]
            assert low < found[name] < high
    printed = run(*EVALUATE)
    assert (printed.code, printed.err) == (0, "")
    assert " ".join(facts["verdict"].split()) in " ".join(printed.out.split())


def test_rows_are_shown_as_pictures_where_they_are_some(files: Workspace, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    said(*EVALUATE, "--samples", "50", "--report", str(output), "--picture-shape", "2x2")
    # Two pixels each way are no picture that anybody could look at.
    assert "<img" not in output.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--outliers", "data.npz"], "--outliers is for the report; expected --report FILE with it."),
        (["--picture-shape", "2x2"], "--picture-shape is for the report"),
        (["--report", "report.pdf"], "ends in '.pdf'; expected .html"),
        (["--report", "nowhere/report.html"], "expected a folder"),
        (["--report", "calibrated.html"], "exists already"),
        (["--report", "new.html", "--picture-shape", "big"], "The picture shape is 'big'"),
        (["--report", "new.html", "--picture-shape", "9x9"], "An input has 4 numbers; expected 1×9×9"),
        (["--report", "new.html", "--outliers", "nowhere.npz"], "nowhere.npz do not exist"),
    ],
)
def test_a_mistake_about_the_report_is_one_sentence(arguments: list[str], expected: str, files: Workspace) -> None:
    Path("calibrated.html").touch()
    result = run(*EVALUATE, *arguments, "--samples", "20", "--json")
    assert (result.code, result.out) == (1, "")
    assert expected in result.err
    assert result.err.count("\n") == 1
    assert not Path("new.html").exists()


# ------------------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_an_exported_graph_predicts_what_errbar_predicts(suffix: str, files: Workspace, tmp_path: Path) -> None:
    output = tmp_path / f"graph.{suffix}"
    command = ["export", "calibrated.safetensors", "data.npz", *MODEL]
    only = ["--only", "pmf", "--only", "std", "--only", "risk"] if suffix == "onnx" else []
    if suffix == "onnx":
        # ONNX Runtime has no double-precision version of everything; the tiny network is in float64.
        command = float32(files, tmp_path)
    facts = said(*command, "--risk", "0.05", "--samples", "200", "--seed", "3", *only, "-o", str(output))
    assert facts["outputs"] == (["pmf", "std", "risk"] if only else list(OUTPUTS))
    assert facts["bytes"] == output.stat().st_size
    model = files.model if suffix == "pt2" else files.model.float()
    source = "calibrated.safetensors" if suffix == "pt2" else tmp_path / "single.safetensors"
    x = files.test[0].to(next(model.parameters()).dtype)
    expected = errbar.load(source, model).predict(x, 200, 3)
    if suffix == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(output, providers=["CPUExecutionProvider"])
        pmf, risk = session.run(["pmf", "risk"], {"x": x.numpy()})
        np.testing.assert_allclose(risk[:, 0], expected.risk(0.05).numpy(), atol=0.011)
    else:
        pmf = torch.export.load(output).module()(x)["pmf"].detach().numpy()
    np.testing.assert_allclose(pmf, expected.pmf.numpy(), atol=1e-4)
    files.model.double()


def float32(files: Workspace, folder: Path) -> list[str]:
    """The command that exports a posterior of the same network in float32, up to its options."""
    Path("single_net.py").write_text("import tiny_net\n\n\ndef model():\n    return tiny_net.trained().float()\n")
    data = {name: part.float().numpy() for name, part in (("x_train", files.train[0]), ("x_test", files.test[0]))}
    np.savez(folder / "single.npz", **data)
    source = str(folder / "single.safetensors")
    said("fit", "single_net:model", str(folder / "single.npz"), "--last-layers", "2", "-o", source)
    return ["export", source, str(folder / "single.npz"), "--model", "single_net:model"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-o", "graph.tflite"], "expected a name that ends in .onnx or .pt2"),
        (["-o", "graph"], "expected a name that ends in .onnx or .pt2"),
        (["-o", "posterior.safetensors"], "exists already"),
        (["-o", "graph.pt2", "--risk", "2"], "expected a probability"),
        (["-o", "graph.pt2", "--only", "risk"], "there is no threshold for it"),
        (["-o", "nowhere/graph.pt2"], "expected a folder"),
    ],
)
def test_a_mistake_about_an_export_is_one_sentence(arguments: list[str], expected: str, files: Workspace) -> None:
    result = run("export", "posterior.safetensors", "data.npz", *MODEL, *arguments, "--json")
    assert (result.code, result.out) == (1, "")
    assert expected in result.err
    assert result.err.count("\n") == 1
    assert not Path("graph.pt2").exists()


def test_the_outputs_to_choose_from_are_those_of_the_library() -> None:
    assert [options.argument_of(choice) for choice in options.OutputName] == [*OUTPUTS, *ON_REQUEST]


# ----------------------------------------------------------------------------------------- mistakes in the user's code


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("bad_data:Broken", "Your code raised KeyError: 'no row', in line 10 of "),
        ("bad_data:workers", "Your code raised KeyError: 'no row', in line 10 of "),
        ("bad_data:stream", "Your code raised OSError: the disk is gone, in line 15 of "),
        ("bad_data:fails", "raised ZeroDivisionError: division by zero (in line 19 of "),
    ],
)
def test_an_exception_of_the_users_code_is_one_sentence_with_its_place(
    data: str, expected: str, files: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["fit", "tiny_net:trained", data, "--last-layers", "1", "-o", str(tmp_path / "p")]
    result = run(*command)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("errbar: ")
    assert expected in result.err
    assert "bad_data.py" in result.err
    assert result.err.count("\n") == 1
    with_traceback = run("--traceback", *command)
    monkeypatch.setenv("ERRBAR_TRACEBACK", "1")
    for shown in (with_traceback, run(*command)):
        assert shown.code == 1
        assert "Traceback (most recent call last)" in shown.err
        assert shown.err.endswith(result.err)


@pytest.mark.parametrize(
    ("sentence", "arguments", "expected"),
    [
        (
            "check their dtype, or pass unpack= if the batch holds something else.",
            {},
            "or change them with --transform.",
        ),
        (
            "Fit (last_layers=1) with fisher='eta' or structure='kron', not structure='dense'.",
            {"last_layers": 1, "fisher": "eta", "structure": ("kron", "dense")},
            "(--last-layers 1) with --fisher eta or --structure kron, not --structure dense.",
        ),
        ("Pass leave_out=False for data", {}, "Use --held-out for data"),
        ("Leave num_replicas= and rank= out.", {}, "Leave num_replicas= and rank= out."),
    ],
)
def test_advice_is_in_the_words_of_the_command_line(sentence: str, arguments: dict[str, object], expected: str) -> None:
    assert expected in main.sentence_of(errbar.ErrbarError(sentence, arguments=arguments))


def constants(tree: ast.AST) -> str:
    """All texts in a piece of code, as one; the numbers in formatted ones are left out."""
    return " ".join(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str)


def test_advice_that_is_replaced_is_what_the_library_says() -> None:
    package = Path(errbar.__file__).parent
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in package.glob("_*/*.py")]
    sentences = "\n".join(constants(tree) for tree in trees)
    for written in main.ADVICE:
        assert written in sentences


OPTIONS = "last_layers|parameters|structure|precision|fisher|samples|seed|prior|checkpoint|every|draws"


def test_errors_carry_the_arguments_that_they_write_out() -> None:
    """Else the command line would tell its users to write Python."""
    package = Path(errbar.__file__).parent
    checked = 0
    for path in package.glob("_*/*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id.endswith("Error")):
                continue
            names = {match[1] for text in call.args for match in re.finditer(rf"\b({OPTIONS})=[\w']", constants(text))}
            carried = [keyword.value for keyword in call.keywords if keyword.arg == "arguments"]
            if names and call.func.id != "SelectionError":  # commands ask for exactly one selection themselves
                assert carried, f"{path.name}, line {call.lineno}"
                checked += 1
    assert checked >= 6


def test_a_path_that_cannot_be_written_asks_for_no_report(files: Workspace) -> None:
    Path("file").touch()
    result = run("demo", "--output", "file/inside")
    assert (result.code, result.out) == (1, "")
    assert "NotADirectoryError" in result.err
    assert "report it" not in result.err


def test_verify_without_weights_says_how_to_give_them(files: Workspace) -> None:
    result = run("verify", "posterior.safetensors", "tiny_net:untrained")
    assert result.code == 1
    assert "Give its weights with --weights." in result.err


def test_an_exception_of_errbar_itself_asks_for_a_report(files: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:

    # A callable whose code no file holds, as if it were a library's.
    code = compile("def fails(*_, **__):\n    raise RuntimeError('odd')\n", "<string>", "exec")
    made: dict[str, object] = {}
    exec(code, made)
    monkeypatch.setattr(errbar, "collect", made["fails"])
    result = run("fit", "tiny_net:trained", "data.npz", "--last-layers", "1", "-o", "never")
    assert result.code == 1
    assert "errbar failed with RuntimeError: odd" in result.err
    assert "please report it" in result.err
