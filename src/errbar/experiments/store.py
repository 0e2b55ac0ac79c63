"""Trained networks on disk, so that an interrupted experiment goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from errbar._base.atomic import write_file


def kept(
    path: Path, recipe: Mapping[str, Any], template: nn.Module, train: Callable[[], nn.Module]
) -> tuple[nn.Module, float]:
    """The network at `path` if it was made by this `recipe`, and else the one that `train` makes, kept there; and the
    seconds that its training took."""
    text = json.dumps(dict(recipe), sort_keys=True)
    found = _load(path, text)
    if found is not None:
        template.load_state_dict(found[0])
        return template.eval(), found[1]
    start = time.perf_counter()
    network = train()
    seconds = time.perf_counter() - start
    _save(path, {"recipe": text, "seconds": str(seconds)}, network)
    return network, seconds


def _load(path: Path, recipe: str) -> tuple[dict[str, torch.Tensor], float] | None:
    """None where there is no such file, or one of another recipe, or half of one."""
    if not path.exists():
        return None
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("recipe") != recipe:
                return None
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return state, float(metadata["seconds"])
    except SafetensorError:
        return None


def _save(path: Path, metadata: dict[str, str], network: nn.Module) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    write_file(path, save(state, metadata=metadata))
