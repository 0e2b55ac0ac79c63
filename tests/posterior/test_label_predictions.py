"""Probabilities of several labels: laws, one label against two classes, and how often intervals hold the truth."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import errbar
from errbar._distributions.covariance import DiagonalCovariance, DrawnCovariance, FactoredCovariance, FullCovariance
from errbar.errors import ArgumentError, DataError, MismatchError

COUNT = 3
STRUCTURES = ("dense", "block", "kron", "diag", "lowrank")


def network(labels: int = COUNT) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, labels)).double()


def data(size: int = 40, labels: int = COUNT) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 2, (size, labels), generator=generator)


def fitted(labels: int = COUNT, **options: object) -> errbar.Posterior:
    keywords = {"parameters": "all", "outputs": "labels", **options}
    return errbar.fit(network(labels), [data(labels=labels)], **keywords)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------- one label is two classes


@pytest.mark.parametrize("structure", STRUCTURES)
def test_one_label_is_the_binary_classifier(structure: str) -> None:
    """The same information, evidence and P^g of the contrast; the PMF within the Monte Carlo error of both."""
    x, y = data(labels=1)
    one = fitted(1, structure=structure)
    binary = errbar.fit(network(1), [(x, y[:, 0])], parameters="all", structure=structure)
    torch.testing.assert_close(one.information.dense(), binary.information.dense(), rtol=1e-9, atol=1e-10)
    assert one.log_evidence() == pytest.approx(binary.log_evidence(), rel=1e-9)
    difference = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    contrast = binary.logits(x).covariance @ difference @ difference
    torch.testing.assert_close(one.logits(x).covariance[:, 0, 0], contrast, rtol=1e-8, atol=1e-10)
    own, others = one.predict(x, 4000), binary.predict(x, 4000, seed=1)
    error = (own.standard_error[:, 0].square() + others.standard_error[:, 1].square()).sqrt()
    assert float(((own.pmf[:, 0] - others.pmf[:, 1]).abs() / error).max()) < 4
    torch.testing.assert_close(own.mutual_information[:, 0], others.mutual_information, rtol=0.2, atol=2e-3)
    torch.testing.assert_close(own.entropy[:, 0], others.entropy, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("names", [("temperature",), ("temperature", "covariance_scale")])
def test_one_label_is_calibrated_as_two_classes_are(names: tuple[str, ...]) -> None:
    x, y = data(labels=1)
    held_out = torch.randn(200, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    truth = (torch.rand(200, 1, generator=torch.Generator().manual_seed(6)) < 0.3).long()
    binary = errbar.fit(network(1), [(x, y[:, 0])], parameters="all")
    expected = errbar.calibrate(binary, [(held_out, truth[:, 0])], fit=names, samples=50)
    own = errbar.calibrate(fitted(1), [(held_out, truth)], fit=names, samples=50)
    for name in names:
        assert getattr(own, name) == pytest.approx(getattr(expected, name), rel=1e-6, abs=1e-9)
    shown = [p.with_calibration(softening=0.7) for p in (own, binary.with_calibration(**vars(own.calibration)))]
    mean = shown[0].logits(x).mean[:, 0]
    torch.testing.assert_close(mean, shown[1].logits(x).mean @ torch.tensor([-1.0, 1.0], dtype=torch.float64))


# ------------------------------------------------------------------------------------------------------------ laws


@pytest.mark.parametrize("structure", [*STRUCTURES, {"2": "kron", "*": "block"}])
def test_without_covariance_it_is_the_sigmoid(structure: object) -> None:
    x, _ = data()
    posterior = fitted(structure=structure).with_calibration(temperature=2.0, covariance_scale=0.0)
    torch.testing.assert_close(posterior.predict(x).pmf, torch.sigmoid(network()(x) / 2).detach())


@pytest.mark.parametrize("last", [1, 2])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_probabilities_are_means_over_the_gaussian(structure: str, last: int) -> None:
    """E σ(g), g ~ N(ĝ, P^g_ll), by quadrature; no common shift is taken away, and labels move together as P^g says."""
    x, _ = data()
    posterior = fitted(structure=structure, parameters=None, last_layers=last)
    gaussian, prediction = posterior.logits(x), posterior.predict(x, 4000)
    nodes = torch.linspace(-8, 8, 801, dtype=torch.float64)
    weights = torch.softmax(-nodes.square() / 2, 0)
    expected = torch.sigmoid(gaussian.mean[..., None] + gaussian.variance.sqrt()[..., None] * nodes) @ weights
    assert float(((prediction.pmf - expected) / prediction.standard_error).abs().max()) < 5
    logits = torch.logit(prediction.samples())
    centred = logits - logits.mean(1, keepdim=True)
    covariance = centred.mT @ centred / 4000
    scale = gaussian.variance.sqrt()
    bound = scale[:, :, None] * scale[:, None, :] * 5 / math.sqrt(2000)
    assert bool(((covariance - gaussian.covariance).abs() <= bound).all())


def test_statistics_of_each_label() -> None:
    x, _ = data()
    prediction = fitted().predict(x, 2000)
    samples = prediction.samples()
    f = samples.mean(1)
    torch.testing.assert_close(prediction.pmf, f)
    torch.testing.assert_close(prediction.std, samples.std(1, correction=0))
    torch.testing.assert_close(prediction.covariance.diagonal(dim1=1, dim2=2), samples.var(1, correction=0))
    torch.testing.assert_close(prediction.risk(0.4), (samples > 0.4).double().mean(1))
    lower, upper = prediction.interval(0.8)
    inside = ((samples >= lower[:, None]) & (samples <= upper[:, None])).double().mean(1)
    assert float((inside - 0.8).abs().max()) < 0.002
    assert torch.equal(prediction.label, (f > 0.5).long())
    torch.testing.assert_close(prediction.confidence, torch.maximum(f, 1 - f))

    def entropy(p: Tensor) -> Tensor:
        return -torch.xlogy(p, p) - torch.xlogy(1 - p, 1 - p)

    torch.testing.assert_close(prediction.entropy, entropy(f))
    torch.testing.assert_close(prediction.mutual_information, entropy(f) - entropy(samples).mean(1))


def test_an_input_does_not_depend_on_its_batch() -> None:
    x, _ = data()
    posterior = fitted()
    whole, alone = posterior.predict(x), posterior.predict(x[3:4])
    torch.testing.assert_close(whole.pmf[3:4], alone.pmf, rtol=1e-9, atol=0)
    torch.testing.assert_close(whole.mutual_information[3:4], alone.mutual_information, rtol=1e-7, atol=1e-12)


def test_parameters_pushed_forward_have_the_same_distribution() -> None:
    x, _ = data()
    posterior = fitted()
    exact, drawn = posterior.logits(x[:8]), posterior.drawn_logits(x[:8], 1000)
    assert drawn.predict(1000).pmf.shape == (8, COUNT)
    torch.testing.assert_close(drawn.variance, exact.variance, rtol=0.25, atol=0)
    by_parameters = posterior.with_calibration(covariance_scale=1e-4).predict_by_parameters(x, 20)
    torch.testing.assert_close(by_parameters.pmf, torch.sigmoid(network()(x)).detach(), rtol=0.05, atol=5e-3)


@pytest.mark.parametrize("by", ["labels", "inputs and labels"])
def test_every_form_of_the_covariance_is_rescaled(by: str) -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(4, COUNT, 6, generator=generator, dtype=torch.float64)
    weights = torch.rand(4, COUNT, generator=generator, dtype=torch.float64)
    forms = [FullCovariance(root @ root.mT), DiagonalCovariance(weights), DrawnCovariance(root)]
    for form in [*forms, FactoredCovariance(root[0, :, :COUNT], weights)]:
        scale = torch.rand(COUNT if by == "labels" else (4, COUNT), generator=generator, dtype=torch.float64)
        expected = form.matrix() * scale[..., :, None] * scale[..., None, :]
        torch.testing.assert_close(form.rescaled(scale).matrix(), expected)


# ------------------------------------------------------------------------------------------------------- coverage


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """80 % intervals of a multi-label logistic regression, 300 re-draws of its labels: 80 ± 3 %.

    Labels do not know of each other, so 300 re-draws of three labels of the same inputs are 900 labels of one network.
    """
    redraws, size = 300, 300
    generator = torch.Generator().manual_seed(7)
    x = torch.cat([torch.randn(size, 3, generator=generator), torch.ones(size, 1)], 1).double()
    true_weight = torch.randn(COUNT, 4, generator=generator, dtype=torch.float64).repeat(redraws, 1)
    y = (
        torch.rand(size, COUNT * redraws, generator=generator, dtype=torch.float64) < (x @ true_weight.T).sigmoid()
    ).double()
    prior = 0.01
    weight = torch.zeros_like(true_weight)
    for _ in range(12):  # Newton's method, all labels at a time
        f = torch.sigmoid(x @ weight.T)
        hessian = torch.einsum("nl,ni,nj->lij", f * (1 - f), x, x) + prior * torch.eye(4, dtype=torch.float64)
        gradient = (y - f).T @ x - prior * weight
        weight += torch.linalg.solve(hessian, gradient[..., None])[..., 0]
    assert float(gradient.abs().max()) < 1e-8
    model = nn.Linear(4, COUNT * redraws, bias=False).double()
    model.weight.data = weight
    posterior = errbar.fit(model, [(x, y)], last_layers=1, outputs="labels", prior=errbar.Prior(prior))
    inputs = torch.cat([torch.randn(6, 3, generator=generator), torch.ones(6, 1)], 1).double()
    lower, upper = posterior.predict(inputs).interval(0.8)
    truth = torch.sigmoid(inputs @ true_weight.T)
    covered = ((truth >= lower) & (truth <= upper)).double().mean()
    assert float(covered) == pytest.approx(0.8, abs=0.03)


# ------------------------------------------------------------------------------- calibration of several labels


def miscalibrated() -> tuple[errbar.Posterior, Tensor, Tensor]:
    """Held-out labels by σ(g_l/T_l): each label with a temperature of its own."""
    posterior = fitted()
    x = torch.randn(500, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits = 3 * posterior.model(x).detach() / torch.tensor([1.0, 3.0, 6.0], dtype=torch.float64)
    y = (
        torch.rand(logits.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64) < logits.sigmoid()
    ).long()
    return posterior, x, y


def test_each_label_may_have_its_own_calibration(tmp_path: Path) -> None:
    posterior, x, y = miscalibrated()
    y[:100] = -1
    y[:, 0].clamp_(min=0)
    pooled = errbar.calibrate(posterior, [(x, y)], samples=50)
    each = errbar.calibrate(posterior, [(x, y)], per_label=True, samples=50)
    assert errbar.metrics.label_nll(each.predict(x), y) < errbar.metrics.label_nll(pooled.predict(x), y)
    assert each.temperature == pooled.temperature
    first, second, third = each.label_temperatures
    assert first < second < third
    assert pooled.label_temperatures == (pooled.temperature,) * COUNT
    assert pooled.label_covariance_scales == (pooled.covariance_scale,) * COUNT
    # As if each label were calibrated by itself.
    gaussian, plain = each.logits(x), posterior.logits(x)
    temperatures = torch.tensor(each.label_temperatures, dtype=torch.float64)
    scales = torch.tensor(each.label_covariance_scales, dtype=torch.float64)
    torch.testing.assert_close(gaussian.mean, plain.mean / temperatures)
    torch.testing.assert_close(gaussian.variance, plain.variance * scales / temperatures.square())
    each.save(tmp_path / "a.safetensors", classes=["a", "b", "c"])
    loaded = errbar.load(tmp_path / "a.safetensors", each.model, classes=["a", "b", "c"])
    for again in (loaded, pickle.loads(pickle.dumps(each)), each.with_prior(each.prior)):
        assert torch.equal(again.predict(x[:5]).pmf, each.predict(x[:5]).pmf)
    assert not each.uncalibrated().is_calibrated
    with pytest.raises(ArgumentError, match="this posterior has a T_c for each label; expected one for all"):
        each.predict_by_parameters(x)


@pytest.mark.filterwarnings("ignore:Label .. The best:errbar.CalibrationWarning")
def test_a_label_without_enough_of_both_keeps_the_common_calibration() -> None:
    posterior, x, y = miscalibrated()
    y[9:, 2] = 0
    with pytest.warns(errbar.CalibrationWarning, match="Labels 2 have fewer than 10 held-out inputs"):
        each = errbar.calibrate(posterior, [(x, y)], per_label=True, samples=50, fit="temperature")
    assert each.label_factors is not None
    assert each.label_factors[2] == (1.0, 1.0)


@pytest.mark.filterwarnings("ignore:Label .. The best:errbar.CalibrationWarning")
def test_what_is_not_fitted_by_label_keeps_its_value() -> None:
    """T of each label, then T_c of each label: neither step undoes the other, and no label ends worse."""
    posterior, x, y = miscalibrated()
    data_ = [(x, y)]
    first = errbar.calibrate(posterior, data_, per_label=True, samples=50, fit="temperature")
    second = errbar.calibrate(first, data_, per_label=True, samples=50, fit="covariance_scale")
    assert second.label_temperatures == pytest.approx(first.label_temperatures, rel=1e-12)
    assert len(set(second.label_covariance_scales)) == COUNT
    third = errbar.calibrate(second, data_, per_label=True, samples=50, fit="temperature")
    assert third.label_covariance_scales == pytest.approx(second.label_covariance_scales, rel=1e-12)
    losses = [errbar.metrics.label_nll(one.predict(x, 50), y) for one in (first, second, third)]
    assert losses[2] <= losses[1] + 1e-6
    assert losses[1] <= losses[0] + 1e-6
    # A label without enough of both is left as it is.
    few = y.clone()
    few[9:, 2] = 0
    with pytest.warns(errbar.CalibrationWarning, match="they keep their T and T_c"):
        fourth = errbar.calibrate(third, [(x, few)], per_label=True, samples=50)
    assert fourth.label_temperatures[2] == pytest.approx(third.label_temperatures[2], rel=1e-12)
    with pytest.raises(ArgumentError, match="fit names temperature alone, and this posterior has a T"):
        errbar.calibrate(third, data_, samples=50, fit="temperature")
    assert errbar.calibrate(third, data_, samples=50).label_factors is None


def test_the_calibration_of_a_label_does_not_depend_on_the_seed() -> None:
    """One random draw for all inputs would have no average over directions; quantiles are the integral itself."""
    posterior, x, y = miscalibrated()
    first, second = (errbar.calibrate(posterior, [(x, y)], samples=500, seed=seed) for seed in (0, 1))
    assert first.temperature == pytest.approx(second.temperature, rel=1e-3)
    assert first.covariance_scale == pytest.approx(second.covariance_scale, rel=0.05)  # the limit of the search
    many = errbar.calibrate(posterior, [(x, y)], samples=5000, fit="temperature")
    few = errbar.calibrate(posterior, [(x, y)], samples=500, fit="temperature")
    assert few.temperature == pytest.approx(many.temperature, rel=0.02)


def test_the_text_of_a_posterior_shows_the_temperatures_in_use() -> None:
    posterior, x, y = miscalibrated()
    each = errbar.calibrate(posterior, [(x, y)], per_label=True, samples=50)
    low, high = min(each.label_temperatures), max(each.label_temperatures)
    assert f"T {low:.2g} to {high:.2g}, T_c" in repr(each)
    assert repr(each).endswith("by label")


@pytest.mark.parametrize("by", ["gaussian", "parameters"])
def test_a_sure_mistake_has_a_finite_loss_in_float32(by: str) -> None:
    """A float32 σ(g) is 1 above a logit of 17; the probability that the label is false still has its digits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, COUNT))
    x, y = torch.randn(50, 4), torch.zeros(50, COUNT, dtype=torch.long)
    posterior = errbar.fit(model, [(x, y)], last_layers=1, outputs="labels", prior=errbar.Prior(100.0))
    with torch.no_grad():
        far = 60 * model[0].weight.sum(0, keepdim=True).repeat(5, 1)
    wrong = (model(far) < 0).long()
    if by == "gaussian":
        prediction = posterior.with_calibration(covariance_scale=0.0).predict(far, 10)
        logits = model(far).detach().double()
        truth = float(torch.nn.functional.binary_cross_entropy_with_logits(logits, wrong.double()))
        assert bool(((prediction.pmf == 1) & (wrong == 0)).any())
        assert errbar.metrics.label_nll(prediction, wrong) == pytest.approx(truth, rel=1e-5)
    else:
        prediction = posterior.predict_by_parameters(far, 20)
    assert isinstance(prediction, errbar.LabelPrediction)
    torch.testing.assert_close(prediction.complement, 1 - prediction.pmf, rtol=0, atol=1e-6)


def test_the_prior_is_chosen_by_the_labels_that_are_given() -> None:
    posterior, x, y = miscalibrated()
    y[200:] = -1
    given = errbar.choose_prior(posterior.information, by="nll", data=[(x[:200], y[:200])], precisions=[0.1, 1])
    some = [(x[:200], y[:200]), (x[200:], y[200:])]
    again = errbar.choose_prior(posterior.information, by="nll", data=some, precisions=[0.1, 1])
    assert again.precision == given.precision


# ------------------------------------------------------------------------------------------------------- fusion


def test_labels_are_fused_by_their_logits() -> None:
    x, y = data()
    first, second = (
        fitted().logits(x),
        errbar.fit(network(), [(x[:20], y[:20])], last_layers=1, outputs="labels").logits(x),
    )
    fused = errbar.fuse([first, second])
    precisions = [g.covariance.inverse() for g in (first, second)]
    covariance = (precisions[0] + precisions[1]).inverse()
    vector = sum(p @ g.mean[..., None] for p, g in zip(precisions, (first, second), strict=True))
    torch.testing.assert_close(fused.covariance, covariance, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(fused.mean, (covariance @ vector)[..., 0], rtol=1e-8, atol=1e-10)
    assert fused.predict().pmf.shape == (40, COUNT)
    classes = errbar.fit(network(), [x], last_layers=1).logits(x)
    with pytest.raises(MismatchError, match="Cannot fuse logits of outputs='labels' with logits of outputs='classes'"):
        errbar.fuse([first, classes])


# ------------------------------------------------------------------------------------------------------ decisions


def test_decisions_are_made_label_by_label() -> None:
    x, _ = data()
    prediction = fitted().predict(x)
    cost = torch.tensor([[0.0, 5.0], [1.0, 0.0]], dtype=torch.float64)  # to miss a label, to raise it for nothing
    decision = errbar.decide(prediction, cost)
    f = prediction.pmf
    torch.testing.assert_close(decision.expected_loss, torch.stack([5 * f, 1 - f], 2))
    torch.testing.assert_close(decision.std, torch.stack([5 * prediction.std, prediction.std], 2))
    assert torch.equal(decision.action, (5 * f > 1 - f).long())
    torch.testing.assert_close(decision.least_loss, torch.minimum(5 * f, 1 - f))
    assert decision.least_loss_std.shape == (40, COUNT)
    by_label = errbar.decide(prediction, torch.stack([cost, 2 * cost, 3 * cost]))
    torch.testing.assert_close(by_label.expected_loss[:, 2], 3 * decision.expected_loss[:, 2])


def test_drawn_parameters_give_predictions_of_labels_input_by_input() -> None:
    prediction = fitted().predict_by_parameters(data()[0], 20)
    cost = [[0.0, 1.0], [0.3, 0.3]]
    assert torch.equal(errbar.decide(prediction[:2], cost).action, errbar.decide(prediction, cost).action[:2])


@pytest.mark.parametrize("cost", [[[0.0, 1.0, 2.0]], [[[0.0, 1.0]]] * 2, []])
def test_costs_of_another_shape_are_refused(cost: object) -> None:
    with pytest.raises(ArgumentError, match=r"expected \(actions, 2\) for outputs='labels'"):
        errbar.decide(fitted().predict(data()[0]), cost)


def test_costs_that_are_no_numbers_are_refused() -> None:
    prediction = fitted().predict(data()[0])
    with pytest.raises(ArgumentError, match="cost holds NaN or infinity"):
        errbar.decide(prediction, [[0.0, math.nan]])
    with pytest.raises(ArgumentError, match="that is not an array of real numbers"):
        errbar.decide(prediction, "cheap")


# ------------------------------------------------------------------------------------ what is for classes alone


def test_what_is_for_classes_alone_says_so() -> None:
    x, y = data()
    posterior = fitted()
    prediction = posterior.predict(x)
    is_for_classes = r"is for one of M classes, and this posterior was fitted with outputs='labels'"
    for call in (
        lambda: posterior.joint_logits(x),
        lambda: errbar.outlier_scores(posterior, [x]),
        lambda: errbar.Track(posterior),
        lambda: errbar.frame_noise(posterior, [x]),
        lambda: errbar.calibrate_track(posterior, [x], [0]),
        lambda: errbar.calibrate_fusion([posterior, posterior], [(x, y)]),
        lambda: errbar.autofit(posterior.model, None, [(x, y)], candidates=[posterior.information]),
    ):
        with pytest.raises(ArgumentError, match=is_for_classes):
            call()
    with pytest.raises(ArgumentError, match="autofit is for one of M classes, and outputs is 'labels'"):
        errbar.autofit(posterior.model, [(x, y)], [(x, y)], outputs="labels")
    with pytest.raises(ArgumentError, match=r"centered\(\) takes a common shift of the logits away"):
        posterior.logits(x).centered()
    for metric in (errbar.metrics.nll, errbar.metrics.ece, errbar.abstention, errbar.conformal):
        with pytest.raises(DataError, match="of outputs='labels', whose probabilities are no PMF"):
            metric(prediction, y[:, 0])


def test_calibration_by_label_is_for_labels() -> None:
    x, y = data()
    classes = errbar.fit(network(), [x], last_layers=1)
    with pytest.raises(ArgumentError, match="per_label is for several labels, and this posterior was fitted with"):
        errbar.calibrate(classes, [(x, y[:, 0])], per_label=True)
    with pytest.raises(ArgumentError, match="per_label fits T and T_c of each label, and fit names the softening"):
        errbar.calibrate(fitted(), [(x, y)], per_label=True, fit=("temperature", "softening"))
    with pytest.raises(ArgumentError, match=r"per_label is 1\.5; expected False or True"):
        errbar.calibrate(fitted(), [(x, y)], per_label=1.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="label_factors are 1 pairs, for a posterior of 3 labels"):
        fitted().with_label_factors(((1.0, 1.0),))


def test_held_out_data_without_labels_are_refused() -> None:
    x, y = data()
    with pytest.raises(DataError, match="expected at least one batch with labels that are not missing"):
        errbar.calibrate(fitted(), [(x, torch.full_like(y, -1))])
    with pytest.raises(errbar.LabelError, match="All labels of the held-out data are missing"):
        errbar.choose_prior(fitted().information, by="nll", data=[(x, torch.full_like(y, -1))])
