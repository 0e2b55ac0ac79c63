"""`errbar autofit` and `errbar fit --auto`: the table, the file, the report, mistakes, and several processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import errbar
from command_line import CLASSES, Workspace, run, said
from processes import torchrun

AUTOFIT = ["autofit", "tiny_net:trained", "data.npz"]
ONE = ["--candidate", "last-layers=1"]
MODEL = ["--model", "tiny_net:trained"]


@pytest.fixture
def files(workspace: Workspace) -> Workspace:
    if not Path("chosen.safetensors").exists():
        said(*AUTOFIT, *ONE, "--class-names", ",".join(CLASSES), "-o", "chosen.safetensors")
    return workspace


def test_autofit_chooses_what_the_library_chooses_and_saves_it(workspace: Workspace, tmp_path: Path) -> None:
    output = tmp_path / "chosen.safetensors"
    facts = said(*AUTOFIT, *ONE, "--folds", "3", "--seed", "4", "-o", str(output))
    choice = errbar.autofit(
        workspace.model, [workspace.train], [workspace.validation], candidates=[{"last_layers": 1}], folds=3, seed=4
    )
    assert facts["command"] == "autofit"
    assert facts["reason"] == choice.reason
    assert [row["nll"] for row in facts["rows"]] == pytest.approx([row.nll for row in choice.rows], abs=1e-6)
    assert [row["parameters"] for row in facts["baselines"]] == ["softmax", "T alone"]
    assert facts["temperature"] == pytest.approx(choice.posterior.temperature, rel=1e-6)
    assert facts["bytes"] == output.stat().st_size
    loaded = errbar.load(output, workspace.model)
    x = workspace.test[0]
    torch.testing.assert_close(loaded.predict(x).pmf, choice.posterior.predict(x).pmf, rtol=1e-5, atol=1e-7)


def test_people_read_the_table(workspace: Workspace, tmp_path: Path) -> None:
    output = tmp_path / "chosen.safetensors"
    validation = ["--validation", "data.npz:validation"]
    result = run(*AUTOFIT, *validation, *ONE, "--no-progress", "-o", str(output))
    assert result.code == 0, result
    lines = result.out.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["prior", "T"], ["softmax", "1"], ["T", "alone"]]
    assert lines[-1].startswith(f"Saved: {output}, ")
    assert errbar.info(output).choice is not None


def test_fit_with_auto_is_autofit(workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    real = errbar.autofit

    def quick(*data: object, **options: object) -> errbar.Choice:
        given.update(options)
        return real(*data, **options | {"candidates": [{"last_layers": 1}]})  # type: ignore[arg-type]

    monkeypatch.setattr(errbar, "autofit", quick)
    output = tmp_path / "chosen.safetensors"
    facts = said("fit", "tiny_net:trained", "data.npz", "--auto", "--seconds", "500", "--seed", "3", "-o", str(output))
    assert (given["seconds"], given["seed"], given["candidates"]) == (500.0, 3, None)
    assert facts["reason"]
    assert errbar.info(output).choice is not None


def test_info_has_the_reason_and_the_report_the_table(files: Workspace, tmp_path: Path) -> None:
    table = errbar.info("chosen.safetensors").choice
    assert table is not None
    assert table.reason in run("info", "chosen.safetensors").out
    assert said("info", "chosen.safetensors")["choice"]["headings"] == list(table.headings)
    output = tmp_path / "report.html"
    said("evaluate", "chosen.safetensors", "data.npz", *MODEL, "--samples", "50", "--report", str(output))
    page = output.read_text(encoding="utf-8")
    assert '<section id="choice"' in page
    assert "What was tried" in page
    for row in table.rows:
        assert row[0] in page
    assert "softmax</th>" in page
    # A posterior that is calibrated again was not chosen.
    again = tmp_path / "again.safetensors"
    said("calibrate", "chosen.safetensors", "data.npz", *MODEL, "--samples", "50", "-o", str(again))
    other = tmp_path / "other.html"
    said("evaluate", str(again), "data.npz", *MODEL, "--samples", "50", "--report", str(other))
    assert '<section id="choice"' not in other.read_text(encoding="utf-8")


def test_groups_come_from_a_file(workspace: Workspace, tmp_path: Path) -> None:
    groups = tmp_path / "groups.npy"
    np.save(groups, np.arange(90) // 3)
    grouped = said(*AUTOFIT, *ONE, "--groups", str(groups), "-o", str(tmp_path / "a.safetensors"))
    choice = errbar.autofit(
        workspace.model,
        [workspace.train],
        [workspace.validation],
        candidates=[{"last_layers": 1}],
        groups=[n // 3 for n in range(90)],
    )
    assert grouped["baselines"][0]["standard_error"] == pytest.approx(choice.baselines[0].standard_error)


@pytest.fixture
def mistaken(files: Workspace) -> Workspace:
    np.save("few.npy", np.arange(3))
    np.save("square.npy", np.zeros((90, 2)))
    Path("text.npy").write_text("no array")
    x, y = files.train
    np.savez("bare.npz", x_train=x.numpy(), y_train=y.numpy(), x_validation=x.numpy())
    return files


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny_net:dataset", "-o", "n"], "no held-out data beside the training data tiny_net:dataset; expected --val"),
        (["compressed.npz", "-o", "n"], "no held-out data beside the training data compressed.npz; expected"),
        (["bare.npz", "-o", "n"], "The held-out data bare.npz:validation have no labels; expected them"),
        (["data.npz", "-o", "chosen.safetensors"], "The output chosen.safetensors exists already"),
        (["data.npz", "--validation", "nowhere.npz", "-o", "n"], "The data nowhere.npz do not exist"),
        (["data.npz", "--seconds", "0", "-o", "n"], "--seconds is 0; expected a positive number"),
        (["data.npz", "--memory", "much", "-o", "n"], "The memory is 'much'; expected bytes"),
        (["data.npz", "--candidate", "all", "-o", "n"], "The candidate is 'all'; expected names and values"),
        (["data.npz", "--candidate", "last-layers=x", "-o", "n"], "has last_layers 'x'; expected a number"),
        (["data.npz", "--candidate", "layers=1", "-o", "n"], "A candidate is {'layers': '1'}; expected a mapping"),
        (["data.npz", "--groups", "few.npy", "-o", "n"], "The groups few.npy are 3 values for 90 samples; expected"),
        (
            ["data.npz", "--groups", "square.npy", "-o", "n"],
            "The groups square.npy have shape (90, 2); expected an .npy",
        ),
        (["data.npz", "--groups", "text.npy", "-o", "n"], "The groups text.npy cannot be read"),
        (["data.npz", "--groups", "none.npy", "-o", "n"], "The groups none.npy cannot be read"),
        (["data.npz", "--folds", "91", "-o", "n"], "There are 90 held-out samples for folds=91; expected"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], message: str, mistaken: Workspace) -> None:
    result = run("autofit", "tiny_net:trained", *arguments)
    assert result.code == 1
    assert message in result.err.replace("\n", " ")
    assert result.out == ""
    assert not Path("n").exists()


def test_what_autofit_chooses_cannot_be_given_and_what_it_needs_only_with_it(workspace: Workspace) -> None:
    fit = ["fit", "tiny_net:trained", "data.npz", "-o", "n"]
    chosen = run(*fit, "--auto", "--prior", "3")
    assert (chosen.code, chosen.err) == (
        1,
        "errbar: --prior was given with --auto, which chooses it; expected one of the two.\n",
    )
    alone = run(*fit, "--last-layers", "1", "--seconds", "3")
    assert "--seconds was given without --auto; expected --auto with it, or errbar autofit." in alone.err
    assert run(*fit, "--auto", "--last-layers", "1").code == 1


def test_two_processes_choose_what_one_does_and_one_of_them_writes(files: Workspace, tmp_path: Path) -> None:
    output = tmp_path / "both.safetensors"
    result = torchrun(2, "-m", "errbar", *AUTOFIT, *ONE, "--no-progress", "-o", str(output))
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("Saved: ") == 1
    assert result.stdout.count("\nsoftmax ") == 1
    table, alone = errbar.info(output).choice, errbar.info("chosen.safetensors").choice
    assert table is not None
    assert alone is not None
    # The order of the held-out samples is another, and so are the folds; the plain softmax has none.
    assert [row[0] for row in table.rows] == [row[0] for row in alone.rows]
    nll = table.headings.index("NLL")
    assert table.rows[0][nll] == alone.rows[0][nll]
    grouped = torchrun(2, "-m", "errbar", *AUTOFIT, "--groups", "few.npy", "-o", str(tmp_path / "no"))
    assert grouped.returncode != 0
    assert "--groups does not work with several processes" in grouped.stderr
