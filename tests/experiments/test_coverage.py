"""The studies with known truth run, and find what theory says that they must."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import pytest
import torch

import errbar
from errbar.experiments import coverage as study
from places import ROOT

SAVED = ROOT / "docs" / "results" / "coverage.json"
LEVELS = ("0.5", "0.8", "0.95")
each_level = pytest.mark.parametrize("level", LEVELS)


@cache
def quick() -> dict[str, Any]:
    return study.run(quick=True)


def row(name: str, **wanted: object) -> dict[str, Any]:
    """The one result of a coverage study with these properties."""
    rows = quick()["coverage"][name]["results"]
    (found,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return found


def keys(value: Any) -> Any:
    """The shape of a result: names at every depth, without numbers; lists by the shape of their first item."""
    if isinstance(value, dict):
        return {name: keys(part) for name, part in value.items()}
    return [keys(value[0])] if isinstance(value, list) and value and isinstance(value[0], dict) else None


def test_the_quick_run_and_the_saved_one_are_json_of_one_shape() -> None:
    saved = json.loads(SAVED.read_text(encoding="utf-8"))
    assert json.loads(json.dumps(quick(), allow_nan=False)) == quick()
    assert keys(quick()) == keys(saved)
    assert (quick()["quick"], saved["quick"]) == (True, False)
    settings = {name: found["settings"] for name, found in saved["coverage"].items()}
    assert settings["network"] == json.loads(json.dumps(asdict(study.NETWORK)))
    assert settings["logistic_2"] == json.loads(json.dumps(asdict(study.LOGISTIC)))


def test_training_goes_to_the_optimum() -> None:
    for name in ("logistic_2", "logistic_3"):
        assert max(row(name, fisher="ggn")["distance_to_optimum"]) < 1e-4


@pytest.mark.parametrize("name", ["logistic_2", "logistic_3"])
@each_level
def test_intervals_of_logistic_regression_cover_what_they_promise(name: str, level: str) -> None:
    found = row(name, fisher="ggn")["coverage"][level]
    assert abs(found["measured"] - float(level)) <= 4 * found["standard_error"]


@each_level
def test_the_written_out_fisher_covers_too_much_with_two_classes(level: str) -> None:
    """z becomes √2 z: 50, 80 and 95 % become 66, 93 and 99.4 %."""
    eta, ggn = (row("logistic_2", fisher=fisher)["coverage"][level] for fisher in ("eta", "ggn"))
    assert eta["measured"] - float(level) > 2 * eta["standard_error"]
    assert eta["measured"] > ggn["measured"]
    z = math.sqrt(2) * torch.special.ndtri(torch.tensor((1 + float(level)) / 2, dtype=torch.float64))
    expected = float(2 * torch.special.ndtr(z) - 1)
    assert abs(eta["measured"] - expected) <= 4 * max(eta["standard_error"], 0.005)


def test_the_stated_standard_deviation_is_the_spread_over_training_sets() -> None:
    """A standard deviation over 40 re-draws is known to 1/√80 = 11 % for one input, and inputs are dependent."""
    found = row("logistic_2", fisher="ggn")
    assert found["std"] / found["spread"] == pytest.approx(1, abs=0.3)
    assert row("logistic_2", fisher="eta")["std"] > 1.2 * found["std"]


def test_a_network_row_says_what_was_fitted() -> None:
    uncalibrated = row("network", parameters="all", fisher="ggn", fitted=[], sampled="logits")
    assert uncalibrated["temperature"] == uncalibrated["covariance_scale"] == [1, 1, 1]
    scaled = row("network", parameters="all", fisher="ggn", fitted=["covariance_scale"])
    assert scaled["temperature"] == [1, 1, 1]
    assert scaled["covariance_scale"] != [1, 1, 1]


def test_redraws_do_not_depend_on_how_many_there_are() -> None:
    settings = replace(study.NETWORK, steps=20, points=3)
    one, three = (study.redraw_and_fit(replace(settings, redraws=redraws)) for redraws in (1, 3))
    assert torch.equal(one.y[0], three.y[0])
    torch.testing.assert_close(one.models[0](one.points), three.models[0](one.points), rtol=1e-9, atol=1e-9)
    assert not torch.equal(three.x[0], three.x[1])


@pytest.mark.parametrize("fisher", ["ggn", "eta"])
def test_the_delta_method_is_at_the_monte_carlo_floor_of_a_linear_model(fisher: str) -> None:
    """A mean over 8 inputs that share their draws is as random as two or three numbers: a factor of 4 is much."""
    drawn = study.redraw_and_fit(replace(study.LOGISTIC, classes=3, redraws=1))
    found = study.linearisation(drawn.posterior(0, "all", fisher), drawn.points, samples=2000, seed=1)
    for what in ("pmf", "std"):
        floor = max(found[what]["floor_of_delta"]["mean"], found[what]["floor_of_parameters"]["mean"])
        assert 0 < found[what]["delta_against_parameters"]["mean"] < 4 * floor
    assert found["std_ratio"] == pytest.approx(1, abs=0.05)


def test_a_network_is_not_linear_and_the_distance_shows_it() -> None:
    drawn = study.redraw_and_fit(replace(study.NETWORK, redraws=1, steps=100, points=10))
    posterior = drawn.posterior(0, "all", "ggn").with_calibration(covariance_scale=4.0)
    found = study.linearisation(posterior, drawn.points, samples=1000)
    floors = [found["pmf"][name]["mean"] for name in ("floor_of_delta", "floor_of_parameters")]
    assert found["pmf"]["delta_against_parameters"]["mean"] > 2 * max(floors)


def test_random_draws_converge_with_the_root_of_their_number_and_sobol_points_faster() -> None:
    """A root mean square of 40 repeats is known to about 1/√80, so a slope over two decades to about 0.035."""
    generator = torch.Generator().manual_seed(5)
    root = torch.randn(6, 3, 3, generator=generator, dtype=torch.float64) / 3**0.5
    gaussian = errbar.LogitGaussian(torch.randn(6, 3, generator=generator, dtype=torch.float64), root @ root.mT)
    errors = study.monte_carlo_error(gaussian, samples=(10, 30, 100, 300, 1000), repeats=40, seed=1)["errors"]
    assert errors["random"]["pmf_slope"] == pytest.approx(-0.5, abs=0.14)
    assert errors["random"]["covariance_slope"] == pytest.approx(-0.5, abs=0.14)
    assert errors["sobol"]["pmf_slope"] < -0.7
    assert errors["sobol"]["pmf"][-1] < errors["antithetic"]["pmf"][-1] < errors["random"]["pmf"][-1]


def test_one_redraw_or_one_number_of_draws_is_not_a_study() -> None:
    with pytest.raises(errbar.ArgumentError, match="redraws is 1; expected two or more"):
        study.coverage(replace(study.LOGISTIC, redraws=1))
    gaussian = errbar.LogitGaussian(torch.zeros(1, 3), torch.eye(3)[None])
    with pytest.raises(errbar.ArgumentError, match=r"samples is \(10, 10\).*expected two different"):
        study.monte_carlo_error(gaussian, samples=(10, 10))
