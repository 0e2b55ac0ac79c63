"""The monitor: formulas against oracles written from the papers, false-alarm rates by simulation, power on digits."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats
from torch import Tensor, nn

import errbar
from chance import most
from data import drawn_labels, shuffled_digits
from errbar._distributions.sampling import GivenSampler
from errbar._monitor.label_statistics import Tally, stitched_boundary
from errbar._monitor.martingales import (
    SCORE_CELLS,
    Evidence,
    RankTest,
    gap_factors,
    innovation_factors,
    innovation_squared,
    score_cells,
)
from errbar.experiments.views import rotated
from networks import trained

CLASSES = 4
INPUT_TESTS = ("mutual_information", "entropy", "classes")
LABEL_TESTS = ("overconfidence", "underconfidence", "innovation")


def prediction(count: int, seed: int, *, samples: int = 5, sharpness: float = 2.0) -> errbar.Prediction:
    """PMFs of inputs that are independent and from one distribution: softmax of normal logits, several samples each."""
    generator = torch.Generator().manual_seed(seed)
    mean = sharpness * torch.randn(count, CLASSES, 1, generator=generator, dtype=torch.float64)
    spread = 0.7 * torch.randn(count, CLASSES, samples, generator=generator, dtype=torch.float64)
    return errbar.Prediction.from_sampler(GivenSampler(torch.softmax(mean + spread, 1)))


def rows(whole: errbar.Prediction, start: int, stop: int) -> errbar.Prediction:
    return errbar.Prediction.from_sampler(GivenSampler(whole.sampler.block(start, stop)))


# --------------------------------------------------------------------------------------------------- the formulas


def test_p_values_are_ranks_among_all_scores_so_far() -> None:
    generator = np.random.default_rng(0)
    reference, stream, uniform = generator.integers(0, 6, 20), generator.integers(0, 6, 30), generator.random(30)
    test, bag = RankTest.against(reference, 6), list(reference)
    for score, u in zip(stream, uniform, strict=True):
        bag.append(score)
        expected = (sum(s > score for s in bag) + u * sum(s == score for s in bag)) / len(bag)
        assert test.place(int(score), u) == pytest.approx(expected, abs=1e-15)


@given(st.floats(0, 1e9), st.floats(0, 1e9))
@settings(deadline=None)
def test_cells_keep_the_order_of_scores_to_five_per_cent(first: float, second: float) -> None:
    low, high = sorted((first, second))
    cells = score_cells(np.array([low, high]))
    assert 0 <= cells[0] <= cells[1] < SCORE_CELLS
    if 1e-6 < low < 1e6 and high > 1.05 * low:
        assert cells[0] < cells[1]
    if high < 0.9e-6:
        assert cells[0] == cells[1] == 0


@pytest.mark.parametrize("levels", [3, 1000])
def test_p_values_of_an_exchangeable_stream_are_independent_and_uniform(levels: int) -> None:
    """With a reference of five and many ties, where ranks within the reference alone would be far from it."""
    generator = np.random.default_rng(levels)
    first, second = [], []
    for _ in range(4000):
        test = RankTest.against(generator.integers(0, levels, 5), levels)
        p = [test.place(int(generator.integers(0, levels)), generator.random()) for _ in range(2)]
        first.append(p[0])
        second.append(p[1])
    assert stats.kstest(first, "uniform").pvalue > 1e-3
    assert stats.kstest(second, "uniform").pvalue > 1e-3
    table = np.histogram2d(first, second, bins=4, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(table.ravel()).pvalue > 1e-3


def test_every_bet_on_a_p_value_is_a_density() -> None:
    generator = np.random.default_rng(1)
    test = RankTest.against(np.zeros(1, np.int64), 1)
    for p in generator.beta(0.5, 2, 150):
        test._factors(float(p))
    learned = [[*history] for history in test.histories]

    def factor(p: float, bet: int) -> float:
        test.histories = [[*history] for history in learned]
        return test._factors(p)[bet]

    for bet in range(len(test.evidence.wealth)):
        inside = integrate.quad(factor, 0, 1, args=(bet,), points=np.linspace(0.1, 0.9, 9), limit=400)[0]
        assert inside == pytest.approx(1, abs=1e-6)


def test_capital_is_the_mixture_over_starts_and_bets() -> None:
    steps, bets = 12, 3
    factors = np.random.default_rng(2).uniform(0.5, 1.6, (steps, bets))
    evidence = Evidence.of(bets)
    for step, row in enumerate(factors):
        evidence.bet(list(row), step + 1)
    mixture = sum(
        factors[start - 1 :, bet].prod() / (start * (start + 1) * bets)
        for start in range(1, steps + 1)
        for bet in range(bets)
    )
    assert evidence.capital == pytest.approx(mixture + 1 / (steps + 1), rel=1e-12)
    for bet in range(bets):
        products = [factors[start:, bet].prod() for start in range(steps)]
        assert evidence.start[bet] == 1 + int(np.argmax(products))
        assert evidence.best[bet] == pytest.approx(max(products), rel=1e-12)


def test_losing_for_long_does_not_make_deaf() -> None:
    evidence = Evidence.of(1)
    for step in range(1, 100_001):
        evidence.bet([0.9], step)
    assert evidence.capital >= 1 / 100_001
    needed = 0
    while evidence.capital < 1000:
        evidence.bet([2.0], 0)
        needed += 1
    # ln 1000 for the alarm and 2 ln 10⁵ for the late start, at ln 2 a step; 10⁵ ln(1/0.9) = 10 536 nats were lost
    assert needed <= (math.log(1000) + 2 * math.log(100_001)) / math.log(2) + 1


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6), st.floats(0.001, 0.9), st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_the_normalised_innovation_squared_and_its_expectation(weights: list[float], noise: float, part: float) -> None:
    pmf = np.array(weights) / sum(weights)
    size = len(pmf)
    smooth = (1 - noise) * pmf + noise / size
    inverse = np.linalg.pinv(np.diag(smooth) - np.outer(smooth, smooth), rcond=1e-9)
    values = []
    for label in range(size):
        residual = np.eye(size)[label] - smooth
        values.append(innovation_squared(pmf, label, noise))
        assert values[-1] == pytest.approx(residual @ inverse @ residual, rel=1e-6)
    assert smooth @ values == pytest.approx(size - 1)
    share = part * noise  # of labels drawn by lot
    assert ((1 - share) * pmf + share / size) @ values <= size - 1 + 1e-9
    factors = np.array([innovation_factors(value, size) for value in values])
    assert (factors >= 0).all()
    assert smooth @ factors == pytest.approx(1)
    assert (pmf @ factors <= 1 + 1e-9).all()


@given(st.floats(-1, 1), st.floats(0, 0.99))
def test_bets_on_the_gap_are_never_negative_and_fair_at_the_tolerance(gap: float, tolerance: float) -> None:
    assert min(gap_factors(gap, tolerance)) >= 0
    assert gap_factors(tolerance, tolerance) == pytest.approx([1.0] * len(gap_factors(0, 0)))
    assert all(a >= b for a, b in zip(gap_factors(1, tolerance), gap_factors(gap, tolerance), strict=True))


def test_the_covariance_of_the_pmf_does_not_change_that_of_one_label() -> None:
    """cov y = E[diag f − f fᵀ] + P^f = diag f̂ − f̂ f̂ᵀ."""
    made = prediction(3, 0, samples=50)
    f = made.samples()
    within = (torch.diag_embed(f) - f[:, :, :, None] * f[:, :, None, :]).mean(1)
    total = torch.diag_embed(made.pmf) - made.pmf[:, :, None] * made.pmf[:, None, :]
    torch.testing.assert_close(within + made.covariance, total, rtol=0, atol=1e-12)


def test_the_default_tolerance_bounds_what_shared_parameters_do_to_the_mean_gap() -> None:
    """For one set of parameters the confidences of all inputs are off together; the mean by at most the mean std."""
    made = prediction(40, 1, samples=300)
    monitor = errbar.Monitor(made)
    index = made.label[:, None]
    assert monitor.tolerance == pytest.approx(float(made.std.gather(1, index).mean()))
    confidence = made.samples().gather(2, index[:, None, :].expand(-1, 300, 1))[:, :, 0]  # of each input and draw
    assert float(confidence.mean(0).std(correction=0)) <= monitor.tolerance


@pytest.mark.parametrize(("variance", "alpha", "scale"), [(0.3, 0.05, 2.0), (17.0, 0.025, 1.0), (4000.0, 0.001, 2.0)])
def test_the_stitched_boundary_is_that_of_the_paper(variance: float, alpha: float, scale: float) -> None:
    """Howard et al. (2021), eq. 10, with η = 2, m = 1, h(k) = (k + 1)^1.4 ζ(1.4)."""
    v, eta, s = max(variance, 1.0), 2.0, 1.4
    h = (math.log(v) / math.log(eta) + 1) ** s * special.zeta(s)
    ell = math.log(h) + math.log(1 / alpha)
    k1, k2 = (eta**0.25 + eta**-0.25) / math.sqrt(2), (math.sqrt(eta) + 1) / 2
    expected = math.sqrt(k1**2 * v * ell + k2**2 * scale**2 * ell**2) + k2 * scale * ell
    assert stitched_boundary(variance, alpha, scale) == pytest.approx(expected, rel=1e-12)


def test_the_interval_of_the_gap_holds_at_all_times_at_once() -> None:
    generator = np.random.default_rng(4)
    missed = 0
    for _ in range(100):
        tally, expected = Tally(), 0.0
        confidence = generator.uniform(0.5, 1, 200)
        truth = np.clip(confidence - generator.uniform(-0.1, 0.3, 200), 0, 1)  # the expected gap moves
        correct = generator.random(200) < truth
        out = False
        for n in range(200):
            tally.add([float(confidence[n])], [bool(correct[n])], 1.0)
            expected += confidence[n] - truth[n]
            low, high = tally.agreement(0.8).interval
            out |= not low <= expected / (n + 1) <= high
        missed += out
    assert missed <= most(100, 0.2)
    low, high = tally.agreement(0.8).interval
    assert high - low < 0.6


# ------------------------------------------------------------------------------------------- the false-alarm rate


def rank_alarms(runs: int, steps: int, rate: float, reference: int, seed: int) -> int:
    generator = np.random.default_rng(seed)
    alarms = 0
    for _ in range(runs):
        cells = score_cells(generator.lognormal(-3, 2, reference + steps))
        test = RankTest.against(cells[:reference], SCORE_CELLS)
        uniform = generator.random(steps)
        for step in range(steps):
            test.observe(int(cells[reference + step]), uniform[step], step)
            if test.evidence.capital * rate >= 1:
                alarms += 1
                break
    return alarms


def test_false_alarms_of_ranks_against_a_small_reference_are_as_rare_as_stated() -> None:
    assert rank_alarms(200, 500, rate=0.1, reference=30, seed=5) <= most(200, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("reference", [30, 1000])
def test_false_alarms_of_ranks_are_as_rare_as_stated_in_long_streams(reference: int) -> None:
    assert rank_alarms(500, 4000, rate=0.05, reference=reference, seed=6) <= most(500, 0.05)


def monitored(runs: int, steps: int, rate: float, **changes: Any) -> list[errbar.Monitor]:
    """Monitors after streams of predictions like the reference, with labels drawn from the PMFs, 40 inputs late."""
    result = []
    for run in range(runs):
        monitor = errbar.Monitor(prediction(100, 2 * run), rate=rate, seed=run, **changes)
        stream = prediction(steps, 2 * run + 1)
        labels = drawn_labels(stream.pmf, run)
        for start in range(0, steps, 40):
            stop = min(start + 40, steps)
            monitor.observe(rows(stream, start, stop), range(start, stop))
            if start:
                monitor.label(range(start - 40, start), labels[start - 40 : start])
        result.append(monitor)
    return result


def test_false_alarms_of_all_tests_together_are_as_rare_as_stated() -> None:
    monitors = monitored(60, 240, rate=0.3, tolerance=0.0)
    assert sum(bool(monitor.alarms) for monitor in monitors) <= most(60, 0.3)
    assert all(monitor.agreement().labels == 200 for monitor in monitors)


@pytest.mark.slow
def test_false_alarms_of_all_tests_together_are_as_rare_as_stated_in_long_streams() -> None:
    monitors = monitored(200, 2000, rate=0.1, tolerance=0.0)
    assert sum(bool(monitor.alarms) for monitor in monitors) <= most(200, 0.1)


def test_the_rate_is_shared_among_the_tests() -> None:
    monitor = errbar.Monitor(prediction(20, 0), rate=0.06)
    assert monitor.rates == pytest.approx(dict.fromkeys(INPUT_TESTS + LABEL_TESTS, 0.01))
    alone = errbar.Monitor(prediction(20, 0), rate=0.06, tests="entropy")
    assert alone.rates == {"entropy": 0.06}
    assert sum(monitor.rates.values()) == pytest.approx(monitor.rate) == alone.rate


# ------------------------------------------------------------------------------------------------- power, on digits


@functools.cache
def digits() -> tuple[errbar.Posterior, Tensor, Tensor]:
    """A posterior fitted and calibrated on 900 digits, and 897 digits that it has not seen, in random order."""
    x, y = shuffled_digits(torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 60), nn.ReLU(), nn.Linear(60, 10))
    trained(model, x[:600], y[:600], steps=150, lr=3e-3, weight_decay=1e-3)
    posterior = errbar.fit(model, [(x[:600], y[:600])], last_layers=1, prior=errbar.Prior(0.6))
    return errbar.calibrate(posterior, [(x[600:900], y[600:900])], samples=200), x[900:], y[900:]


REFERENCE, CLEAN = 400, 150


def digits_stream(x: Tensor, y: Tensor, posterior: errbar.Posterior | None = None, **changes: Any) -> errbar.Monitor:
    """A monitor after 150 clean digits, then these, with labels at once."""
    original, held_out, truth = digits()
    monitor = errbar.Monitor(original.predict(held_out[:REFERENCE], samples=200), rate=0.01, **changes)
    stop = REFERENCE + CLEAN
    monitor.observe(original.predict(held_out[REFERENCE:stop], samples=200), range(CLEAN))
    monitor.label(range(CLEAN), truth[REFERENCE:stop])
    assert monitor.alarms == ()
    later = range(CLEAN, CLEAN + len(x))
    monitor.observe((posterior or original).predict(x, samples=200), later)
    monitor.label(later, y)
    return monitor


def after() -> tuple[Tensor, Tensor]:
    _, x, y = digits()
    return x[REFERENCE + CLEAN :], y[REFERENCE + CLEAN :]


def test_digits_that_are_not_changed_raise_no_alarm() -> None:
    monitor = digits_stream(*after())
    assert monitor.alarms == ()
    low, high = monitor.agreement().interval
    assert low < monitor.agreement().gap < high


@pytest.mark.parametrize(("degrees", "within"), [(20.0, 150), (45.0, 80)])
def test_turned_digits_are_noticed_without_labels(degrees: float, within: int) -> None:
    x, y = after()
    monitor = digits_stream(rotated(x.reshape(-1, 1, 8, 8), degrees).flatten(1), y)
    found = {alarm.test: alarm for alarm in monitor.alarms}
    for test in ("mutual_information", "entropy"):
        assert found[test].side == "higher"
        assert CLEAN < found[test].at <= CLEAN + within
        assert abs(found[test].since - CLEAN) <= 30


def test_noise_is_noticed_without_labels() -> None:
    x, y = after()
    noise = 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    monitor = digits_stream((x + noise).clamp(0, 1), y)
    assert CLEAN < min(alarm.at for alarm in monitor.alarms if alarm.test in INPUT_TESTS) <= CLEAN + 60


def test_another_mix_of_classes_is_noticed_and_named() -> None:
    x, y = after()
    keep = (y == 3) | (y == 4)
    monitor = digits_stream(x[keep], y[keep], tests=["classes"])
    (alarm,) = monitor.alarms
    assert alarm.side in ("more of class 3", "more of class 4")
    assert CLEAN < alarm.at <= CLEAN + 50


@pytest.mark.parametrize(("share", "within"), [(0.1, 250), (0.3, 60)])
def test_wrong_labels_are_noticed(share: float, within: int) -> None:
    x, y = after()
    wrong = torch.rand(len(y), generator=torch.Generator().manual_seed(1)) < share
    monitor = digits_stream(x, torch.where(wrong, (y + 1) % 10, y), tests=LABEL_TESTS)
    found = {alarm.test: alarm for alarm in monitor.alarms}
    assert CLEAN < found["innovation"].at <= CLEAN + within
    assert "underconfidence" not in found
    assert share < 0.3 or found["overconfidence"].side == "confidence above accuracy"


@pytest.mark.parametrize(("factor", "test", "within"), [(8.0, "underconfidence", 60), (0.02, "overconfidence", 1000)])
def test_another_temperature_is_noticed_by_labels(factor: float, test: str, within: int) -> None:
    original, _, _ = digits()
    # Without the covariance: a low temperature alone leaves the doubt of the parameters, and the PMF calibrated.
    changed = original.with_calibration(temperature=factor * original.temperature, covariance_scale=0.0)
    x, y = after()
    # The digits three times over: tests on labels do not ask for inputs that are independent.
    monitor = digits_stream(x.repeat(3, 1), y.repeat(3), changed, tests=LABEL_TESTS[:2], tolerance=0.0)
    (alarm,) = monitor.alarms
    assert alarm.test == test
    assert CLEAN < alarm.at <= CLEAN + within


def confident() -> tuple[errbar.Posterior, Tensor]:
    """A network that is sure of nearly all of its 1200 inputs: half of the mutual information is below 2e-7."""

    def inputs(count: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        kinds = torch.randint(8, (count,), generator=generator)
        return torch.eye(8)[kinds] + 0.12 * torch.randn(count, 8, generator=generator)

    model = nn.Linear(8, 8)
    with torch.no_grad():
        model.weight.copy_(12 * torch.eye(8))
        model.bias.zero_()
    return errbar.fit(model, [inputs(500, 1)], last_layers=1, prior=errbar.Prior(1000.0)), inputs(1200, 100)


def clean_streams_with_alarms(posterior: errbar.Posterior, x: Tensor, reference: int, size: int, runs: int) -> int:
    """Of streams of inputs in random order: the reference predicted in one batch, the rest in batches of `size`."""
    alone = [posterior.predict(row) for row in x.split(1)] if size == 1 else []
    found = 0
    for run in range(runs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(run))
        monitor = errbar.Monitor(posterior.predict(x[order[:reference]]), rate=0.01, seed=run, tests=INPUT_TESTS)
        for part in order[reference:].split(size):
            monitor.observe(alone[int(part)] if size == 1 else posterior.predict(x[part]))
        found += bool(monitor.alarms)
    return found


@pytest.mark.parametrize("size", [1, 64])
def test_streams_may_come_in_other_batches_than_the_reference(size: int) -> None:
    posterior, x = confident()
    assert clean_streams_with_alarms(posterior, x, 600, size, runs=6) <= most(6, 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 7, 64])
def test_clean_digits_raise_no_more_alarms_than_stated_in_batches_of_any_size(size: int) -> None:
    posterior, x, _ = digits()
    assert clean_streams_with_alarms(posterior, x, REFERENCE, size, runs=60) <= 2


# -------------------------------------------------------------------------------------------- what a stream may do


def fed(monitor: errbar.Monitor, stream: errbar.Prediction, labels: Tensor, cuts: list[int], lag: int) -> list[Any]:
    """Observe in pieces, and label each piece `lag` pieces later."""
    pieces = list(zip([0, *cuts], [*cuts, len(stream)], strict=True))
    alarms = []
    for index, (start, stop) in enumerate(pieces):
        alarms += monitor.observe(rows(stream, start, stop), range(start, stop))
        if index >= lag:
            first, last = pieces[index - lag]
            alarms += monitor.label(range(first, last), labels[first:last])
    return alarms


def shifting(steps: int = 150) -> tuple[errbar.Prediction, Tensor]:
    values = torch.cat(
        [prediction(steps // 2, 10).samples().mT, prediction(steps // 2, 11, sharpness=0.3).samples().mT]
    )
    stream = errbar.Prediction.from_sampler(GivenSampler(values.contiguous()))
    return stream, drawn_labels(prediction(steps, 12).pmf, 13)


def test_a_monitor_saved_and_restored_mid_stream_is_the_one_that_was_not() -> None:
    stream, labels = shifting()
    whole = errbar.Monitor(prediction(60, 0), rate=0.05, outstanding=50, seed=3)
    cuts = list(range(10, 150, 10))
    expected = fed(whole, stream, labels, cuts, lag=3)
    assert len(expected) >= 2
    monitor, alarms = errbar.Monitor(prediction(60, 0), rate=0.05, outstanding=50, seed=3), []
    for index, start in enumerate(range(0, 150, 10)):
        text = json.dumps(monitor.state(), allow_nan=False)
        monitor = errbar.Monitor.from_state(json.loads(text))
        alarms += monitor.observe(rows(stream, start, start + 10), range(start, start + 10))
        if index >= 3:
            late = start - 30
            alarms += monitor.label(range(late, late + 10), labels[late : late + 10])
    assert alarms == expected
    assert monitor.state() == whole.state()
    assert monitor.alarms == whole.alarms
    assert monitor.agreement() == whole.agreement()


def test_a_state_is_not_shared_with_the_monitor_that_came_of_it() -> None:
    monitor = errbar.Monitor(prediction(60, 0))
    monitor.observe(prediction(5, 1), list("abcde"))
    state = monitor.state()
    before = json.dumps(state)
    errbar.Monitor.from_state(state).observe(prediction(20, 2))
    monitor.observe(prediction(20, 2))
    assert json.dumps(state) == before
    assert json.dumps(monitor.state()) != before


@given(st.lists(st.integers(1, 99), unique=True, max_size=8))
@settings(max_examples=20, deadline=None)
def test_how_a_stream_is_cut_into_batches_does_not_matter(cuts: list[int]) -> None:
    stream, labels = shifting(100)
    monitors = [errbar.Monitor(prediction(60, 0), rate=0.05) for _ in range(2)]
    for monitor, places in zip(monitors, ([], sorted(cuts)), strict=True):
        fed(monitor, stream, labels, places, lag=10)  # observes alone: no piece is old enough to be labelled
        monitor.label(range(100), labels)
    assert monitors[0].state() == monitors[1].state()


@given(st.permutations(range(30)))
@settings(max_examples=30, deadline=None)
def test_the_order_of_labels_in_a_call_does_not_matter(order: list[int]) -> None:
    stream, labels = prediction(30, 1), drawn_labels(prediction(30, 1).pmf, 2)
    straight, mixed = (errbar.Monitor(prediction(50, 0)) for _ in range(2))
    for monitor in (straight, mixed):
        monitor.observe(stream, range(30))
    straight.label(range(30), labels)
    mixed.label(order, labels[order])
    assert straight.state() == mixed.state()


@given(st.permutations(range(30)))
@settings(max_examples=30, deadline=None)
def test_the_order_in_which_labels_come_does_not_change_what_they_add_up_to(order: list[int]) -> None:
    stream, labels = prediction(30, 1), drawn_labels(prediction(30, 1).pmf, 2)
    straight, mixed = (errbar.Monitor(prediction(50, 0)) for _ in range(2))
    for monitor, names in ((straight, range(30)), (mixed, order)):
        monitor.observe(stream, range(30))
        for name in names:
            monitor.label([name], labels[name : name + 1])
    a, b = straight.agreement(), mixed.agreement()
    assert (a.labels, a.accuracy) == (b.labels, b.accuracy)
    assert (a.gap, a.ece, a.innovation, a.confidence) == pytest.approx((b.gap, b.ece, b.innovation, b.confidence))


def test_the_agreement_is_that_of_the_metrics() -> None:
    stream, labels = prediction(200, 1), drawn_labels(prediction(200, 3).pmf, 2)
    monitor = errbar.Monitor(prediction(50, 0), label_noise=0.02)
    monitor.observe(stream, range(200))
    monitor.label(range(200), labels)
    agreement = monitor.agreement(0.9)
    assert agreement.level == 0.9
    assert agreement.labels == 200
    assert agreement.accuracy == pytest.approx(errbar.metrics.accuracy(stream.pmf, labels))
    assert agreement.ece == pytest.approx(errbar.metrics.ece(stream.pmf, labels))
    assert agreement.gap == pytest.approx(float(stream.confidence.mean()) - agreement.accuracy)
    smooth = (0.98 * stream.pmf + 0.02 / CLASSES)[torch.arange(200), labels]
    assert agreement.innovation == pytest.approx(float((1 / smooth - 1).mean()) / (CLASSES - 1))


def test_the_oldest_wait_no_longer_when_too_many_do() -> None:
    monitor = errbar.Monitor(prediction(50, 0), outstanding=10)
    monitor.observe(prediction(25, 1), [f"image {n}" for n in range(25)])
    assert (monitor.outstanding, monitor.dropped) == (10, 15)
    monitor.label(["image 14", "image 15", "image 24", "no image"], [0, 1, 2, 3])
    assert (monitor.outstanding, monitor.unmatched, monitor.agreement().labels) == (8, 2, 2)
    monitor.label(["image 15"], [1])
    assert (monitor.unmatched, monitor.agreement().labels) == (3, 2)


def test_what_a_monitor_keeps_does_not_grow_with_the_stream() -> None:
    monitor = errbar.Monitor(prediction(500, 0), outstanding=5)
    sizes = []
    for part in range(6):
        monitor.observe(prediction(500, part + 1), range(500 * part, 500 * (part + 1)))
        sizes.append(len(json.dumps(monitor.state())))
    assert sizes[-1] < 1.2 * sizes[0]
    assert sizes[-1] < 40_000


def test_inputs_without_names_wait_for_nothing() -> None:
    monitor = errbar.Monitor(prediction(50, 0))
    monitor.observe(prediction(20, 1))
    assert (monitor.inputs, monitor.outstanding, monitor.dropped) == (20, 0, 0)
    assert math.isnan(monitor.agreement().gap)
    assert monitor.agreement().interval == (-1, 1)


def test_a_test_raises_its_alarm_once_until_it_is_reset() -> None:
    monitor = errbar.Monitor(prediction(200, 0), rate=0.01, tests=["entropy"])
    strange = prediction(100, 1, sharpness=0.1)
    (alarm,) = monitor.observe(strange, range(100))
    assert monitor.evidence["entropy"] >= 1
    assert alarm.capital * alarm.rate == pytest.approx(monitor.evidence["entropy"])
    assert (alarm.test, alarm.side, alarm.observations) == ("entropy", "higher", alarm.at)
    assert f"since about input {alarm.since}" in str(alarm)
    assert monitor.observe(prediction(100, 2, sharpness=0.1)) == []
    assert monitor.alarms == (alarm,)
    assert "alarms: entropy" in repr(monitor)
    monitor.reset()
    assert (monitor.alarms, monitor.inputs, monitor.outstanding, monitor.dropped) == ((), 0, 0, 100)
    assert monitor.evidence["entropy"] == pytest.approx(0.01)
    assert monitor.observe(prediction(100, 3)) == []
    (again,) = monitor.observe(prediction(100, 4, sharpness=0.1))
    assert again.at > 100


def test_a_new_reference_makes_the_new_normal() -> None:
    monitor = errbar.Monitor(prediction(200, 0), rate=0.01)
    assert monitor.observe(prediction(200, 1, sharpness=0.1))
    monitor.reset(prediction(200, 2, sharpness=0.1))
    assert monitor.observe(prediction(200, 3, sharpness=0.1)) == []
    assert monitor.observe(prediction(200, 4))


# ------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"rate": 0.0}, r"rate is 0\.0; expected a number between 0 and 1"),
        ({"rate": "often"}, r"rate is 'often'; expected a number"),
        ({"label_noise": 1.0}, r"label_noise is 1\.0; expected a number between 0 and 1"),
        ({"tolerance": -0.1}, r"tolerance is -0\.1; expected a number from 0 to less than 1"),
        ({"tests": ["entropy", "drift"]}, r"tests is .*; expected one or more of 'mutual_information'"),
        ({"tests": []}, r"tests is \[\]; expected one or more"),
        ({"tests": ["entropy", "entropy"]}, r"each once"),
        ({"outstanding": -1}, r"outstanding is -1; expected a whole number of zero or more"),
        ({"seed": -1}, r"seed is -1; expected a whole number"),
    ],
)
def test_settings_that_cannot_be(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(errbar.ArgumentError, match=sentence):
        errbar.Monitor(prediction(5, 0), **arguments)


def test_a_reference_that_cannot_be() -> None:
    with pytest.raises(errbar.ArgumentError, match=r"The reference is Tensor; expected a Prediction"):
        errbar.Monitor(prediction(5, 0).pmf)  # type: ignore[arg-type]
    with pytest.raises(errbar.DataError, match=r"The reference holds no inputs"):
        errbar.Monitor(prediction(0, 0))
    with pytest.raises(errbar.ArgumentError, match=r"level is 1; expected a number between 0 and 1"):
        errbar.Monitor(prediction(5, 0)).agreement(1)


@pytest.mark.parametrize(
    ("ids", "error", "sentence"),
    [
        ([1, 2], errbar.ArgumentError, r"There are 2 ids for 3 inputs; expected one per input"),
        ([1, 2, 2], errbar.DataError, r"the same name twice"),
        ([1, 2, 0], errbar.DataError, r"The input 0 is still waiting for its label"),
        ([1.5, 2, 3], errbar.ArgumentError, r"ids hold 1\.5; expected integers or strings"),
        ("abc", errbar.ArgumentError, r"ids is 'abc'; expected a sequence"),
        (7, errbar.ArgumentError, r"ids is 7; expected a sequence"),
    ],
)
def test_names_that_cannot_be(ids: Any, error: type[Exception], sentence: str) -> None:
    monitor = errbar.Monitor(prediction(5, 0))
    monitor.observe(prediction(1, 1), torch.tensor([0]))
    before = monitor.state()
    with pytest.raises(error, match=sentence):
        monitor.observe(prediction(3, 2), ids)
    assert monitor.state() == before


def test_predictions_and_labels_that_cannot_be() -> None:
    monitor = errbar.Monitor(prediction(5, 0))
    monitor.observe(prediction(2, 1), ["a", "b"])
    before = monitor.state()
    two_classes = errbar.Prediction.from_sampler(GivenSampler(torch.full((1, 2, 1), 0.5)))
    broken = errbar.Prediction.from_sampler(GivenSampler(torch.full((1, CLASSES, 1), math.nan)))
    with pytest.raises(errbar.MismatchError, match=r"has 2 classes and the monitor's reference has 4"):
        monitor.observe(two_classes)
    with pytest.raises(errbar.MismatchError, match=r"The reference has 2 classes"):
        monitor.reset(two_classes)
    with pytest.raises(errbar.DataError, match=r"NaN or infinite probabilities"):
        monitor.observe(broken)
    with pytest.raises(errbar.LabelError, match=r"Labels run from 0 to 4; expected 0 to 3"):
        monitor.label(["a", "b"], [0, 4])
    with pytest.raises(errbar.LabelError, match=r"expected \(2,\), one class number for each input"):
        monitor.label(["a", "b"], [0])
    assert monitor.state() == before


def test_states_that_cannot_be() -> None:
    state = errbar.Monitor(prediction(5, 0)).state()
    with pytest.raises(
        errbar.ArgumentError, match=r"not the state of a monitor; expected the result of `Monitor.state`"
    ):
        errbar.Monitor.from_state({"format": "something else"})
    with pytest.raises(errbar.ArgumentError, match=r"not the state of a monitor"):
        errbar.Monitor.from_state({**state, "version": 2})
    with pytest.raises(errbar.ArgumentError, match=r"is damaged \(KeyError: 'tally'\)"):
        errbar.Monitor.from_state({key: value for key, value in state.items() if key != "tally"})
    waiting = {**state["waiting"], "entries": [["a", 1, [0.5, 0.5]]]}
    with pytest.raises(errbar.ArgumentError, match=r"is damaged \(ValueError: a PMF of 2 numbers for 4 classes\)"):
        errbar.Monitor.from_state({**state, "waiting": waiting})


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        (("settings", "classes"), 10**13, r"There are 10000000000000 classes"),
        (("settings", "rate"), math.nan, r"rate is nan; expected a number between 0 and 1"),
        (("settings", "tests"), ["nope"], r"expected one or more of 'mutual_information'"),
        (("settings", "tests"), [], r"expected one or more of"),
        (("settings", "tolerance"), -1, r"tolerance is -1"),
        (("settings", "label_noise"), 0, r"label_noise is 0"),
        (("drawn",), -1, r"'-1' instead of a whole number"),
        (("inputs",), math.inf, r"'inf' instead of a whole number"),
        (("ranks", "entropy", "counts"), [[3, -5]], r"'-5' instead of a whole number"),
        (("ranks", "entropy", "counts"), [[-3, 5]], r"'-3' instead of a whole number"),
        (("ranks", "entropy", "counts"), [], r"fewer scores than in the reference"),
        (("ranks", "entropy", "reference"), [], r"fewer scores than in the reference"),
        (("ranks", "entropy", "evidence", "wealth"), [math.nan] * 8, r"instead of 8 finite numbers"),
        (("ranks", "entropy", "evidence", "wealth"), [-1.0] * 8, r"instead of 8 finite numbers"),
        (("ranks", "entropy", "evidence", "start"), [0.5] * 8, r"'0.5' instead of a whole number"),
        (("ranks", "entropy", "evidence", "steps"), -1, r"'-1' instead of a whole number"),
        (("ranks", "entropy", "seen"), [], r"0 densities instead of 2"),
        (("labelled", "innovation", "best"), [1.0], r"instead of 5 finite numbers"),
        (("tally", "count"), [], r"instead of 10 finite numbers"),
        (("tally", "labels"), 3, r"3 labels, which do not match its bins"),
        (("waiting", "limit"), "many", r"'many' instead of a whole number"),
        (("waiting", "entries"), [["a", 1, [math.nan] * CLASSES]], r"instead of 4 finite numbers"),
        (("waiting", "entries"), [[None, 1, [0.25] * CLASSES]], r"the name 'None'"),
    ],
)
def test_numbers_of_a_state_that_cannot_be(place: tuple[str, ...], value: Any, sentence: str) -> None:
    """Such a state would raise false alarms, or none, or fail at the next label."""
    state = errbar.Monitor(prediction(5, 0)).state()
    inside = state
    for name in place[:-1]:
        inside = inside[name]
    inside[place[-1]] = value
    with pytest.raises(errbar.ArgumentError, match=r"The state of the monitor is damaged \(.*" + sentence):
        errbar.Monitor.from_state(state)
