"""The monitor of several labels: an input is one bet, whatever its labels have to do with each other."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor

import errbar
from chance import most
from errbar._distributions.prediction import prediction_of
from errbar._distributions.sampling import GivenSampler
from errbar._model.outputs import LABELS
from errbar._monitor.label_statistics import Tally
from errbar._monitor.settings import LABEL_TESTS

COUNT = 3


def prediction(count: int, seed: int, shift: float = 0.0, labels: int = COUNT) -> errbar.Prediction:
    generator = torch.Generator().manual_seed(seed)
    mean = 1.5 * torch.randn(count, labels, 1, generator=generator, dtype=torch.float64) + shift
    spread = 0.7 * torch.randn(count, labels, 5, generator=generator, dtype=torch.float64)
    return prediction_of(GivenSampler(torch.sigmoid(mean + spread), LABELS))


def drawn(probability: Tensor, seed: int, *, together: bool = False, missing: float = 0.2) -> Tensor:
    """Labels by these probabilities; with `together` one number decides about all labels of an input."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(len(probability), 1 if together else probability.shape[1], generator=generator)
    given = torch.rand(probability.shape, generator=generator) >= missing
    return torch.where(given, (uniform < probability).long(), -1)


def test_false_alarms_are_as_rare_as_stated_though_labels_depend_on_each_other() -> None:
    alarms = 0
    for run in range(60):
        monitor = errbar.Monitor(prediction(20, 2 * run), rate=0.3, tests=LABEL_TESTS, tolerance=0.0, seed=run)
        stream = prediction(120, 2 * run + 1)
        monitor.observe(stream, range(120))
        monitor.label(range(120), drawn(stream.pmf, run, together=True))
        alarms += bool(monitor.alarms)
    assert alarms <= most(60, 0.3)


def test_what_changes_is_noticed_and_named() -> None:
    monitor = errbar.Monitor(prediction(300, 0), rate=0.05)
    stream = prediction(400, 1)
    monitor.observe(stream, range(400))
    assert monitor.alarms == ()
    monitor.label(range(400), drawn(1 - stream.pmf, 2))
    assert {alarm.test for alarm in monitor.alarms} == {"overconfidence", "innovation"}
    monitor.reset()
    raised = monitor.observe(prediction(400, 3, shift=-3.0))
    assert {alarm.test: alarm.side for alarm in raised}["classes"] == "more without a label"
    monitor.reset()
    only_the_last = prediction(400, 4, shift=0.0)
    only_the_last.sampler.values[:, :-1] *= 0.3  # type: ignore[attr-defined]
    raised = monitor.observe(prediction_of(only_the_last.sampler))
    assert {alarm.test: alarm.side for alarm in raised}["classes"] == "more of label 2"


def test_the_agreement_is_that_of_the_labels_that_are_given() -> None:
    stream, labels = prediction(200, 1), drawn(prediction(200, 3).pmf, 2)
    labels[5] = -1
    monitor = errbar.Monitor(prediction(50, 0), label_noise=0.02)
    monitor.observe(stream, range(200))
    monitor.label(range(200), labels)
    agreement, given = monitor.agreement(), labels >= 0
    assert agreement.labels == 199
    assert agreement.accuracy == pytest.approx(errbar.metrics.label_accuracy(stream, labels))
    assert agreement.confidence == pytest.approx(float(stream.confidence[given].mean()))
    pmf = torch.stack([1 - stream.pmf[given], stream.pmf[given]], 1)
    assert agreement.ece == pytest.approx(errbar.metrics.ece(pmf, labels[given]))
    each = torch.where(given, stream.confidence - (stream.label == labels).double(), 0).sum(1) / given.sum(1)
    assert agreement.gap == pytest.approx(float(each[given.any(1)].mean()))
    smooth = 0.98 * torch.where(labels == 1, stream.pmf, 1 - stream.pmf) + 0.01
    each = torch.where(given, 1 / smooth - 1, 0).sum(1) / given.sum(1)
    assert agreement.innovation == pytest.approx(float(each[given.any(1)].mean()))


def test_the_interval_of_the_gap_holds_for_labels_that_are_all_the_same() -> None:
    generator, missed = np.random.default_rng(4), 0
    for _ in range(60):
        tally, expected, out = Tally(means=[0.0, 0.0]), 0.0, False
        for n, confidence in enumerate(generator.uniform(0.5, 1, 150).tolist()):
            truth = min(max(confidence - generator.uniform(-0.1, 0.3), 0.0), 1.0)
            tally.add([confidence] * 4, [bool(generator.random() < truth)] * 4, 1.0)
            expected += confidence - truth
            low, high = tally.agreement(0.8).interval
            out |= not low <= expected / (n + 1) <= high
        missed += out
    assert missed <= most(60, 0.2)


def test_a_saved_monitor_of_labels_goes_on_as_if_it_had_not_been() -> None:
    stream, labels = prediction(60, 1), drawn(prediction(60, 1).pmf, 2)
    whole = errbar.Monitor(prediction(40, 0), rate=0.05)
    saved = errbar.Monitor(prediction(40, 0), rate=0.05)
    for start in range(0, 60, 20):
        part = slice(start, start + 20)
        saved = errbar.Monitor.from_state(json.loads(json.dumps(saved.state())))
        for monitor in (whole, saved):
            monitor.observe(stream[part], range(start, start + 20))
            monitor.label(range(start, start + 20), labels[part])
    assert saved.state() == whole.state()
    state = whole.state()
    del state["tally"]["means"]
    with pytest.raises(errbar.ArgumentError, match=r"is damaged .* do not match"):
        errbar.Monitor.from_state(state)


def test_one_label_is_enough_and_other_outputs_are_refused() -> None:
    one = errbar.Monitor(prediction(40, 0, labels=1))
    one.observe(prediction(10, 1, labels=1), range(10))
    one.label(range(10), drawn(prediction(10, 1, labels=1).pmf, 0, missing=0.0))
    assert one.agreement().labels == 10
    monitor = errbar.Monitor(prediction(40, 0))
    classes = errbar.Prediction.from_sampler(GivenSampler(torch.full((1, COUNT, 1), 1 / 3)))
    with pytest.raises(errbar.MismatchError, match="has 3 classes and the monitor's reference has 3 labels"):
        monitor.observe(classes)
    monitor.observe(prediction(2, 1), ["a", "b"])
    with pytest.raises(errbar.LabelError, match=r"Labels have shape \(2,\); expected \(2, 3\) for outputs='labels'"):
        monitor.label(["a", "b"], [0, 1])
    words = errbar.fit(torch.nn.Linear(4, 3), [torch.randn(3, 5, 4)], last_layers=1, outputs="positions")
    with pytest.raises(errbar.ArgumentError, match="a monitor watches inputs with one class or some labels each"):
        errbar.Monitor(words.predict(torch.randn(3, 5, 4), 5))
