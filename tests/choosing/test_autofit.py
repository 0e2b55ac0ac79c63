"""`autofit`: its rule on trials made by hand, its folds and standard errors by their formulas, and small problems."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import errbar
from errbar._calibration.folds import divided, group_numbers, standard_error
from errbar._calibration.held_out import HeldOut, held_out_of_gaussians
from errbar._choosing import autofit as module
from errbar._choosing import deadline as deadline_module
from errbar._choosing import last_fit
from errbar._choosing.candidates import Candidate, Question
from errbar._choosing.choice import Choice, Row, Trial, best_trial, reason_for, reason_without
from errbar._choosing.deadline import Deadline, Pace, TimeIsUpError
from errbar._curvature.layout import Inspection, Layout
from errbar._distributions.calibration import Calibration
from errbar._model.batch import Batch
from errbar._planning import plan as planning
from errbar._planning.plan import Subject
from errbar.errors import ArgumentError, DamagedFileError, DataError, LabelError

ONE = [{"last_layers": 1}]


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    x = torch.randn(count, 2, generator=generator, dtype=torch.float64) + 2 * torch.eye(3).double()[y][:, :2]
    return x, y


# So few training samples that the error bars gain something.
TRAIN, HELD_OUT = samples(30, 0), samples(300, 1)


@pytest.fixture(scope="module", autouse=True)
def few_priors() -> Iterator[None]:
    """Fewer priors to choose among, so that a test takes a second or two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PRECISIONS", (1.0, 100.0))
        yield


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(TRAIN[0]), TRAIN[1]).backward()
        optimizer.step()
    return network


@pytest.fixture(scope="module")
def choice(model: nn.Module) -> Choice:
    return errbar.autofit(model, [TRAIN], [HELD_OUT], candidates=ONE)


def compared(choice: Choice) -> dict[str, Any]:
    """What does not depend on the clock."""
    clock = ("seconds", "microseconds")
    rows = [{name: value for name, value in asdict(row).items() if name not in clock} for row in choice.rows]
    posterior = choice.posterior
    precision = posterior.prior.precision
    return {"rows": rows, "reason": choice.reason, "calibration": posterior.calibration, "prior": precision}


# --------------------------------------------------------------------------------------------------------- the rule


def row(nll: float, *, parameters: int = 10, exact: bool = True, softening: float = 0.0, by: str = "evidence") -> Row:
    return Row(
        parameters="last layer",
        structure="dense" if exact else "kron",
        fisher="ggn",
        n_parameters=parameters,
        exact=exact,
        link="T, T_c, c" if softening else "T, T_c",
        temperature=1.0,
        covariance_scale=1.0,
        softening=softening,
        prior=1.0,
        prior_by=by,
        nll=nll,
        standard_error=0.0,
        ece=0.0,
        brier=0.0,
        difference=0.0,
        interval=(0.0, 0.0),
        seconds=0.0,
        microseconds=0.0,
        bytes=0,
    )


COUNT = 100
NOISE = torch.randn(COUNT, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NOISE -= NOISE.mean()
# The standard error of the mean of NOISE, as `standard_error` has it: divided by N − 1.
NOISE /= NOISE.std() / math.sqrt(COUNT)
SCALING = torch.full((COUNT,), 0.5, dtype=torch.float64)
ALONE = torch.arange(COUNT)


def trial(nll: float, noise: float = 0.0, **facts: Any) -> Trial:
    """With losses of mean `nll`, whose difference to losses without noise has the standard error `noise`."""
    return Trial(row(nll, **facts), nll + noise * NOISE)


def test_what_is_worse_than_temperature_scaling_is_never_taken() -> None:
    assert best_trial([trial(0.50031, noise=1.0, parameters=10**6, softening=1.0)], SCALING, ALONE) is None
    near = trial(0.50029)
    assert best_trial([trial(0.50031, noise=1.0, parameters=10**6), near], SCALING, ALONE) is near


def test_what_might_be_worse_by_much_is_not_taken() -> None:
    # Better by 0.01 on average, but with a standard error of the difference of 0.006: up to 0.0018 worse.
    uncertain, sure = trial(0.49, noise=0.006, parameters=10**6), trial(0.4995, noise=0.0007)
    assert best_trial([uncertain], SCALING, ALONE) is None
    assert best_trial([uncertain, sure], SCALING, ALONE) is sure
    assert best_trial([trial(0.49, noise=0.0055, parameters=10**6), sure], SCALING, ALONE) is not sure
    # In groups of ten that agree the same losses are less certain.
    groups = torch.arange(COUNT) // 10
    noise = NOISE[::10].repeat_interleave(10)
    losses = 0.4995 + 0.0005 * (noise - noise.mean())
    grouped = Trial(row(float(losses.mean())), losses)
    assert best_trial([grouped], SCALING, ALONE) is grouped
    assert best_trial([grouped], SCALING, groups) is None


def test_of_equally_good_ones_the_one_with_most_parameters_in_an_exact_structure_is_taken() -> None:
    best = trial(0.40, parameters=10)
    large = trial(0.41, noise=0.01, parameters=1000)
    approximate = trial(0.405, noise=0.01, parameters=10**6, exact=False)
    assert best_trial([best, approximate, large], SCALING, ALONE) is large
    assert best_trial([large, approximate, best], SCALING, ALONE) is large


@pytest.mark.parametrize(("exact", "limit"), [(True, 2.0), (False, 1.0)])
def test_as_good_as_the_best_is_counted_in_standard_errors_of_the_paired_difference(exact: bool, limit: float) -> None:
    best = trial(0.40, parameters=5, exact=exact, by="nll")
    inside = trial(0.40 + 0.99 * limit * 0.01, noise=0.01, parameters=6, exact=exact, softening=1.0)
    outside = trial(0.40 + 1.01 * limit * 0.01, noise=0.01, parameters=7, exact=exact, softening=1.0)
    assert best_trial([best, outside, inside], SCALING, ALONE) is inside
    assert best_trial([best, outside], SCALING, ALONE) is best


def test_the_standard_error_is_that_of_the_groups() -> None:
    # Ten equal losses in each group: √10 times the standard error of independent ones, nearly.
    groups = torch.arange(COUNT) // 10
    noise = NOISE[::10].repeat_interleave(10)
    noise -= noise.mean()
    best = trial(0.40, parameters=5)
    losses = 0.40 + noise + 2.5 * standard_error(noise, ALONE)
    other = Trial(row(float(losses.mean()), parameters=6), losses)
    assert best_trial([best, other], SCALING + 10, ALONE) is best
    assert best_trial([best, other], SCALING + 10, groups) is other


def test_then_a_softening_then_the_evidence_then_the_lower_nll() -> None:
    plain, soft = trial(0.40), trial(0.41, noise=0.01, softening=2.0)
    assert best_trial([plain, soft], SCALING, ALONE) is soft
    chosen, by_evidence = trial(0.40, by="nll"), trial(0.41, noise=0.01, by="evidence")
    assert best_trial([chosen, by_evidence], SCALING, ALONE) is by_evidence
    lower, higher = trial(0.40), trial(0.41, noise=0.01)
    assert best_trial([higher, lower], SCALING, ALONE) is lower


def test_of_equals_the_first_that_was_tried_is_taken() -> None:
    first, second = trial(0.4), trial(0.4)
    assert best_trial([first, second], SCALING, ALONE) is first
    assert best_trial([], SCALING, ALONE) is None


# ------------------------------------------------------------------------------------- folds and standard errors


def test_folds_keep_groups_together_and_are_a_partition() -> None:
    groups = group_numbers([f"track {n // 7}" for n in range(200)], 200)
    folds = divided(groups, 5, seed=0)
    assert torch.equal(torch.cat(folds).sort().values, torch.arange(200))
    owners = [set(groups[rows].tolist()) for rows in folds]
    assert sum(map(len, owners)) == len(set.union(*owners)) == 29
    sizes = [len(rows) for rows in folds]
    assert max(sizes) - min(sizes) <= 7
    again, other = divided(groups, 5, seed=0), divided(groups, 5, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(folds, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(folds, other, strict=True))


def test_one_large_group_does_not_empty_a_fold() -> None:
    folds = divided(group_numbers([0] * 90 + list(range(1, 11)), 100), 3, seed=0)
    assert sorted(map(len, folds)) == [5, 5, 90]


def test_the_standard_error_sums_within_groups() -> None:
    # Two groups, values 1, 2, 3 | 6: mean 3, sums of deviations −3 and 3; √((9 + 9) · 2/(2 − 1))/4.
    values = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    assert standard_error(values, torch.tensor([0, 0, 0, 1])) == pytest.approx(math.sqrt(18 * 2) / 4)
    # Each by itself: the usual s/√N with N − 1.
    assert standard_error(values, torch.arange(4)) == pytest.approx(float(values.std()) / 2)


# ------------------------------------------------------------------------------------------------- what comes out


def test_temperature_scaling_is_the_softmax_of_the_logits_divided_by_the_temperature(
    choice: Choice, model: nn.Module
) -> None:
    scaling = choice.temperature_scaling
    assert (scaling.covariance_scale, scaling.softening) == (0.0, 0.0)
    x, y = HELD_OUT
    with torch.no_grad():
        logits = model(x)
    torch.testing.assert_close(
        scaling.predict(x).pmf, torch.softmax(logits / scaling.temperature, 1), rtol=0, atol=1e-6
    )
    assert scaling.temperature == choice.baselines[1].temperature

    def nll(temperature: float) -> float:
        return float(nn.functional.cross_entropy(logits / temperature, y))

    least = min(nll(scaling.temperature * factor) for factor in (0.9, 0.99, 1.01, 1.1))
    assert nll(scaling.temperature) <= least + 1e-9


def test_the_baselines_are_scored_as_the_formulas_say(choice: Choice, model: nn.Module) -> None:
    x, y = HELD_OUT
    with torch.no_grad():
        logits = model(x)
    plain = nn.functional.cross_entropy(logits, y, reduction="none")
    row = choice.baselines[0]
    assert row.nll == pytest.approx(float(plain.mean()))
    assert row.standard_error == pytest.approx(float(plain.std()) / math.sqrt(300))
    assert row.ece == pytest.approx(errbar.metrics.ece(torch.softmax(logits, 1), y))
    assert row.brier == pytest.approx(errbar.metrics.brier(torch.softmax(logits, 1), y))
    # Temperature scaling out of fold: T by a fine grid on the other folds.
    losses = torch.empty(300, dtype=torch.float64)
    grid = torch.logspace(-1, 1, 4001, dtype=torch.float64)
    for rows in divided(torch.arange(300), 5, seed=0):
        others = torch.ones(300, dtype=torch.bool)
        others[rows] = False
        values = [float(nn.functional.cross_entropy(logits[others] / t, y[others])) for t in grid]
        best = grid[min(range(len(values)), key=values.__getitem__)]
        losses[rows] = nn.functional.cross_entropy(logits[rows] / best, y[rows], reduction="none")
    scaled = choice.baselines[1]
    # The library searches T to a few parts in a thousand.
    assert scaled.nll == pytest.approx(float(losses.mean()), abs=1e-4)
    difference = plain - losses
    assert row.difference == pytest.approx(float(difference.mean()), abs=1e-4)
    half = 1.96 * float(difference.std()) / math.sqrt(300)
    assert row.interval == pytest.approx((row.difference - half, row.difference + half), abs=1e-3)


def test_the_posterior_is_calibrated_as_well_as_its_row_says(choice: Choice) -> None:
    chosen = choice.chosen
    assert chosen is not None
    posterior = choice.posterior
    assert posterior.prior.precision == chosen.prior
    assert posterior.information.n_parameters == chosen.n_parameters == 21
    x, y = HELD_OUT

    def nll(candidate: errbar.Posterior) -> float:
        return errbar.metrics.nll(candidate.predict(x, samples=4000, seed=5).pmf, y)

    of_row = posterior.with_calibration(
        temperature=chosen.temperature, covariance_scale=chosen.covariance_scale, softening=chosen.softening
    )
    # T and T_c make up for each other, so the values may differ where the PMFs do not.
    assert nll(posterior) == pytest.approx(nll(of_row), abs=0.003)
    # Fitted on everything, and so better than out of fold.
    assert nll(posterior) <= chosen.nll + 0.003


def test_the_rows_are_in_order_and_their_differences_are_to_temperature_scaling(choice: Choice) -> None:
    assert [row.nll for row in choice.rows] == sorted(row.nll for row in choice.rows)
    for row in choice.rows:
        assert row.difference == pytest.approx(row.nll - choice.baselines[1].nll, abs=1e-9)
        assert row.interval[0] < row.difference < row.interval[1]
        assert row.prior_by in ("evidence", "nll")
        assert row.seconds > 0 < row.microseconds
    links = {(row.prior_by, row.link) for row in choice.rows}
    assert links <= {(by, link) for by in ("evidence", "nll") for link in ("T, T_c", "T, T_c, c")}
    assert {("evidence", "T, T_c"), ("nll", "T, T_c")} <= links
    # A softening of zero is the row without one.
    assert all((row.softening > 0) == (row.link == "T, T_c, c") for row in choice.rows)
    assert choice.chosen in choice.rows


def test_the_table_has_a_row_for_the_softmax_and_for_temperature_scaling(choice: Choice) -> None:
    lines = str(choice).splitlines()
    assert lines[0].split()[:5] == ["prior", "T", "T_c", "c", "NLL"]
    assert lines[1].startswith("softmax ")
    assert lines[2].startswith("T alone ")
    assert f"{choice.baselines[1].nll:.4f}" in lines[2]
    # One candidate: its costs, its rows, and the reason.
    assert lines[3].startswith("last layer (dense): n = 21, fit ")
    assert len(lines) == 4 + len(choice.rows) + 1
    assert sum(line.startswith("* ") for line in lines[:-1]) == 1
    assert lines[-1] == f"* {choice.reason}"
    assert choice.reason.startswith("Chosen: last layer (dense)")


def test_the_table_fits_into_100_columns(choice: Choice) -> None:
    row = replace(
        choice.rows[0],
        parameters="last layer and vectors",
        structure="lowrank",
        fisher="sampled",
        n_parameters=11_173_962,
        prior=1e4,
        prior_by="evidence",
        temperature=0.0384,
        covariance_scale=1.2e-05,
        softening=1.1e3,
        seconds=123.0,
        microseconds=123_456.0,
        bytes=10**9 + 1,
    )
    wide = replace(choice, rows=(row, *choice.rows), chosen=row)
    *lines, reason = str(wide).splitlines()
    assert lines[3].startswith("last layer and vectors (lowrank, drawn): n = 11,173,962, fit 123 s, ")
    assert reason.startswith("* Chosen: ")
    # The second candidate is another one, so it has a line of its own.
    assert len(lines) == 3 + 2 + 1 + len(choice.rows)
    assert max(map(len, lines)) <= 100


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] in ("td", "th"):
            self.cells.append(data)


def test_the_table_of_a_notebook_is_whole_and_escaped(choice: Choice) -> None:
    strange = replace(choice, not_tried=("<script>", *choice.not_tried))
    text = strange._repr_html_()
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert {"softmax", "T alone", "last layer", "chosen"} <= set(tags.cells)
    assert "<script>" not in text
    assert "Not tried: <script>" in str(strange)


def test_a_choice_is_saved_with_its_table(choice: Choice, model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "chosen.safetensors"
    replace(choice, not_tried=("all,\nkron: \x07",)).save(path, classes=("ant", "bee", "cat"))
    loaded = errbar.load(path, model, classes=("ant", "bee", "cat"))
    assert loaded.calibration == choice.posterior.calibration
    table = errbar.info(path).choice
    assert table is not None
    assert table.reason == choice.reason
    assert table.headings[0] == "parameters"
    assert [row[0] for row in table.rows] == ["softmax", "T alone", *["last layer"] * len(choice.rows)]
    assert [row[-1] for row in table.rows].count("chosen") == 1
    assert table.not_tried == ("all, kron: ?",)
    assert errbar.verify(path, model).choice == table
    loaded.save(path)
    assert errbar.info(path).choice is None


def test_a_table_whose_rows_do_not_fit_its_headings_is_damage(
    choice: Choice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from errbar._files.choice_table import ChoiceTable

    path = tmp_path / "chosen.safetensors"
    wrong = {"reason": "", "headings": ["a", "b"], "rows": [{"cells": ["1"]}], "not_tried": []}
    monkeypatch.setattr(ChoiceTable, "described", lambda self: wrong)
    choice.save(path)
    with pytest.raises(DamagedFileError, match="rows are not as long as its headings"):
        errbar.info(path)


# -------------------------------------------------------------------------------------------------- kinds of data


def test_the_order_of_a_loader_and_iterators_change_nothing(choice: Choice, model: nn.Module) -> None:
    loader = DataLoader(TensorDataset(*HELD_OUT), batch_size=300, shuffle=True)
    shuffled = errbar.autofit(model, iter([TRAIN]), loader, candidates=ONE)
    assert compared(shuffled) == compared(choice)
    parts = zip(HELD_OUT[0].split(40), HELD_OUT[1].split(40), strict=True)
    iterated = errbar.autofit(model, TensorDataset(*TRAIN), parts, candidates=ONE)
    assert iterated.posterior.temperature == pytest.approx(choice.posterior.temperature, rel=1e-6)
    assert [row.nll for row in iterated.rows] == pytest.approx([row.nll for row in choice.rows], abs=1e-6)


def test_without_labels_in_the_training_data_the_prior_is_one_or_by_held_out_nll(model: nn.Module) -> None:
    choice = errbar.autofit(model, [TRAIN[0]], [HELD_OUT], candidates=ONE)
    assert {(row.prior_by, row.prior) for row in choice.rows if row.prior_by != "nll"} == {("default", 1.0)}
    assert choice.posterior.information.log_likelihood is None


def test_groups_change_the_standard_errors_and_may_come_from_a_function(choice: Choice, model: nn.Module) -> None:
    values = [n // 2 for n in range(300)]
    listed = errbar.autofit(model, [TRAIN], [HELD_OUT], candidates=ONE, groups=values)
    assert listed.baselines[0].nll == pytest.approx(choice.baselines[0].nll)
    assert listed.baselines[0].standard_error != choice.baselines[0].standard_error
    batches = [(x, y, torch.arange(i * 150, i * 150 + 150) // 2) for i, (x, y) in enumerate(halves())]
    called = errbar.autofit(
        model,
        [TRAIN],
        batches,
        candidates=ONE,
        groups=lambda batch: batch[2],
        unpack=lambda batch: ((batch[0],), {}, batch[1]),
    )
    assert called.baselines[0].standard_error == pytest.approx(listed.baselines[0].standard_error)
    assert called.baselines[1].nll == pytest.approx(listed.baselines[1].nll, abs=1e-6)


def halves() -> Iterator[tuple[Tensor, Tensor]]:
    return zip(HELD_OUT[0].split(150), HELD_OUT[1].split(150), strict=True)


def test_a_network_in_float64_stays_there_and_float32_agrees(choice: Choice, model: nn.Module) -> None:
    assert choice.posterior.predict(HELD_OUT[0][:2]).pmf.dtype == torch.float64
    single = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3))
    single.load_state_dict(model.state_dict())
    found = errbar.autofit(single, [(TRAIN[0].float(), TRAIN[1])], [(HELD_OUT[0].float(), HELD_OUT[1])], candidates=ONE)
    assert found.posterior.predict(HELD_OUT[0][:2].float()).pmf.dtype == torch.float32
    assert found.baselines[1].nll == pytest.approx(choice.baselines[1].nll, abs=1e-4)
    assert found.rows[0].nll == pytest.approx(choice.rows[0].nll, abs=2e-3)


def test_where_nothing_is_as_good_as_temperature_scaling_the_covariance_is_small(
    choice: Choice, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "best_trial", lambda *_: None)
    none = errbar.autofit(model, [TRAIN], [HELD_OUT], candidates=ONE)
    assert none.chosen is None
    assert none.reason.startswith("No candidate is surely as good as temperature scaling")
    assert "chosen" not in str(none).splitlines()[0]
    x, y = HELD_OUT
    own, scaled = (errbar.metrics.nll(p.predict(x).pmf, y) for p in (none.posterior, none.temperature_scaling))
    # The draws of the search are those of `predict`.
    assert own <= scaled + 3.1e-4
    assert 0 <= none.posterior.covariance_scale <= 1


def test_the_reason_names_the_best_of_those_that_passed(choice: Choice) -> None:
    base = replace(choice.rows[0], parameters="all", structure="dense", exact=True, link="T, T_c", softening=0.0)
    risky = replace(base, nll=0.50, difference=-0.02, interval=(-0.06, 0.02), parameters="risky")
    best = replace(base, nll=0.51, difference=-0.01, interval=(-0.015, -0.005), prior_by="nll")
    near = replace(best, nll=0.511, difference=-0.009, prior_by="evidence", n_parameters=base.n_parameters + 1)
    rows = (risky, best, near)
    assert reason_for(risky, rows).endswith("-0.0200 against temperature scaling, the best of 3.")
    assert reason_for(best, rows).endswith(
        "the best of those that are surely as good as that; the lowest NLL (risky, dense, T, T_c: -0.0200 "
        "[-0.0600, +0.0200]) is not."
    )
    assert reason_for(near, rows).endswith(
        "; the best by NLL (all, dense, T, T_c: -0.0100) is within two standard errors of that, and this one has more "
        "parameters in an exact structure."
    )
    for structure, softening, advantage in (("dense", 0.5, "a softening"), ("kron", 0.0, "a prior that the held-out")):
        other = replace(near, n_parameters=best.n_parameters, softening=softening, exact=structure == "dense")
        assert f"this one has {advantage}" in reason_for(other, rows)


def test_within_a_limit_large_batches_are_taken_in_parts(
    choice: Choice, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks: list[float] = []
    sizes: list[int] = []
    left, gaussians = Deadline.left, module.logits_of_each

    def looked_at(self: Deadline) -> float:
        ticks.append(left(self))
        return ticks[-1]

    def read(posteriors: Any, batch: Any) -> Any:
        sizes.append(len(batch))
        return gaussians(posteriors, batch)

    monkeypatch.setattr(Deadline, "left", looked_at)
    monkeypatch.setattr(module, "logits_of_each", read)
    limited = errbar.autofit(model, [TRAIN], [HELD_OUT], candidates=ONE, seconds=500)
    # They grow, as each takes less than half a hundredth of the limit; some inputs are predicted again, to be timed.
    assert sizes == [8, 16, 32, 64, 128, 52, 32]
    # Each trial of the prior, and each step of a search for a calibration, looks at the clock too.
    assert len(ticks) > 100
    assert [row.nll for row in limited.rows] == pytest.approx([row.nll for row in choice.rows], abs=1e-6)


def test_information_that_was_collected_already_is_a_candidate(
    choice: Choice, model: nn.Module, tmp_path: Path
) -> None:
    information = errbar.collect(model, [TRAIN], last_layers=1)
    given = errbar.autofit(model, None, [HELD_OUT], candidates={"mine": information})
    assert [row.nll for row in given.rows] == [row.nll for row in choice.rows]
    assert given.posterior.calibration == choice.posterior.calibration
    assert {row.parameters for row in given.rows} == {"mine"}
    assert {(row.exact, row.structure, row.fisher) for row in given.rows} == {(True, "dense", "ggn")}
    information.save(tmp_path / "information.safetensors")
    merged = errbar.autofit(model, None, [HELD_OUT], candidates=[errbar.merge([tmp_path / "information.safetensors"])])
    assert [row.nll for row in merged.rows] == pytest.approx([row.nll for row in choice.rows], abs=1e-9)
    assert {row.parameters for row in merged.rows} == {"information 1"}
    assert merged.posterior.model is model


def test_information_and_keywords_can_be_mixed(model: nn.Module) -> None:
    information = errbar.collect(model, [TRAIN], last_layers=1)
    both = errbar.autofit(model, [TRAIN], [HELD_OUT], candidates=[information, {"last_layers": 2}])
    assert {row.parameters for row in both.rows} == {"information 1", "last 2 layers"}


def test_a_prior_too_weak_for_a_root_is_left_out_and_the_others_are_tried(
    choice: Choice, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = module.held_out_of_gaussians, []

    def fails_once(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise errbar.CovarianceError("The covariance of the logits is not positive semi-definite: adding 1e-04.")
        return real(*arguments)

    monkeypatch.setattr(module, "held_out_of_gaussians", fails_once)
    found = errbar.autofit(model, [TRAIN], [HELD_OUT], candidates=ONE)
    assert {row.prior_by for row in found.rows} == {"nll"}
    assert found.not_tried == ()


def test_a_candidate_without_a_covariance_is_named_and_the_next_is_tried(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = module.held_out_of_gaussians, []

    def fails_at_first(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) <= 3:
            raise errbar.CovarianceError("The covariance of the logits is not positive semi-definite: adding 1e-04.")
        return real(*arguments)

    monkeypatch.setattr(module, "held_out_of_gaussians", fails_at_first)
    found = errbar.autofit(model, [TRAIN], [HELD_OUT], candidates=[*ONE, {"last_layers": 2}])
    assert {row.parameters for row in found.rows} == {"last 2 layers"}
    assert found.not_tried == ("last layer, dense: The covariance of the logits is not positive semi-definite.",)
    calls.clear()
    monkeypatch.setattr(module, "held_out_of_gaussians", fails_at_first)
    with pytest.raises(errbar.CovarianceError, match="No candidate has a covariance that can be used"):
        errbar.autofit(model, [TRAIN], [HELD_OUT], candidates=ONE)


def test_what_does_not_fit_into_the_memory_of_the_device_is_tried_alone_and_then_named(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.collect_several

    def limited(requests: Any, *arguments: Any, **options: Any) -> Any:
        if len(requests) > 1 or requests[0].last_layers == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(requests, *arguments, **options)

    monkeypatch.setattr(module, "collect_several", limited)
    found = errbar.autofit(model, [TRAIN], [HELD_OUT], candidates=[*ONE, {"last_layers": 2}])
    assert {row.parameters for row in found.rows} == {"last layer"}
    assert found.not_tried == ("last 2 layers, dense: the memory of the device was not enough.",)


# ------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"held_out": [HELD_OUT[0]]}, DataError, "held-out data have no labels; expected batches .x, labels."),
        ({"held_out": []}, DataError, "held-out data are empty: expected at least one batch with labels"),
        ({"train": []}, DataError, "training data are empty: expected at least one batch"),
        (
            {"held_out": [(HELD_OUT[0][:4], HELD_OUT[1][:4])]},
            DataError,
            "There are 4 held-out samples for folds=5; expected at least one for each fold. Give more held-out data",
        ),
        ({"groups": [0, 1] * 150}, DataError, "There are 2 groups of held-out samples for folds=5"),
        ({"groups": [0] * 300}, DataError, "All held-out samples are one group for folds=5; expected at least one"),
        ({"groups": 5}, ArgumentError, "groups is or returns 5; expected one value for each held-out sample, or a"),
        ({"groups": lambda batch: 5}, ArgumentError, "groups is or returns 5; expected one value for each"),
        ({"groups": "train"}, ArgumentError, "groups is or returns 'train'; expected one value for each"),
        ({"groups": [0, 1]}, DataError, "groups has 2 values; expected one for each of the 300 held-out samples"),
        ({"folds": 1}, ArgumentError, "folds is 1; expected a whole number of 2 or more"),
        ({"folds": 2.5}, ArgumentError, "folds is 2.5; expected a whole number"),
        ({"seconds": 0}, ArgumentError, "seconds is 0; expected a positive number, or None for no limit"),
        ({"seconds": "soon"}, ArgumentError, "seconds is 'soon'; expected a positive number"),
        ({"seconds": 1e-6}, ArgumentError, r"seconds is 1e-06, and .* a single candidate|the cheapest candidate alone"),
        ({"candidates": []}, ArgumentError, r"candidates is \[\]; expected a list of mappings of keywords"),
        (
            {"candidates": {"last_layers": 1}},
            ArgumentError,
            "A candidate is 1; expected a mapping of some of last_layers",
        ),
        ({"candidates": ["all"]}, ArgumentError, "A candidate is 'all'; expected a mapping of some of last_layers"),
        ({"candidates": [{"layers": 1}]}, ArgumentError, "A candidate is {'layers': 1}; expected a mapping"),
        ({"candidates": [{"last_layers": 9}]}, ArgumentError, "last_layers"),
        ({"candidates": [{"last_layers": 1, "structure": "dens"}]}, ArgumentError, "dens"),
        ({"seed": -1}, ArgumentError, "seed is -1"),
        ({"held_out": [(HELD_OUT[0], HELD_OUT[1] + 1)]}, LabelError, "Labels run from 1 to 3; expected 0 to 2"),
    ],
)
def test_mistakes_are_answered_in_words(
    model: nn.Module, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"train": [TRAIN], "held_out": [HELD_OUT], "candidates": ONE} | changes
    with pytest.raises(error, match=message):
        errbar.autofit(model, arguments.pop("train"), arguments.pop("held_out"), **arguments)


def test_a_limit_of_time_says_what_was_not_tried(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    # The clock jumps once the first candidate is judged.
    judge = module._Search._judge

    def slow(self: Any, *arguments: Any) -> None:
        judge(self, *arguments)
        self.deadline = replace(self.deadline, begin=self.deadline.begin - 1000)

    monkeypatch.setattr(module._Search, "_judge", slow)
    choice = errbar.autofit(model, [TRAIN], [HELD_OUT], candidates=[*ONE, {"last_layers": 2}], seconds=500)
    assert {row.parameters for row in choice.rows} == {"last layer"}
    (note,) = choice.not_tried
    assert note.startswith("last 2 layers, dense: it would take about")
    assert str(choice).splitlines()[-1] == f"Not tried: {note}"


def test_what_takes_too_long_does_not_keep_quicker_ones_from_being_tried(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {"last layer": 0.0, "last 2 layers": 1e6, "all": 0.0}
    monkeypatch.setattr(module._Search, "_expected", lambda _, candidate: expected[candidate.label])
    candidates = [*ONE, {"last_layers": 2}, {"parameters": "all", "structure": "diag"}]
    choice = errbar.autofit(model, [TRAIN], [HELD_OUT], candidates=candidates, seconds=500)
    assert {row.parameters for row in choice.rows} == {"last layer", "all"}
    (note,) = choice.not_tried
    assert note.startswith("last 2 layers, dense: it would take about 1000000 s")


def test_the_cheapest_come_first_and_what_is_nearly_as_quick_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [Candidate(str(n), "dense", "ggn", exact=True, posterior_bytes=0) for n in range(4)]
    fit = {"0": 1.9, "1": 1.0, "2": 0.4, "3": 30.0}
    each = {"0": 0.0, "1": 0.0, "2": 1.0, "3": 0.0}
    monkeypatch.setattr(Candidate, "fit_seconds", lambda self, _: fit[self.label])
    monkeypatch.setattr(Candidate, "predict_seconds", lambda self, inputs: each[self.label] * inputs)

    def order(held_out: int, seconds: float | None = 60.0) -> list[str]:
        question = Question(nn.Identity(), None, 1, None, seconds, None, None, held_out)
        return [candidate.label for candidate in question._cheapest_first(listed)]

    assert order(0) == ["2", "0", "1", "3"]
    # The held-out inputs count too.
    assert order(10) == ["0", "1", "2", "3"]
    # Without a limit all are tried, and no clock decides anything.
    assert order(0, None) == ["0", "1", "2", "3"]


def test_the_network_is_looked_at_once_for_all_candidates(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = planning.inspect

    def looked(*arguments: Any, **keywords: Any) -> Inspection:
        sizes.append(1)
        return real(*arguments, **keywords)

    monkeypatch.setattr(planning, "inspect", looked)
    found, _ = Question(model, TRAIN, 30, None, None, None, None).candidates(None)
    assert len(found) == 5
    assert len(sizes) == 1


def test_without_a_limit_no_clock_decides_which_fisher_information_is_collected(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Subject.looked.func

    def fishers(factor: float, samples: int) -> list[str]:
        def slowed(subject: Subject) -> tuple[Inspection, Layout, int]:
            inspection, layout, size = real(subject)
            return inspection, replace(layout, sample_seconds=layout.sample_seconds * factor), size

        monkeypatch.setattr(Subject, "looked", property(slowed))
        found, _ = Question(model, TRAIN, samples, None, None, None, None).candidates(None)
        return [candidate.fisher for candidate in found]

    # A machine that is a million times slower exactly collects as much: this network takes hundreds of multiplications.
    assert fishers(1.0, 30) == fishers(1e6, 30) == fishers(1e6, 10**6) == ["ggn"] * 5
    assert "sampled" in fishers(1e-6, 10**13)


def test_within_a_limit_the_network_is_looked_at_with_as_many_samples_as_a_part_has(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = Subject.looked.func

    def looked(subject: Subject) -> tuple[Inspection, Layout, int]:
        sizes.append(len(subject.example))
        return real(subject)

    # Of each subject once.
    monkeypatch.setattr(Subject, "looked", remembered := cached_property(looked))
    remembered.__set_name__(Subject, "looked")
    train = samples(1000, 0)
    errbar.autofit(model, [train], [HELD_OUT], candidates=ONE, seconds=500)
    errbar.autofit(model, [train], [HELD_OUT], candidates=ONE)
    assert sizes == [256, 1000]


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(deadline_module.time, "monotonic", lambda: self.now)


def test_a_pass_is_given_up_when_its_pace_says_that_it_cannot_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = Pace(Deadline(100.0), total=100, after=10.0)
    # The first part warms up: 20 s tell nothing.
    pace(10)
    clock.now += 20
    pace(10)
    assert pace.needed() is None
    # From here 10 samples take 5 s: 80 more take 40, what follows 10, and 92 − 25 are left for the search.
    clock.now += 5
    assert pace.needed() == pytest.approx(50.0)
    pace(10)
    # Now 10 samples take 15 s on average: 70 more would take 105.
    clock.now += 25
    with pytest.raises(TimeIsUpError, match=r"by its pace it would take about 115 s more, and 42 s were left"):
        pace(10)
    pace.again()
    assert pace.needed() is None
    clock.now += 43
    with pytest.raises(TimeIsUpError, match="the time was up"):
        pace(10)


def test_several_ranks_and_calls_without_a_limit_do_not_look_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for deadline in (Deadline(100.0, decides=False), Deadline(None)):
        pace = Pace(deadline, total=100)
        for _ in range(3):
            pace(1)
            clock.now += 1000
    assert Deadline(None).at_once(1e-3) is None
    assert [Deadline(100.0).at_once(each) for each in (0.0, 0.1, 10.0)] == [256, 10, 1]


def test_parts_grow_until_they_take_a_hundredth_of_the_limit_and_shrink_where_they_take_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    sizes = []
    for part in Deadline(100.0).parts(iter([Batch((torch.zeros(100, 2),)), Batch((torch.zeros(150, 2),))])):
        sizes.append(len(part))
        # 0.03 s each, and three times that in the second batch.
        clock.now += (0.03 if sum(sizes) <= 100 else 0.09) * len(part)
    assert sizes == [8, 16, 32, 32, 12, 64, 32, 16, 8, 8, 8, 8, 6]
    assert [len(part) for part in Deadline(None).parts(iter([Batch((torch.zeros(100, 2),))]))] == [100]


def test_where_there_is_no_time_for_all_priors_the_evidence_alone_is_tried(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    real = module.logits_of_each
    read: list[tuple[int, int]] = []

    def slow(posteriors: Any, batch: Any) -> Any:
        # 300 inputs of a prior take 300 s.
        read.append((len(posteriors), len(batch)))
        clock.now += len(batch) * len(posteriors)
        return real(posteriors, batch)

    monkeypatch.setattr(module, "logits_of_each", slow)
    choice = errbar.autofit(model, [TRAIN], [HELD_OUT], candidates=ONE, seconds=600)
    assert {row.prior_by for row in choice.rows} == {"evidence"}
    # And some of them again, of one posterior, to be timed.
    *read, timed = read
    assert timed[0] == 1
    assert sum(size for _, size in read) == 300
    assert {count for count, _ in read} == {3, 1}
    assert choice.not_tried == ("last layer, dense, the prior that the held-out data want: there was no time for it.",)
    # What is there is what the whole pass gives.
    monkeypatch.setattr(module, "logits_of_each", real)
    whole = errbar.autofit(model, [TRAIN], [HELD_OUT], candidates=ONE)
    expected = [row.nll for row in whole.rows if row.prior_by == "evidence"]
    assert [row.nll for row in choice.rows] == pytest.approx(expected, abs=1e-6)
    # And where not even that can end, the time goes to the next.
    monkeypatch.setattr(module, "logits_of_each", slow)
    read.clear()
    with pytest.raises(ArgumentError, match="seconds is 100, and that was not enough for a single candidate"):
        errbar.autofit(model, [TRAIN], [HELD_OUT], candidates=ONE, seconds=100)


def test_a_candidate_that_is_too_slow_is_given_up_early(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    real = module.logits_of_each
    spent: dict[int, float] = {}

    def slow(posteriors: Any, batch: Any) -> Any:
        n = posteriors[0].information.n_parameters
        seconds = len(batch) * (0.01 if n == 21 else 10.0)
        spent[n] = spent.get(n, 0.0) + seconds
        clock.now += seconds
        return real(posteriors, batch)

    monkeypatch.setattr(module, "logits_of_each", slow)
    choice = errbar.autofit(model, [TRAIN], [HELD_OUT], candidates=[*ONE, {"last_layers": 2}], seconds=1000)
    assert {row.parameters for row in choice.rows} == {"last layer"}
    assert choice.not_tried[-1].startswith("last 2 layers, dense: by its pace it would take about ")
    assert spent[39] <= 300


def test_the_last_fit_ends_with_the_limit(choice: Choice, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    real = HeldOut.log_likelihood

    def slow(self: Any, *arguments: Any) -> Any:
        clock.now += 1.0
        return real(self, *arguments)

    monkeypatch.setattr(HeldOut, "log_likelihood", slow)
    posterior = errbar.fit(model, [TRAIN], last_layers=1)
    held_out = held_out_of_gaussians([posterior.uncalibrated().logits(HELD_OUT[0])], [HELD_OUT[1]])
    assert choice.chosen is not None
    for fit, expected in (
        (lambda last: last.near(("temperature", "covariance_scale"), choice.chosen), choice.chosen.temperature),
        (lambda last: last.largest_covariance(), None),
    ):
        begin = clock.now
        found = fit(last_fit.LastFit(held_out, torch.arange(300), Deadline(5.0), 0))
        # A look begins within the limit, so all end at most one look after it.
        assert clock.now - begin <= 6.0
        assert (None if found is None else found.temperature) == expected
        assert fit(last_fit.LastFit(held_out, torch.arange(300), Deadline(1e6), 0)) is not None


def test_without_time_for_the_last_fit_the_reason_says_so(choice: Choice) -> None:
    reason = reason_without(choice.rows, None)
    assert reason.endswith(
        "there was no time to find out how large a covariance may be: this is temperature scaling, and there are no "
        "error bars; more seconds would allow some."
    )


def test_the_final_calibration_is_as_good_as_temperature_scaling_by_the_rule(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = last_fit.calibration_near
    asked = []

    def watched(*arguments: Any, **keywords: Any) -> Calibration:
        asked.append(keywords["is_as_good"])
        return near(*arguments, **keywords)

    monkeypatch.setattr(last_fit, "calibration_near", watched)
    choice = errbar.autofit(model, [TRAIN], [HELD_OUT], candidates=ONE, groups=[row // 10 for row in range(300)])
    assert choice.chosen is not None
    (rule,) = asked
    # By the groups of the held-out data: ten equal losses of one group are one observation.
    groups = torch.arange(300) // 10
    difference = 0.004 * torch.randn(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[groups]
    difference -= difference.mean()
    assert not rule(difference)
    assert rule(difference[torch.randperm(300, generator=torch.Generator().manual_seed(0))])
