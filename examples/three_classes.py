"""A small network for points of three overlapping classes, trained on a hundred of them until it is over-confident.

It stands for any trained classifier: the README uses its `model`, `training` and `held_out`.
"""

import torch
from torch import nn

generator = torch.Generator().manual_seed(0)
y = torch.arange(1100) % 3
x = torch.randn(1100, 2, generator=generator).double() + 2 * torch.eye(3)[y][:, :2]
training, held_out = [(x[:100], y[:100])], [(x[100:], y[100:])]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 3)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(200):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[:100]), y[:100]).backward()
    optimizer.step()
