"""Several classifiers fused as one: the formula against dense algebra, its limits, the choice, files and mistakes."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import errbar
from data import draw, generator
from errbar._fusion.calibrate_fusion import best_fusion, simplest_of_best, tolerance
from errbar._fusion.variants import (
    Numbers,
    Pool,
    Readings,
    Variant,
    Widened,
    _objective,
    draws_for,
    fitted,
)
from networks import perceptron, seeded, trained

CLASSES = 4


def inputs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Four overlapping clouds in five dimensions."""
    centres = 1.2 * draw(CLASSES, 5, seed=99)
    y = torch.randint(CLASSES, (count,), generator=generator(seed))
    return centres[y] + draw(count, 5, seed=seed + 1), y


TRAIN, HELD_OUT, NEW = inputs(120, 10), inputs(300, 20), inputs(50, 30)


@cache
def posterior(seed: int, width: int = 7) -> errbar.Posterior:
    model = trained(seeded(lambda: perceptron(5, width, CLASSES), seed), *TRAIN, steps=60, lr=3e-2)
    return errbar.fit(model, [TRAIN], last_layers=1, prior=errbar.Prior(3.0))


def pair() -> list[errbar.Posterior]:
    return [posterior(0), posterior(1, 12)]


@cache
def calibrated() -> errbar.FusedClassifier:
    return errbar.calibrate_fusion(pair(), [HELD_OUT], samples=64)


def contrasts() -> Tensor:
    """Any orthonormal basis of what sums to zero will do."""
    centring = torch.eye(CLASSES).double() - 1 / CLASSES
    return torch.linalg.svd(centring)[0][:, : CLASSES - 1]


def centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(1, keepdim=True)


# ------------------------------------------------------------------------------------------------------- the formula


def test_the_formula_is_that_of_dense_algebra() -> None:
    a, s, T, q = (2.0, 0.5), (0.3, 1.7), 1.4, 0.6
    fused = errbar.FusedClassifier(pair(), scales=a, discrepancies=s, temperature=T, covariance_scale=q)
    answer = fused.logits(NEW[0])
    E = contrasts()
    gaussians = [member.logits(NEW[0]) for member in pair()]
    for row in range(len(NEW[0])):
        Q = [
            a[c] * E.T @ g.covariance[row] @ E + s[c] * torch.eye(CLASSES - 1).double() for c, g in enumerate(gaussians)
        ]
        P = torch.linalg.inv(sum(torch.linalg.inv(part) for part in Q))
        mean = P @ sum(torch.linalg.inv(Q[c]) @ E.T @ g.mean[row] for c, g in enumerate(gaussians))
        torch.testing.assert_close(answer.mean[row], E @ mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(answer.covariance[row], q * E @ P @ E.T, rtol=1e-10, atol=1e-10)


def test_without_numbers_it_is_the_fusion_of_the_paper() -> None:
    fused = errbar.FusedClassifier(pair()).logits(NEW[0])
    expected = errbar.fuse([member.logits(NEW[0]) for member in pair()])
    torch.testing.assert_close(fused.mean, expected.mean, rtol=0, atol=1e-10)
    torch.testing.assert_close(fused.covariance, expected.covariance, rtol=0, atol=1e-10)


@pytest.mark.parametrize("discrepancy", [1e12, math.inf])
def test_large_and_equal_discrepancies_give_the_mean_of_the_logits(discrepancy: float) -> None:
    same = (discrepancy, discrepancy)
    mean = sum(centred(member.logits(NEW[0]).mean) for member in pair()) / 2
    for T in (1.0, 1.7):
        fused = errbar.FusedClassifier(pair(), discrepancies=same, temperature=T, covariance_scale=0.0)
        torch.testing.assert_close(fused.logits(NEW[0]).mean, mean, rtol=0, atol=1e-9)
        torch.testing.assert_close(fused.predict(NEW[0]).pmf, torch.softmax(mean / T, 1), rtol=0, atol=1e-9)


@pytest.mark.parametrize("discrepancy", [1e12, 1e100])
def test_the_mean_of_the_logits_does_not_depend_on_q(discrepancy: float) -> None:
    mean = sum(centred(member.logits(NEW[0]).mean) for member in pair()) / 2
    for q in (0.0, 1e-6, 1.0):
        fused = errbar.FusedClassifier(pair(), discrepancies=(discrepancy,) * 2, covariance_scale=q)
        torch.testing.assert_close(fused.logits(NEW[0]).mean, mean, rtol=0, atol=1e-9)


def test_the_logits_are_those_before_the_temperature() -> None:
    """`logits` are N(ĝ, qP), and the PMF is the mean softmax of N(ĝ/T, qP/T²)."""
    fused = errbar.FusedClassifier(pair(), discrepancies=(0.1, 0.2), temperature=2.0, covariance_scale=0.5)
    torch.testing.assert_close(
        fused.logits(NEW[0]).tempered(2.0).predict(500, 3).pmf, fused.predict(NEW[0], 500, 3).pmf, rtol=0, atol=1e-12
    )
    cool = fused.with_calibration(temperature=1.0)
    torch.testing.assert_close(cool.logits(NEW[0]).mean, fused.logits(NEW[0]).mean, rtol=0, atol=0)
    torch.testing.assert_close(cool.logits(NEW[0]).predict(500, 3).pmf, cool.predict(NEW[0], 500, 3).pmf)


def test_a_common_factor_of_scales_and_discrepancies_is_one_of_q() -> None:
    first = errbar.FusedClassifier(pair(), scales=(1, 2), discrepancies=(0.1, 0.2), covariance_scale=3)
    second = errbar.FusedClassifier(pair(), scales=(3, 6), discrepancies=(0.3, 0.6), covariance_scale=1)
    torch.testing.assert_close(first.logits(NEW[0]).mean, second.logits(NEW[0]).mean, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(first.logits(NEW[0]).covariance, second.logits(NEW[0]).covariance, rtol=1e-9, atol=0)


def test_a_network_with_an_infinite_discrepancy_takes_no_part() -> None:
    alone = errbar.FusedClassifier(pair(), discrepancies=(0.0, math.inf))
    own = posterior(0).logits(NEW[0]).centered()
    torch.testing.assert_close(alone.logits(NEW[0]).mean, own.mean)
    torch.testing.assert_close(alone.logits(NEW[0]).covariance, own.covariance)
    gaussians = [member.logits(NEW[0]) for member in pair()]
    assert alone.weights(gaussians)[0].tolist() == [1.0, 0.0]


def test_covariances_of_zero_are_taken_where_there_is_a_discrepancy() -> None:
    certain = [member.with_calibration(covariance_scale=0.0) for member in pair()]
    fused = errbar.FusedClassifier(certain, discrepancies=(1.0, 3.0)).logits(NEW[0])
    means = [centred(member.logits(NEW[0]).mean) for member in certain]
    torch.testing.assert_close(fused.mean, 0.75 * means[0] + 0.25 * means[1], rtol=1e-10, atol=1e-10)
    with pytest.raises(errbar.SingularCovarianceError, match="give it a discrepancy above zero"):
        errbar.FusedClassifier(certain).logits(NEW[0])


def test_singular_covariances_are_taken_where_there_is_a_discrepancy() -> None:
    """Two parameters for three contrasts: P^g has rank 2."""
    model = seeded(lambda: perceptron(5, 2, CLASSES), 3)
    narrow = errbar.fit(trained(model, *TRAIN, steps=20, lr=1e-2), [TRAIN], parameters=["0.bias"])
    certain = posterior(0).with_calibration(covariance_scale=0.0)
    s = (0.4, 0.9)
    fused = errbar.FusedClassifier([narrow, certain], discrepancies=s).logits(NEW[0])
    E, eye = contrasts(), torch.eye(CLASSES - 1).double()
    for row in range(len(NEW[0])):
        Q = [
            E.T @ member.logits(NEW[0][row : row + 1]).covariance[0] @ E + s[c] * eye
            for c, member in enumerate((narrow, certain))
        ]
        P = torch.linalg.inv(sum(torch.linalg.inv(part) for part in Q))
        torch.testing.assert_close(fused.covariance[row], E @ P @ E.T, rtol=1e-10, atol=1e-10)
    with pytest.raises(errbar.SingularCovarianceError, match="covariance of network 1"):
        errbar.FusedClassifier([posterior(0), narrow], discrepancies=(0.4, 0.0)).logits(NEW[0])


def test_a_certain_network_beside_others_is_fused_by_its_discrepancy() -> None:
    certain = [posterior(0), posterior(1, 12).with_calibration(covariance_scale=0.0)]
    fused = errbar.calibrate_fusion(certain, [HELD_OUT], samples=32)
    assert fused.table is not None
    assert "an s for each" in {row.name for row in fused.table.rows}
    assert bool(torch.isfinite(fused.predict(NEW[0]).pmf).all())


def test_weights_sum_to_one_and_fall_with_the_discrepancy() -> None:
    gaussians = [member.logits(NEW[0]) for member in pair()]
    first = errbar.FusedClassifier(pair(), discrepancies=(0.1, 0.1)).weights(gaussians)
    second = errbar.FusedClassifier(pair(), discrepancies=(1.0, 0.1)).weights(gaussians)
    torch.testing.assert_close(first.sum(1), torch.ones(len(first)).double())
    assert bool((second[:, 0] < first[:, 0]).all())


def test_an_input_for_each_network_and_streams_of_batches() -> None:
    fused = errbar.FusedClassifier(pair(), discrepancies=(0.5, 0.5))
    x = NEW[0]
    torch.testing.assert_close(fused.predict(each=[x, x]).pmf, fused.predict(x).pmf)
    assert not torch.allclose(fused.predict(each=[x, x.flip(0)]).pmf, fused.predict(x).pmf)
    torch.testing.assert_close(fused.predict(iter([x[:20], x[20:]])).pmf, fused.predict(x).pmf)
    separate = iter([([x[:20], x[:20].flip(0)], NEW[1][:20]), ([x[20:], x[20:].flip(0)], NEW[1][20:])])
    each = torch.cat([fused.predict(each=[part, part.flip(0)]).pmf for part in (x[:20], x[20:])])
    torch.testing.assert_close(fused.predict(separate).pmf, each)
    unlabelled = iter([([x, x.flip(0)],)])
    torch.testing.assert_close(fused.predict(unlabelled).pmf, fused.predict(each=[x, x.flip(0)]).pmf)


def test_a_copy_on_a_device_and_a_pickled_one_predict_the_same() -> None:
    fused = errbar.FusedClassifier(pair(), scales=(2.0, 0.5), discrepancies=(0.5, 0.1), temperature=1.3)
    for other in (fused.to("cpu"), pickle.loads(pickle.dumps(fused))):
        assert (other.scales, other.discrepancies, other.calibration) == (
            fused.scales,
            fused.discrepancies,
            fused.calibration,
        )
        torch.testing.assert_close(other.predict(NEW[0]).pmf, fused.predict(NEW[0]).pmf)


# ------------------------------------------------------------------------------------------------------- the search


def readings_of(classes: int = 3, count: int = 400, scales: tuple[float, ...] = (1.0, 1.0)) -> Readings:
    """Networks whose logits are the truth plus N(0, λ_n I + s_c I), with λ_n known and s_c not."""
    truth = 2.0 * draw(count, classes, seed=3)
    labels = torch.multinomial(torch.softmax(truth, 1), 1, generator=generator(4))[:, 0]
    parts = []
    for c, scale in enumerate(scales):
        variance = draw(count, seed=10 + c).exp()
        noise = draw(count, classes, seed=20 + c) * (variance + scale).sqrt()[:, None]
        covariance = variance[:, None, None] * torch.eye(classes).double()
        parts.append([errbar.LogitGaussian(truth + noise, covariance)])
    return Readings.of(parts, labels)


@pytest.mark.parametrize(
    "variant",
    [
        Pool("w", 2, weighted=True),
        Widened("s", 2, None, (1.0, 2.0), own_discrepancies=True, own_scales=True, width=True),
        Widened("s", 2, None, (1.0, 2.0), own_discrepancies=True, own_scales=False, width=False),
    ],
)
def test_slopes_are_those_of_differences(variant: Variant) -> None:
    readings = readings_of(count=30)
    normal = draws_for(readings, 32, 0).double()
    slopes = _objective(variant, readings, normal, None)
    theta = 0.3 * draw(variant.size(), seed=5)
    gradient = slopes(theta)[1]
    for place in range(len(theta)):
        step = torch.zeros_like(theta)
        step[place] = 1e-5
        difference = (slopes(theta + step)[0] - slopes(theta - step)[0]) / 2e-5
        assert float(gradient[place]) == pytest.approx(difference, abs=1e-7)


@pytest.mark.parametrize("own", [False, True])
def test_a_variant_scores_what_its_numbers_predict(own: bool) -> None:
    """θ and (a, s, T, q) are two ways to say the same: the NLL of the search is that of `FusedClassifier`."""
    gaussians = [member.unrounded_logits(NEW[0]) for member in pair()]
    readings = Readings.of([[part] for part in gaussians], NEW[1])
    variances = tuple(readings.typical_variances().tolist())
    variant = Widened("s", 2, None, variances, own_discrepancies=own, own_scales=own, width=True)
    theta = torch.tensor([0.2, -0.5, 0.1, *([0.7, -0.4] if own else [])]).double()
    numbers = variant.numbers(theta)
    assert math.prod(numbers.scales) == pytest.approx(1.0)
    mean, root = variant.fused(theta, readings)
    assert root is not None
    fused = errbar.FusedClassifier(pair(), **vars(numbers)).fused(gaussians)
    E = torch.as_tensor(errbar._base.linalg.contrast_basis(CLASSES, torch.device("cpu")))
    fused = fused.tempered(numbers.temperature)
    torch.testing.assert_close(fused.mean, mean @ E.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(fused.covariance, E @ root @ root.mT @ E.T, rtol=1e-9, atol=1e-9)


def test_the_weighted_mean_of_logits_is_reached_by_large_discrepancies() -> None:
    gaussians = [member.unrounded_logits(NEW[0]) for member in pair()]
    readings = Readings.of([[part] for part in gaussians], NEW[1])
    pool = Pool("w", 2, weighted=True, largest=float(readings.values.max()))
    theta = torch.tensor([0.3, 0.8]).double()
    fused = errbar.FusedClassifier(pair(), **vars(pool.numbers(theta))).fused(gaussians)
    w = pool.weights(theta)
    expected = sum(float(w[c]) * centred(part.mean) for c, part in enumerate(gaussians))
    torch.testing.assert_close(fused.mean, expected, rtol=1e-7, atol=1e-7)


def test_the_noisier_network_is_found_and_weighed_by_input() -> None:
    """With s = 0.2 and 4, and covariances that are true, discrepancies beat every fixed weight."""
    choice = best_fusion(readings_of(count=1500, scales=(0.2, 4.0)), 5, 0, 64)
    numbers = choice.fit.variant.numbers(choice.fit.theta)
    assert isinstance(choice.fit.variant, Widened)
    assert numbers.discrepancies[0] < numbers.discrepancies[1]
    assert choice.table.weights[0] > choice.table.weights[1]
    assert choice.table.gains[0] > choice.table.gains[1] > 0
    chosen = choice.table.row(choice.table.chosen)
    for baseline in ("mean of logits", "mean of PMFs", "best network alone", "weighted mean of logits"):
        assert chosen.nll < choice.table.row(baseline).nll - 3e-4


def test_groups_are_one_for_each_held_out_input() -> None:
    with pytest.raises(errbar.DataError, match="groups has 7 values; expected one for each of the 300 held-out"):
        errbar.calibrate_fusion(pair(), [HELD_OUT], samples=16, groups=range(7))


def test_few_held_out_data_give_the_mean_of_the_logits() -> None:
    """Two networks that are equally good, and 25 inputs: no number but T can be told."""
    few = readings_of(count=25, scales=(0.5, 0.5))
    choice = best_fusion(few, 5, 0, 64)
    assert choice.table.chosen == "mean of logits"
    numbers = choice.fit.variant.numbers(choice.fit.theta)
    T = numbers.temperature
    assert numbers == Numbers((1.0, 1.0), (math.inf, math.inf), T, 0.0)


def test_the_rule_takes_the_simplest_within_a_standard_error_and_the_tolerance() -> None:
    noise = draw(1000, seed=7)
    spread = 0.1 * (noise - noise.mean()) / noise.std()
    best = torch.zeros(1000).double()
    assert simplest_of_best([best + 4e-4 + spread, best]) == 0  # within 450/N², and within 0.1/√1000
    assert simplest_of_best([best + 4e-4, best]) == 1  # no standard error at all
    assert simplest_of_best([best + 5e-4 + spread, best]) == 1  # beyond 450/N²
    assert simplest_of_best([best + 1.0, best + 4e-4 + spread, best]) == 1
    few = spread[:100] - spread[:100].mean()
    assert simplest_of_best([0.005 + few, torch.zeros(100).double()]) == 0  # below 1.5/N and 0.1/√100
    assert [tolerance(count) for count in (100, 300, 3000)] == [0.015, 0.005, pytest.approx(5e-5)]


def test_inputs_of_one_group_are_not_independent() -> None:
    """Ten copies of 1,000 inputs tell no more than these."""
    noise = draw(1000, seed=8)
    simple = (4e-4 + 0.02 * (noise - noise.mean()) / noise.std()).repeat_interleave(10)
    rich = torch.zeros(10_000).double()
    assert simplest_of_best([simple, rich]) == 1  # one standard error is 2e-4
    assert simplest_of_best([simple, rich], torch.arange(1000).repeat_interleave(10)) == 0  # and now 6e-4


def test_groups_stay_in_one_fold() -> None:
    once = readings_of(count=60)
    twice = once.chosen(torch.arange(60).repeat_interleave(2))
    choices = [
        best_fusion(once, 5, 0, 32),
        best_fusion(twice, 5, 0, 32, groups=torch.arange(60).repeat_interleave(2)),
    ]
    # With the same folds of objects everything that is without a prior is the same, twice.
    first, second = (choice.table.row("mean of logits") for choice in choices)
    assert second.nll == pytest.approx(first.nll, abs=1e-6)


def test_networks_without_covariances_are_fused_by_their_logits() -> None:
    readings = readings_of(count=100)
    certain = Readings(
        readings.means, torch.zeros_like(readings.values), readings.vectors, readings.along, readings.labels
    )
    choice = best_fusion(certain, 5, 0, 32)
    assert {row.name for row in choice.table.rows} == {
        "mean of PMFs",
        "mean of logits",
        "best network alone",
        "weighted mean of logits",
    }


def test_the_mean_of_logits_is_fitted_to_its_optimum() -> None:
    readings = readings_of(count=200)
    normal = draws_for(readings, 8, 0)
    pool = Pool("mean of logits", 2)
    fit = fitted(pool, readings, normal, pool.starts())
    grid = [float(-pool.log_likelihood(torch.tensor([t]).double(), readings, normal)[0].mean()) for t in (
        float(fit.theta[0]) - 0.02, float(fit.theta[0]), float(fit.theta[0]) + 0.02)]  # fmt: skip
    assert grid[1] < min(grid[0], grid[2])


# ------------------------------------------------------------------------------------------------ calibrate_fusion


def test_the_result_is_no_worse_than_what_it_is_compared_with() -> None:
    fused = calibrated()
    table = fused.table
    assert table is not None
    assert table.inputs == len(HELD_OUT[1])
    chosen = table.row(table.chosen)
    limit = tolerance(table.inputs)
    for baseline in ("mean of logits", "best network alone"):
        assert chosen.nll <= table.row(baseline).nll + limit
    assert math.prod(fused.scales) == pytest.approx(1.0)


def test_the_result_prints_its_numbers_and_the_comparison() -> None:
    text = str(calibrated())
    assert text.startswith("2 networks fused, 4 classes: T = ")
    for word in ("weight", "adds", "mean of PMFs", "mean of logits", "best network alone", "chosen", "Chosen: "):
        assert word in text
    assert "chosen" not in str(errbar.FusedClassifier(pair()))


def test_the_same_data_and_seed_give_the_same_numbers() -> None:
    again = errbar.calibrate_fusion(pair(), iter([HELD_OUT]), samples=64)
    assert (again.scales, again.discrepancies) == (calibrated().scales, calibrated().discrepancies)


def test_held_out_batches_may_hold_an_input_for_each_network() -> None:
    x, y = HELD_OUT
    parts = [([x[:150], x[:150]], y[:150]), ([x[150:], x[150:]], y[150:])]
    each = errbar.calibrate_fusion(pair(), parts, samples=64)
    assert each.temperature == pytest.approx(calibrated().temperature, rel=1e-6)


def test_decisions_take_the_predictions() -> None:
    prediction = calibrated().predict(NEW[0])
    assert prediction.risk(0.05).shape == (len(NEW[0]), CLASSES)
    costs = 1 - torch.eye(CLASSES).double()
    assert len(errbar.decide(prediction, costs).action) == len(NEW[0])
    rule = errbar.conformal(calibrated().predict(HELD_OUT[0]).pmf, HELD_OUT[1], level=0.9)
    assert rule.sets(prediction).shape == (len(NEW[0]), CLASSES)


def test_a_monitor_watches_the_predictions() -> None:
    monitor = errbar.Monitor(calibrated().predict(HELD_OUT[0]), rate=0.01)
    assert monitor.observe(calibrated().predict(NEW[0]), list(range(len(NEW[0])))) == []
    alarms = [alarm for _ in range(30) for alarm in monitor.observe(calibrated().predict(NEW[0] + 4.0))]
    assert alarms


# ----------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("factors", [True, False])
def test_a_saved_fusion_predicts_the_same(tmp_path: Path, factors: bool) -> None:
    fused = errbar.FusedClassifier(
        pair(), scales=(2.0, 0.5), discrepancies=(0.3, math.inf), temperature=1.2, covariance_scale=0.7
    )
    path = tmp_path / "fused.safetensors"
    fused.save(path, factors=factors, classes=["a", "b", "c", "d"])
    models = [member.model for member in pair()]
    loaded = errbar.load(path, models, classes=["a", "b", "c", "d"])
    assert (loaded.scales, loaded.discrepancies) == (fused.scales, fused.discrepancies)
    torch.testing.assert_close(loaded.predict(NEW[0]).pmf, fused.predict(NEW[0]).pmf, rtol=1e-9, atol=1e-12)


def test_files_of_fusions_and_models_must_fit_together(tmp_path: Path) -> None:
    path, other = tmp_path / "fused.safetensors", tmp_path / "one.safetensors"
    errbar.FusedClassifier(pair()).save(path)
    posterior(0).save(other)
    models = [member.model for member in pair()]
    with pytest.raises(errbar.MismatchError, match="of 2 networks, and model is 1 models"):
        errbar.load(path, models[:1])
    with pytest.raises(errbar.MismatchError, match="model is a Sequential; expected a list"):
        errbar.load(path, models[0])
    with pytest.raises(errbar.MismatchError, match="weights"):
        errbar.load(path, models[::-1])
    with pytest.raises(errbar.FileError, match="of one network, and model is a list"):
        errbar.load(other, models)
    with pytest.raises(errbar.FileError, match="holds a fused classifier of several networks"):
        errbar.merge([path])
    with pytest.raises(errbar.MismatchError, match="weights"):
        errbar.verify(path, models[::-1])
    with pytest.raises(errbar.MismatchError, match="of 2 networks, and model is a Sequential"):
        errbar.verify(path, models[0])
    with pytest.raises(errbar.FileError, match="of one network, and model is a list"):
        errbar.verify(other, models)


def test_a_file_says_what_it_holds(tmp_path: Path) -> None:
    path, by_hand = tmp_path / "fused.safetensors", tmp_path / "by_hand.safetensors"
    fused = calibrated()
    fused.save(path, classes=["a", "b", "c", "d"])
    models = [member.model for member in pair()]
    for description in (errbar.info(path), errbar.verify(path), errbar.verify(path, models)):
        assert isinstance(description, errbar.FusionDescription)
        assert (description.kind, description.n_classes, description.classes) == ("fusion", 4, ("a", "b", "c", "d"))
        assert (description.scales, description.discrepancies) == (fused.scales, fused.discrepancies)
        assert (description.temperature, description.covariance_scale) == (fused.temperature, fused.covariance_scale)
        assert [part.weights for part in description.networks] == [p.information.network.fingerprint for p in pair()]
        assert description.choice is not None
        assert description.choice.reason.startswith("Chosen: ")
    assert str(errbar.load(path, models)) == str(fused)
    errbar.FusedClassifier(pair()).save(by_hand)
    assert errbar.info(by_hand).choice is None
    assert errbar.load(by_hand, models).table is None
    damaged = bytearray(path.read_bytes())
    damaged[-5] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(errbar.DamagedFileError, match="is damaged: its content does not have the SHA-256"):
        errbar.verify(path)


def test_a_comparison_of_other_networks_is_refused(tmp_path: Path) -> None:
    table = calibrated().table
    assert table is not None
    path = tmp_path / "fused.safetensors"
    models = [member.model for member in pair()]
    for wrong in (replace(table, chosen="nothing"), replace(table, weights=(1.0,), gains=(0.0,))):
        errbar.FusedClassifier(pair(), table=wrong).save(path)
        with pytest.raises(errbar.DamagedFileError, match="comparison that is not one of its 2 networks"):
            errbar.load(path, models)


# -------------------------------------------------------------------------------------------------------- mistakes


def test_mistakes_in_the_numbers_are_named() -> None:
    for numbers, message in (
        ({"discrepancies": (-1.0, 0.0)}, "expected zero or more"),
        ({"discrepancies": (1.0,)}, "discrepancies are .*expected 2 numbers"),
        ({"discrepancies": 1.0}, "discrepancies is 1.0; expected 2 numbers"),
        ({"scales": (0.0, 1.0)}, "expected a positive finite number"),
        ({"scales": ("a", 1.0)}, "scales are"),
        ({"temperature": 0.0}, "temperature"),
        ({"covariance_scale": -1.0}, "covariance scale"),
        ({"discrepancies": (math.inf, math.inf)}, "expected covariance_scale=0|Expected covariance_scale=0"),
    ):
        with pytest.raises(errbar.ArgumentError, match=message):
            errbar.FusedClassifier(pair(), **numbers)


def test_mistakes_in_the_networks_are_named() -> None:
    with pytest.raises(errbar.ArgumentError, match="There is one posterior to fuse; expected two or more"):
        errbar.FusedClassifier([posterior(0)])
    with pytest.raises(errbar.ArgumentError, match="expected a list of two or more posteriors"):
        errbar.calibrate_fusion(posterior(0), [HELD_OUT])
    with pytest.raises(errbar.ArgumentError, match="Expected a Posterior"):
        errbar.calibrate_fusion([posterior(0), nn.Linear(5, 4)], [HELD_OUT])
    y = TRAIN[1].clamp_max(2)
    model = trained(seeded(lambda: perceptron(5, 6, 3), 0), TRAIN[0], y, steps=20, lr=1e-2)
    three = errbar.fit(model, [(TRAIN[0], y)], last_layers=1)
    with pytest.raises(errbar.MismatchError, match="Posterior 0 has 4 classes and posterior 1 has 3"):
        errbar.calibrate_fusion([posterior(0), three], [HELD_OUT])


def test_mistakes_in_the_data_are_named() -> None:
    x, y = HELD_OUT
    with pytest.raises(errbar.LabelError, match="Labels are missing"):
        errbar.calibrate_fusion(pair(), [x])
    with pytest.raises(errbar.LabelError, match="Labels are missing"):
        errbar.calibrate_fusion(pair(), [([x, x],)])
    with pytest.raises(errbar.DataError, match="held-out data are empty"):
        errbar.calibrate_fusion(pair(), [])
    with pytest.raises(errbar.DataError, match="3 inputs for 2 networks"):
        errbar.calibrate_fusion(pair(), [([x, x, x], y)])
    with pytest.raises(errbar.MismatchError, match="row i of each"):
        errbar.calibrate_fusion(pair(), [([x, x[:10]], y)])
    with pytest.raises(errbar.ArgumentError, match="folds"):
        errbar.calibrate_fusion(pair(), [HELD_OUT], folds=1)
    with pytest.raises(errbar.DataError, match="All held-out samples are one group for folds=5"):
        errbar.calibrate_fusion(pair(), [HELD_OUT], groups=[0] * len(HELD_OUT[1]))
    fused = errbar.FusedClassifier(pair())
    with pytest.raises(errbar.ArgumentError, match="Expected x, an input that all networks see"):
        fused.predict()
    with pytest.raises(errbar.ArgumentError, match="each is 1 inputs; expected a list of 2"):
        fused.predict(each=[x])


def test_held_out_data_of_the_training_are_warned_of() -> None:
    with pytest.warns(errbar.CalibrationWarning, match="were in the data of the fit"):
        errbar.calibrate_fusion(pair(), [TRAIN], samples=16)
