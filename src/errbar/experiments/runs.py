"""The runs of an experiment on disk: each one kept when it is done, and while it is under way part by part."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import errbar
from errbar._base.atomic import write_file
from errbar.errors import ArgumentError
from errbar.experiments.problem import Problem

SEEDS = {
    "mnist": 5,
    "cifar10": 3,
    "gtsrb": 3,
    "digits": 5,
    "acquire-mnist": 5,
    "acquire-cifar10": 5,
    "acquire-digits": 5,
}


@dataclass(frozen=True)
class RunOptions:
    """What the command line asks for."""

    name: str
    data: Path | None = None
    output: Path = Path("reproduce-output")
    seeds: int | None = None
    quick: bool = False
    device: str = "cpu"
    progress: bool = True
    only: int | None = None

    def count(self) -> int:
        default = SEEDS.get(self.name, 3)
        count = self.seeds if self.seeds is not None else (2 if self.name == "digits" else 1) if self.quick else default
        if count < 1:
            raise ArgumentError(f"seeds is {count}; expected a number of runs of one or more.")
        return count

    @property
    def stem(self) -> str:
        return f"{self.name}-quick" if self.quick else self.name


class Parts:
    """The parts of one run, by name: each kept in a file once it is computed, so that none is computed twice.

    `versions` and `device` are those that computed the parts, the ones of this process only if it computes one.
    """

    def __init__(self, path: Path, description: dict[str, Any]) -> None:
        self._path, self._identity = path, _identity(description)
        self._here = {"versions": description["versions"], "device": description["device"]}
        self._made_with: list[dict[str, Any]] = []
        self._done: dict[str, Any] = {}
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["of"] == self._identity:
                self._done, self._made_with = content["parts"], content["made_with"]

    def __call__(self, name: str, compute: Callable[[], Any]) -> Any:
        if name not in self._done:
            self._done[name] = rounded(compute())
            if self._here not in self._made_with:
                self._made_with.append(self._here)
            write(self._path, {"of": self._identity, "made_with": self._made_with, "parts": self._done})
        return self._done[name]

    @property
    def made_with(self) -> dict[str, Any]:
        """Versions and device, with " and " between those of different machines."""
        names = self._here["versions"]
        return {
            "versions": {name: _joined(one["versions"][name] for one in self._made_with) for name in names},
            "device": _joined(one["device"] for one in self._made_with),
        }


def kept_run(
    options: RunOptions, description: dict[str, Any], seed: int, compute: Callable[[Parts], dict[str, Any]]
) -> None:
    """Compute a run and keep it, unless one of the same description is kept already.

    Of a run that was interrupted only the parts that are missing are computed.
    """
    path = options.output / "runs" / f"{options.stem}-{seed}.json"
    identity = _identity(description)
    if path.exists() and json.loads(path.read_text(encoding="utf-8"))["of"] == identity:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".parts")
    parts = Parts(unfinished, description)
    computed = compute(parts)
    write(path, {"of": identity, **parts.made_with, **computed})
    unfinished.unlink(missing_ok=True)


def finished_runs(options: RunOptions, description: dict[str, Any]) -> list[dict[str, Any]]:
    """The kept runs, in the order of their seeds."""
    paths = (options.output / "runs").glob(f"{options.stem}-*.json")
    all_runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    own_runs = [run for run in all_runs if run.pop("of") == _identity(description)]
    return sorted(own_runs, key=lambda run: int(run["seed"]))


def assembled(options: RunOptions, description: dict[str, Any]) -> dict[str, Any]:
    """The kept runs as one result: versions and machine are those of the runs, wherever they are put together."""
    runs = finished_runs(options, description)
    result = {**description, "methods": runs[0]["methods"], "versions": runs[0]["versions"]}
    result["device"] = _joined(run["device"] for run in runs)
    for run in runs:
        for key in ("methods", "versions", "device"):
            del run[key]
    return {**result, "runs": runs}


def _joined(names: Iterable[str]) -> str:
    return " and ".join(sorted(set(names)))


def _identity(description: dict[str, Any]) -> dict[str, Any]:
    """What must be equal for runs to belong to one experiment."""
    identity: dict[str, Any] = rounded({key: description[key] for key in ("experiment", "quick", "settings")})
    return identity


def described(options: RunOptions, problem: Problem) -> dict[str, Any]:
    """The description of a result: settings, versions, machine."""
    return {
        "experiment": options.name,
        "quick": options.quick,
        "class_names": list(problem.class_names),
        "settings": {
            "recipe": asdict(problem.recipe),
            "members": problem.members,
            "dropout_samples": problem.dropout_samples,
            "sizes": [len(part.y) for part in (problem.train, problem.validation, problem.test)],
            "samples": 1000,
        },
        "versions": {"errbar": errbar.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.machine(),
    }


def save(result: dict[str, Any], options: RunOptions) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    write(options.output / f"{options.stem}.json", result)


def write(path: Path, value: Any) -> None:
    """Write a file of JSON, whole or not at all."""
    write_file(path, (json.dumps(rounded(value), separators=(",", ":")) + "\n").encode())


def rounded(value: Any) -> Any:
    """Six significant digits: more than the results warrant."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if value == value else None
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [rounded(item) for item in value]
    return value
