"""Decisions: formulas against oracles written from the papers, promises by simulation with a binomial bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor

import errbar
from chance import fewest, most
from data import drawn_labels
from errbar._deciding.decisions import _running_p_values, error_bound
from errbar._distributions.sampling import GivenSampler

SCORES = ["aps", "lac"]


def prediction(count: int = 6, classes: int = 4, samples: int = 50, seed: int = 0) -> errbar.Prediction:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(count, classes, 1, generator=generator, dtype=torch.float64)
    spread = torch.randn(count, classes, samples, generator=generator, dtype=torch.float64)
    return errbar.Prediction.from_sampler(GivenSampler(torch.softmax(mean + 0.7 * spread, 1)))


# ------------------------------------------------------------------------------------------------------- least loss


def test_expected_losses_and_their_deviations_are_those_of_the_pmf_and_its_covariance() -> None:
    made = prediction()
    cost = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    decision = errbar.decide(made, cost.tolist())
    for row in range(len(made)):
        for action in range(5):
            loss = float(cost[action] @ made.pmf[row])
            variance = float(cost[action] @ made.covariance[row] @ cost[action])
            assert float(decision.expected_loss[row, action]) == pytest.approx(loss, rel=1e-12)
            assert float(decision.std[row, action]) == pytest.approx(math.sqrt(variance), rel=1e-9)
        best = min(range(5), key=lambda a, row=row: float(cost[a] @ made.pmf[row]))  # type: ignore[misc]
        assert int(decision.action[row]) == best
        assert decision.least_loss[row] == decision.expected_loss[row, best]
        assert decision.least_loss_std[row] == decision.std[row, best]


def test_the_deviation_is_that_of_the_loss_over_the_samples() -> None:
    made, cost = prediction(), torch.tensor([[0.0, 1.0, 5.0, 2.0]], dtype=torch.float64)
    losses = made.samples() @ cost[0]
    torch.testing.assert_close(errbar.decide(made, cost).std[:, 0], losses.std(1, correction=0))


def test_with_equal_costs_of_all_mistakes_the_action_is_the_most_likely_class() -> None:
    made = prediction(50)
    decision = errbar.decide(made, 1 - torch.eye(4))
    assert torch.equal(decision.action, made.label)
    torch.testing.assert_close(decision.least_loss, 1 - made.confidence)
    torch.testing.assert_close(decision.least_loss_std, made.std.gather(1, made.label[:, None])[:, 0])


def test_an_expensive_mistake_changes_the_action() -> None:
    """Two classes: act if ten times the probability of harm exceeds the cost of acting, that is from 1/10 on."""
    samples = torch.tensor([[0.95, 0.05], [0.85, 0.15]], dtype=torch.float64)[:, :, None]
    made = errbar.Prediction.from_sampler(GivenSampler(samples))
    assert errbar.decide(made, [[0, 10], [1, 1]]).action.tolist() == [0, 1]


@settings(max_examples=25, deadline=None)
@given(st.floats(-5, 5), st.floats(0.1, 10))
def test_what_all_classes_cost_alike_is_certain_and_units_do_not_matter(shift: float, unit: float) -> None:
    made = prediction()
    cost = torch.randn(3, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    one, other = errbar.decide(made, cost), errbar.decide(made, unit * (cost + shift))
    assert torch.equal(one.action, other.action)
    torch.testing.assert_close(other.std, unit * one.std)
    torch.testing.assert_close(other.expected_loss, unit * (one.expected_loss + shift))
    assert float(errbar.decide(made, torch.full((1, 4), shift)).std.max()) < 1e-12


def test_decisions_work_in_the_dtype_of_the_prediction() -> None:
    made = errbar.LogitGaussian(torch.zeros(2, 3), torch.eye(3).expand(2, 3, 3)).predict()
    decision = errbar.decide(made, np.eye(3))
    assert decision.expected_loss.dtype == decision.std.dtype == torch.float32
    assert len(decision) == 2


# ------------------------------------------------------------------------------------------------------- abstention


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=60), st.floats(0.01, 0.9))
def test_running_p_values_are_binomial_tails(wrong: list[bool], rate: float) -> None:
    count = np.arange(1, len(wrong) + 1)
    expected = stats.binom.cdf(np.cumsum(wrong), count, rate)
    np.testing.assert_allclose(_running_p_values(torch.tensor(wrong), rate).numpy(), expected, atol=1e-12)


def test_running_p_values_keep_their_digits_over_a_hundred_thousand_inputs() -> None:
    wrong = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) < 0.049
    ours = _running_p_values(wrong, 0.05)[[999, 9_999, 99_999]]
    expected = stats.binom.cdf(wrong.cumsum(0)[[999, 9_999, 99_999]], [1000, 10_000, 100_000], 0.05)
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-9)


@pytest.mark.parametrize(("count", "wrong", "delta"), [(59, 0, 0.05), (200, 3, 0.1), (1000, 70, 0.01), (10, 9, 0.05)])
def test_the_bound_is_that_of_clopper_and_pearson(count: int, wrong: int, delta: float) -> None:
    assert error_bound(count, wrong, delta) == pytest.approx(stats.beta.ppf(1 - delta, wrong + 1, count - wrong))


def test_of_nothing_and_of_all_wrong_nothing_is_known() -> None:
    assert error_bound(0, 0, 0.05) == error_bound(7, 7, 0.05) == 1.0


def two_classes(doubt: Tensor) -> Tensor:
    return torch.stack([1 - doubt, doubt], 1)


def rule_by_hand(doubt: Tensor, wrong: Tensor, risk: float, delta: float) -> int:
    """How many are accepted, with a binomial test for each number, from the first with which one can succeed."""
    order = doubt.argsort()
    accepted = 0
    for j in range(1, len(doubt) + 1):
        if (1 - risk) ** j > delta:
            continue
        if stats.binom.cdf(int(wrong[order[:j]].sum()), j, risk) > delta:
            break
        accepted = j
    return accepted


@pytest.mark.parametrize("seed", range(10))
def test_the_rule_is_the_last_of_a_sequence_of_binomial_tests(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    doubt = torch.rand(300, generator=generator, dtype=torch.float64) / 2
    wrong = torch.rand(300, generator=generator, dtype=torch.float64) < doubt / 2
    rule = errbar.abstention(two_classes(doubt), wrong.long(), risk=0.1, delta=0.1)
    accepts = rule.accepts(two_classes(doubt))
    assert rule.accepted == int(accepts.sum()) == rule_by_hand(doubt, wrong, 0.1, 0.1)
    assert rule.wrong == int(wrong[accepts].sum())
    assert rule.held_out == 300
    assert rule.coverage == rule.accepted / 300
    assert rule.accepted == 0 or rule.bound <= 0.1


# The error rate at a doubt u, uniform on [0, 1/2]; 0.1 is tolerated.
ERROR_RATES: dict[str, Callable[[float], float]] = {
    "a little above everywhere": lambda u: 0.101,
    "calibrated": lambda u: u,
    "above at first": lambda u: 0.25 if u < 0.1 else 0.08,
    "above and below by turns": lambda u: 0.1 + 0.1 * math.cos(40 * u + 1.5),
    "below at first": lambda u: 0.0 if u < 0.15 else 0.3,
    "waves that grow": lambda u: 0.1 + 0.4 * u * math.sin(60 * u - 1),
}


@pytest.mark.parametrize("name", ERROR_RATES)
@pytest.mark.parametrize("count", [60, 300])
def test_the_promise_of_abstention_holds(name: str, count: int) -> None:
    """In at most a share delta of the runs the true error rate among the accepted exceeds the risk."""
    runs, risk, delta = 400, 0.1, 0.1
    rate = ERROR_RATES[name]
    grid = np.linspace(0, 0.5, 5001)
    integral = integrate.cumulative_trapezoid([rate(u) for u in grid], grid, initial=0)
    generator = torch.Generator().manual_seed(count)
    broken = 0
    for _ in range(runs):
        doubt = torch.rand(count, generator=generator, dtype=torch.float64) / 2
        chance = torch.tensor([rate(u) for u in doubt.tolist()], dtype=torch.float64)
        wrong = torch.rand(count, generator=generator, dtype=torch.float64) < chance
        rule = errbar.abstention(two_classes(doubt), wrong.long(), risk=risk, delta=delta)
        end = min(rule.threshold, 0.5)
        broken += end > 0 and float(np.interp(end, grid, integral)) / end > risk + 1e-9
    assert broken <= most(runs, delta)


def test_rules_accept_much_of_what_may_be_accepted() -> None:
    """Calibrated doubts: Pr(wrong | doubt < d) = d/2, so all below 0.2 could be accepted; 2000 show most of it."""
    generator = torch.Generator().manual_seed(3)
    doubt = torch.rand(2000, generator=generator, dtype=torch.float64) / 2
    wrong = torch.rand(2000, generator=generator, dtype=torch.float64) < doubt
    rule = errbar.abstention(two_classes(doubt), wrong.long(), risk=0.1, delta=0.05)
    assert 0.12 < rule.threshold < 0.2


def test_rules_accept_everything_or_nothing_where_that_is_right() -> None:
    doubt = torch.linspace(0.01, 0.4, 100, dtype=torch.float64)
    everything = errbar.abstention(two_classes(doubt), torch.zeros(100, dtype=torch.long))
    assert (everything.threshold, everything.accepted, everything.coverage) == (math.inf, 100, 1.0)
    assert bool(everything.accepts([[0.5, 0.5]]).all())
    nothing = errbar.abstention(two_classes(doubt), torch.ones(100, dtype=torch.long))
    assert (nothing.threshold, nothing.accepted, nothing.bound) == (0.0, 0, 1.0)
    assert not bool(nothing.accepts([[1.0, 0.0]]).any())


def test_inputs_of_equal_doubt_are_accepted_together() -> None:
    doubt = torch.cat([torch.full((80,), 0.1), torch.full((80,), 0.3)]).double()
    labels = torch.cat([torch.zeros(80), torch.ones(80)]).long()
    rule = errbar.abstention(two_classes(doubt), labels)
    assert rule.accepted == 80
    assert rule.accepts(two_classes(doubt)).tolist() == [True] * 80 + [False] * 80


def test_doubts_too_small_for_a_difference_from_one_are_told_apart() -> None:
    doubt = torch.logspace(-30, -18, 100, dtype=torch.float64)
    labels = torch.cat([torch.zeros(70), torch.ones(30)]).long()
    rule = errbar.abstention(two_classes(doubt), labels)
    assert 59 <= rule.accepted < 80
    assert rule.accepts(two_classes(doubt)).sum() == rule.accepted


# ---------------------------------------------------------------------------------------------------- conformal sets


def score_by_hand(pmf: list[float], label: int, score: str) -> float:
    return 1 - pmf[label] if score == "lac" else sum(f for f in pmf if f > pmf[label])


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
def test_sets_are_those_of_the_definition(score: str, level: float) -> None:
    made = prediction(200)
    held, new = made.pmf[:60], made.pmf[60:]
    labels = drawn_labels(held, 1)
    scores = sorted(score_by_hand(row, int(y), score) for row, y in zip(held.tolist(), labels, strict=True))
    threshold = scores[math.ceil(61 * level) - 1]
    rule = errbar.conformal(held, labels, level=level, score=score)
    assert rule.threshold == pytest.approx(threshold, abs=1e-12)
    sets = rule.sets(new)
    for row, inside in zip(new.tolist(), sets.tolist(), strict=True):
        for m in range(4):
            margin = score_by_hand(row, m, score) - threshold
            if abs(margin) > 1e-12:
                assert inside[m] == (margin < 0 or row[m] == max(row))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("level", [0.7, 0.9])
@pytest.mark.parametrize("calibrated", [True, False])
def test_sets_hold_the_class_as_often_as_promised_and_hardly_more(score: str, level: float, calibrated: bool) -> None:
    """Pr(y ∈ set) is in [level, level + 1/(N + 1)], N held-out inputs; one input is tried in each run."""
    runs, held = 1500, 19
    pmf = prediction(runs * (held + 1), samples=1, seed=5).pmf
    labels = drawn_labels(pmf if calibrated else (pmf.sqrt() + 0.1), 6)
    covered = 0
    for run in range(runs):
        rows = slice(run * (held + 1), (run + 1) * (held + 1))
        p, y = pmf[rows], labels[rows]
        rule = errbar.conformal(p[:-1], y[:-1], level=level, score=score)
        covered += bool(rule.sets(p[-1:])[0, y[-1]])
    assert covered >= fewest(runs, level)
    assert covered <= most(runs, level + 1 / (held + 1))


@pytest.mark.parametrize("score", SCORES)
def test_no_set_is_empty_and_sets_grow_with_the_level(score: str) -> None:
    made = prediction(300)
    labels = drawn_labels(made.pmf, 2)
    before = torch.zeros(300, 4, dtype=torch.bool)
    for level in (0.05, 0.5, 0.9, 0.99):
        sets = errbar.conformal(made, labels, level=level, score=score).sets(made)
        assert bool(sets.any(1).all())
        assert bool(sets.gather(1, made.label[:, None]).all())
        assert bool((sets | ~before).all())
        before = sets


def test_with_too_few_held_out_inputs_sets_have_all_classes() -> None:
    made = prediction(8)
    rule = errbar.conformal(made, made.label, level=0.9)
    assert rule.threshold == math.inf
    assert bool(rule.sets(made).all())
    assert errbar.conformal(prediction(9), prediction(9).label, level=0.9).threshold < math.inf


def test_the_rank_is_that_of_the_level_in_decimals() -> None:
    """100 · 0.55 is 55.00000000000001 in floating point: not a reason to take the next score."""
    doubt = torch.linspace(0.1, 0.4, 99, dtype=torch.float64)
    rule = errbar.conformal(two_classes(doubt), torch.zeros(99, dtype=torch.long), level=0.55, score="lac")
    assert rule.threshold == pytest.approx(float(doubt[54]))


def test_sets_of_an_input_do_not_depend_on_the_inputs_beside_it() -> None:
    made = prediction(40)
    rule = errbar.conformal(made, drawn_labels(made.pmf, 3), level=0.8)
    alone = torch.cat([rule.sets(row[None]) for row in made.pmf])
    assert torch.equal(rule.sets(made), alone)


# ---------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: errbar.decide(prediction().pmf, torch.eye(4)),
            errbar.ArgumentError,
            "expected a Prediction from post",
        ),
        (lambda: errbar.decide(prediction(), torch.eye(3)), errbar.ArgumentError, r"shape \(3, 3\); expected \(act"),
        (lambda: errbar.decide(prediction(), torch.ones(4)), errbar.ArgumentError, r"shape \(4,\); expected"),
        (
            lambda: errbar.decide(prediction(), "costs"),
            errbar.ArgumentError,
            "a str that is not an array of real numbers",
        ),
        (
            lambda: errbar.decide(prediction(), torch.ones(2, 3, dtype=torch.complex64)),
            errbar.ArgumentError,
            "a Tensor that is not an array of real numbers",
        ),
        (lambda: errbar.decide(prediction(), [[math.nan] * 4]), errbar.ArgumentError, "cost holds NaN or infinity"),
        (lambda: errbar.abstention(prediction(), [0] * 6), errbar.DataError, "6 held-out inputs; expected 59 or more"),
        (lambda: errbar.abstention(prediction(), [0] * 5), errbar.LabelError, r"shape \(5,\); expected \(6,\)"),
        (lambda: errbar.abstention(prediction(), [0] * 6, risk=0), errbar.ArgumentError, "risk is 0; expected a num"),
        (lambda: errbar.abstention(prediction(), [0] * 6, delta=1.0), errbar.ArgumentError, "delta is 1.0; expected"),
        (lambda: errbar.conformal(prediction(), [0] * 6, level=90), errbar.ArgumentError, "level is 90; expected a n"),
        (
            lambda: errbar.conformal(prediction(), [0] * 6, score="raps"),
            errbar.ArgumentError,
            "expected 'aps' or 'lac'",
        ),
        (lambda: errbar.conformal(torch.randn(6, 4), [0] * 6), errbar.DataError, "pass probabilities, not logits"),
        (
            lambda: errbar.conformal(prediction(), [0] * 6).sets(prediction(classes=3)),
            errbar.MismatchError,
            "The prediction has 3 classes; expected 4",
        ),
        (
            lambda: errbar.abstention(prediction(60), prediction(60).label).accepts(prediction(classes=5)),
            errbar.MismatchError,
            "The prediction has 5 classes; expected 4",
        ),
    ],
)
def test_mistakes_are_answered_in_words(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
