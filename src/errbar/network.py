"""The user's model, looked at without being touched.

Every call runs on a *replica*: a second tree of module objects that shares the parameters and buffers of the
user's model but has its own mode and hooks, in eval mode. So the user's train/eval mode, gradients and hooks never
change, not even when a call fails, and threads do not disturb each other: each has a replica of its own.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from errbar.checks import Checks
from errbar.data import Batch
from errbar.errors import ArgumentError, DataError, ModelError, WeightsChangedError

_ENDS_IN_PROBABILITIES = (nn.Softmax, nn.LogSoftmax, nn.Softmax2d, nn.Softmin, nn.Sigmoid, nn.LogSigmoid)


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside DistributedDataParallel, DataParallel and torch.compile wrappers."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def replicate(module: nn.Module) -> nn.Module:
    """A tree of new module objects around the same tensors.

    `copy.deepcopy` would follow references out of the tree (a trainer, a data set); here only modules and the
    containers that hold them are new. Bound methods kept as attributes are bound to the new modules.
    """
    clones: dict[int, nn.Module] = {}

    def clone(original: nn.Module) -> nn.Module:
        if id(original) in clones:
            return clones[id(original)]
        new = original.__class__.__new__(original.__class__)
        clones[id(original)] = new
        attributes = {
            name: copy.copy(value) if isinstance(value, (dict, list, set)) else value
            for name, value in original.__dict__.items()
        }
        attributes["_modules"] = {
            name: None if child is None else clone(child) for name, child in original._modules.items()
        }
        new.__dict__.update(attributes)
        return new

    root = clone(module)
    for new in clones.values():
        for name, value in new.__dict__.items():
            if isinstance(value, MethodType) and id(value.__self__) in clones:
                new.__dict__[name] = MethodType(value.__func__, clones[id(value.__self__)])
    return root


def _weights(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers, with their names: what a state dict holds."""
    found: list[tuple[str, Tensor]] = list(module.named_parameters())
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                found.append((f"{prefix}.{name}" if prefix else name, buffer))
    return found


def fingerprint(module: nn.Module) -> str:
    """SHA-256 over the names, types, shapes and bytes of the weights."""
    digest = hashlib.sha256()
    for name, tensor in _weights(module):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        values = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Network:
    """A model whose weights are known: refuses to run once they have changed."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"model is a {type(model).__name__}; expected a torch.nn.Module.")
        self.model = model
        self.module = unwrap(model)
        if isinstance(self.module, torch.jit.ScriptModule):
            raise ModelError("The model is a ScriptModule; expected a plain torch.nn.Module. Pass the original.")
        weights = _weights(self.module)
        if not any(True for _ in self.module.parameters()):
            raise ModelError("The model has no parameters; expected a trained classifier.")
        for name, part in self.module.named_modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is None:
                raise ModelError(
                    f"'{name}' is a {type(part).__name__} without running statistics: it normalises by the batch, so "
                    "one input's result depends on the others. Expected track_running_stats=True."
                )
        self.fingerprint = fingerprint(self.module)
        self.device = next(self.module.parameters()).device
        kinds = {p.dtype for p in self.module.parameters() if p.is_floating_point()}
        self.input_dtype = kinds.pop() if len(kinds) == 1 else None
        self.dtype = torch.float64 if self.input_dtype == torch.float64 else torch.float32
        self._seen = [(tensor, tensor._version) for _, tensor in weights]
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the model; the versions are counted anew there."""
        return {"model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"])  # type: ignore[misc]

    def require_unchanged(self) -> None:
        """Raise unless every weight is the tensor it was, at the version it had, on the device it was on."""
        now = [tensor for _, tensor in _weights(self.module)]
        if next(self.module.parameters()).device != self.device:
            raise WeightsChangedError(
                f"The model moved from {self.device} to {next(self.module.parameters()).device} since the fit; "
                "call posterior.to(device) to move the posterior as well."
            )
        same = len(now) == len(self._seen) and all(
            tensor is seen and tensor._version == version
            for tensor, (seen, version) in zip(now, self._seen, strict=True)
        )
        if not same:
            raise WeightsChangedError(
                "The model's weights changed since the fit, so the posterior is not about this model any more. "
                "Fit again, or fit on a copy (copy.deepcopy) before training goes on."
            )

    def same_weights(self, other: Network) -> bool:
        return self.fingerprint == other.fingerprint

    def replica(self) -> nn.Module:
        """This thread's replica, in eval mode."""
        found: nn.Module | None = getattr(self._local, "replica", None)
        if found is None:
            found = self._local.replica = replicate(self.module).eval()
        return found

    def prepare(self, batch: Batch, checks: Checks) -> Batch:
        """The batch on the model's device and in its dtype; `DataError` for NaN, infinite or no input."""
        if len(batch) == 0:
            raise DataError("A batch holds no samples; expected at least one.")

        def move(tensor: Tensor) -> Tensor:
            dtype = self.input_dtype if tensor.is_floating_point() else None
            moved = tensor.detach().to(device=self.device, dtype=dtype)
            return moved.clone() if moved.is_inference() else moved

        moved = batch.map(move)
        for value in (*moved.args, *moved.kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                checks.require(
                    torch.isfinite(value).all(),
                    lambda: DataError(
                        "An input holds NaN or infinite values; expected finite numbers. Remove or impute it."
                    ),
                )
        return moved

    def logits(self, batch: Batch, values: Mapping[str, Tensor] | None = None) -> Float[Tensor, "B M"]:
        """g(x; θ) in the network's own dtype, with the parameters in `values` put in place of the model's own."""
        replica = self.replica()
        if values is None:
            return as_logits(replica(*batch.args, **batch.kwargs), len(batch))
        return as_logits(functional_call(replica, dict(values), batch.args, batch.kwargs), len(batch))

    def execution_order(self, batch: Batch) -> tuple[list[str], Float[Tensor, "B M"]]:
        """Names of the modules in the order in which they last finished, and the logits of the batch.

        A model whose last leaf module is a softmax (or a sigmoid) is refused: its output are probabilities, and
        their softmax would be taken again.
        """
        replica = replicate(self.module).eval()
        names: dict[str, None] = {}

        def note(name: str) -> Any:
            def hook(*_: Any) -> None:
                names.pop(name, None)
                names[name] = None

            return hook

        modules = dict(replica.named_modules())
        for name, part in modules.items():
            part.register_forward_hook(note(name))
        output = replica(*batch.args, **batch.kwargs)
        order = list(names)
        leaves = [name for name in order if not any(modules[name].children())]
        if leaves and isinstance(modules[leaves[-1]], _ENDS_IN_PROBABILITIES):
            kind = type(modules[leaves[-1]]).__name__
            raise ModelError(
                f"The model ends in a {kind} ('{leaves[-1]}'), so it returns probabilities; expected logits. Pass the "
                f"model without its {kind}."
            )
        return order, as_logits(output, len(batch))


@contextmanager
def plain_execution(device: torch.device) -> Iterator[None]:
    """The network in its own dtype and without gradients, whatever mode the caller is in.

    Derivatives by `torch.func` are not affected by the absence of gradients around them.
    """
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def as_logits(output: Any, size: int) -> Float[Tensor, "B M"]:
    """The (B, M) logits in a model's output; one logit g is read as the pair (0, g)."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"The model returned {type(output).__name__}; expected logits of shape (batch, classes), or an object "
            "with .logits."
        )
    if logits.ndim != 2 or logits.shape[0] != size or logits.shape[1] == 0 or not logits.is_floating_point():
        raise ModelError(
            f"The model returned a {logits.dtype} tensor of shape {tuple(logits.shape)} for a batch of {size}; "
            f"expected floating-point logits of shape ({size}, classes)."
        )
    if logits.shape[1] == 1:
        return torch.cat([torch.zeros_like(logits), logits], 1)
    return logits


def require_finite_logits(logits: Float[Tensor, "B M"], checks: Checks) -> None:
    checks.require(
        torch.isfinite(logits).all(),
        lambda: ModelError(
            "The model returned NaN or infinite logits for a finite input. Check its weights, or use a wider dtype "
            "(float16 overflows at 65504)."
        ),
    )
