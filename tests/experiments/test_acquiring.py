"""The experiment on what to label next, on a few digits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from errbar.experiments import acquiring, runs
from errbar.experiments.problem import Problem, Recipe, Samples


def test_every_rule_begins_with_the_same_labels(tmp_path: Path) -> None:
    options = runs.RunOptions("acquire-digits", output=tmp_path, quick=True, progress=False)
    result = acquiring.acquisitions(options)
    found = result["runs"][0]["acquired"]
    assert found["labels"] == [10, 15, 20, 25]
    assert set(found["curves"]) == set(acquiring.RULES)
    assert all(len(own["accuracy"]) == 4 and len(own["seconds"]) == 3 for own in found["curves"].values())
    assert len({own["accuracy"][0] for own in found["curves"].values()}) == 1
    summary = acquiring.summary(result["runs"])
    random = summary["random"]["accuracy"][0]
    margin = summary["margin"]["accuracy"][0]
    assert summary["margin"]["minus_random"]["mean"] == pytest.approx((sum(margin[1:]) - sum(random[1:])) / 3)


@pytest.mark.parametrize(("shape", "convolutions"), [((3, 32, 32), 3), ((1, 28, 28), 0)])
def test_small_networks_fit_the_pictures(shape: tuple[int, ...], convolutions: int) -> None:
    samples = Samples(torch.rand(6, *shape), torch.arange(6) % 3)
    problem = Problem(
        name="made",
        train=samples,
        validation=samples,
        test=samples,
        network=lambda dropout: nn.Identity(),
        recipe=Recipe(epochs=1, batch_size=2),
        members=1,
        class_names=("a", "b", "c"),
    )
    campaign = acquiring.Campaign(pool=6, first=2, each=2, rounds=1, steps=1, small=True)
    model = acquiring._trained(problem, campaign, samples, seed=0)
    assert model(samples.x).shape == (6, 3)
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == convolutions
    assert len(acquiring.curve(problem, campaign, "margin", 0)["accuracy"]) == 2
