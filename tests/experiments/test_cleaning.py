"""Mistakes put into training data, and how well scores find them."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

import errbar
from data import generator
from errbar.experiments import cleaning
from networks import trained

N, CLASSES = 400, 4


def bytes_of(*shape: int, seed: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=generator(seed), dtype=torch.uint8)


def test_exactly_the_places_named_are_changed() -> None:
    images, foreign = bytes_of(N, 1, 3, 3, seed=0), bytes_of(40, 1, 3, 3, seed=1)
    labels = torch.arange(N) % CLASSES
    dirty, given, kind = cleaning.contaminate(
        images, labels, foreign, wrong=0.05, foreign_share=0.1, classes=CLASSES, seed=2
    )
    assert kind.bincount().tolist() == [N - 60, 20, 40]
    assert torch.equal(given != labels, kind == cleaning.WRONG_LABEL)
    assert set(given.tolist()) == set(range(CLASSES))
    assert torch.equal((dirty != images).flatten(1).any(1), kind == cleaning.FOREIGN)
    placed = {tuple(picture.flatten().tolist()) for picture in dirty[kind == cleaning.FOREIGN]}
    assert placed == {tuple(picture.flatten().tolist()) for picture in foreign}
    assert torch.equal(labels, torch.arange(N) % CLASSES)
    again = cleaning.contaminate(images, labels, foreign, wrong=0.05, foreign_share=0.1, classes=CLASSES, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(again, (dirty, given, kind), strict=True))


def test_mistakes_that_do_not_fit_are_refused() -> None:
    images, labels = bytes_of(10, 1, 3, 3, seed=0), torch.arange(10)
    with pytest.raises(errbar.ArgumentError, match=r"wrong is 1\.5"):
        cleaning.contaminate(images, labels, images, wrong=1.5, seed=0)
    with pytest.raises(errbar.DataError, match="do not fit"):
        cleaning.contaminate(images, labels, images[:1], foreign_share=0.5, seed=0)
    with pytest.raises(errbar.DataError, match="pictures of one shape"):
        cleaning.contaminate(images, labels, images[:, :, :2], seed=0)
    with pytest.raises(errbar.ArgumentError, match="classes is 3"):
        cleaning.contaminate(images, labels, images, classes=3, seed=0)


@pytest.mark.parametrize("levels", [7, 10**6], ids=["many ties", "no ties"])
def test_average_precision_is_that_of_scikit_learn(levels: int) -> None:
    scores = torch.randint(0, levels, (300,), generator=generator(3)).double()
    positive = torch.rand(300, generator=generator(4)) < 0.1 + 0.3 * scores / levels
    found = cleaning.precision_recall(scores, positive)
    assert found["average_precision"] == pytest.approx(average_precision_score(positive, scores))
    order = torch.randperm(300, generator=generator(5))
    again = cleaning.precision_recall(scores[order], positive[order])
    assert again["flagged"] == [pytest.approx(row) for row in found["flagged"]]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_precision_and_recall_count_the_highest_scores() -> None:
    scores = torch.arange(200, 0, -1).double()
    positive = torch.zeros(200, dtype=torch.bool)
    positive[[0, 2, 3, 9, 150]] = True
    found = cleaning.precision_recall(scores, positive)
    assert found["positives"] == 5
    assert found["precision_at_positives"] == pytest.approx(3 / 5)
    flagged = {row["share"]: (row["precision"], row["recall"]) for row in found["flagged"]}
    assert flagged == {0.01: (0.5, 0.2), 0.02: (0.75, 0.6), 0.03: (0.5, 0.6), 0.05: (0.4, 0.8)}
    # Scores that say nothing find what chance finds.
    chance = cleaning.precision_recall(torch.zeros(200), positive)
    assert chance["average_precision"] == pytest.approx(5 / 200)
    assert chance["precision_at_positives"] == pytest.approx(5 / 200)
    with pytest.raises(errbar.DataError, match="some of each kind"):
        cleaning.precision_recall(scores, positive | True)


@functools.cache
def fitted() -> tuple[errbar.Posterior, Tensor, Tensor, Tensor]:
    """Four clusters of bytes with wrong labels, and pictures that belong to none of them."""
    centre = torch.tensor([[40.0, 40.0], [40.0, 160.0], [160.0, 40.0], [160.0, 160.0]])
    truth = torch.arange(N) % CLASSES
    clean = centre[truth] + 12 * torch.randn(N, 2, generator=generator(6))
    foreign = torch.randint(240, 256, (20, 1, 1, 2), generator=generator(7), dtype=torch.uint8)
    pixels, y, kind = cleaning.contaminate(
        clean.clamp(0, 255).byte().reshape(N, 1, 1, 2), truth, foreign, wrong=0.03, classes=CLASSES, seed=8
    )
    x = pixels.double() / 128 - 1
    with torch.random.fork_rng():
        torch.manual_seed(9)
        model = nn.Sequential(nn.Flatten(), nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()
    trained(model, x, y, steps=150, lr=0.02, weight_decay=1e-3)
    return errbar.fit(model, [(x, y)], last_layers=2, prior=errbar.Prior(1.0)), x, y, kind


def test_scores_are_errbars_and_those_of_the_softmax() -> None:
    posterior, x, y, _ = fitted()
    scores = cleaning.rank(posterior, x, y, samples=200, seed=1)
    own = errbar.outlier_scores(posterior, [(x, y)], samples=200, seed=1)
    torch.testing.assert_close(scores["label suspicion"], own.label_suspicion)
    torch.testing.assert_close(scores["mutual information"], own.mutual_information)
    torch.testing.assert_close(scores["contrast variance"], own.contrast_variance)
    pmf = posterior.model(x).softmax(1).detach()
    of_label = pmf.gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(scores["loss"], -of_label.log())
    torch.testing.assert_close(scores["margin"], pmf.scatter(1, y[:, None], 0).amax(1).log() - of_label.log())
    torch.testing.assert_close(scores["entropy"], -(pmf * pmf.log()).sum(1))
    torch.testing.assert_close(scores["least confidence"], 1 - pmf.amax(1))
    torch.testing.assert_close(scores["suspicion plus entropy"], scores["label suspicion"] + scores["entropy"])
    torch.testing.assert_close(scores["loss plus entropy"], scores["loss"] + scores["entropy"])


def test_wrong_labels_and_foreign_pictures_are_found() -> None:
    posterior, x, y, kind = fitted()
    found = cleaning.report(cleaning.rank(posterior, x, y, samples=200), kind)
    assert set(found) == {"wrong label", "foreign", "either"}
    assert found["wrong label"]["label suspicion"]["average_precision"] > 0.6
    assert found["foreign"]["contrast variance"]["average_precision"] > 0.9
    assert found["either"]["suspicion plus entropy"]["average_precision"] > 0.9
    assert set(cleaning.report({"loss": torch.rand(4)}, torch.tensor([0, 1, 0, 0]))) == {"wrong label", "either"}
