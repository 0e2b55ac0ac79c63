"""The default model: the demo's network on scikit-learn's handwritten digits.

It is trained when the service starts, which takes seconds and gives the same weights every time. Nothing is saved: the
posterior of 4450 parameters would take 79 MB on disk, 238 MB with its factors, to save three seconds of training.
"""

from __future__ import annotations

from torch import Tensor

import errbar
from errbar import demo
from errbar._base.progress import track
from errbar.serve.pictures import PictureRule
from errbar.serve.service import Served, reference_scores

# The demo's choices on the validation digits: the prior among three, T and T_c by `calibrate`. Stored here because the
# search takes as long as everything else; a slow test repeats it.
PRIOR = 3.0
TEMPERATURE, COVARIANCE_SCALE = 0.830, 0.108
ABOUT = (
    "A network of five layers (64–256–150–100–40–10), trained on 700 of scikit-learn's handwritten digits of 8 × 8 "
    "pixels and calibrated on 400 others. The covariance is that of the 4450 parameters of its last two layers."
)


def digits(settings: demo.DemoSettings | None = None, *, progress: bool = False) -> Served:
    """The demo's network, its posterior with T and T_c, and the training digits to compare inputs with."""
    settings = demo.DemoSettings() if settings is None else settings
    data = demo.load(settings)
    steps = iter(track(range(2), "Training the digits model", enabled=progress))
    next(steps)
    network = demo.train_network(data.train, settings, seed=settings.seed)
    next(steps)
    information = errbar.collect(network, data.train.data(), last_layers=2)
    uncalibrated = errbar.condition(information, errbar.Prior(PRIOR))
    posterior = uncalibrated.with_calibration(temperature=TEMPERATURE, covariance_scale=COVARIANCE_SCALE)
    names = tuple(str(number) for number in range(10))
    scores, _ = reference_scores(posterior, data.train.data(), names)
    examples = _examples(posterior, data.test)
    for _ in steps:
        pass
    rule = PictureRule((64,), digit=True)
    return Served("digits", posterior, names, (64,), rule, False, scores, examples, ABOUT)


def _examples(posterior: errbar.Posterior, test: demo.Samples) -> tuple[tuple[Tensor, str], ...]:
    """One test digit of each class, and the three that are hardest for the network."""
    first = [int((test.y == label).nonzero()[0]) for label in range(10)]
    leaders = posterior.predict(test.x, 200).pmf.topk(2).values
    hardest = (leaders[:, 0] - leaders[:, 1]).argsort()[:3].tolist()
    return tuple((test.x[row], str(int(test.y[row]))) for row in (*first, *hardest))
