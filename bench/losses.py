"""What label smoothing and a focal loss do to calibration: the table of `docs/faq.md`, on the digits of scikit-learn.

`python bench/losses.py`
"""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import errbar

images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
pixels, digits = torch.tensor(images)[order] / 16, torch.tensor(labels)[order]
fitted, held_out, tested = slice(0, 300), slice(300, 800), slice(800, None)


def focal(logits: Tensor, y: Tensor, gamma: float = 2.0) -> Tensor:
    log_f = torch.log_softmax(logits, 1).gather(1, y[:, None])[:, 0]
    return -((1 - log_f.exp()) ** gamma * log_f).mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": cross_entropy,
    "smoothed by 0.1": lambda logits, y: cross_entropy(logits, y, label_smoothing=0.1),
    "focal, γ = 2": focal,
}


def network_of(loss: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        loss(model(pixels[fitted]), digits[fitted]).backward()
        optimizer.step()
    return model


def measured(pmf: Tensor) -> str:
    y = digits[tested]
    return f"{errbar.metrics.nll(pmf, y):.3f} {100 * errbar.metrics.ece(pmf, y):4.1f}%"


print("loss             network      errbar       calibrated   T     T_c")
for name, loss in LOSSES.items():
    model = network_of(loss)
    plain = errbar.fit(model, [pixels[fitted]], last_layers=2, prior=errbar.Prior(30.0))
    tuned = errbar.calibrate(plain, [(pixels[held_out], digits[held_out])])
    x = pixels[tested]
    pmfs = model(x).detach().softmax(1), plain.predict(x).pmf, tuned.predict(x).pmf
    columns = "  ".join(measured(pmf) for pmf in pmfs)
    print(f"{name:15}  {columns}  {tuned.temperature:.2f}  {tuned.covariance_scale:.2f}")
