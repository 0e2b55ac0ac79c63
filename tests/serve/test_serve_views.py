"""Digits as the page asks for them: drawn by people, seen several times, and what is no digit."""

from __future__ import annotations

import math

import pytest
import torch

import errbar
import strokes
from errbar import demo
from errbar.serve.digits import SETTINGS, digits
from errbar.serve.pictures import PictureRule
from errbar.serve.redrawing import no_digits, redrawn
from errbar.serve.service import Served
from serving import service


@pytest.fixture(scope="module")
def digits_model() -> Served:
    return digits()


def read(lines: list[strokes.Stroke], pen: int = strokes.PEN) -> torch.Tensor:
    return PictureRule((64,), digit=True).read(strokes.drawing(lines, pen), 10**6)


def test_four_views_of_150_digits_fused_are_at_least_as_good_as_one(digits_model: Served) -> None:
    test = demo.load(SETTINGS).test
    labels = test.y[:150]
    frames = demo.make_frames(test.x[:150], 4, seed=0)
    alone, fused = [], []
    with service(digits_model) as running:
        for views in frames:
            (told,) = running.told("/v1/fuse", {"inputs": views.tolist()})["objects"]
            alone.append([view["pmf"] for view in told["single"]])
            fused.append(told["fused"]["pmf"])
    together = torch.tensor(fused, dtype=torch.float64)
    for view in torch.tensor(alone, dtype=torch.float64).unbind(1):
        assert errbar.metrics.accuracy(together, labels) >= errbar.metrics.accuracy(view, labels)
        assert errbar.metrics.nll(together, labels) <= errbar.metrics.nll(view, labels)


@pytest.mark.parametrize("pen", [14, strokes.PEN, 32])
def test_nine_of_ten_digits_that_people_draw_are_recognised(digits_model: Served, pen: int) -> None:
    labels = torch.tensor([int(label) for label, _ in strokes.DIGITS])
    drawn = torch.stack([read(lines, pen) for _, lines in strokes.DIGITS])
    prediction = digits_model.posterior.predict(drawn)
    assert len(labels) == 30
    assert int((prediction.label == labels).sum()) >= 27
    # And they are not foreign: the outlier score of all but a few is among those of the training digits.
    assert digits_model.reference is not None
    limit = digits_model.reference[math.ceil(0.99 * len(digits_model.reference)) - 1]
    assert int((prediction.mutual_information > limit).sum()) <= 3


def test_a_dot_and_noise_have_outlier_scores_above_those_of_the_training_digits(digits_model: Served) -> None:
    generator = torch.Generator().manual_seed(11)
    foreign = torch.cat([read(strokes.DOT)[None], torch.rand(20, 64, generator=generator)])
    scores = digits_model.posterior.predict(foreign).mutual_information.double()
    assert digits_model.reference is not None
    assert float(scores.min()) > float(digits_model.reference[math.ceil(0.99 * len(digits_model.reference)) - 1])


def test_digits_are_drawn_again_and_differ_from_what_is_none() -> None:
    x = demo.load(demo.DemoSettings(train_size=100)).train.x
    again = redrawn(x, 4, seed=1)
    assert again.shape == (400, 64)
    assert torch.equal(again, redrawn(x, 4, seed=1))
    assert not torch.equal(again, redrawn(x, 4, seed=2))
    assert float(again.min()) >= 0
    assert float(again.max()) <= 1
    # The nearest original of most copies is of the same label; thinner and wider strokes change the ink.
    nearest = torch.cdist(again, x).argmin(1)
    labels = demo.load(demo.DemoSettings(train_size=100)).train.y
    assert float((labels[nearest] == labels.repeat_interleave(4)).double().mean()) > 0.8
    ink = (again.mean(1).reshape(100, 4) / x.mean(1, keepdim=True)).flatten()
    assert float(ink.min()) < 0.6
    assert float(ink.max()) > 0.95
    others = no_digits(x, 90, seed=3)
    assert others.shape == (90, 64)
    assert torch.equal(others, no_digits(x, 90, seed=3))
    assert float(others.min()) >= 0
    assert float(others.max()) <= 1
