"""Trained networks on disk, so that an interrupted experiment continues where it stopped."""

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
    """The network at `path` if it comes from this `recipe`, otherwise one from `train`, which is then kept there; and
    the seconds that its training took."""
    text = json.dumps(dict(recipe), sort_keys=True)
    state_and_seconds = _load(path, text)
    if state_and_seconds is not None:
        template.load_state_dict(state_and_seconds[0])
        return template.eval(), state_and_seconds[1]
    start = time.perf_counter()
    network = train()
    seconds = time.perf_counter() - start
    _save(path, {"recipe": text, "seconds": str(seconds)}, network)
    return network, seconds


def _load(path: Path, recipe: str) -> tuple[dict[str, torch.Tensor], float] | None:
    """None if there is no such file, or it has another recipe or is incomplete."""
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
