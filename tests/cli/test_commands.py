"""Every command from end to end: what the library says is what the files hold, and --json is one JSON object."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import errbar
from command_line import CLASSES, Workspace, run, said
from errbar.cli.images import ImageRows
from errbar.cli.rows import ArrayRows
from processes import environment

FLOAT = {"rtol": 1e-6, "atol": 1e-9}


@pytest.fixture
def files(workspace: Workspace) -> Workspace:
    """The workspace with a posterior and a calibrated one."""
    if not Path("calibrated.safetensors").exists():
        said("fit", "tiny_net:trained", "data.npz", "--last-layers", "2", "--prior", "2", "-o", "posterior.safetensors")
        command = ["calibrate", "posterior.safetensors", "data.npz", "--model", "tiny_net:trained"]
        said(*command, "-o", "calibrated.safetensors")
    return workspace


def library(workspace: Workspace) -> errbar.Posterior:
    data = TensorDataset(*workspace.train)
    return errbar.fit(workspace.model, data, last_layers=2, prior=errbar.Prior(2.0))


# ------------------------------------------------------------------------------------------- fit, calibrate, update


def test_fit_writes_what_the_library_fits(files: Workspace) -> None:
    loaded = errbar.load("posterior.safetensors", files.model)
    torch.testing.assert_close(loaded.covariance(), library(files).covariance())
    assert loaded.prior.precision == 2.0


def test_fit_says_what_it_made(workspace: Workspace, tmp_path: Path) -> None:
    output = tmp_path / "p.safetensors"
    command = ["fit", "tiny_net:trained", "data.npz", "--parameters", "2", "--prior", "2=3.0", "-o", str(output)]
    facts = said(*command, "--class-names", ",".join(CLASSES), "--structure", "kron", "--fisher", "eta")
    assert facts["samples"] == len(workspace.train[0])
    assert (facts["structure"], facts["fisher"], facts["prior"]) == ("kron", "eta", {"2": 3.0})
    assert (facts["layers"], facts["parameters"], facts["classes"]) == (["2"], 27, list(CLASSES))
    assert facts["bytes"] == output.stat().st_size
    assert errbar.info(output).classes == CLASSES


def test_a_fit_has_a_structure_for_each_layer(workspace: Workspace, tmp_path: Path) -> None:
    output = tmp_path / "mixed.safetensors"
    facts = said(
        *("fit", "tiny_net:trained", "data.npz", "-o", str(output), "--parameters", "all"),
        *("--structure", "0=kron,*=block"),
    )
    assert facts["structure"] == "0=kron,*=block"
    lines = run("info", str(output)).out.splitlines()
    assert "structure         kron (0) and block (the rest)" in lines
    refused = run(
        *("fit", "tiny_net:trained", "data.npz", "-o", str(tmp_path / "other.safetensors")),
        *("--parameters", "all", "--structure", "tail=kron,*=block"),
    )
    assert refused.code == 1
    assert "structure names 'tail', which no selected parameter lies in" in refused.err
    table = run("plan", "tiny_net:trained", "data.npz", "--structure", "0=kron,*=block").out
    assert table.splitlines()[-1].endswith("kron (0) and block (the rest)")


def test_fit_by_drawn_labels_is_that_of_the_library(workspace: Workspace, tmp_path: Path) -> None:
    output = tmp_path / "p.safetensors"
    command = ["fit", "tiny_net:trained", "data.npz", "--parameters", "vectors", "-o", str(output)]
    facts = said(*command, "--fisher", "sampled", "--draws", "3", "--seed", "5")
    assert facts["fisher"] == "sampled"
    data = TensorDataset(*workspace.train)
    options = {"parameters": "vectors", "fisher": "sampled", "draws": 3, "seed": 5}
    expected = errbar.fit(workspace.model, data, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(errbar.load(output, workspace.model).covariance(), expected.covariance())


def test_the_prior_can_be_that_of_weight_decay_or_the_best_by_evidence(workspace: Workspace, tmp_path: Path) -> None:
    command = ["fit", "tiny_net:trained", "data.npz", "--last-layers", "1"]
    decayed = said(*command, "--weight-decay", "0.01", "-o", str(tmp_path / "a.safetensors"))
    assert decayed["prior"] == pytest.approx(0.01 * len(workspace.train[0]))
    best = said(*command, "--prior", "evidence", "-o", str(tmp_path / "b.safetensors"))
    information = errbar.collect(workspace.model, TensorDataset(*workspace.train), last_layers=1)
    assert best["prior"] == errbar.choose_prior(information).precision
    assert best["log_evidence"] > decayed["log_evidence"]


def test_a_fit_with_a_checkpoint_continues_from_it(workspace: Workspace, tmp_path: Path) -> None:
    command = ["fit", "tiny_net:trained", "data.npz", "--last-layers", "1", "--batch-size", "16", "--every", "2"]
    command += ["--checkpoint", str(tmp_path / "checkpoint")]
    said(*command, "-o", str(tmp_path / "a.safetensors"))
    assert errbar.info(tmp_path / "checkpoint").kind == "checkpoint"
    said(*command, "-o", str(tmp_path / "b.safetensors"))
    first, second = (errbar.load(tmp_path / name, workspace.model) for name in ("a.safetensors", "b.safetensors"))
    assert torch.equal(first.covariance(), second.covariance())


def test_calibrate_writes_what_the_library_finds(files: Workspace) -> None:
    expected = errbar.calibrate(library(files), TensorDataset(*files.validation))
    found = errbar.load("calibrated.safetensors", files.model)
    assert found.temperature == pytest.approx(expected.temperature, rel=1e-4)
    assert found.covariance_scale == pytest.approx(expected.covariance_scale, rel=1e-3)


def test_calibrate_can_fit_one_of_the_two(files: Workspace, tmp_path: Path) -> None:
    command = ["calibrate", "posterior.safetensors", "data.npz", "--model", "tiny_net:trained", "--objective", "brier"]
    facts = said(*command, "--only", "temperature", "-o", str(tmp_path / "c.safetensors"))
    assert facts["covariance_scale"] == 1.0
    assert facts["temperature"] != 1.0


@pytest.mark.parametrize(
    ("options", "fitted"),
    [
        (["--softening"], ("temperature", "covariance_scale", "softening")),
        (["--softening", "--only", "temperature"], ("temperature", "softening")),
        ([], ("temperature", "covariance_scale")),
    ],
)
def test_calibrate_fits_the_softening_if_asked(
    options: list[str], fitted: tuple[str, ...], files: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def calibrate(posterior: errbar.Posterior, data: Any, **choices: Any) -> errbar.Posterior:
        asked.append(choices["fit"])
        return posterior.with_calibration(softening=1.5)

    monkeypatch.setattr(errbar, "calibrate", calibrate)
    command = ["calibrate", "posterior.safetensors", "data.npz", "--model", "tiny_net:trained", *options]
    facts = said(*command, "-o", str(tmp_path / "c.safetensors"))
    assert asked == [fitted]
    assert facts["softening"] == 1.5
    assert errbar.load(tmp_path / "c.safetensors", files.model).softening == 1.5


def test_a_discounted_update_keeps_the_softening(files: Workspace, tmp_path: Path) -> None:
    library(files).with_calibration(temperature=1.2, softening=1.5).save(tmp_path / "soft.safetensors")
    command = ["update", str(tmp_path / "soft.safetensors"), "data.npz", "--model", "tiny_net:trained"]
    facts = said(*command, "--discount", "0.5", "-o", str(tmp_path / "after.safetensors"))
    assert (facts["temperature"], facts["softening"]) == (1.2, 1.5)


def test_update_and_forget_undo_each_other_and_tell_the_change_of_the_variance(
    files: Workspace, tmp_path: Path
) -> None:
    more, back = tmp_path / "more.safetensors", tmp_path / "back.safetensors"
    about = ["data.npz:validation", "--model", "tiny_net:trained"]
    grown = said("update", "calibrated.safetensors", *about, "-o", str(more))
    assert grown["samples"] == len(files.train[0]) + len(files.validation[0])
    assert grown["mean_variance_after"] < grown["mean_variance_before"]
    change = grown["mean_variance_after"] / grown["mean_variance_before"] - 1
    assert grown["mean_variance_change"] == pytest.approx(change)
    shrunk = said("forget", str(more), *about, "-o", str(back))
    assert shrunk["mean_variance_after"] == pytest.approx(grown["mean_variance_before"])
    calibrated = errbar.load("calibrated.safetensors", files.model)
    torch.testing.assert_close(errbar.load(back, files.model).covariance(), calibrated.covariance())
    assert errbar.load(back, files.model).temperature == calibrated.temperature


def test_a_discount_makes_earlier_data_count_less(files: Workspace, tmp_path: Path) -> None:
    output = tmp_path / "drifted.safetensors"
    command = ["update", "posterior.safetensors", "data.npz:validation", "--model", "tiny_net:trained"]
    said(*command, "--discount", "0.5", "-o", str(output))
    new = errbar.collect(files.model, TensorDataset(*files.validation), last_layers=2)
    expected = errbar.condition(library(files).information * 0.5 + new, errbar.Prior(2.0))
    torch.testing.assert_close(errbar.load(output, files.model).covariance(), expected.covariance())


def test_merge_adds_up_files(workspace: Workspace, tmp_path: Path) -> None:
    halves = [str(tmp_path / f"{name}.safetensors") for name in ("first", "second")]
    for name, output in zip(("train", "validation"), halves, strict=True):
        said("fit", "tiny_net:trained", f"data.npz:{name}", "--last-layers", "1", "-o", output)
    total = len(workspace.train[0]) + len(workspace.validation[0])
    summed = said("merge", *halves, "-o", str(tmp_path / "sum"))
    assert (summed["kind"], summed["samples"]) == ("information", total)
    made = said("merge", *halves, "--model", "tiny_net:trained", "--prior", "3", "-o", str(tmp_path / "posterior"))
    assert (made["kind"], made["samples"], made["prior"]) == ("posterior", total, 3.0)
    data = [workspace.train, workspace.validation]
    expected = errbar.fit(workspace.model, data, last_layers=1, prior=errbar.Prior(3.0))
    found = errbar.load(tmp_path / "posterior", workspace.model)
    torch.testing.assert_close(found.covariance(), expected.covariance())


# ---------------------------------------------------------------------------------------------------- predict, fuse


def read(path: Path) -> dict[str, np.ndarray]:
    """The columns of any of the formats; those of a .csv put together again."""
    if path.suffix == ".npz":
        return dict(np.load(path))
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {name: np.array([row[name] for row in rows]) for name in rows[0]}
    if path.suffix == ".parquet":
        table = pytest.importorskip("pyarrow.parquet").read_table(path)
        return {name: np.array(table[name].to_pylist()) for name in table.column_names}
    with path.open(newline="", encoding="utf-8") as stream:
        lines = list(csv.DictReader(stream))
    found: dict[str, np.ndarray] = {}
    for name in ("input", "label", "confidence", "mutual_information"):
        found[name] = np.array([float(line[name]) for line in lines])
    for name in ("pmf", "std", "risk_0.05", "risk_by_class"):
        found[name] = np.array([[float(line[f"{name}_{number}"]) for number in range(3)] for line in lines])
    pairs = [(i, j) for i in range(3) for j in range(3)]
    flat = np.array([[float(line[f"covariance_{i}_{j}"]) for i, j in pairs] for line in lines])
    return found | {"covariance": flat.reshape(-1, 3, 3)}


def assert_equal(found: Any, expected: Tensor) -> None:
    np.testing.assert_allclose(found, expected.cpu().numpy(), **FLOAT)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "npz", "parquet"])
def test_predict_writes_what_the_library_predicts(suffix: str, files: Workspace, tmp_path: Path) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    output = tmp_path / f"out.{suffix}"
    command = ["predict", "calibrated.safetensors", "data.npz", "--model", "tiny_net:trained", "-o", str(output)]
    options = ["--risk", "0.05", "--risk", "0.1,0.2,0.3", "--covariance", "--samples", "200", "--seed", "3"]
    facts = said(*command, *options, "--batch-size", "7")
    found = read(output)
    prediction = errbar.load("calibrated.safetensors", files.model).predict(files.test[0], 200, 3)
    assert facts["inputs"] == len(files.test[0]) == len(found["input"])
    assert facts["mean_confidence"] == pytest.approx(float(prediction.confidence.mean()))
    assert found["input"].tolist() == list(range(len(prediction)))
    assert found["label"].tolist() == prediction.label.tolist()
    for name in ("confidence", "mutual_information", "pmf", "std", "covariance"):
        assert_equal(found[name], getattr(prediction, name))
    assert_equal(found["risk_0.05"], prediction.risk(0.05))
    assert_equal(found["risk_by_class"], prediction.risk(torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)))


def test_predictions_have_the_names_of_classes(workspace: Workspace, tmp_path: Path) -> None:
    posterior, output = tmp_path / "p.safetensors", tmp_path / "out.csv"
    command = ["fit", "tiny_net:trained", "data.npz", "--last-layers", "1", "--class-names", "classes.txt"]
    said(*command, "-o", str(posterior))
    said("predict", str(posterior), "data.npz", "--model", "tiny_net:trained", "-o", str(output))
    with output.open(newline="", encoding="utf-8") as stream:
        first = next(csv.DictReader(stream))
    assert first["class"] == CLASSES[int(first["label"])]
    assert {f"pmf_{name}" for name in CLASSES} <= set(first)


def test_a_prediction_that_fails_on_the_way_leaves_the_old_file(files: Workspace, tmp_path: Path) -> None:
    x = files.test[0].numpy().copy()
    x[40] = np.nan
    np.savez(tmp_path / "broken.npz", x=x)
    output = tmp_path / "out.jsonl"
    output.write_text("before")
    command = ["predict", "calibrated.safetensors", str(tmp_path / "broken.npz"), "--model", "tiny_net:trained"]
    result = run(*command, "-o", str(output), "--force", "--batch-size", "8")
    assert (result.code, result.out) == (1, "")
    assert "NaN" in result.err
    assert output.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.npz", "out.jsonl"]


def test_fuse_of_classifiers_is_that_of_the_library(files: Workspace, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    said("fit", "tiny_net:other", "data.npz", "--last-layers", "1", "-o", str(other))
    output = tmp_path / "out.npz"
    command = ["fuse", "data.npz", "-p", "posterior.safetensors", "--model", "tiny_net:trained", "-p", str(other)]
    said(*command, "--model", "tiny_net:other", "-o", str(output), "--risk", "0.05", "--batch-size", "9")
    second = errbar.fit(files.other, TensorDataset(*files.train), last_layers=1)
    both = [posterior.logits(files.test[0]) for posterior in (library(files), second)]
    expected = errbar.fuse(both).predict()
    assert_equal(np.load(output)["pmf"], expected.pmf)
    assert_equal(np.load(output)["risk_0.05"], expected.risk(0.05))


def test_classifiers_of_one_architecture_share_the_model_and_not_the_weights(files: Workspace, tmp_path: Path) -> None:
    parts = []
    for name, model in (("trained", files.model), ("other", files.other)):
        torch.save(model.state_dict(), tmp_path / f"{name}.pt")
        posterior = str(tmp_path / f"{name}.safetensors")
        weights = ["--weights", str(tmp_path / f"{name}.pt")]
        said("fit", "tiny_net:untrained", "data.npz", "--last-layers", "1", *weights, "-o", posterior)
        parts += ["-p", posterior, *weights]
    output = tmp_path / "out.npz"
    said("fuse", "data.npz", *parts, "--model", "tiny_net:untrained", "-o", str(output))
    data = TensorDataset(*files.train)
    both = [errbar.fit(model, data, last_layers=1).logits(files.test[0]) for model in (files.model, files.other)]
    assert_equal(np.load(output)["pmf"], errbar.fuse(both).predict().pmf)


def test_fuse_of_frames_is_that_of_the_library(files: Workspace, tmp_path: Path) -> None:
    output = tmp_path / "out.npz"
    command = ["fuse", "data.npz", "-p", "posterior.safetensors", "--model", "tiny_net:trained", "--frames", "5"]
    facts = said(*command, "-o", str(output))
    assert facts["inputs"] == len(files.test[0]) // 5
    posterior = library(files)
    expected = [errbar.Track(posterior).add(files.test[0][i : i + 5]) for i in range(0, 60, 5)]
    assert_equal(np.load(output)["pmf"], torch.cat([one.predict().pmf for one in expected]))


@pytest.mark.filterwarnings("ignore::errbar.FusionNotice")
def test_fuse_of_frames_with_the_covariance_between_them_is_that_of_the_library(
    files: Workspace, tmp_path: Path
) -> None:
    output = tmp_path / "out.npz"
    command = ["fuse", "data.npz", "-p", "posterior.safetensors", "--model", "tiny_net:trained", "--frames", "5"]
    said(*command, "--joint", "-o", str(output))
    posterior = library(files)
    expected = [errbar.fuse_frames(posterior.joint_logits(files.test[0][i : i + 5])) for i in range(0, 60, 5)]
    assert_equal(np.load(output)["pmf"], torch.cat([one.predict().pmf for one in expected]))


# ---------------------------------------------------------------------------------------- evaluate, outliers, plan


def test_evaluate_tells_the_metrics_before_and_after(files: Workspace) -> None:
    facts = said("evaluate", "calibrated.safetensors", "data.npz", "--model", "tiny_net:trained", "--bins", "5")
    after = errbar.load("calibrated.safetensors", files.model)
    before = after.with_calibration(temperature=1.0, covariance_scale=1.0)
    x, y = files.test
    pmfs = {"before_calibration": before.predict(x).pmf, "after_calibration": after.predict(x).pmf}
    pmfs["network"] = torch.softmax(files.model(x), 1).detach()
    assert set(facts["scores"]) == set(pmfs)
    for name, pmf in pmfs.items():
        for metric in ("accuracy", "nll", "brier", "aurc"):
            assert facts["scores"][name][metric] == pytest.approx(getattr(errbar.metrics, metric)(pmf, y), rel=1e-6)
        assert facts["scores"][name]["ece"] == pytest.approx(errbar.metrics.ece(pmf, y, 5), rel=1e-5)
    assert facts["temperature"] == after.temperature


def test_without_calibration_there_is_nothing_after_it(files: Workspace) -> None:
    facts = said("evaluate", "posterior.safetensors", "data.npz", "--model", "tiny_net:trained")
    assert set(facts["scores"]) == {"network", "before_calibration"}


def test_outliers_ranks_a_wrong_label_first(files: Workspace, tmp_path: Path) -> None:
    x, y = files.train
    sure = int(errbar.load("posterior.safetensors", files.model).predict(x).pmf.gather(1, y[:, None]).argmax())
    wrong = y.clone()
    wrong[sure] = (wrong[sure] + 1) % 3
    np.savez(tmp_path / "wrong.npz", x=x.numpy(), y=wrong.numpy())
    output = tmp_path / "ranked.csv"
    command = ["outliers", "posterior.safetensors", str(tmp_path / "wrong.npz"), "--model", "tiny_net:trained"]
    facts = said(*command, "--top", "3", "-o", str(output))
    assert (facts["inputs"], facts["by"], len(facts["outliers"])) == (len(x), "label_suspicion", 3)
    assert facts["outliers"][0]["input"] == sure
    assert facts["outliers"][0]["label"] == int(wrong[sure])
    with output.open(newline="", encoding="utf-8") as stream:
        ranked = [int(line["input"]) for line in csv.DictReader(stream)]
    posterior = errbar.load("posterior.safetensors", files.model)
    expected = errbar.rank_outliers(posterior, [(x, wrong)], by="label_suspicion")
    assert ranked == expected.tolist()


def test_outliers_without_labels_are_ranked_by_mutual_information(files: Workspace, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=files.test[0].numpy())
    command = ["outliers", "posterior.safetensors", str(tmp_path / "x.npz"), "--model", "tiny_net:trained"]
    facts = said(*command, "--held-out")
    posterior = errbar.load("posterior.safetensors", files.model)
    expected = errbar.rank_outliers(posterior, [files.test[0]])
    assert facts["by"] == "mutual_information"
    assert [row["input"] for row in facts["outliers"]] == expected[:20].tolist()


def test_acquire_chooses_what_to_label_next(files: Workspace, tmp_path: Path) -> None:
    x = files.test[0]
    np.savez(tmp_path / "pool.npz", x_pool=x.numpy())
    output = tmp_path / "chosen.csv"
    command = ["acquire", "posterior.safetensors", str(tmp_path / "pool.npz"), "--model", "tiny_net:trained"]
    facts = said(*command, "-k", "4", "-o", str(output))
    posterior = errbar.load("posterior.safetensors", files.model)
    expected = errbar.acquire(posterior, [x], 4).tolist()
    assert (facts["by"], facts["chosen"], facts["indices"]) == ("information", expected, expected)
    with output.open(newline="", encoding="utf-8") as stream:
        assert [int(line["input"]) for line in csv.DictReader(stream)] == expected
    # Labels in the data are ignored.
    facts = said("acquire", "posterior.safetensors", "data.npz:test", *command[3:], "-k", "4", "--by", "entropy")
    assert facts["indices"] == errbar.acquire(posterior, [x], 4, by="entropy").tolist()


def test_plan_lists_the_options_and_the_best(workspace: Workspace) -> None:
    facts = said("plan", "tiny_net:trained", "data.npz", "--memory", "1GiB", "--batch-size", "32")
    assert (facts["memory"], facts["batch"]) == (2**30, 32)
    assert facts["best"]["structure"] == "dense"
    assert {option["structure"] for option in facts["options"]} == {"dense", "block", "kron", "lowrank", "diag"}
    assert facts["best"]["parameters"] == "all"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (["--last-layers", "1"], {"last_layers": 1, "parameters": None}),
        (["--parameters", "all"], {"last_layers": None, "parameters": "all"}),
    ],
)
def test_plan_is_about_what_is_asked(asked: list[str], expected: dict[str, object], workspace: Workspace) -> None:
    facts = said("plan", "tiny_net:trained", "data.npz", *asked, "--structure", "kron")
    (option,) = facts["options"]
    assert option["structure"] == "kron"
    assert {name: option[name] for name in expected} == expected


# ----------------------------------------------------------------------------------------------------------- people


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["evaluate", "calibrated.safetensors", "data.npz", "--model", "tiny_net:trained"], "after calibration"),
        (["outliers", "posterior.safetensors", "data.npz", "--model", "tiny_net:trained"], "label suspicion"),
        (["plan", "tiny_net:trained", "data.npz"], "structure"),
        (["info", "posterior.safetensors"], "n parameters"),
        (["verify", "posterior.safetensors", "tiny_net:trained"], "is whole"),
    ],
)
def test_people_get_tables_and_programs_one_json_object(command: list[str], expected: str, files: Workspace) -> None:
    table = run(*command)
    assert (table.code, table.err) == (0, "")
    assert expected in table.out
    facts = said(*command)
    assert facts["command"] == command[0]


def test_warnings_are_notices(files: Workspace, tmp_path: Path) -> None:
    # Labels that the network is always right about want no error bars: the best scale lies at the edge of the search.
    np.savez(tmp_path / "two.npz", x=files.test[0][:2].numpy(), y=files.model(files.test[0][:2]).argmax(1).numpy())
    command = ["calibrate", "posterior.safetensors", str(tmp_path / "two.npz"), "--model", "tiny_net:trained"]
    result = run(*command, "--only", "covariance-scale", "-o", str(tmp_path / "c.safetensors"), "--json")
    assert result.code == 0
    assert json.loads(result.out)["notices"][0].startswith("The best covariance scale lies at the edge")
    assert result.err.startswith("errbar: note: The best covariance scale")


# --------------------------------------------------------------------------------------------------- models and data


def test_weights_from_before_batch_norms_counted_batches_are_taken(workspace: Workspace, tmp_path: Path) -> None:
    from errbar.cli.models import load_weights

    model, other = (torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)) for _ in range(2))
    state = {name: value for name, value in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    torch.save(state, tmp_path / "old.pt")
    load_weights(other, tmp_path / "old.pt")
    torch.testing.assert_close(other.state_dict(), model.state_dict())
    del state["1.running_mean"]
    torch.save(state, tmp_path / "less.pt")
    with pytest.raises(errbar.MismatchError, match=r"1\.running_mean missing"):
        load_weights(other, tmp_path / "less.pt")


@pytest.mark.parametrize("form", ["safetensors", "pt", "state_dict", "wrapped", "compiled"])
def test_weights_come_in_the_usual_forms(form: str, workspace: Workspace, tmp_path: Path) -> None:
    state = workspace.model.state_dict()
    path = tmp_path / ("weights.safetensors" if form == "safetensors" else "weights.pth")
    if form == "safetensors":
        safetensors.torch.save_file(state, path)
    elif form == "state_dict":
        torch.save({"epoch": 3, "state_dict": state}, path)
    else:
        prefix = {"wrapped": "module.", "compiled": "_orig_mod."}.get(form, "")
        torch.save({prefix + name: value for name, value in state.items()}, path)
    output = tmp_path / "p.safetensors"
    said("fit", "tiny_net:untrained", "data.npz", "--last-layers", "1", "--weights", str(path), "-o", str(output))
    expected = errbar.fit(workspace.model, TensorDataset(*workspace.train), last_layers=1)
    torch.testing.assert_close(errbar.load(output, workspace.model).covariance(), expected.covariance())


@pytest.mark.parametrize("data", ["tiny_net:dataset", "tiny_net:stream", "compressed.npz", "columns.parquet"])
def test_data_come_in_the_usual_forms(data: str, workspace: Workspace, tmp_path: Path) -> None:
    if data.endswith(".parquet"):
        workspace.write_parquet(pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet"))
    output = tmp_path / "p.safetensors"
    facts = said("fit", "tiny_net:trained", data, "--last-layers", "1", "-o", str(output), "--batch-size", "13")
    expected = errbar.fit(workspace.model, TensorDataset(*workspace.train), last_layers=1)
    torch.testing.assert_close(errbar.load(output, workspace.model).covariance(), expected.covariance())
    assert facts["log_evidence"] == pytest.approx(expected.log_evidence())


def test_a_parquet_file_has_inputs_as_lists_and_names(files: Workspace, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    names = [f"object {number}" for number in range(len(files.test[0]))]
    table = arrow.table({"id": names, "x": files.test[0].tolist()})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=11)
    output = tmp_path / "out.npz"
    command = ["predict", "posterior.safetensors", str(tmp_path / "in.parquet"), "--model", "tiny_net:trained"]
    said(*command, "-o", str(output), "--batch-size", "8")
    assert np.load(output)["input"].tolist() == names
    assert_equal(np.load(output)["pmf"], library(files).predict(files.test[0]).pmf)


@pytest.mark.parametrize("size", [-1, 4], ids=["lists", "lists of a fixed size"])
def test_lists_of_a_parquet_file_are_read_in_a_fresh_process(size: int, files: Workspace, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    x = arrow.array(files.test[0].tolist(), arrow.list_(arrow.float64(), size))
    source, output = tmp_path / "in.parquet", tmp_path / "out.npz"
    parquet.write_table(arrow.table({"x": x}), source)
    words = ["acquire", "posterior.safetensors", str(source), "--model", "tiny_net:trained", "--count", "3"]
    command = [sys.executable, "-m", "errbar", *words, "-o", str(output)]
    subprocess.run(command, env=environment(), capture_output=True, timeout=120, check=True)
    expected = errbar.acquire(library(files), [files.test[0]], 3)
    assert np.load(output)["index"].tolist() == expected.tolist()
    said("predict", *words[1:5], "-o", str(tmp_path / "predicted.npz"))
    assert_equal(np.load(tmp_path / "predicted.npz")["pmf"], library(files).predict(files.test[0]).pmf)


def test_arrays_stay_on_the_disk(workspace: Workspace) -> None:
    from errbar.cli.inputs import TRAINING, DataRequest

    rows: Any = DataRequest("data.npz", 8).open(TRAINING).rows
    assert isinstance(rows.x, np.memmap)
    torch.testing.assert_close(rows[5][0], workspace.train[0][5])


def test_a_transform_is_applied_to_each_row(files: Workspace, tmp_path: Path) -> None:
    np.savez(tmp_path / "scaled.npz", x=(files.test[0] * 100).numpy())
    output = tmp_path / "out.npz"
    command = ["predict", "posterior.safetensors", str(tmp_path / "scaled.npz"), "--model", "tiny_net:trained"]
    said(*command, "--transform", "tiny_net:hundredth", "-o", str(output))
    expected = library(files).predict(files.test[0] * 100 / 100)
    np.testing.assert_allclose(np.load(output)["pmf"], expected.pmf.numpy(), atol=1e-6)


@pytest.mark.parametrize("size", [None, (2, 2)])
def test_pictures_of_sixteen_bits_keep_their_range(size: tuple[int, int] | None, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    levels = np.linspace(0, 65535, 16).round().astype(np.uint16).reshape(4, 4)
    for name, array in (("a", levels), ("b", (levels // 257).astype(np.uint8))):
        (tmp_path / name).mkdir()
        image.fromarray(array).save(tmp_path / name / "picture.png")
    deep, shallow = ImageRows(tmp_path, None, None, size).__getitems__([0, 1])[0]
    torch.testing.assert_close(deep, shallow, rtol=0, atol=0.005)
    assert float(deep.max() - deep.min()) > 0.5


def test_pictures_in_floating_point_need_a_transform(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.ones((4, 4), dtype=np.float32)).save(tmp_path / "picture.tiff")
    with pytest.raises(errbar.DataError, match=r"numbers of another range .* Give a --transform that scales it"):
        ImageRows(tmp_path, None, None, None)[0]
    rows = ImageRows(tmp_path, None, lambda picture: torch.from_numpy(np.array(picture)), None)
    assert torch.equal(rows[0][0], torch.ones(4, 4))


def test_rows_come_in_the_order_that_is_asked_for() -> None:
    rows = ArrayRows(np.arange(6.0), None, None)
    for order in ([0, 2, 1, 3], [1, 2, 3], [3, 1], [5]):
        assert rows.__getitems__(order)[0].tolist() == order


def test_folders_of_pictures_have_classes_by_name(workspace: Workspace, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(0)
    for number, name in enumerate(CLASSES):
        for index in range(4):
            path = tmp_path / "train" / name / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.fromarray(generator.integers(0, 60, (6, 6), dtype=np.uint8) + np.uint8(80 * number)).save(path)
    posterior = tmp_path / "p.safetensors"
    command = ["fit", "tiny_net:pictures", str(tmp_path / "train"), "--last-layers", "1", "--image-size", "4"]
    facts = said(*command, "-o", str(posterior))
    assert (facts["classes"], facts["samples"]) == (list(CLASSES), 12)
    assert facts["log_evidence"] is not None
    # A folder without the first class: labels keep the numbers that they had in the fit.
    for path in (tmp_path / "train" / CLASSES[0]).iterdir():
        path.unlink()
    (tmp_path / "train" / CLASSES[0]).rmdir()
    command = [str(posterior), str(tmp_path / "train"), "--model", "tiny_net:pictures", "--image-size", "4x4"]
    ranked = said("outliers", *command, "--held-out")["outliers"]
    assert {(row["class"], row["label"]) for row in ranked} == {(CLASSES[1], 1), (CLASSES[2], 2)}
    assert all(row["input"].startswith(row["class"] + "/") for row in ranked)
    output = tmp_path / "out.jsonl"
    said("predict", *command, "-o", str(output))
    names = [json.loads(line)["input"] for line in output.read_text(encoding="utf-8").splitlines()]
    assert names == [f"{name}/{index}.png" for name in CLASSES[1:] for index in range(4)]
