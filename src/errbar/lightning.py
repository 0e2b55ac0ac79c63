"""`ErrbarCallback`: a posterior at the end of a Lightning training.

    callback = ErrbarCallback(path="posterior.safetensors")
    Trainer(callbacks=[callback]).fit(module, train_loader, validation_loader)
    callback.posterior.predict(x)
    print(callback.choice)

Works with `lightning` and with `pytorch_lightning`, whichever is installed. All imports are absolute: `lightning` is
Lightning here too, and this module is `errbar.lightning`.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from torch import nn

import errbar
from errbar.errors import ArgumentError, MissingExtraError

if find_spec("lightning") is not None:
    from lightning.pytorch import Callback, LightningModule, Trainer
elif find_spec("pytorch_lightning") is not None:
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    raise MissingExtraError(
        "errbar.lightning needs Lightning, which is not installed: pip install lightning, or pytorch-lightning."
    )


# What of `autofit` the trainer gives.
_DATA = ("train", "held_out")


class ErrbarCallback(Callback):  # type: ignore[misc]
    """Fits a posterior when the training ends, calibrates it on the validation data, and keeps it in `.posterior`.

    Without `last_layers` and `parameters`, `errbar.autofit` chooses the layers and all else on the validation data; its
    table is then in `.choice`.

    It is about the weights as they are then, at the end: to have it about the best checkpoint, load that and call
    `errbar.fit`. Callbacks that change the weights when the training ends, such as `StochasticWeightAveraging`, have to
    come before this one. With several processes all of them take part, and all have the result.

    Args:
        network: the name of the submodule that returns logits; None if the LightningModule itself does when called.
        data: what to fit on; None for the training loader of the trainer. Give it where that loader augments its
            samples or draws them with replacement.
        calibration: held-out data; None for the validation loader, if the trainer validates with one; False for no
            calibration.
        calibrate: "auto": everything, by `errbar.autofit`, unless `last_layers` or `parameters` is given, and then the
            temperature and the covariance scale; or what `errbar.calibrate` shall fit.
        path: where to save the posterior, for `errbar.load`; None to not save it.
        options: `last_layers` or `parameters`, and all else that `errbar.fit` takes; without these two what
            `errbar.autofit` takes, `seconds` for example.
    """

    def __init__(
        self,
        *,
        network: str | None = None,
        data: Any = None,
        calibration: Any = None,
        calibrate: str | Sequence[str] = "auto",
        path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.chooses = calibrate == "auto" and options.get("last_layers") is None and options.get("parameters") is None
        _require_options(options, chooses=self.chooses, calibration=calibration)
        self.network = network
        self.data = data
        self.calibration = calibration
        self.calibrate = calibrate
        self.path = path
        self.options = options
        self.choice: errbar.Choice | None = None
        self._posterior: errbar.Posterior | None = None

    @property
    def posterior(self) -> errbar.Posterior:
        """The posterior of the training that ended last."""
        if self._posterior is None:
            raise ArgumentError(
                "There is no posterior yet: it is fitted when the training ends. Call trainer.fit first."
            )
        return self._posterior

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find a wrong name before the training, not after it."""
        if stage == "fit":
            self._model(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out before the training which of several loaders is meant."""
        self._data(trainer)
        if self._held_out(trainer) is None and self.chooses:
            raise ArgumentError(
                "There are no held-out data to choose the parameters with: the trainer has no validation loader. "
                "Expected calibration=, or one of last_layers= and parameters=."
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit, calibrate, save: while the network is still on the device that it was trained on."""
        model = self._model(pl_module)
        if self.chooses:
            self.choice = errbar.autofit(model, self._data(trainer), self._held_out(trainer), **self.options)
            self._posterior = self.choice.posterior
        else:
            self._posterior = self._fitted(model, trainer)
        if self.path is not None and trainer.is_global_zero:
            (self.choice or self._posterior).save(self.path)

    def _fitted(self, model: nn.Module, trainer: Trainer) -> errbar.Posterior:
        held_out = self._held_out(trainer)
        with warnings.catch_warnings():
            if held_out is not None:
                # What it says of a posterior that is not calibrated does not matter: this one will be.
                warnings.simplefilter("ignore", errbar.PosteriorWarning)
            posterior = errbar.fit(model, self._data(trainer), **self.options)
        if held_out is None:
            return posterior
        shared = {name: self.options[name] for name in ("unpack", "group", "progress") if name in self.options}
        names = ("temperature", "covariance_scale") if self.calibrate == "auto" else self.calibrate
        return errbar.calibrate(posterior, held_out, fit=names, **shared)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The trainer puts the network back on the CPU when it is done; the posterior follows."""
        if self._posterior is not None:
            device = next(self._model(pl_module).parameters()).device
            if device != self._posterior.information.network.device:
                self._posterior = self._posterior.to(device)

    def _model(self, pl_module: LightningModule) -> nn.Module:
        if self.network is None:
            model: nn.Module = pl_module
            return model
        try:
            found: nn.Module = pl_module.get_submodule(self.network)
        except AttributeError as error:
            names = ", ".join(name for name, _ in pl_module.named_children())
            raise ArgumentError(
                f"network is {self.network!r}, and the LightningModule has no such submodule; it has {names}."
            ) from error
        return found

    def _data(self, trainer: Trainer) -> Any:
        return _one_loader(trainer.train_dataloader, "data") if self.data is None else self.data

    def _held_out(self, trainer: Trainer) -> Any:
        if self.calibration is False:
            return None
        if self.calibration is not None:
            return self.calibration
        if trainer.val_dataloaders is None and trainer.enable_validation:
            # Lightning opens the validation loader when it first validates, which may be after the last epoch.
            trainer.fit_loop.epoch_loop.val_loop.setup_data()
        return None if not trainer.val_dataloaders else _one_loader(trainer.val_dataloaders, "calibration")


def _one_loader(loaders: Any, name: str) -> Any:
    """The trainer's loader, if any, alone or in a list; several may have different purposes."""
    if not isinstance(loaders, (list, tuple, dict)):
        return loaders
    if len(loaders) == 1:
        return next(iter(loaders.values() if isinstance(loaders, dict) else loaders))
    raise ArgumentError(
        f"The trainer has {len(loaders)} loaders; expected one. Say which to use with ErrbarCallback({name}=loader)."
    )


def _require_options(options: dict[str, Any], *, chooses: bool, calibration: Any) -> None:
    """Find a misspelt option before the training, not after it."""
    function = errbar.autofit if chooses else errbar.fit
    known = [name for name in inspect.signature(function).parameters if name not in ("model", "data", *_DATA)]
    unknown = [name for name in options if name not in known]
    if unknown and chooses:
        raise ArgumentError(
            f"ErrbarCallback has no option {unknown[0]!r} without last_layers= or parameters=; errbar.autofit takes "
            f"{', '.join(known)}."
        )
    if unknown:
        raise ArgumentError(f"ErrbarCallback has no option {unknown[0]!r}; errbar.fit takes {', '.join(known)}.")
    count = sum(options.get(name) is not None for name in ("last_layers", "parameters"))
    if count > 1 or (count == 0 and (not chooses or calibration is False)):
        raise ArgumentError(
            "Which parameters? Expected exactly one of last_layers= and parameters=, or neither and held-out data."
        )
