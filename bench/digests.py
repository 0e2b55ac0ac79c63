"""Digests of results: run it before and after a change that must not alter any of them, and compare the output.

    python bench/digests.py > before.txt

One line for each result of each network, Fisher and structure: a SHA-256 over the bytes of all its arrays, so the last
bit counts. Compare only runs on the same machine, with the same number of threads and the same version of torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import errbar

STRUCTURES = ("dense", "block", "kron", "lowrank", "diag")
ROWS, CLASSES = 24, 4


def mlp() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    layers = (nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    return nn.Sequential(*layers), lambda x: x


def convolutional() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    layers = (nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, CLASSES))
    return nn.Sequential(*layers), lambda x: x[:, :, None].expand(-1, -1, 6)[:, None, :4, :4] * x[:, None, None, 2:6]


class Transformer(nn.Module):
    """Two tokens per input, one block of attention, and a head on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(3, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.block(self.embedding(x.reshape(len(x), 2, 3)))
        logits: Tensor = self.head(tokens.mean(1))
        return logits


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Callable[[Tensor], Tensor]]]] = {
    "mlp": mlp,
    "convolutional": convolutional,
    "transformer": lambda: (Transformer(), lambda x: x),
}


def digest(value: Any) -> str:
    """The digest of a tensor is that of its bytes, of a container that of its contents."""
    total = hashlib.sha256()

    def feed(part: Any) -> None:
        if isinstance(part, Tensor):
            total.update(f"{part.dtype}{tuple(part.shape)}".encode())
            total.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for key in sorted(part):
                total.update(str(key).encode())
                feed(part[key])
        elif isinstance(part, (list, tuple)):
            for item in part:
                feed(item)
        else:
            total.update(repr(part).encode())

    feed(value)
    return total.hexdigest()[:16]


def of_prediction(prediction: errbar.Prediction) -> list[Any]:
    return [prediction.pmf, prediction.covariance, prediction.std, prediction.risk(0.3), prediction.mutual_information]


def results(
    model: nn.Module, data: list[tuple[Tensor, Tensor]], fisher: str, structure: str, folder: Path
) -> Iterator[tuple[str, Any]]:
    """The name and value of every compared result."""
    chosen: dict[str, Any] = {"last_layers": 2} if structure == "dense" else {"parameters": "all"}
    x, y = data[0]
    information = errbar.collect(model, data, fisher=fisher, structure=structure, rank=10, **chosen)
    yield "information", [information.dense(), information.n_samples, information.log_likelihood]
    posterior = errbar.condition(information, errbar.Prior(2.0))
    yield "covariance", posterior.covariance()
    yield "evidence", posterior.log_evidence()
    gaussian = posterior.logits(x)
    yield "logits", [gaussian.mean, gaussian.covariance]
    yield "predict", of_prediction(posterior.predict(x, samples=200, seed=3))
    yield "predict, Sobol", posterior.predict(x, samples=64, draws="sobol").pmf
    joint = posterior.joint_logits(x[:3])
    yield "joint logits", [joint.mean, joint.covariance]
    for name, fused in (
        ("fuse", lambda: errbar.fuse([gaussian, gaussian])),
        ("fuse frames", lambda: errbar.fuse_frames(joint)),
    ):
        result = attempt(fused)
        yield name, result if isinstance(result, str) else [result.mean, result.covariance]
    calibrated = errbar.calibrate(posterior, data)
    yield "calibrate", [calibrated.temperature, calibrated.covariance_scale]
    more = [(x[:5] * 0.5, y[:5])]
    updated = posterior.update(more)
    yield "update", [updated.predict(x, samples=50).pmf, updated.covariance()]
    forgotten = attempt(lambda: updated.forget(more))
    yield "forget", forgotten if isinstance(forgotten, str) else forgotten.predict(x, samples=50).pmf
    yield "parameters", posterior.sample_parameters(3, seed=1)
    yield "by parameters", posterior.predict_by_parameters(x, samples=5).pmf
    path = folder / "posterior.safetensors"
    calibrated.save(path, factors=True)
    yield "file", hashlib.sha256(path.read_bytes()).hexdigest()
    yield "load", errbar.load(path, model).predict(x, samples=50).pmf
    scores = attempt(lambda: errbar.outlier_scores(posterior, data))
    yield "outliers", scores if isinstance(scores, str) else list(vars(scores).values())


def attempt(call: Callable[[], Any]) -> Any:
    """A result, or the message of a refusal."""
    try:
        return call()
    except errbar.ErrbarError as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for network, build in NETWORKS.items():
        torch.manual_seed(0)
        model, inputs = build()
        model.eval()
        x = torch.randn(ROWS, 6)
        y = torch.arange(ROWS) % CLASSES
        data = [(inputs(x[:16]).contiguous(), y[:16]), (inputs(x[16:]).contiguous(), y[16:])]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for fisher in ("ggn", "eta"):
                for structure in STRUCTURES:
                    for what, value in results(model, data, fisher, structure, folder):
                        print(f"{network:14} {fisher:4} {structure:8} {what:15} {digest(value)}")
            for layers in (1, 2):
                posterior = errbar.fit(model, data, last_layers=layers, fisher="eta")
                print(f"{network:14} eta  dense    last {layers}          {digest(posterior.predict(data[0][0]).pmf)}")
            options = errbar.plan(model, data[0], memory=2**30).options
            kept = [
                (o.structure, o.last_layers, o.n_parameters, o.posterior_bytes, o.fit_bytes, o.predict_bytes)
                for o in options
            ]
            print(f"{network:14} plan                          {digest(json.dumps(kept))}")
            path = folder / "it.pt2"
            posterior = errbar.fit(model, data, last_layers=1)
            exported = attempt(functools.partial(posterior.export, path, example=data[0][0], samples=20))
            if exported is None:
                program = torch.export.load(path)
                exported = list(program.module()(data[0][0]))
            print(f"{network:14} export                        {digest(exported)}")


if __name__ == "__main__":
    main()
