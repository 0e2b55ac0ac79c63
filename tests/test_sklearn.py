"""The scikit-learn classifier: scikit-learn's own checks, and what they do not look at."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import errbar

sklearn = pytest.importorskip("sklearn")

from sklearn.base import clone  # noqa: E402
from sklearn.datasets import load_digits, make_blobs  # noqa: E402
from sklearn.exceptions import NotFittedError  # noqa: E402
from sklearn.metrics import log_loss  # noqa: E402
from sklearn.model_selection import GridSearchCV, cross_val_predict  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import parametrize_with_checks  # noqa: E402

from errbar.sklearn import ErrbarClassifier  # noqa: E402

# Perfectly separated classes, of which scikit-learn's checks have many, drive T to its bound; that is announced.
pytestmark = pytest.mark.filterwarnings("ignore::errbar.CalibrationWarning")

# Checks that are expected to fail, with the reason: none. Two skip themselves: the one for pandas where that is not
# installed, and the one for the array API unless SCIPY_ARRAY_API is set.
EXPECTED_FAILURES: dict[str, str] = {}


@parametrize_with_checks(
    [ErrbarClassifier(epochs=15, samples=100)], expected_failed_checks=lambda estimator: EXPECTED_FAILURES
)
def test_checks_of_scikit_learn(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


def blobs(count: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three classes that overlap."""
    x, y = make_blobs(count, centers=[[0, 0], [2, 0], [0, 2]], random_state=seed)
    return x, np.array(["cat", "dog", "eel"])[y]


def quick(**settings: Any) -> ErrbarClassifier:
    return ErrbarClassifier(**{"epochs": 20, "samples": 200} | settings)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_the_module_is_not_mistaken_for_scikit_learn() -> None:
    assert errbar.sklearn.BaseEstimator is sklearn.base.BaseEstimator
    assert sys.modules["sklearn"] is not sys.modules["errbar.sklearn"]
    script = (
        "import errbar.sklearn, sklearn, sys; print(sklearn.__name__, 'errbar' in sklearn.__file__.split('/')[-2:])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split() == ["sklearn", "False"]


def test_predictions_are_those_of_the_posterior() -> None:
    x, y = blobs()
    classifier = quick().fit(x, y)
    full = classifier.predict_full(x[:7])
    np.testing.assert_allclose(classifier.predict_proba(x[:7]), full.pmf.numpy())
    np.testing.assert_allclose(classifier.predict_std(x[:7]), full.std.numpy())
    assert classifier.classes_.tolist() == ["cat", "dog", "eel"]
    assert classifier.predict(x[:7]).tolist() == [classifier.classes_[m] for m in full.label]
    assert classifier.n_features_in_ == 2
    assert bool((classifier.predict_std(x) > 0).all())


def test_inputs_are_predicted_alike_in_blocks_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = blobs()
    classifier = quick().fit(x, y)
    whole = classifier.predict_proba(x)
    monkeypatch.setattr(errbar.sklearn, "_BLOCK", 7)
    np.testing.assert_allclose(classifier.predict_proba(x), whole, rtol=1e-9)


def test_the_held_out_part_is_not_trained_on_and_calibrates() -> None:
    x, y = blobs()
    classifier = quick().fit(x, y)
    assert classifier.calibrated_
    assert classifier.posterior_.information.n_samples == 240
    assert classifier.posterior_.covariance_scale != 1.0
    none = quick(validation_fraction=0).fit(x, y)
    assert not none.calibrated_
    assert none.posterior_.information.n_samples == 300
    assert (none.posterior_.temperature, none.posterior_.covariance_scale) == (1.0, 1.0)


def test_calibration_data_of_the_user_replace_the_held_out_part() -> None:
    x, y = blobs()
    classifier = quick(calibrate="covariance_scale").fit(x[:200], y[:200], calibration=(x[200:], y[200:]))
    assert classifier.posterior_.information.n_samples == 200
    held_out = torch.tensor(x[200:]), torch.tensor(np.searchsorted(classifier.classes_, y[200:]))
    bare = classifier.posterior_.with_calibration(temperature=1.0, covariance_scale=1.0)
    again = errbar.calibrate(bare, [held_out], fit="covariance_scale", samples=200, seed=classifier._seed)
    assert again.covariance_scale == pytest.approx(classifier.posterior_.covariance_scale, rel=1e-6)


@pytest.mark.parametrize("names", ["temperature", "covariance_scale", ("temperature", "covariance_scale")])
def test_what_is_calibrated_is_what_is_asked_for(names: str | tuple[str, ...]) -> None:
    x, y = blobs()
    posterior = quick(calibrate=names, objective="brier").fit(x, y).posterior_
    assert (posterior.temperature != 1.0) == ("temperature" in names)
    assert (posterior.covariance_scale != 1.0) == ("covariance_scale" in names)


def test_with_enough_held_out_samples_autofit_chooses_what_was_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = errbar.autofit

    def quick_autofit(model: Any, train: Any, held_out: Any, **options: Any) -> errbar.Choice:
        calls.append(len(held_out))
        return real(model, train, held_out, candidates=[{"last_layers": 1}], **options)

    monkeypatch.setattr(errbar, "autofit", quick_autofit)
    x, y = blobs(600)
    classifier = quick().fit(x, y)
    assert calls == [120]
    assert classifier.choice_ is not None
    assert classifier.posterior_ is classifier.choice_.posterior
    assert classifier.calibrated_
    assert classifier.posterior_.information.n_samples == 480
    given = quick().fit(x[:100], y[:100], calibration=(x[100:300], y[100:300]))
    assert calls == [120, 200]
    assert given.choice_ is not None
    # What is asked for is not chosen.
    for settings in ({"last_layers": 1}, {"prior": 2.0}, {"objective": "brier"}, {"calibrate": "temperature"}):
        assert quick(**settings).fit(x, y).choice_ is None
    assert len(calls) == 2


def test_every_class_stays_in_the_training_part() -> None:
    x, y = blobs()
    rare = np.concatenate([y, ["fox"]])
    classifier = quick(validation_fraction=0.9).fit(np.vstack([x, [[9.0, 9.0]]]), rare)
    assert classifier.classes_.tolist() == ["cat", "dog", "eel", "fox"]
    assert classifier.posterior_.information.n_samples == 301 - 3 * 90


def test_the_random_state_decides_everything_and_the_global_generators_nothing() -> None:
    x, y = blobs()
    torch.manual_seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    one = quick(random_state=3).fit(x, y)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    torch.manual_seed(2)
    np.testing.assert_array_equal(one.predict_proba(x), quick(random_state=3).fit(x, y).predict_proba(x))
    assert not np.array_equal(one.predict_proba(x), quick(random_state=4).fit(x, y).predict_proba(x))
    state = np.random.RandomState(3)
    first, second = quick(random_state=state).fit(x, y), quick(random_state=state).fit(x, y)
    assert not same_weights(first.posterior_.model, second.posterior_.model)


def test_pipelines_grid_search_and_clones_work() -> None:
    x, y = blobs(150)
    pipeline = make_pipeline(StandardScaler(), quick())
    search = GridSearchCV(pipeline, {"errbarclassifier__prior": [0.1, 10.0]}, cv=2, scoring="neg_log_loss").fit(x, y)
    assert search.best_params_["errbarclassifier__prior"] in (0.1, 10.0)
    assert search.predict_proba(x).shape == (150, 3)
    best = search.best_estimator_[-1]
    assert best.posterior_.prior.precision == best.prior
    copied = clone(best)
    assert copied.get_params() == best.get_params()
    with pytest.raises(NotFittedError, match="not fitted yet"):
        copied.predict(x)
    assert cross_val_predict(pipeline, x, y, cv=2).shape == (150,)


def test_a_fitted_classifier_survives_pickling() -> None:
    x, y = blobs()
    classifier = quick().fit(x, y)
    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_allclose(again.predict_proba(x), classifier.predict_proba(x), rtol=1e-9)
    np.testing.assert_allclose(again.predict_std(x), classifier.predict_std(x), rtol=1e-9)


@pytest.mark.parametrize("structure", ["dense", "block", "kron", "diag", "lowrank"])
def test_posteriors_of_every_structure_survive_pickling(structure: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double(), torch.randn(20, 3).double()
    posterior = errbar.fit(model, [x], parameters="all", structure=structure)
    posterior = posterior.with_calibration(temperature=1.5, covariance_scale=0.5)
    posterior.predict(x)
    again = pickle.loads(pickle.dumps(posterior))
    assert (again.temperature, again.covariance_scale) == (1.5, 0.5)
    torch.testing.assert_close(again.predict(x).std, posterior.predict(x).std)


def test_a_factory_is_called_with_features_and_classes_and_trained() -> None:
    x, y = blobs()
    asked = []

    def factory(features: int, classes: int) -> nn.Module:
        asked.append((features, classes))
        return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, classes))

    classifier = quick(module=factory).fit(x, y)
    assert asked == [(2, 3)]
    assert classifier.score(x, y) > 0.7
    assert classifier.posterior_.model[0].weight.dtype == torch.float32
    assert classifier.predict_proba(x).dtype == np.float64


def float32_network(features: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))


def test_probabilities_of_a_float32_network_sum_to_one_as_scikit_learn_wants_it() -> None:
    x, y = blobs()
    probability = quick(module=float32_network).fit(x, y).predict_proba(x)
    assert log_loss(y, probability) < 1.1  # warns of sums that are off by more than 1e-8
    np.testing.assert_allclose(probability.sum(1), 1, rtol=0, atol=1e-12)


def test_one_sample_that_is_left_over_is_no_batch_of_its_own() -> None:
    """Batch norms refuse to train on one sample."""
    x, y = blobs(101)
    assert quick(module=float32_network, batch_size=10, validation_fraction=0).fit(x, y).score(x, y) > 0.5
    assert quick(batch_size=1, epochs=1, validation_fraction=0).fit(x[:5], y[:5]).predict(x).shape == (101,)


def test_a_network_with_one_logit_tells_two_classes_apart() -> None:
    x, y = blobs()
    x, y = x[y != "eel"], y[y != "eel"]
    classifier = quick(module=lambda features, _: nn.Linear(features, 1), last_layers=1).fit(x, y)
    assert classifier.predict_proba(x).shape == (len(x), 2)
    assert classifier.score(x, y) > 0.7


def test_inputs_may_run_backwards_or_be_read_only() -> None:
    x, y = blobs()
    classifier = quick().fit(x, y, calibration=(x[::-1], y[::-1]))
    np.testing.assert_allclose(classifier.predict_proba(x[::-1]), classifier.predict_proba(x)[::-1], rtol=1e-9)
    shared = x.copy()
    shared.flags.writeable = False
    np.testing.assert_array_equal(classifier.predict_proba(shared), classifier.predict_proba(x))


def test_a_trained_module_is_used_as_it_is() -> None:
    x, y = blobs()
    module = quick().fit(x, y).posterior_.model
    weights = [parameter.clone() for parameter in module.parameters()]
    classifier = quick(module=module, prior=2.0).fit(x, y)
    assert classifier.posterior_.model is module
    assert all(torch.equal(a, b) for a, b in zip(weights, module.parameters(), strict=True))
    assert not classifier.calibrated_
    assert classifier.posterior_.information.n_samples == 300
    assert quick(module=module, prior=2.0).fit(x, y, calibration=(x, y)).calibrated_


def test_the_prior_is_that_of_the_weight_decay_or_what_is_asked_for() -> None:
    x, y = blobs()
    assert quick(weight_decay=1e-2).fit(x, y).posterior_.prior.precision == pytest.approx(2.4)
    assert quick(prior=3).fit(x, y).posterior_.prior.precision == 3.0
    assert quick(prior=errbar.Prior(5.0)).fit(x, y).posterior_.prior.precision == 5.0
    chosen = quick(prior="evidence").fit(x, y).posterior_
    assert chosen.prior.precision == errbar.choose_prior(chosen.information).precision


def test_digits_are_learnt_and_errors_have_larger_bars() -> None:
    x, y = load_digits(return_X_y=True)
    classifier = make_pipeline(StandardScaler(), ErrbarClassifier(epochs=30, samples=200, last_layers=2)).fit(
        x[:1200], y[:1200]
    )
    right = classifier.predict(x[1200:]) == y[1200:]
    assert right.mean() > 0.88
    pmf = classifier.predict_proba(x[1200:])
    assert errbar.metrics.ece(pmf, y[1200:]) < 0.05
    bars = classifier[-1].predict_std(classifier[0].transform(x[1200:])).max(1)
    assert errbar.metrics.auroc(bars, ~right) > 0.75


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"epochs": 0}, errbar.ArgumentError, "epochs is 0; expected a whole number of one or more"),
        ({"batch_size": 2.5}, errbar.ArgumentError, "batch_size is 2.5; expected a whole number"),
        ({"validation_fraction": 1.0}, errbar.ArgumentError, "validation_fraction is 1.0; expected 0 up to less"),
        ({"module": 7}, errbar.ArgumentError, "module is 7; expected None, a trained torch.nn.Module"),
        ({"module": lambda f, c: "net"}, errbar.ModelError, "returned a str; expected a torch.nn.Module"),
        ({"module": lambda f, c: nn.Linear(f, 5)}, errbar.ModelError, "tells 5 classes apart; expected 3"),
        ({"prior": "wide"}, errbar.ArgumentError, "prior is 'wide'; expected a number, errbar.Prior, 'evidence'"),
        ({"prior": -1.0}, errbar.ArgumentError, "expected a positive finite number"),
        ({"calibrate": "sharpness"}, errbar.ArgumentError, "fit is 'sharpness'; expected one or more of 'temperature'"),
        ({"objective": "accuracy"}, errbar.ArgumentError, "objective is 'accuracy'"),
        ({"module": lambda f, c: nn.Linear(f, 2)}, errbar.ModelError, "tells 2 classes apart; expected 3"),
        ({"module": lambda f, c: nn.Linear(f + 1, c)}, errbar.DataError, "The model failed on a batch with"),
        ({"hidden_layer_sizes": 32}, errbar.ArgumentError, "hidden_layer_sizes is 32; expected the widths"),
        ({"hidden_layer_sizes": (8, 0)}, errbar.ArgumentError, r"hidden_layer_sizes is \(8, 0\); expected the widths"),
        ({"learning_rate": -1.0}, errbar.ArgumentError, "learning_rate is -1.0; expected a positive number"),
        ({"weight_decay": "small"}, errbar.ArgumentError, "weight_decay is 'small'; expected zero or a positive"),
        ({"samples": 0, "validation_fraction": 0}, errbar.ArgumentError, "samples is 0; expected a whole number"),
    ],
)
def test_mistakes_in_the_settings_are_answered_in_words(settings: Any, error: type[Exception], message: str) -> None:
    x, y = blobs(60)
    with pytest.raises(error, match=message):
        quick(**{"last_layers": 1} | settings).fit(x, y)


@pytest.mark.parametrize(
    ("calibration", "error", "message"),
    [
        (5, errbar.DataError, "calibration is not a pair; expected"),
        (([[1.0, 2.0, 3.0]], ["cat"]), errbar.DataError, "have 3 features; expected 2"),
        (([[1.0, 2.0]], ["cow"]), errbar.LabelError, "have the class .*cow.*, which y does not have"),
    ],
)
def test_mistakes_in_the_calibration_data_are_answered_in_words(
    calibration: Any, error: type[Exception], message: str
) -> None:
    x, y = blobs(60)
    with pytest.raises(error, match=message):
        quick().fit(x, y, calibration=calibration)


def test_one_class_is_no_classification() -> None:
    with pytest.raises(errbar.LabelError, match=r"one class only, .*cat.*; a classifier needs two classes or more"):
        quick().fit(np.zeros((4, 2)), ["cat"] * 4)
