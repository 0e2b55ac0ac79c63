"""Operations that are written out have the values of torch's own."""

from __future__ import annotations

import torch
from torch import nn

from errbar._base.formulas import WrittenOut


def test_formulas_have_the_values_of_torch() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    scaled, tracked = nn.InstanceNorm2d(4, affine=True), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    norm = nn.LayerNorm([5, 6])
    for part in (scaled, tracked, norm):
        for parameter in part.parameters():
            nn.init.normal_(parameter)
    tracked.running_mean, tracked.running_var = torch.randn(4), torch.rand(4) + 0.5
    plain = nn.LayerNorm(6, elementwise_affine=False, eps=0.1)
    parts = [norm, plain, nn.InstanceNorm2d(4), scaled, tracked.eval(), nn.GLU(1), nn.GLU(), nn.Hardsigmoid()]
    for part in parts:
        own = part.double()(x)
        with WrittenOut():
            assert torch.allclose(part(x), own, rtol=1e-12, atol=1e-14), part
    own = torch.layer_norm(x, (6,))
    with WrittenOut():
        assert torch.allclose(torch.layer_norm(x, (6,)), own, rtol=1e-12, atol=1e-14)
