"""The model of a command: the user's callable makes it, a file may hold its weights."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from errbar._base.digest import digest_of
from errbar.cli.user_code import called, named
from errbar.errors import ArgumentError, FileError, MismatchError

if TYPE_CHECKING:
    from errbar.cli.inputs import Source

_PICKLED = (".pt", ".pth", ".th", ".bin", ".ckpt")
# Where training scripts put the state dict beside the epoch and the optimiser.
_INSIDE = ("state_dict", "model_state_dict", "model")
_COUNTER = "num_batches_tracked"
# What DistributedDataParallel and torch.compile put before each name.
_WRAPPERS = ("module.", "_orig_mod.")


def model_of(where: str, weights: Path | None, device: torch.device) -> nn.Module:
    """The model that `package.module:callable` returns or is, with the weights of a file, on `device`."""
    value = named(where, "model")
    model = value if isinstance(value, nn.Module) else called(value, where, "model")
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"The model {where!r} is a {type(model).__name__}; expected a torch.nn.Module.")
    if weights is not None:
        load_weights(model, weights)
    return model.to(device)


def reproducible_model_of(where: str, weights: Path | None, device: torch.device) -> nn.Module:
    """The same, once it is certain that each call, and so each command, makes the same weights.

    Without a file the callable is called twice. Where its module sets the seed when it is imported, each first call in
    a process starts from there, and so does the second one here.
    """
    if weights is not None:
        return model_of(where, weights, device)
    seed = torch.initial_seed()
    value = named(where, "model")
    if isinstance(value, nn.Module):
        return model_of(where, None, device)
    state = torch.get_rng_state() if torch.initial_seed() != seed else None
    model = model_of(where, None, device)
    if state is not None:
        torch.set_rng_state(state)
    # What it prints has been read already.
    with contextlib.redirect_stdout(io.StringIO()):
        again = model_of(where, None, device)
    if _fingerprint(model) != _fingerprint(again):
        raise ArgumentError(
            f"The model {where!r} has other weights each time it is made: they are drawn at random, and nothing was "
            "loaded. Give the trained ones with --weights FILE, or let the callable load them."
        )
    return model


def _fingerprint(model: nn.Module) -> str:
    return digest_of([model.state_dict()])


def load_weights(model: nn.Module, path: Path) -> None:
    """Put the weights of a file into a model that must have exactly these names and shapes.

    Batch norms counted no batches before torch 0.4.1; files of that time lack the counters, which predict nothing.
    """
    expected = model.state_dict()
    state = _unwrapped(_state_dict(_content(path), path), expected)
    missing = [name for name in expected if name not in state and not name.endswith(_COUNTER)]
    unknown = [name for name in state if name not in expected]
    other = [
        f"{name} is {tuple(state[name].shape)} and not {tuple(value.shape)}"
        for name, value in expected.items()
        if name in state and isinstance(value, Tensor) and state[name].shape != value.shape
    ]
    if missing or unknown or other:
        differences = [
            f"{_list_of(names)} {text}"
            for names, text in ((missing, "missing"), (unknown, "not in the model"), (other, ""))
            if names
        ]
        raise MismatchError(
            f"The weights {path} are of another model: {'; '.join(differences).strip()}. Give the file that was saved "
            "from this model."
        )
    model.load_state_dict(state, strict=False)


def device_of(name: str) -> torch.device:
    """The device by its name; "cuda" is the GPU of this process, "auto" too where there is one, and else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(
            f"The device {name!r} cannot be used: {str(error).splitlines()[0]}. Expected cpu, cuda, cuda:1 or auto."
        ) from error
    return device


def _content(path: Path) -> Any:
    if not path.is_file():
        raise FileError(f"The weights {path} do not exist; expected a .safetensors, .pt, .pth or .th file.")
    suffix = path.suffix.lower()
    try:
        if suffix == ".safetensors":
            return load_file(path)
        if suffix in _PICKLED:
            # weights_only: a file from elsewhere must not be able to run code.
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FileError(
            f"The weights {path} cannot be read: this is not a file of torch, or it holds more than tensors and plain "
            "values, which could run code. Expected a state dict, as torch.save(model.state_dict(), path) writes it."
        ) from error
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise FileError(
            f"The weights {path} cannot be read: {str(error).splitlines()[0].rstrip('.')}. Expected a state dict, as "
            "torch.save(model.state_dict(), path) writes it."
        ) from error
    raise FileError(f"The weights {path} end in {suffix!r}; expected .safetensors, .pt, .pth or .th.")


def _state_dict(content: Any, path: Path) -> Mapping[str, Tensor]:
    for name in _INSIDE:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise FileError(
            f"The weights {path} hold a {type(content).__name__} and not a state dict; expected a mapping of names to "
            "tensors, or one with a 'state_dict'."
        )
    return content


def _unwrapped(state: Mapping[str, Tensor], expected: Mapping[str, Any]) -> dict[str, Tensor]:
    """Names without what wrappers put before all of them."""
    names = dict(state)
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in names) and not all(name.startswith(prefix) for name in expected):
            names = {name.removeprefix(prefix): value for name, value in names.items()}
    return names


def _list_of(names: Sequence[str]) -> str:
    more = "" if len(names) <= 3 else f" and {len(names) - 3} more"
    return ", ".join(names[:3]) + more


def require_class_names(model: nn.Module, source: Source, outputs: str = "classes") -> None:
    """Refuse names that are not as many as the outputs of the model, before all data are read."""
    from errbar._base.checks import Checks
    from errbar._files.task import checked_classes
    from errbar._model.network import Network
    from errbar._model.outputs import POSITIONS, kind_called
    from errbar._model.positions import PositionsNetwork
    from errbar.cli.inputs import first_inputs

    batch = next(iter(first_inputs(source.loader(), 1)), None) if source.classes is not None else None
    if batch is not None:
        kind = kind_called(outputs)
        network = PositionsNetwork(model) if outputs == POSITIONS else Network(model, kind=kind)
        checks = Checks(network.device)
        prepared = network.prepare(batch, checks)
        logits = network.shaped(prepared) if isinstance(network, PositionsNetwork) else network.logits(prepared)
        checks.finish()
        checked_classes(source.classes, logits.shape[-1])
