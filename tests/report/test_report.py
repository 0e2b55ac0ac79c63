"""The report: its numbers are those of the library, its words those of its numbers, and nothing gets in unescaped."""

from __future__ import annotations

import base64
import io
import math
import os
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import errbar
from errbar import metrics, report
from errbar._model.batch import Batch
from errbar.errors import ArgumentError, DataError, LabelError, MismatchError
from errbar.report import assessing, checking, scoring, verdict
from errbar.report.axes import Scale
from errbar.report.markup import element
from errbar.report.numbers import points, significant
from errbar.report.observing import Fingerprint, Leaders, Observation, Spread, input_of, observe
from errbar.report.pictures import numbers_of, picture_of, picture_shape
from errbar.report.resampling import area, means, share
from errbar.report.values import Estimate, Facts, Linearisation, Report, Variant
from networks import trained

HOSTILE = ("<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "fish & ships'")


def problem(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three overlapping classes in four dimensions, as float32."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (count,), generator=generator)
    return torch.randn(count, 4, generator=generator) + 1.2 * torch.eye(4)[y], y


@pytest.fixture(scope="module")
def posterior() -> errbar.Posterior:
    """A network that has been trained for too long on too few data, with two layers of it uncertain; calibrated."""
    x, y = problem(60, 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    trained(model, x, y, steps=150, lr=0.05)
    fitted = errbar.fit(model, [(x, y)], last_layers=2, prior=errbar.Prior(1.0))
    return fitted.with_calibration(temperature=1.4, covariance_scale=0.3)


@pytest.fixture(scope="module")
def made(posterior: errbar.Posterior) -> Report:
    x, y = problem(300, 1)
    outside = [torch.randn(80, 4, generator=torch.Generator().manual_seed(2)) * 6]
    return report.assess(posterior, [(x[:170], y[:170]), (x[170:], y[170:])], outliers=outside, classes=HOSTILE)


# ------------------------------------------------------------------------------------------------------ the numbers


def test_the_scores_are_those_of_the_metrics(made: Report, posterior: errbar.Posterior) -> None:
    x, y = problem(300, 1)
    plain = posterior.with_calibration(temperature=1.0, covariance_scale=1.0)
    pmfs = [torch.softmax(posterior.model(x).detach(), 1), plain.predict(x).pmf, posterior.predict(x).pmf]
    assert [variant.key for variant in made.variants] == ["network", "before_calibration", "after_calibration"]
    for variant, pmf in zip(made.variants, pmfs, strict=True):
        assert variant.accuracy.value == pytest.approx(metrics.accuracy(pmf, y))
        assert variant.nll.value == pytest.approx(metrics.nll(pmf, y), rel=1e-5)
        assert variant.brier.value == pytest.approx(metrics.brier(pmf, y), rel=1e-5)
        assert variant.ece.value == pytest.approx(metrics.ece(pmf, y), rel=1e-4)
        assert (variant.ece.low, variant.ece.high) == pytest.approx(metrics.ece_interval(pmf, y), rel=1e-3)
        assert variant.aurc == pytest.approx(metrics.aurc(pmf, y), rel=1e-4)
        assert variant.gap.value == pytest.approx(float(pmf.amax(1).mean()) - metrics.accuracy(pmf, y), abs=1e-6)
        for estimate in (variant.accuracy, variant.nll, variant.brier, variant.gap):
            assert estimate.low < estimate.value < estimate.high
        assert sum(bin_.count for bin_ in variant.diagram) == sum(variant.histogram.count) == 300
        assert sum(variant.histogram.wrong) == round(300 * (1 - variant.accuracy.value))
        assert variant.risk_coverage.x[-1] == 1
        assert variant.risk_coverage.y[-1] == pytest.approx(1 - variant.accuracy.value)


def test_without_calibration_there_is_nothing_after_it(posterior: errbar.Posterior) -> None:
    x, y = problem(40, 3)
    plain = posterior.with_calibration(temperature=1.0, covariance_scale=1.0)
    found = report.assess(plain, [(x, y)], samples=50)
    assert [variant.name for variant in found.variants] == ["network alone", "with error bars"]
    assert "calibrated it claims" not in found.verdict.sentences[1]


def test_a_softened_posterior_is_reported_with_its_softening(posterior: errbar.Posterior) -> None:
    softened = posterior.with_calibration(softening=2.5)
    x, y = problem(60, 3)
    found = report.assess(softened, [(x, y)], samples=100, outliers=[x + 5])
    assert found.softening == 2.5
    assert found.variants[-1].nll.value == pytest.approx(metrics.nll(softened.predict(x, 100).pmf, y), rel=1e-5)
    assert found.curves is not None
    assert found.curves.softening == 2.5
    # The curves go through the posterior itself, and so do the scores of the second set.
    middle = len(found.curves.by_temperature.x) // 2
    assert found.curves.by_temperature.x[middle] == pytest.approx(1.4)
    same = metrics.nll(softened.predict(x, scoring._CURVE_SAMPLES).pmf, y)
    assert found.curves.by_temperature.y[middle] == pytest.approx(same, rel=1e-5)
    assert found.outliers is not None
    variance = {row.name: row.outside for row in found.outliers.rows}["variance of the logits’ contrasts"]
    assert variance == pytest.approx(float(softened.logits(x + 5).contrast_variance.median()), rel=1e-4)
    assert "and the softening c is 2.5" in " ".join(found.verdict.sentences)
    assert "The softening c = 2.5 raises the temperature" in report.page(found)
    assert ("T, T_c, c", "1.4, 0.3, 2.5") in [row for facts in found.provenance for row in facts.rows]


def test_the_interval_of_a_mean_covers_it() -> None:
    covered = 0
    for seed in range(100):
        values = torch.rand(80, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        first, second = means(values, seed)
        assert second.low < second.value < second.high
        covered += first.low <= 0.5 <= first.high
    # Nominal 95 %: a standard deviation of 2.2 in 100, and the bootstrap of 80 numbers is a little narrow.
    assert covered >= 95 - 4 * 2.2


def test_columns_are_resampled_together() -> None:
    values = torch.rand(50, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first, second, difference = means(torch.cat([values, values + 1, values - values], 1), 0)
    assert (second.low, second.high) == pytest.approx((first.low + 1, first.high + 1))
    assert (difference.low, difference.high) == (0, 0)


def test_the_intervals_of_scores_hold_no_negative_number() -> None:
    # One of twenty is wrong: twice the mean, less a high quantile of its resamples, is below zero.
    pmf = torch.tensor([[0.99, 0.01]], dtype=torch.float64).expand(20, 2)
    y = (torch.arange(20) == 0).long()
    found = scoring._variant("network", "it", pmf, Observation({"network": pmf}, y), 10, 0)
    for score in (found.nll, found.brier):
        assert 0 == score.low < score.value < score.high
    assert found.gap.low < 0 < found.gap.high


def test_a_mean_that_is_infinite_has_no_interval() -> None:
    (found,) = means(torch.tensor([[1.0], [math.inf]], dtype=torch.float64), 0)
    assert found.value == math.inf
    assert math.isnan(found.low)
    assert math.isnan(found.high)


@pytest.mark.parametrize(("right", "count"), [(0, 7), (3, 10), (20, 20)])
def test_the_interval_of_a_share_is_wilsons(right: int, count: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(right, count).proportion_ci(method="wilson")
    found = share(right, count)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_the_area_and_its_variance_are_those_of_all_pairs() -> None:
    inside, outside = torch.tensor([1.0, 2.0, 2.0, 5.0]), torch.tensor([2.0, 3.0, 6.0])
    pairs = (outside[:, None] > inside).double() + 0.5 * (outside[:, None] == inside)
    found = area(inside, outside)
    assert found.value == pytest.approx(float(pairs.mean()))
    variance = float(pairs.mean(1).var()) / 3 + float(pairs.mean(0).var()) / 4
    assert found.low == pytest.approx(max(0.0, found.value - 1.959964 * math.sqrt(variance)))
    assert found.high == pytest.approx(min(1.0, found.value + 1.959964 * math.sqrt(variance)))


def test_the_best_temperature_is_that_of_a_fine_grid() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(200, 3, generator=generator)
    labels = torch.multinomial(torch.softmax(logits / 2.5, 1), 1, generator=generator)[:, 0]
    grid = torch.linspace(1.0, 5.0, 2001).tolist()
    best = min(grid, key=lambda T: float(nn.functional.cross_entropy(logits / T, labels)))
    assert scoring.best_temperature(logits, labels) == pytest.approx(best, abs=0.003)


def test_the_gain_of_the_covariance_is_against_the_best_temperature(made: Report, posterior: errbar.Posterior) -> None:
    x, y = problem(300, 1)
    logits = posterior.model(x).detach()
    T = scoring.best_temperature(logits, y)
    rival = float(nn.functional.cross_entropy(logits / T, y))
    prediction = posterior.predict(x)
    assert made.effect.temperature == pytest.approx(T)
    assert made.effect.gain.value == pytest.approx(rival - metrics.nll(prediction.pmf, y), abs=1e-5)
    assert made.effect.std == pytest.approx(float(prediction.std.gather(1, prediction.label[:, None]).mean()), rel=1e-4)


def test_the_curves_pass_through_the_posterior_as_it_is(made: Report, posterior: errbar.Posterior) -> None:
    x, y = problem(300, 1)
    curves = made.curves
    assert curves is not None
    assert curves.inputs == 300
    middle = len(curves.by_temperature.x) // 2
    assert curves.by_temperature.x[middle] == pytest.approx(1.4)
    assert curves.by_scale.x[middle] == pytest.approx(0.3)
    expected = metrics.nll(posterior.predict(x, 200).pmf, y)
    assert curves.by_temperature.y[middle] == pytest.approx(expected, rel=1e-5)
    assert curves.by_scale.y[middle] == pytest.approx(expected, rel=1e-5)
    bare = float(nn.functional.cross_entropy(posterior.model(x).detach() / 1.4, y))
    assert curves.without_covariance.y[middle] == pytest.approx(bare, rel=1e-4)
    assert curves.ridge is not None
    assert all(best <= fixed for best, fixed in zip(curves.ridge.y, curves.by_scale.y, strict=True))


def test_the_rows_of_classes_are_counted(made: Report, posterior: errbar.Posterior) -> None:
    x, y = problem(300, 1)
    label = posterior.predict(x).label
    assert [row.number for row in made.class_rows] == [0, 1, 2]
    for row in made.class_rows:
        assert (row.inputs, row.predicted) == (int((y == row.number).sum()), int((label == row.number).sum()))
        hits = int(((y == row.number) & (label == row.number)).sum())
        assert (row.recall, row.precision) == pytest.approx((hits / row.inputs, hits / row.predicted))
    assert made.class_rows[0].confused_with is not None
    assert re.fullmatch(r".* \(\d+\)", made.class_rows[0].confused_with)


def test_the_examples_lead_their_lists(made: Report, posterior: errbar.Posterior) -> None:
    x, y = problem(300, 1)
    prediction = posterior.predict(x)
    order = prediction.mutual_information.argsort(descending=True)[:6]
    assert [int(example.name) for example in made.uncertain] == order.tolist()
    wrong = prediction.confidence.where(prediction.label != y, -1.0).argsort(descending=True)[:6]
    assert [int(example.name) for example in made.wrong] == wrong.tolist()
    first = made.wrong[0]
    assert (first.label, first.predicted) == (HOSTILE[int(y[wrong[0]])], HOSTILE[int(prediction.label[wrong[0]])])
    assert first.confidence == pytest.approx(float(prediction.confidence[wrong[0]]), rel=1e-4)
    assert {bar.role for bar in first.bars} == {"predicted", "label", "other"}
    assert all(bar.low <= bar.probability + 0.05 and bar.high >= bar.probability - 0.05 for bar in first.bars)


def test_an_ellipse_is_that_of_the_centred_logits(made: Report, posterior: errbar.Posterior) -> None:
    x, _ = problem(300, 1)
    example = made.uncertain[0]
    row = int(example.name)
    centred = posterior.logits(x[row : row + 1]).centered()
    i, j = (HOSTILE.index(name) for name in example.ellipse.names)
    assert example.ellipse.mean == pytest.approx((float(centred.mean[0, i]), float(centred.mean[0, j])), rel=1e-3)
    c, s = math.cos(example.ellipse.angle), math.sin(example.ellipse.angle)
    turn = torch.tensor([[c, -s], [s, c]])
    found = turn @ torch.diag(torch.tensor([example.ellipse.major, example.ellipse.minor]) ** 2) @ turn.T
    torch.testing.assert_close(found, centred.covariance[0][[i, j]][:, [i, j]], rtol=1e-3, atol=1e-4)


def test_outliers_are_told_by_the_area_under_the_curve(made: Report, posterior: errbar.Posterior) -> None:
    x, _ = problem(300, 1)
    outside = torch.randn(80, 4, generator=torch.Generator().manual_seed(2)) * 6
    both = posterior.predict(torch.cat([x, outside])).mutual_information
    expected = metrics.auroc(both, torch.arange(380) >= 300)
    assert made.outliers is not None
    found = {row.name: row for row in made.outliers.rows}["mutual information (nats)"]
    assert (made.outliers.inputs, found.auroc.value) == (80, pytest.approx(expected, abs=1e-6))
    trapezoids = torch.trapezoid(torch.tensor(found.curve.y), torch.tensor(found.curve.x))
    assert float(trapezoids) == pytest.approx(expected, abs=0.02)


def test_the_linearisation_of_a_last_layer_differs_by_noise_alone(posterior: errbar.Posterior) -> None:
    x, y = problem(60, 0)
    last = errbar.fit(posterior.model, [(x, y)], last_layers=1, prior=errbar.Prior(1.0))
    inputs = [Batch((x[row : row + 1],)) for row in range(40)]
    check = checking.linearisation(last, inputs, 400, 1000, 0)
    assert check.distance < 2 * check.noise
    assert check.ratio.low < check.ratio.value < check.ratio.high
    # 400 draws know a standard deviation to 1/√800 = 3.5 %, of each input the same draws.
    assert check.ratio.value == pytest.approx(1, abs=4 * 0.035)
    assert len(check.points) == 40


# --------------------------------------------------------------------------------------------------- one pass of data


@pytest.mark.parametrize("size", [1, 7, 100])
def test_what_is_kept_does_not_depend_on_the_batches(posterior: errbar.Posterior, size: int) -> None:
    x, y = problem(100, 4)

    def kept(size: int) -> tuple[list[float], list[tuple[int, ...]], str]:
        spread: Spread[Batch] = Spread(10, input_of)
        leaders = [Leaders(4, wrong=False), Leaders(4, wrong=True)]
        print_ = Fingerprint()
        stream = [Batch((x[i : i + size],), {}, y[i : i + size]) for i in range(0, 100, size)]
        observe(posterior, stream, 50, 0, [spread, *leaders, print_])
        firsts = [float(batch.args[0][0, 0]) for batch in spread.items]
        return firsts, [tuple(leader.index for leader in one.items) for one in leaders], print_.digest()

    first, second = kept(size), kept(33)
    assert first == second
    # 100 inputs and at most 10 of them: every sixteenth.
    assert first[0] == pytest.approx(x[::16, 0].tolist())


def test_the_fingerprint_is_about_every_number(posterior: errbar.Posterior) -> None:
    x, y = problem(10, 5)
    digests = set()
    for row in (None, 3):
        changed = x.clone()
        if row is not None:
            changed[row, 2] += 1e-6
        for labels in (y, (y + 1) % 3):
            print_ = Fingerprint()
            observe(posterior, [Batch((changed,), {}, labels)], 10, 0, [print_])
            digests.add(print_.digest())
    assert len(digests) == 4


def test_data_without_labels_are_refused(posterior: errbar.Posterior) -> None:
    with pytest.raises(LabelError, match="Labels are missing"):
        report.assess(posterior, [problem(10, 0)[0]])
    with pytest.raises(DataError, match="The data are empty"):
        report.assess(posterior, [])
    with pytest.raises(DataError, match="The second set is empty"):
        report.assess(posterior, [problem(10, 0)], outliers=[], samples=10)
    with pytest.raises(ArgumentError, match="There are 2 class names; expected 3"):
        report.assess(posterior, [problem(10, 0)], classes=("a", "b"))


def test_what_would_not_fit_into_memory_is_left_out_and_said(
    posterior: errbar.Posterior, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "_DRAWN_NUMBERS", 100)
    monkeypatch.setattr(assessing, "_CURVE_NUMBERS", 100)
    found = report.assess(posterior, [problem(30, 0)], samples=20)
    assert found.curves is None
    assert found.linearisation is None
    page = report.page(found)
    for sentence in ("The curves over <i>T</i> and", "The linearisation was not checked: draws of 131 parameters"):
        assert sentence in page


@pytest.mark.parametrize("q", [0.5, 0.0])
def test_a_fused_classifier_has_a_report(posterior: errbar.Posterior, q: float) -> None:
    x, y = problem(200, 1)
    second = posterior.with_calibration(temperature=2.0)
    fused = errbar.FusedClassifier([posterior, second], discrepancies=(0.2, 1.0), temperature=1.3, covariance_scale=q)
    outside = [torch.randn(40, 4, generator=torch.Generator().manual_seed(2)) * 6]
    made = report.assess(fused, [(x[:90], y[:90]), (x[90:], y[90:])], outliers=outside)
    logits = fused.logits(x)
    pmfs = [torch.softmax(logits.mean, 1), logits.predict().pmf, fused.predict(x).pmf]
    for variant, pmf in zip(made.variants, pmfs, strict=True):
        assert variant.nll.value == pytest.approx(metrics.nll(pmf, y), rel=1e-5)
    assert (made.temperature, made.covariance_scale, made.softening) == (1.3, q, 0.0)
    assert [facts.heading for facts in made.provenance][:3] == ["Fusion", "Posterior 0", "Posterior 1"]
    assert any("linearisation was not checked" in sentence for sentence in made.missing)
    assert made.linearisation is None
    text = report.page(made)
    assert "discrepancies s" in text
    assert made.curves is not None
    if q == 0:
        assert len(set(made.curves.by_scale.y)) == 1


# -------------------------------------------------------------------------------------------------------- the words


def variant(gap: Estimate, key: str = "network", **changes: Any) -> Variant:
    nothing = Estimate(0.1, 0.05, 0.15)
    accuracy = Estimate(0.8, 0.78, 0.82)
    empty: Any = ()
    made = Variant(key, key, 0.8 + gap.value, accuracy, gap, nothing, nothing, nothing, 0.1, empty, empty, empty)
    return replace(made, **changes)


OVER, UNDER, NEITHER = Estimate(0.05, 0.03, 0.07), Estimate(-0.04, -0.06, -0.02), Estimate(0.01, -0.01, 0.03)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (OVER, NEITHER, "over-confident by 5.0 percentage points; with error bars it shows no sign"),
        (OVER, OVER, "over-confident by 5.0 percentage points; with error bars still by 5.0 percentage points."),
        (OVER, UNDER, "over-confident by 5.0 percentage points; with error bars it is under-confident by 4.0"),
        (UNDER, NEITHER, "under-confident by 4.0 percentage points; with error bars it shows no sign"),
        (NEITHER, UNDER, "shows no sign of over- or under-confidence; with error bars it is under-confident by 4.0"),
        (NEITHER, NEITHER, "No sign of over- or under-confidence on average"),
    ],
)
def test_the_headline_says_which_way_and_how_far(before: Estimate, after: Estimate, expected: str) -> None:
    assert expected in verdict.headline(variant(before), variant(after))


@pytest.mark.parametrize(
    ("gain", "scale", "expected"),
    [
        (Estimate(0.01, 0.005, 0.015), 0.5, "The covariance improves the probabilities"),
        (Estimate(0.001, -0.005, 0.007), 0.5, "does nothing that a temperature could not:"),
        (Estimate(-0.01, -0.015, -0.005), 0.5, "does not pay off here"),
        (Estimate(-math.inf, math.nan, math.nan), 0.5, "the NLL is infinite"),
        (Estimate(0.0, 0.0, 0.0), 0.0, "switches the error bars off"),
    ],
)
def test_the_verdict_says_whether_the_covariance_scale_does_something(
    gain: Estimate, scale: float, expected: str
) -> None:
    effect = scoring.ScaleEffect(1.2, gain, 0.03)
    pair = [variant(OVER), variant(NEITHER, "after_calibration")]
    sentences = verdict.verdict(1000, pair, effect, errbar.Calibration(1.1, scale), None, None).sentences
    assert expected in sentences[2]
    assert "95\u202f% interval 3.0 to 7.0" in sentences[0]
    assert "which may be chance" in sentences[1]


@pytest.mark.parametrize(
    ("distance", "ratio", "expected"),
    [(0.01, 1.05, "nothing speaks against it"), (0.05, 2.0, "wider"), (0.05, 0.5, "narrower")],
)
def test_the_verdict_says_whether_the_linearisation_holds(distance: float, ratio: float, expected: str) -> None:
    check = Linearisation(64, 100, distance, 0.008, Estimate(ratio, ratio, ratio), ())
    effect = scoring.ScaleEffect(1.2, NEITHER, 0.03)
    sentences = verdict.verdict(10, [variant(OVER)], effect, errbar.Calibration(), check, None).sentences
    assert expected in sentences[3]


def test_the_verdict_says_that_a_posterior_is_not_calibrated() -> None:
    effect = scoring.ScaleEffect(1.2, NEITHER, 0.03)
    sentence = (
        "This posterior is not calibrated (T = 1 and T_c = 1): its PMFs may be far too flat, and its error bars far "
        "too wide. errbar.calibrate fits both to held-out data."
    )
    for scales, is_said in (((1.0, 1.0), True), ((1.0, 0.9), False), ((1.1, 1.0), False)):
        said = verdict.verdict(10, [variant(OVER)], effect, errbar.Calibration(*scales), None, None).sentences
        assert (sentence in said) == is_said


def test_numbers_have_real_minus_signs_and_their_unit() -> None:
    assert points(-0.0123) == "\u22121.2 percentage points"
    assert points(0.01) == "1.0 percentage point"
    assert significant(-1234.5) == "\u22121\u202f234"
    assert significant(0.00001234) == "1.23·10⁻⁵"
    assert significant(math.inf) == "∞"


# --------------------------------------------------------------------------------------------------------- the page


class Page(HTMLParser):
    """Elements with their attributes; closing tags have to match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br", "hr", "col"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def values(self, name: str) -> list[str]:
        return [attributes[name] or "" for _, attributes in self.elements if name in attributes]


@pytest.fixture(scope="module")
def page(made: Report) -> str:
    return report.page(replace(made, provenance=(Facts("Command", (("command", "errbar </code><script>"),)),)))


def test_nothing_of_the_user_is_markup(page: str) -> None:
    parsed = Page(page)
    tags = Counter(tag for tag, _ in parsed.elements)
    assert tags["script"] == 0
    assert tags["img"] == 0  # the inputs are numbers, and the class name is no picture
    assert not any(name.startswith("on") for _, attributes in parsed.elements for name in attributes)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "errbar &lt;/code&gt;&lt;script&gt;" in page


def test_the_page_needs_nothing_from_elsewhere(page: str) -> None:
    parsed = Page(page)
    assert all(target.startswith("#") for target in parsed.values("href"))
    assert all(target.startswith("data:") for target in parsed.values("src"))
    assert set(re.findall(r"url\(([^)]*)\)", page)) == {"#over"}
    assert "@import" not in page
    assert any((policy or "").startswith("default-src 'none'") for policy in parsed.values("content"))
    assert len(page.encode()) < 200_000


def test_what_is_referred_to_exists_once(page: str) -> None:
    parsed = Page(page)
    ids = Counter(parsed.values("id"))
    assert max(ids.values()) == 1
    targets = {target.removeprefix("#") for target in parsed.values("href")} | set(parsed.values("aria-labelledby"))
    assert len(targets) >= 9
    assert targets <= set(ids)


def test_every_chart_says_what_it_shows(page: str) -> None:
    charts = [attributes for tag, attributes in Page(page).elements if tag == "svg"]
    for attributes in charts:
        assert ("aria-label" in attributes) != (attributes.get("aria-hidden") == "true")
    said = [attributes["aria-label"] or "" for attributes in charts if "aria-label" in attributes]
    # Three reliability diagrams, two histograms, risk, two curves, ROC, linearisation, and two a card.
    assert len(said) == 10 + 2 * 12
    assert sum(label.startswith("Reliability diagram") for label in said) == 3


def test_no_coordinate_of_a_chart_is_no_number(page: str) -> None:
    numbers = [
        attributes for tag, attributes in Page(page).elements if tag in ("path", "rect", "circle", "line", "text")
    ]
    values = [value for attributes in numbers for name, value in attributes.items() if name != "class" and value]
    assert len(values) > 500
    assert not [value for value in values if re.search(r"nan|inf", value, re.IGNORECASE)]


def test_headings_go_down_one_step_at_a_time(page: str) -> None:
    levels = [int(tag[1]) for tag, _ in Page(page).elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(second - first <= 1 for first, second in pairwise(levels))


def test_many_classes_are_cut_down_to_the_worst(made: Report) -> None:
    rows = [replace(made.class_rows[0], number=n, name=f"class {n}", recall=n / 200) for n in range(200)]
    page = report.page(replace(made, class_rows=tuple(rows)))
    assert "class 59" in page
    assert "class 60" not in page
    assert "Shown are the 60 of 200 classes with the lowest recall." in page


def test_a_report_without_errors_or_outliers_says_so(posterior: errbar.Posterior) -> None:
    x, _ = problem(30, 6)
    right = posterior.predict(x).label
    found = report.assess(posterior.with_calibration(covariance_scale=0.0), [(x, right)], samples=50)
    assert found.wrong == ()
    page = report.page(found)
    assert "No prediction is wrong." in page
    assert "Inputs from elsewhere" not in page
    assert "switches the error bars off" in page


def test_a_page_is_written_whole_or_not_at_all(made: Report, tmp_path: Path) -> None:
    odd = replace(made, subject="a name that is no text: \udcff")
    report.write(odd, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert text.endswith("</html>\n")
    with pytest.raises(errbar.FileError, match="expected a folder"):
        report.write(made, tmp_path / "nowhere" / "report.html")
    os.mkfifo(tmp_path / "pipe.html")
    with pytest.raises(errbar.FileError, match="it is a pipe"):
        report.write(made, tmp_path / "pipe.html")


def test_elements_escape_texts_and_attributes() -> None:
    assert element("p", "<b>", title='"') == '<p title="&quot;">&lt;b&gt;</p>'
    assert element("p", [element("b", 1.5), None, 2], hidden=False) == "<p><b>1.5</b>2</p>"


@pytest.mark.parametrize(
    ("low", "high", "kind"), [(0.0, 0.0733, "linear"), (0.4, 4.2, "log"), (1e-4, 3.0, "log"), (0.0, 9000.0, "root")]
)
def test_ticks_are_few_round_and_inside(low: float, high: float, kind: str) -> None:
    ticks = Scale(low, high, 0, 100, kind).ticks()
    assert 2 <= len(ticks) <= 8
    assert all(low * 0.999 <= tick <= high * 1.001 for tick in ticks)
    assert all(len(significant(tick, 2)) <= len(significant(tick, 6)) for tick in ticks)
    assert all(float(f"{tick:.1e}") == pytest.approx(tick) for tick in ticks)


# ------------------------------------------------------------------------------------------------------- the pictures


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_has_the_pixels_of_the_input(channels: int) -> None:
    image = pytest.importorskip("PIL.Image")
    x = torch.rand(1, channels, 5, 7, generator=torch.Generator().manual_seed(0))
    found = picture_of(Batch((x,)))
    assert found is not None
    assert (found.width, found.height, found.stretched) == (7, 5, False)
    pixels = torch.tensor(list(image.open(io.BytesIO(found.png)).tobytes()), dtype=torch.uint8)
    assert pixels.reshape(5, 7, channels).permute(2, 0, 1).equal((x[0] * 255).round().to(torch.uint8))


def test_normalised_inputs_are_stretched_bytes_are_not_and_large_ones_made_small() -> None:
    x = torch.linspace(-2, 2, 64).reshape(1, 1, 8, 8)
    stretched = picture_of(Batch((x,)))
    assert stretched is not None
    assert stretched.stretched
    bytes_ = picture_of(Batch((torch.arange(64, dtype=torch.uint8).reshape(1, 1, 8, 8),)))
    assert bytes_ is not None
    assert not bytes_.stretched
    large = picture_of(Batch((torch.rand(1, 3, 300, 150, generator=torch.Generator().manual_seed(0)),)))
    assert large is not None
    assert (large.width, large.height) == (48, 96)


def test_rows_become_pictures_when_asked_to_and_numbers_else() -> None:
    row = Batch((torch.arange(16.0)[None] / 16,))
    assert picture_of(row) is None
    assert numbers_of(row).startswith("0, 0.0625, 0.125")
    assert numbers_of(row).endswith(", …")
    assert numbers_of(Batch((), {"tokens": torch.tensor([[3, -1]])})) == "tokens 3, \u22121"
    found = picture_of(row, (1, 4, 4))
    assert found is not None
    assert (found.width, found.height) == (4, 4)
    with pytest.raises(MismatchError, match="An input has 16 numbers; expected 1×5×5 for a picture"):
        picture_of(row, (1, 5, 5))


@pytest.mark.parametrize("text", ["8", "2x8x8", "8x0", "wide"])
def test_a_shape_of_pictures_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="expected height x width"):
        picture_shape(text)


def test_pictures_are_in_the_page(posterior: errbar.Posterior) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    x = torch.rand(40, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    y = torch.arange(40) % 3
    fitted = errbar.fit(model, [(x, y)], last_layers=1)
    page = Page(report.page(report.assess(fitted, [(x, y)], samples=50)))
    images = [attributes for tag, attributes in page.elements if tag == "img"]
    assert len(images) == 12
    for attributes in images:
        assert (attributes["alt"] or "").startswith("Input ")
        data = (attributes["src"] or "").removeprefix("data:image/png;base64,")
        assert base64.b64decode(data).startswith(b"\x89PNG")
