"""The default model: the demo's network on scikit-learn's handwritten digits, trained for digits that people draw.

It is trained when the service starts, which takes seconds and gives the same weights every time. Nothing is saved: the
posterior of 4450 parameters would take 79 MB on disk, 238 MB with its factors, to save these seconds of training.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import errbar
from errbar import demo
from errbar._base.progress import track
from errbar._base.threads import one_thread
from errbar.experiments.networks import paper_network
from errbar.experiments.training import seeded, train
from errbar.serve.pictures import PictureRule
from errbar.serve.redrawing import no_digits, redrawn
from errbar.serve.service import Served, training_reference

SETTINGS = demo.DemoSettings(train_size=1000, epochs=10, batch_size=64)
# How often each training and each validation digit is drawn again, and pictures that are no digits, per digit.
COPIES, VALIDATION_COPIES, OTHERS = 6, 2, 0.25
# The demo's prior, and T and T_c by `calibrate` on the validation digits and their copies. Stored here because the
# search takes as long as everything else; a slow test repeats it.
PRIOR = 3.0
TEMPERATURE, COVARIANCE_SCALE = 0.98, 0.75
ABOUT = (
    "A network of five layers (64–256–150–100–40–10), trained on 1000 of scikit-learn's handwritten digits of 8 × 8 "
    "pixels, each also turned, shifted and with strokes of other widths, and on pictures of no digit, for which all "
    "classes are right alike. Calibrated on 400 others. The covariance is that of the 4450 parameters of its last two "
    "layers."
)


class Drawn(NamedTuple):
    """Digits, each with its copies drawn again, in an order of chance."""

    x: Tensor
    y: Tensor

    def data(self) -> TensorDataset:
        return TensorDataset(self.x, self.y)


def drawn(samples: demo.Samples, copies: int, seed: int) -> Drawn:
    """The digits and `copies` of each, drawn again."""
    x = torch.cat([samples.x, redrawn(samples.x, copies, seed)])
    y = torch.cat([samples.y, samples.y.repeat_interleave(copies)])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return Drawn(x[order], y[order])


# As the demo: thousands of small products, which several threads would spend on waiting for each other.
@one_thread(0, torch.device("cpu"))
def digits(settings: demo.DemoSettings | None = None, *, progress: bool = False) -> Served:
    """The network, its posterior with T and T_c, and the training digits to compare inputs with."""
    settings = SETTINGS if settings is None else settings
    data = demo.load(settings)
    training = drawn(data.train, COPIES, settings.seed + 1)
    steps = iter(track(range(2), "Training the digits model", enabled=progress))
    next(steps)
    network = train_network(training, settings)
    next(steps)
    posterior = uncalibrated(network, training).with_calibration(
        temperature=TEMPERATURE, covariance_scale=COVARIANCE_SCALE
    )
    names = tuple(str(number) for number in range(10))
    known = training_reference(posterior, [(training.x, training.y)], names)
    examples = _examples(posterior, data.test)
    for _ in steps:
        pass
    rule = PictureRule((64,), digit=True)
    return Served("digits", posterior, names, (64,), rule, False, known.scores, examples, ABOUT)


def train_network(training: Drawn, settings: demo.DemoSettings) -> nn.Module:
    """The demo's network, trained on digits, and on pictures of none, whose targets are all classes with 1/10 each.

    In float64: training amplifies rounding, and in float32 the result would depend on the number of threads.
    """
    others = no_digits(training.x, int(OTHERS * len(training.x)), settings.seed + 3)
    targets = torch.cat([nn.functional.one_hot(training.y, 10).double(), torch.full((len(others), 10), 0.1).double()])
    with seeded(settings.seed, training.x.device):  # a new network draws weights, from the global generator
        network = paper_network(64).double()
    return train(
        network,
        torch.cat([training.x, others]).double(),
        targets,
        epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        batch_size=settings.batch_size,
        seed=settings.seed,
    ).float()


def uncalibrated(network: nn.Module, training: Drawn) -> errbar.Posterior:
    """From the digits alone: what is no digit adds no information."""
    return errbar.condition(errbar.collect(network, training.data(), last_layers=2), errbar.Prior(PRIOR))


def _examples(posterior: errbar.Posterior, test: demo.Samples) -> tuple[tuple[Tensor, str], ...]:
    """One test digit of each class, and the three that are hardest for the network."""
    first = [int((test.y == label).nonzero()[0]) for label in range(10)]
    leaders = posterior.predict(test.x, 200).pmf.topk(2).values
    hardest = (leaders[:, 0] - leaders[:, 1]).argsort()[:3].tolist()
    return tuple((test.x[row], str(int(test.y[row]))) for row in (*first, *hardest))
