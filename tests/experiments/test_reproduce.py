"""`errbar reproduce`: the whole pipeline on a small scale, and the parts that turn PMFs into tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from errbar import metrics
from errbar.cli.main import application
from errbar.errors import ArgumentError
from errbar.experiments import evaluation, problems, reproduce, runs, shifts, store, tables
from errbar.experiments.methods import Method, Outcome
from errbar.experiments.problem import Samples, halves
from places import ROOT


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reproduce")


@pytest.fixture(scope="module")
def result(output: Path) -> dict[str, Any]:
    """The command itself, once for all tests here."""
    arguments = ["reproduce", "digits", "--quick", "--output", str(output), "--no-progress"]
    outcome = CliRunner().invoke(application(), arguments, catch_exceptions=False)
    assert outcome.exit_code == 0
    assert "On the test data" in outcome.output
    found: dict[str, Any] = json.loads((output / "digits-quick.json").read_text(encoding="utf-8"))
    return found


def test_the_result_has_every_method_and_every_part(result: dict[str, Any], output: Path) -> None:
    keys = list(result["methods"])
    assert keys[:6] == ["standard", "temperature", "ensemble", "dropout", "proposed", "proposed_tc"]
    assert {"temperature_nll", "ggn", "both", "softened", "evidence_both", "validation_both"} <= set(keys)
    assert len(result["runs"]) == 2
    for run in result["runs"]:
        assert set(run["scores"]) == set(keys)
        # T_c alone by ECE, as the paper has it, may end at a PMF that is flat and calibrated: here, with 200 inputs.
        sensible = [key for key in keys if key != "proposed_tc"]
        assert all(0.2 < run["scores"][key]["accuracy"] <= 1 for key in sensible)
        assert set(run["shift"]) == {"rotation"}
        assert set(run["fusion"]["sequences"]["methods"]) >= {
            "latest",
            "independent",
            "joint",
            "joint with frame noise",
        }
        assert set(run["cleaning"]["retrained"]) >= {"nothing", "label suspicion", "what is wrong"}
    assert {path.suffix for path in output.glob("digits-*")} == {".json", ".md", ".png", ".pdf"}


def test_with_json_a_finished_experiment_is_one_object(result: dict[str, Any], output: Path) -> None:
    arguments = ["reproduce", "digits", "--quick", "--output", str(output), "--json"]
    outcome = CliRunner().invoke(application(), arguments, catch_exceptions=False)
    assert outcome.exit_code == 0
    assert outcome.stdout.count("\n") == 1
    facts = json.loads(outcome.stdout)
    assert facts["result"] == str(output / "digits-quick.json")
    assert len(facts["tables"]["scores"]["rows"]) == len(result["methods"])
    assert all(Path(figure).exists() for figure in facts["figures"])


def test_calibrated_covariance_keeps_the_log_likelihood_of_temperature_scaling(result: dict[str, Any]) -> None:
    for run in result["runs"]:
        assert run["scores"]["both"]["nll"] < run["scores"]["temperature_nll"]["nll"] + 0.05


def test_an_interrupted_experiment_trains_nothing_twice(
    result: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a network was trained again")

    monkeypatch.setattr(reproduce, "train", forbidden)
    again = reproduce.reproduce(runs.RunOptions("digits", output=output, quick=True, progress=False))
    first, second = (r["runs"][1]["scores"]["ensemble"]["nll"] for r in (result, again))
    assert first == pytest.approx(second, rel=1e-5)


def test_of_an_interrupted_run_only_what_is_missing_is_computed(tmp_path: Path) -> None:
    options = runs.RunOptions("digits", output=tmp_path)
    description = {"experiment": "digits", "quick": False, "settings": {"members": 10}, "versions": {}, "device": "a"}
    computed: list[str] = []

    def run(parts: runs.Parts, *, fails: bool) -> dict[str, Any]:
        def part(name: str) -> float:
            if fails and name == "second":
                raise KeyboardInterrupt("stopped")
            computed.append(name)
            return 1 / 3

        return {"seed": 0, **{name: parts(name, lambda name=name: part(name)) for name in ("first", "second")}}

    with pytest.raises(KeyboardInterrupt, match="stopped"):
        runs.kept_run(options, description, 0, lambda parts: run(parts, fails=True))
    assert runs.finished_runs(options, description) == []
    runs.kept_run(options, {**description, "device": "b"}, 0, lambda parts: run(parts, fails=False))
    assert computed == ["first", "second"]
    expected = {"seed": 0, "first": 0.333333, "second": 0.333333, "versions": {}, "device": "a and b"}
    assert runs.finished_runs(options, {**description, "device": "c"}) == [expected]
    runs.kept_run(options, description, 0, lambda parts: run(parts, fails=True))
    other = {**description, "settings": {"members": 11}}
    with pytest.raises(KeyboardInterrupt, match="stopped"):
        runs.kept_run(options, other, 0, lambda parts: run(parts, fails=True))
    assert computed == ["first", "second", "first"]
    assert [path.suffix for path in (tmp_path / "runs").iterdir() if path.suffix != ".json"] == [".parts"]


def test_every_table_can_be_made_and_filled_in(result: dict[str, Any]) -> None:
    names = tables.available(result)
    # The rest are of the experiments on fusion and on labelling alone, and one of all experiments together.
    assert set(names) == set(tables.TABLES) - {"fused", "chosen", "tracks", "change", "autofit", "acquisition"}
    assert tables.autofit_table({"digits": {"0": result["runs"][0]["autofit"]}}).rows[0][0] == "digits"
    for name in names:
        table = tables.TABLES[name](result)
        assert table.rows
        assert all(len(row) == len(table.headings) for row in table.rows)
    text = tables.fill("a <!-- table: digits scores -->old<!-- end --> b", {"digits": result})
    assert "old" not in text
    assert "| (i) standard |" in text
    assert tables.fill(text, {"digits": result}) == text
    with pytest.raises(ArgumentError, match="table 'nothing' of 'digits'"):
        tables.fill("<!-- table: digits nothing --><!-- end -->", {"digits": result})


@pytest.mark.parametrize(("softening", "headings"), [(0.5, ("T", "T_c", "c")), (0.0, ("T", "T_c"))])
def test_the_softening_is_a_column_where_it_was_fitted(softening: float, headings: tuple[str, ...]) -> None:
    fitted = [
        {"scores": {"old": {"fitted": {"temperature": 2.0}}, "new": {"fitted": one}}}
        for one in (
            {"temperature": 1.0, "covariance_scale": 0.5, "softening": softening, "prior_precision": 1.0},
            {"temperature": 1.0, "covariance_scale": 0.5, "softening": 0.0, "prior_precision": 1.0},
        )
    ]
    table = tables.fitted_table({"methods": {"old": "old", "new": "new"}, "runs": fitted})
    assert table.headings == ("method", *headings, "prior precision")
    assert all(len(row) == len(table.headings) for row in table.rows)
    assert table.rows[1][1:3] == ("1 ± 0", "0.5 ± 0")
    if softening:
        assert table.rows[0][3] == ""
        assert table.rows[1][3].startswith("0.25 ± ")


def test_the_results_pages_show_the_result_files() -> None:
    folder, shown = ROOT / "docs" / "results", set()
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}
    for path in (folder.with_suffix(".md"), *folder.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        assert tables.fill(page, results) == page, path
        shown |= set(re.findall(r"<!-- table: (\S+) ", page))
    # Coverage has a table that was written by hand.
    assert shown == set(results) - {"coverage"}


def test_an_unknown_experiment_and_missing_data_are_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no experiment 'imagenet'; expected mnist"):
        problems.build("imagenet", tmp_path, quick=True, device=torch.device("cpu"))
    with pytest.raises(ArgumentError, match="needs its data: give the folder"):
        problems.build("mnist", None, quick=True, device=torch.device("cpu"))
    with pytest.raises(ArgumentError, match="seeds is 0"):
        runs.RunOptions("digits", seeds=0).count()


def test_validation_and_test_halves_share_nothing() -> None:
    samples = Samples(torch.arange(11.0)[:, None], torch.arange(11))
    first, second = halves(samples)
    assert sorted(first.y.tolist() + second.y.tolist()) == list(range(11))


def test_tracks_are_split_by_class_and_share_nothing() -> None:
    labels = torch.arange(100) % 4
    parts = problems._stratified(labels, (0.6, 0.2, 0.2), seed=0)
    assert sorted(torch.cat(parts).tolist()) == list(range(100))
    assert [torch.bincount(labels[part]).tolist() for part in parts] == [[15] * 4, [5] * 4, [5] * 4]


def test_a_kept_network_is_made_again_only_when_its_recipe_changes_or_its_file_is_broken(tmp_path: Path) -> None:
    path, made = tmp_path / "network.safetensors", []

    def make() -> nn.Module:
        made.append(1)
        return nn.Linear(2, 2)

    first, _ = store.kept(path, {"seed": 0}, nn.Linear(2, 2), make)
    second, _ = store.kept(path, {"seed": 0}, nn.Linear(2, 2), make)
    assert len(made) == 1
    assert torch.equal(first.weight, second.weight)  # type: ignore[arg-type]
    store.kept(path, {"seed": 1}, nn.Linear(2, 2), make)
    assert len(made) == 2
    path.write_bytes(path.read_bytes()[:40])
    store.kept(path, {"seed": 1}, nn.Linear(2, 2), make)
    assert len(made) == 3


def test_paired_differences_have_the_interval_of_student() -> None:
    scipy = pytest.importorskip("scipy.stats")
    first, second = [1.0, 2.0, 4.0, 3.5], [0.5, 2.5, 3.0, 3.0]
    expected = scipy.ttest_rel(first, second).confidence_interval(0.95)
    found = evaluation.paired(first, second)
    assert found["interval"] == pytest.approx([expected.low, expected.high], rel=1e-3)
    assert evaluation.paired([1.0], [0.0])["interval"] is None


def test_a_roc_curve_has_the_area_of_its_scores() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.cat([torch.randn(3000, generator=generator), 1 + torch.randn(3000, generator=generator)])
    positive = torch.arange(6000) >= 3000
    curve = evaluation.roc(scores, positive)
    area = torch.trapezoid(torch.tensor(curve["tpr"]), torch.tensor(curve["fpr"]))
    assert float(area) == pytest.approx(metrics.auroc(scores, positive), abs=0.01)


def test_accuracy_at_a_coverage_counts_the_most_confident() -> None:
    pmf = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2], [0.7, 0.3]])
    assert evaluation.accuracy_at(pmf, torch.tensor([0, 1, 0, 1]), 0.5) == 1.0
    assert evaluation.accuracy_at(pmf, torch.tensor([0, 1, 0, 1]), 1.0) == 0.5


@pytest.mark.parametrize("shift", [shifts.ROTATION, shifts.NOISE, shifts.BLUR, shifts.CONTRAST], ids=lambda s: s.kind)
def test_shifts_do_nothing_at_first_and_more_with_severity(shift: shifts.Shift) -> None:
    x = torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(shift.apply(x, shift.severities[0]), x, atol=1e-5, rtol=0)
    changes = [float((shift.apply(x, severity) - x).square().mean()) for severity in shift.severities[:5]]
    assert changes == sorted(changes)


def test_a_method_works_through_its_inputs_in_parts() -> None:
    sizes = []

    def predict(x: torch.Tensor) -> Outcome:
        sizes.append(len(x))
        return Outcome(torch.full((len(x), 2), 0.5), torch.zeros(len(x)))

    outcome = Method("m", predict)(torch.zeros(5000, 1))
    assert len(sizes) > 1
    assert outcome.pmf.shape == (5000, 2)
    assert set(outcome.outlier_scores()) == {"entropy", "maximum probability", "mutual information"}
