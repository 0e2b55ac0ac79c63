"""Pictures of predictions for many positions."""

from __future__ import annotations

import pytest
import torch

import errbar
from errbar._distributions.positions import PositionsPrediction
from errbar._distributions.prediction import Prediction
from errbar._distributions.sampling import GivenSampler


def predicted(*leading: int, classes: int = 3) -> PositionsPrediction:
    generator = torch.Generator().manual_seed(0)
    rows = int(torch.tensor(leading).prod())
    values = torch.rand(rows, classes, 7, generator=generator)
    flat = Prediction.from_sampler(GivenSampler(values / values.sum(1, keepdim=True)))
    return PositionsPrediction.of(flat, leading, ignore_index=-100)


def test_a_segmented_picture_shows_the_std_of_the_most_probable_class() -> None:
    prediction = predicted(2, 5, 6)
    figure = errbar.plots.segmentation(torch.rand(1, 5, 6), prediction, number=1, classes=["none", "cat", "dog"])
    _, middle, right, *_ = figure.axes
    shown = torch.as_tensor(right.images[0].get_array().data)
    expected = prediction.std[1].gather(-1, prediction.label[1][..., None])[..., 0]
    assert torch.allclose(shown.float(), expected, atol=1e-6)
    assert {text.get_text() for text in middle.get_legend().get_texts()} <= {"none", "cat", "dog"}
    figure.canvas.draw()


def test_a_sentence_shows_each_word_with_its_class() -> None:
    prediction = predicted(1, 4)
    words = ["Ada", "lives", "in", "London"]
    figure = errbar.plots.tokens(words, prediction, classes=["O", "PER", "LOC"])
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert [text for text in texts if text in words] == words
    assert sum("±" in text for text in texts) == 4
    figure.canvas.draw()


def test_other_predictions_are_refused() -> None:
    with pytest.raises(errbar.errors.ArgumentError, match=r"expected \(inputs, height, width, classes\)"):
        errbar.plots.segmentation(torch.rand(1, 5, 6), predicted(2, 5))
    with pytest.raises(errbar.errors.ArgumentError, match="There are 9 words"):
        errbar.plots.tokens(["a"] * 9, predicted(1, 4))
