"""The callback in real trainings by Lightning, and metrics of torchmetrics on what errbar predicts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import errbar

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what Lightning's own imports warn of is not for this package to answer
    lightning = pytest.importorskip("lightning.pytorch")
    torchmetrics = pytest.importorskip("torchmetrics.functional.classification")
    from errbar.lightning import ErrbarCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*num_workers.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*no `val_dataloader`.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
]


def samples(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    x = torch.randn(count, 2, generator=generator) + 2 * torch.eye(3)[y][:, :2]
    return TensorDataset(x, y)


TRAIN, HELD_OUT = samples(200, 0), samples(100, 1)


class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def train(callback: Any, folder: Path, *loaders: Any, module: Any = None, **settings: Any) -> Any:
    module = Classifier() if module is None else module
    trainer = lightning.Trainer(
        **{"max_epochs": 3} | settings,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callback if isinstance(callback, list) else [callback],
    )
    trainer.fit(module, *loaders)
    return module


def training_loader() -> DataLoader[Any]:
    return DataLoader(TRAIN, batch_size=32, shuffle=True)


def validation_loader() -> DataLoader[Any]:
    return DataLoader(HELD_OUT, batch_size=50)


def test_the_posterior_is_that_of_fit_and_calibrate_after_the_training(tmp_path: Path) -> None:
    callback = ErrbarCallback(last_layers=2, prior=errbar.Prior(2.0))
    module = train(callback, tmp_path, training_loader(), validation_loader())
    expected = errbar.calibrate(errbar.fit(module, TRAIN, last_layers=2, prior=errbar.Prior(2.0)), HELD_OUT)
    assert callback.posterior.model is module
    assert callback.posterior.information.n_samples == 200
    assert callback.posterior.temperature == pytest.approx(expected.temperature, rel=1e-3)
    x = HELD_OUT.tensors[0]
    torch.testing.assert_close(callback.posterior.predict(x).pmf, expected.predict(x).pmf, rtol=1e-3, atol=1e-4)


def test_without_layers_autofit_chooses_on_the_validation_data(tmp_path: Path) -> None:
    path = tmp_path / "posterior.safetensors"
    callback = ErrbarCallback(candidates=[{"last_layers": 1}], path=path)
    module = train(callback, tmp_path, training_loader(), validation_loader())
    assert callback.choice is not None
    assert callback.posterior is callback.choice.posterior
    assert callback.posterior.model is module
    assert callback.posterior.information.n_samples == 200
    table = errbar.info(path).choice
    assert table is not None
    assert table.reason == callback.choice.reason
    expected = errbar.autofit(module, TRAIN, HELD_OUT, candidates=[{"last_layers": 1}])
    assert callback.choice.baselines[1].nll == pytest.approx(expected.baselines[1].nll, abs=1e-5)


def test_without_layers_and_without_held_out_data_the_training_does_not_begin(tmp_path: Path) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"no held-out data to choose the parameters with.*calibration="):
        train(ErrbarCallback(), tmp_path, training_loader())


def test_a_submodule_other_data_and_no_calibration_can_be_asked_for(tmp_path: Path) -> None:
    callback = ErrbarCallback(network="net", data=HELD_OUT, calibration=False, parameters=["3"], fisher="eta")
    module = train(callback, tmp_path, training_loader(), validation_loader())
    assert callback.posterior.model is module.net
    assert callback.posterior.information.n_samples == 100
    assert callback.posterior.information.fisher == "eta"
    assert callback.posterior.information.parameter_names == ("3.weight", "3.bias")
    assert (callback.posterior.temperature, callback.posterior.covariance_scale) == (1.0, 1.0)


def test_what_is_calibrated_can_be_chosen(tmp_path: Path) -> None:
    callback = ErrbarCallback(last_layers=1, calibrate="temperature")
    train(callback, tmp_path, training_loader(), validation_loader())
    assert callback.posterior.temperature != 1
    assert callback.posterior.covariance_scale == 1


def test_calibration_data_can_be_given_where_there_is_no_validation_loader(tmp_path: Path) -> None:
    without = ErrbarCallback(last_layers=1)
    train(without, tmp_path, training_loader())
    assert without.posterior.temperature == 1.0
    given = ErrbarCallback(last_layers=1, calibration=validation_loader())
    train(given, tmp_path, training_loader())
    assert given.posterior.temperature != 1.0


def test_a_validation_loader_calibrates_also_where_no_validation_ran(tmp_path: Path) -> None:
    callback = ErrbarCallback(last_layers=1)
    settings = {"check_val_every_n_epoch": 5, "num_sanity_val_steps": 0}
    train(callback, tmp_path, training_loader(), validation_loader(), **settings)
    assert callback.posterior.temperature != 1.0
    without = ErrbarCallback(last_layers=1)
    train(without, tmp_path, training_loader(), validation_loader(), limit_val_batches=0)
    assert without.posterior.temperature == 1.0


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
def test_weights_that_are_averaged_when_the_training_ends_are_those_of_the_posterior(tmp_path: Path) -> None:
    averaging = lightning.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1)
    callback = ErrbarCallback(last_layers=1)
    module = train([averaging, callback], tmp_path, training_loader(), validation_loader())
    assert callback.posterior.model is module
    assert callback.posterior.predict(HELD_OUT.tensors[0]).pmf.shape == (100, 3)


def test_the_posterior_is_saved_for_load(tmp_path: Path) -> None:
    path = tmp_path / "posterior.safetensors"
    callback = ErrbarCallback(last_layers=2, path=path)
    module = train(callback, tmp_path, training_loader(), validation_loader())
    x = HELD_OUT.tensors[0]
    loaded = errbar.load(path, module)
    torch.testing.assert_close(loaded.predict(x).std, callback.posterior.predict(x).std, rtol=1e-4, atol=1e-6)


def test_training_again_makes_another_posterior(tmp_path: Path) -> None:
    callback = ErrbarCallback(last_layers=1)
    train(callback, tmp_path, training_loader())
    first = callback.posterior
    train(callback, tmp_path, training_loader())
    assert callback.posterior is not first


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_posterior_follows_a_network_that_is_put_back_on_the_cpu() -> None:
    callback, module = ErrbarCallback(last_layers=1), Classifier().cuda()
    callback._posterior = errbar.fit(module, [tensor.cuda() for tensor in TRAIN.tensors[:1]], last_layers=1)
    module.cpu()
    callback.teardown(None, module, "fit")
    assert callback.posterior.predict(HELD_OUT.tensors[0]).pmf.device.type == "cpu"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"last_layer": 2}, "no option 'last_layer' without last_layers= or parameters=; errbar.autofit takes"),
        ({"last_layers": 2, "prier": 1}, "no option 'prier'; errbar.fit takes prior, last_layers"),
        ({"calibration": False}, "Which parameters. Expected exactly one of last_layers= and parameters="),
        ({"calibrate": "temperature"}, "Which parameters. Expected exactly one of last_layers= and parameters="),
        ({"fisher": "eta"}, "no option 'fisher' without last_layers= or parameters=; errbar.autofit takes candidates"),
        ({"last_layers": 1, "parameters": "all"}, "Expected exactly one of last_layers= and parameters="),
    ],
)
def test_wrong_options_are_found_before_the_training(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(errbar.ArgumentError, match=message):
        ErrbarCallback(**settings)


def test_a_wrong_name_is_found_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"network is 'model', and .* has no such submodule; it has net"):
        train(ErrbarCallback(network="model", last_layers=1), tmp_path, training_loader())


def test_there_is_no_posterior_before_the_training() -> None:
    with pytest.raises(errbar.ArgumentError, match="no posterior yet: it is fitted when the training ends"):
        _ = ErrbarCallback(last_layers=1).posterior


def test_of_several_validation_loaders_one_has_to_be_named_before_the_training(tmp_path: Path) -> None:
    class Two(Classifier):
        def training_step(self, batch: Any, index: int) -> Tensor:
            raise AssertionError("the training began")

        def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
            return

    loaders = [validation_loader(), validation_loader()]
    with pytest.raises(errbar.ArgumentError, match=r"has 2 loaders; expected one. Say which .*calibration=loader"):
        train(ErrbarCallback(last_layers=1), tmp_path, training_loader(), loaders, module=Two())
    one = ErrbarCallback(last_layers=1)
    train(one, tmp_path, training_loader(), loaders[:1])
    assert one.posterior.temperature != 1.0


# ------------------------------------------------------------------------------------------------------ torchmetrics


def test_predictions_go_straight_into_torchmetrics(tmp_path: Path) -> None:
    callback = ErrbarCallback(last_layers=2)
    train(callback, tmp_path, training_loader(), validation_loader())
    x, y = HELD_OUT.tensors
    pmf = callback.posterior.predict(x).pmf
    accuracy = torchmetrics.multiclass_accuracy(pmf, y, num_classes=3, average="micro")
    assert float(accuracy) == pytest.approx(errbar.metrics.accuracy(pmf, y))
    error = torchmetrics.multiclass_calibration_error(pmf, y, num_classes=3, n_bins=10, norm="l1")
    assert float(error) == pytest.approx(errbar.metrics.ece(pmf, y), abs=1e-6)
