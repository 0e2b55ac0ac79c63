"""The residual networks for CIFAR, and the weights that others trained."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import errbar
from errbar.errors import ArgumentError, DataError, ModelError
from errbar.experiments.datasets import read_cifar10
from errbar.experiments.resnet import Shortcut, cifar_resnet, load_pretrained, normalise


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lively(model: nn.Module) -> nn.Module:
    """Statistics of the batch norms that differ from their initial values, so that forgetting them shows."""
    with torch.no_grad():
        for seed, module in enumerate(model.modules()):
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.copy_(0.1 * randn(module.num_features, seed=seed))
                module.running_var.copy_(1 + 0.1 * randn(module.num_features, seed=seed).abs())
    return model.eval()


def save(path: Path, model: nn.Module, prefix: str = "module.") -> Path:
    state = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": state, "best_prec1": 91.73}, path)
    return path


@pytest.mark.parametrize(("depth", "parameters"), [(20, 269_722), (32, 464_154)])
def test_the_networks_have_the_published_number_of_parameters_and_layers(depth: int, parameters: int) -> None:
    model = cifar_resnet(depth)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) == depth
    assert model.eval()(randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("depth", [2, 7, 18, 50 + 1])
def test_other_depths_are_refused(depth: int) -> None:
    with pytest.raises(ArgumentError, match=rf"depth is {depth}; expected 6n \+ 2"):
        cifar_resnet(depth)


def test_the_shortcut_takes_every_second_pixel_and_pads_with_zero_channels() -> None:
    x = randn(2, 16, 8, 8)
    y = Shortcut(16, 32)(x)
    assert y.shape == (2, 32, 4, 4)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert not y[:, :8].any()
    assert not y[:, 24:].any()
    assert not list(Shortcut(16, 32).parameters())


def test_stages_halve_the_picture_and_double_the_channels() -> None:
    model = cifar_resnet(8).eval()
    shapes = []
    for stage in (model.layer1, model.layer2, model.layer3):
        stage.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    model(randn(1, 3, 32, 32))
    assert shapes == [(1, 16, 32, 32), (1, 32, 16, 16), (1, 64, 8, 8)]


@pytest.mark.parametrize(("depth", "prefix", "classes"), [(20, "module.", 10), (8, "", 43)])
def test_saved_weights_come_back(tmp_path: Path, depth: int, prefix: str, classes: int) -> None:
    model = lively(cifar_resnet(depth, classes))
    loaded = load_pretrained(save(tmp_path / "weights.th", model, prefix))
    assert not any(module.training for module in loaded.modules())
    x = randn(2, 3, 32, 32)
    assert torch.equal(loaded(x), model(x))


def test_files_without_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.th"
    with pytest.raises(DataError, match=r"Cannot read weights from .*weights.th .*; expected a file of torch.save"):
        load_pretrained(path)
    for content in (b"", b"something else", save(path, cifar_resnet(8)).read_bytes()[:5000]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"Cannot read weights from .*weights.th"):
            load_pretrained(path)
    torch.save({"state_dict": cifar_resnet(8)}, path)  # a whole pickled network: its code would run
    with pytest.raises(DataError, match=r"Cannot read weights from .*weights.th"):
        load_pretrained(path)
    for value in ({}, [1], {"state_dict": {"layer1.0.conv1.weight": 1.0}}):
        torch.save(value, path)
        with pytest.raises(DataError, match=r"holds no weights under 'state_dict'"):
            load_pretrained(path)


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.th"
    with pytest.raises(ModelError, match=r"have 0 blocks .* and no 'linear.weight'; expected a ResNet for CIFAR"):
        load_pretrained(save(path, nn.Sequential(nn.Linear(2, 2))))
    model = cifar_resnet(8)
    model.layer2[0].extra = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"are not those of a ResNet-8 for CIFAR(.|\n)*layer2.0.extra"):
        load_pretrained(save(path, model))
    model = cifar_resnet(14)
    model.layer3 = model.layer3[:1]
    model.layer1.append(model.layer1[0])
    with pytest.raises(ModelError, match=r"are not those of a ResNet-14 for CIFAR"):
        load_pretrained(save(path, model))


def test_normalised_channels_have_mean_zero_and_deviation_one_on_the_scale_given() -> None:
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    pixels = (mean + std * torch.tensor([[-1.0], [0.0], [1.0]]))[:, :, None, None]
    expected = torch.tensor([-1.0, 0.0, 1.0])[:, None, None, None].expand(3, 3, 1, 1)
    torch.testing.assert_close(normalise(pixels), expected, rtol=0, atol=1e-6)
    assert normalise(pixels.double()).dtype == torch.float64


def test_the_network_gets_error_bars() -> None:
    model = lively(cifar_resnet(8))
    x, y = randn(6, 3, 8, 8), torch.arange(6)
    posterior = errbar.fit(model, [(x, y)], last_layers=1)
    assert posterior.predict(x, samples=10).std.shape == (6, 10)


@pytest.mark.parametrize("name", ["resnet20-12fca82f.th", "resnet32-d509ac18.th"])
def test_real_weights_classify_real_pictures(name: str) -> None:
    folder = os.environ.get("ERRBAR_DATA")
    if not folder:
        pytest.skip("ERRBAR_DATA does not say where the data are")
    model = load_pretrained(Path(folder) / "pretrained_cifar10" / name)
    images = read_cifar10(Path(folder)).test.take(torch.arange(1000))
    with torch.no_grad():
        labels = torch.cat([model(part).argmax(1) for part in normalise(images.pixels()).split(250)])
    assert (labels == images.y).double().mean() > 0.89
