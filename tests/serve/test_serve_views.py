"""Several views of a digit on the page: what the page asks the service for must not be worse than a single view."""

from __future__ import annotations

import torch

import errbar
from errbar import demo
from errbar.serve.digits import digits
from serving import service


def test_four_views_of_150_digits_fused_are_at_least_as_good_as_one() -> None:
    settings = demo.DemoSettings()
    test = demo.load(settings).test
    labels = test.y[:150]
    frames = demo.make_frames(test.x[:150], 4, seed=0)
    alone, fused = [], []
    with service(digits(settings)) as running:
        for views in frames:
            (told,) = running.told("/v1/fuse", {"inputs": views.tolist()})["objects"]
            alone.append([view["pmf"] for view in told["single"]])
            fused.append(told["fused"]["pmf"])
    together = torch.tensor(fused, dtype=torch.float64)
    for view in torch.tensor(alone, dtype=torch.float64).unbind(1):
        assert errbar.metrics.accuracy(together, labels) >= errbar.metrics.accuracy(view, labels)
        assert errbar.metrics.nll(together, labels) <= errbar.metrics.nll(view, labels)
