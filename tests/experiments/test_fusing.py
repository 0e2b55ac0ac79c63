"""Ways to fuse compared: each method against a small computation of its own, and what is kept of each run."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import errbar
from data import generator
from errbar.cli.main import application
from errbar.experiments import fusing, fusions, runs, tables, tracking
from errbar.experiments.problem import Problem, Recipe, Samples
from networks import trained

CLASSES, WIDTH = 3, 5


def inputs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Overlapping clouds."""
    y = torch.randint(CLASSES, (count,), generator=generator(seed))
    noise = torch.randn(count, WIDTH, generator=generator(seed + 1), dtype=torch.float64)
    return 1.5 * torch.eye(CLASSES, WIDTH, dtype=torch.float64)[y] + noise, y


@functools.cache
def posterior(seed: int) -> errbar.Posterior:
    x, y = inputs(90, 1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    trained(model, x, y, steps=100, lr=0.03)
    return errbar.fit(model, [(x, y)], last_layers=1, prior=errbar.Prior(1.0))


def seen(count: int, seed: int) -> fusing.Seen:
    x, y = inputs(count, seed)
    gaussians = [fusing.gaussians_of(posterior(member), x) for member in (0, 1)]
    return fusing.Seen(gaussians, y, torch.arange(count))


@functools.cache
def comparison() -> fusing.Comparison:
    held_out = seen(80, 10)
    calibrations = [fusing.calibration_of(one, held_out.labels, samples=200) for one in held_out.gaussians]
    return fusing.compare(held_out, {"test": seen(60, 20)}, calibrations, samples=32)


def frames(count: int, seed: int, length: int = 4) -> tracking.Frames:
    x, y = inputs(count, seed)
    grain = 0.4 * torch.randn(count, length, WIDTH, generator=generator(seed + 2), dtype=torch.float64)
    return tracking.Frames(x[:, None] + grain, y)


@functools.cache
def study() -> tracking.Tracking:
    return tracking.study(posterior(0), frames(40, 30), frames(30, 40), lengths=(1, 2, 4, 10), samples=200)


def test_logits_are_calibrated_as_their_posterior_is() -> None:
    x, y = inputs(80, 10)
    direct = errbar.calibrate(posterior(0), [(x, y)], samples=200)
    found = fusing.calibration_of(fusing.gaussians_of(posterior(0), x), y, samples=200)
    assert found.temperature == pytest.approx(direct.temperature, rel=1e-3)
    assert found.covariance_scale == pytest.approx(direct.covariance_scale, rel=1e-3)


def test_readings_are_calibrated_as_gaussians_are() -> None:
    held_out = seen(20, 10)
    calibrations = [fusing.Calibration(1.7, 0.3), fusing.Calibration(0.8, 2.0)]
    direct = held_out.calibrated(calibrations).readings(torch.device("cpu"))
    found = fusing.calibrated_readings(held_out.readings(torch.device("cpu")), calibrations)
    torch.testing.assert_close(found.means, direct.means)
    torch.testing.assert_close(found.values, direct.values)
    torch.testing.assert_close((found.vectors @ found.along[..., None])[..., 0], direct.means)


def test_every_method_is_there_and_pools_are_what_their_names_say() -> None:
    losses = comparison().losses["test"]
    assert set(losses) == set(fusing.METHODS)
    report, held_out = seen(60, 20), seen(80, 10)
    softmaxes = [one.mean.softmax(1) for one in report.gaussians]
    deep = -torch.stack(softmaxes).mean(0)[torch.arange(60), report.labels].log()
    torch.testing.assert_close(losses[fusing.ENSEMBLE], deep)
    # T of the mean of logits by a grid: nothing on it is better on the held-out inputs.
    mean = torch.stack([one.mean for one in held_out.gaussians]).mean(0)
    grid = torch.linspace(-2, 2, 401).exp()
    nll = torch.stack([nn.functional.cross_entropy(mean / T, held_out.labels) for T in grid])
    T = grid[nll.argmin()]
    expected = nn.functional.cross_entropy(
        torch.stack([one.mean for one in report.gaussians]).mean(0) / T, report.labels, reduction="none"
    )
    torch.testing.assert_close(losses[fusing.LOGITS], expected, rtol=0.02, atol=0.02)


def test_what_was_not_taken_is_reported_too() -> None:
    facts = comparison().facts
    chosen = facts[fusing.FUSED]["chosen"]
    loss = float(comparison().losses["test"][fusing.FUSED].mean())
    assert facts["variants"]["test"][fusing.FUSED][chosen] == pytest.approx(loss)
    assert {"mean of logits", "an s for each"} <= set(facts["variants"]["test"][fusing.FUSED])


def test_differences_are_paired_by_object_over_all_runs(tmp_path: Path) -> None:
    """By hand: the mean over all, and the spread of sums over what belongs to one object."""
    objects = torch.tensor([3, 3, 7, 8])
    files = []
    for seed in (0, 1):
        path = tmp_path / f"{seed}"
        losses = {name: torch.rand(4, generator=generator(100 * seed + n)) for n, name in enumerate(fusing.METHODS)}
        fusions._keep(path, "halves", {"test": losses}, objects)
        fusions._keep(path, "halves", {"test": losses}, objects)  # a part that is computed again replaces itself
        files.append(fusions._read(path))
    found = fusions.pooled(files)["halves"]["test"]
    first, other = (
        torch.cat([one[f"halves/test/{name}"] for one in files]).double() for name in (fusing.FUSED, fusing.LOGITS)
    )
    difference = first - other
    mean, half = found["minus"][fusing.FUSED][fusing.LOGITS]
    assert mean == pytest.approx(float(difference.mean()))
    centred = difference - difference.mean()
    sums = [float(centred[torch.tensor(rows)].sum()) for rows in ([0, 1, 4, 5], [2, 6], [3, 7])]
    assert half == pytest.approx(1.96 * math.sqrt(3 / 2 * sum(value**2 for value in sums)) / 8)
    assert found["nll"][fusing.LOGITS] == pytest.approx(float(other.mean()))


def test_temperature_and_evidence_are_the_best_of_a_grid() -> None:
    logits = torch.randn(30, 4, CLASSES, generator=generator(5), dtype=torch.float64)
    labels = (logits.mean(1) + 0.5 * torch.randn(30, CLASSES, generator=generator(6))).argmax(1)
    T, correlation = tracking.evidence(logits, labels)

    def nll(T: float, correlation: float) -> float:
        total = 0.0
        for count in range(1, 5):
            growth = count / (1 + (count - 1) * correlation)
            pmf = (growth * logits[:, :count].mean(1) / T).softmax(1)
            total -= float(pmf[torch.arange(30), labels].log().sum())
        return total / 120

    least = min(nll(math.exp(t / 20), c / 20) for t in range(-40, 41) for c in range(21))
    assert nll(T, correlation) <= least + 1e-5


def test_tracks_and_baselines_are_what_their_names_say() -> None:
    found = study()
    assert list(found.losses) == [1, 2, 4]  # no sequence has ten frames
    calibrated = tracking.calibrated(posterior(0), frames(40, 30))
    report = frames(30, 40)
    for length, losses in found.losses.items():
        assert set(losses) == set(tracking.METHODS)
        each = [calibrated.predict(x[:length], 200).pmf for x in report.frames]
        expected = {
            tracking.TRACK: [errbar.Track(calibrated).add(x[:length]).predict(200).pmf[0] for x in report.frames],
            tracking.LATEST: [pmf[-1] for pmf in each],
            tracking.PMFS: [pmf.mean(0) for pmf in each],
            tracking.PRODUCT: [pmf.prod(0) / pmf.prod(0).sum() for pmf in each],
        }
        for name, pmfs in expected.items():
            own = -torch.stack(pmfs)[torch.arange(30), report.labels].log()
            torch.testing.assert_close(losses[name], own, rtol=1e-6, atol=1e-8)


def test_a_change_of_the_object_is_seen() -> None:
    change = study().facts["change"]
    assert 0.5 < change["auroc"]["surprise"] <= 1
    strict, loose = change["levels"][-1], change["levels"][0]
    assert strict["noticed"] <= loose["noticed"]
    assert strict["false_alarms"] <= loose["false_alarms"]
    assert loose["delay"] is None or 1 <= loose["delay"] <= change["frames_after_the_change"]


def test_another_object_is_one_of_another_class() -> None:
    labels = torch.tensor([0, 0, 0, 1, 2])
    partners = tracking._partners(labels, 0)
    assert all(labels[own] != labels[other] for own, other in enumerate(partners))


def test_tables_have_what_counts() -> None:
    result = {
        "pooled": {
            "halves": {
                "test": {
                    "nll": {fusing.LOGITS: 0.25, fusing.FUSED: 0.2},
                    "minus": {fusing.FUSED: {fusing.LOGITS: [-0.05, 0.01]}},
                }
            },
            "frames": {"1": {"nll": {tracking.TRACK: 0.3}, "minus": {tracking.TRACK: {}}}},
        },
        "runs": [{"seed": 0, "frames": study().facts, "cases": {"halves": comparison().facts}}],
    }
    assert tables.available(result) == ["fused", "chosen", "tracks", "change"]
    table = tables.fused_table(result)
    assert table.headings == ("method", "NLL, halves ↓", "calibrate_fusion minus it")
    assert table.rows[0] == (fusing.LOGITS, "0.2500", "-0.0500 [-0.0600, -0.0400]")
    assert tables.track_table(result).rows == ((tracking.TRACK, "0.3000", ""),)
    assert tables.change_table(result).rows[0][0] == "AUROC % of the first frame by surprise"
    assert tables.chosen_table(result).rows[0][1] == comparison().facts[fusing.FUSED]["chosen"]


@pytest.mark.parametrize(
    ("name", "title", "cases"),
    [
        ("fusion-digits", "Several classifiers of one input", {"halves", "2 members"}),
        ("frames-digits", "Frames of one object", {"frames"}),
    ],
)
def test_the_command_compares(name: str, title: str, cases: set[str], tmp_path: Path) -> None:
    arguments = ["reproduce", name, "--quick", "--output", str(tmp_path), "--no-progress"]
    outcome = CliRunner().invoke(application(), arguments, catch_exceptions=False)
    assert outcome.exit_code == 0
    assert title in outcome.output
    result: dict[str, Any] = json.loads((tmp_path / f"{name}-quick.json").read_text(encoding="utf-8"))
    assert set(result["pooled"]) == cases


def test_the_logits_of_a_member_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Samples(*inputs(count, seed)) for count, seed in ((30, 1), (20, 2), (10, 3))]
    problem = Problem("own", *parts, lambda _: nn.Identity(), Recipe(1, 10), 1)
    asked = []

    def own(*_: Any, kind: str) -> errbar.Posterior:
        asked.append(kind)
        return posterior(0)

    monkeypatch.setattr(fusions, "_posterior", own)
    options = runs.RunOptions("fusion-own", output=tmp_path)
    first, again = (fusions.member_logits(options, problem, parts[0], 7) for _ in range(2))
    fusions.member_logits(options, problem, parts[0], 8)
    fusions.member_logits(options, problem, parts[0], 7, kind="half")
    assert asked == ["network", "network", "half"]
    for one, kept, x in zip(first, again, (parts[1].x, parts[2].x), strict=True):
        direct = fusing.gaussians_of(posterior(0), x)
        assert torch.equal(one.mean, kept.mean)
        assert torch.equal(one.covariance, kept.covariance)
        assert torch.equal(one.mean, direct.mean)
        torch.testing.assert_close(one.covariance, direct.covariance, rtol=1e-6, atol=1e-7)


def test_data_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(errbar.ArgumentError, match="fusion-mnist needs its data: give the folder"):
        fusions.fusions(runs.RunOptions("fusion-mnist", output=tmp_path))
