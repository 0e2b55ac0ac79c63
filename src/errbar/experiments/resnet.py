"""The residual networks for CIFAR of He et al., "Deep residual learning for image recognition", 2016, section 4.2.

One convolution, three stages of n blocks of two convolutions each, with 16, 32 and 64 channels on 32², 16² and 8²
pixels, the mean over the pixels, and one linear layer: 6n + 2 layers with weights. Names of modules and layers are
those of the checkpoints in akamaster/pytorch_resnet_cifar10 on GitHub, which `load_pretrained` reads.
"""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from errbar.errors import ArgumentError, DataError, ModelError

_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)


class Shortcut(nn.Module):
    """Option A, without parameters: every second pixel, the new channels zero, half of them on either side."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.padding = (outputs - inputs) // 2

    def forward(self, x: Float[Tensor, "B c H W"]) -> Float[Tensor, "B C h w"]:
        return nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))


class Block(nn.Module):
    """relu(F(x) + shortcut(x)), F = batch norm ∘ conv ∘ relu ∘ batch norm ∘ conv."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        narrows = inputs != outputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2 if narrows else 1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = Shortcut(inputs, outputs) if narrows else nn.Identity()
        self.relu2 = nn.ReLU()

    def forward(self, x: Float[Tensor, "B c H W"]) -> Float[Tensor, "B C h w"]:
        residual = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        result: Tensor = self.relu2(residual + self.shortcut(x))
        return result


class ResNet(nn.Module):
    """Logits of pictures as `normalise` returns them; `blocks` is n."""

    def __init__(self, blocks: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu1 = nn.ReLU()
        self.layer1 = _stage(16, 16, blocks)
        self.layer2 = _stage(16, 32, blocks)
        self.layer3 = _stage(32, 64, blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B M"]:
        features = self.layer3(self.layer2(self.layer1(self.relu1(self.bn1(self.conv1(x))))))
        logits: Tensor = self.linear(self.flatten(self.pool(features)))
        return logits


def _stage(inputs: int, outputs: int, blocks: int) -> nn.Sequential:
    return nn.Sequential(Block(inputs, outputs), *(Block(outputs, outputs) for _ in range(blocks - 1)))


def cifar_resnet(depth: int, classes: int = 10) -> nn.Module:
    """An untrained ResNet of `depth` = 6n + 2 layers: 20, 32, 44, 56, ….

    >>> sum(parameter.numel() for parameter in cifar_resnet(20).parameters())
    269722
    """
    if depth < 8 or depth % 6 != 2:
        raise ArgumentError(f"depth is {depth}; expected 6n + 2 with n = 1, 2, …: 8, 14, 20, 26, 32, ….")
    return ResNet((depth - 2) // 6, classes)


def load_pretrained(path: Path) -> nn.Module:
    """The network of a checkpoint {"state_dict": weights}, in eval mode; its depth follows from the weights.

    The names of the weights may begin with "module.", as nn.DataParallel writes them. Only weights are unpickled.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever bytes that are no pickle lead the unpickler to
        raise DataError(
            f"Cannot read weights from {path} ({type(error).__name__}); expected a file of torch.save with tensors and "
            "numbers only, such as resnet20-12fca82f.th of akamaster/pytorch_resnet_cifar10 on GitHub."
        ) from error
    state = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise DataError(f"{path} holds no weights under 'state_dict'; expected a mapping from names to tensors there.")
    weights = {name.removeprefix("module."): value for name, value in state.items()}
    blocks = sum(name.startswith("layer") and name.endswith(".conv1.weight") for name in weights)
    head = weights.get("linear.weight")
    if blocks == 0 or blocks % 3 or head is None or head.ndim != 2:
        raise ModelError(
            f"The weights of {path} have {blocks} blocks 'layer….conv1.weight' and {'no' if head is None else 'a'} "
            "'linear.weight'; expected a ResNet for CIFAR with three stages of equally many blocks and a linear layer."
        )
    model = cifar_resnet(2 * blocks + 2, classes=len(head))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ModelError(
            f"The weights of {path} are not those of a ResNet-{2 * blocks + 2} for CIFAR: {error}"
        ) from error
    return model.eval()


def normalise(pixels: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N 3 H W"]:
    """(pixels − mean)/std, channel by channel: from [0, 1] to what the pretrained networks expect."""
    mean, std = (pixels.new_tensor(values)[:, None, None] for values in (_MEAN, _STD))
    return (pixels - mean) / std
