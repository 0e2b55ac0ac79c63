"""The demo: scikit-learn's digits, the paper's six methods and ours, fusion, risk and figures, in a minute or so.

Every part is a function from values to small frozen values; `run` calls them in order and prints. All numbers follow
from `DemoSettings`. What a method leaves open (prior, T, T_c) is fitted on the validation digits and never on the test
digits; the sizes, epochs and frame disturbances were set by hand, with results in view; the seed is plain 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import errbar
from errbar import metrics, plots
from errbar._base.progress import track
from errbar._base.threads import one_thread
from errbar.errors import ArgumentError, MissingExtraError, how_to_install
from errbar.experiments.baselines import dropout_pmf, ensemble_pmf, softmax_pmf
from errbar.experiments.evaluation import contrasting
from errbar.experiments.networks import paper_network
from errbar.experiments.training import seeded, train
from errbar.plots.curves import write_figure

try:
    from rich import box
    from rich.console import Console
    from rich.table import Table
except ImportError as missing:
    raise MissingExtraError(
        f"The demo prints with rich, which is not installed: {how_to_install('demo')}."
    ) from missing

_NEXT = """[bold]What to try next[/]
  your network      choice = errbar.autofit(model, training, held_out)
                    print(choice); posterior = choice.posterior
  step by step      posterior = errbar.fit(model, training, last_layers=2)
                    posterior = errbar.calibrate(posterior, held_out)
  with error bars   prediction = posterior.predict(x); prediction.std
  with more data    posterior.update(batches)
  several frames    track = errbar.Track(posterior).add(frame); track.predict()
  to see and touch  errbar serve, then open http://127.0.0.1:8000 in a browser
  and the paper's own Fisher information: errbar.fit(..., fisher="eta")"""


@dataclass(frozen=True)
class DemoSettings:
    """What the demo computes. It trains until every training digit is right: an over-confident network."""

    train_size: int = 700
    validation_size: int = 400
    seed: int = 0
    epochs: int = 40
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    batch_size: int = 32
    members: int = 10
    dropout: float = 0.2
    dropout_samples: int = 50
    priors: tuple[float, ...] = (3.0, 100.0)
    # What autofit tries here; by default it tries more, which takes longer than a demo should.
    candidates: tuple[Mapping[str, Any], ...] = ({"last_layers": 1}, {"parameters": "vectors"})
    frames: int = 5
    objects: int = 100
    threshold: float = 0.05


class Samples(NamedTuple):
    """Images of 8 × 8 grey values in [0, 1], one per row, and their labels."""

    x: Float[Tensor, "N 64"]
    y: Int[Tensor, " N"]

    def data(self) -> TensorDataset:
        return TensorDataset(self.x, self.y)


class Digits(NamedTuple):
    """Digits to train on, to choose and calibrate on, and to report on."""

    train: Samples
    validation: Samples
    test: Samples


@dataclass(frozen=True)
class Score:
    """One row of a table. `fitted` says what was chosen on the validation digits; `ece` is a fraction."""

    method: str
    fitted: str
    accuracy: float
    log_likelihood: float
    brier: float
    ece: float


@dataclass(frozen=True)
class Comparison:
    """The methods' scores and PMFs on the test digits; of the last one also the choice and the logits.

    `prior` is that of the one before, (vii).
    """

    scores: tuple[Score, ...]
    pmfs: dict[str, Float[Tensor, "N M"]]
    choice: errbar.Choice
    gaussian: errbar.LogitGaussian
    prior: errbar.Prior

    @property
    def posterior(self) -> errbar.Posterior:
        return self.choice.posterior


@dataclass(frozen=True)
class ClassRisk:
    """What is known about the probability f_m of one class m for one input."""

    label: int
    softmax: float
    pmf: float
    std: float
    lower: float
    upper: float
    risk: float


def load(settings: DemoSettings) -> Digits:
    """scikit-learn's 1797 digits, scaled to [0, 1], split with equal shares of each class."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as missing:
        raise MissingExtraError(
            f"The demo needs the digits of scikit-learn, which is not installed: {how_to_install('demo')}."
        ) from missing
    images, labels = load_digits(return_X_y=True)
    pixels, truth = torch.as_tensor(images, dtype=torch.float32) / 16, torch.as_tensor(labels).long()

    parts, rest = [], range(len(labels))
    for size in (settings.train_size, settings.validation_size):
        rows, rest = train_test_split(rest, train_size=size, stratify=labels[rest], random_state=settings.seed)
        parts.append(rows)
    return Digits(*(Samples(pixels[rows], truth[rows]) for rows in (*parts, rest)))


def train_network(samples: Samples, settings: DemoSettings, *, seed: int, dropout: float = 0.0) -> nn.Module:
    """The five-layer network 64–256–150–100–40–10, trained on `samples` from `seed`.

    In float64: training amplifies rounding, and in float32 the result would depend on the number of threads.
    """
    with seeded(seed, samples.x.device):  # a new network draws weights, from the global generator
        network = paper_network(samples.x.shape[1], dropout=dropout)
    trained = train(
        network.double(),
        samples.x.double(),
        samples.y,
        epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        batch_size=settings.batch_size,
        seed=seed,
    )
    return trained.float()


def score(method: str, pmf: Float[Tensor, "N M"], labels: Int[Tensor, " N"], fitted: str = "") -> Score:
    """The four measures of the paper's Table 1."""
    measures = (metrics.accuracy, metrics.log_likelihood, metrics.brier, metrics.ece)
    return Score(method, fitted, *(measure(pmf, labels) for measure in measures))


def choose_posteriors(
    network: nn.Module, digits: Digits, settings: DemoSettings, *, progress: bool = False
) -> tuple[errbar.Posterior, errbar.Posterior, errbar.Posterior]:
    """Methods (v) and (vi), with the paper's Fisher, and (vii), each with the best of the priors."""
    if not settings.priors:
        raise ArgumentError("DemoSettings.priors is empty; expected at least one prior precision.")
    x, y = digits.validation
    data = digits.validation.data()
    eta, ggn = (errbar.collect(network, digits.train.data(), last_layers=2, fisher=kind) for kind in ("eta", "ggn"))
    best: dict[int, tuple[float, errbar.Posterior]] = {}
    # One prior after the other, keeping only the best: a covariance of 4450 parameters takes 160 MB.
    for precision in track(settings.priors, "Fitting and calibrating", enabled=progress):
        prior = errbar.Prior(precision)
        paper, exact = errbar.condition(eta, prior), errbar.condition(ggn, prior)
        scaled = errbar.calibrate(paper, data, fit=("covariance_scale",))
        both = errbar.calibrate(exact, data)
        gaussian = paper.logits(x)
        rescaled = gaussian.scaled(scaled.covariance_scale)
        candidates = ((paper, gaussian), (scaled, rescaled), (both, both.logits(x)))
        for method, (posterior, logits) in enumerate(candidates):
            nll = metrics.nll(logits.predict().pmf, y)
            if method not in best or nll < best[method][0]:
                best[method] = nll, posterior
    return best[0][1], best[1][1], best[2][1]


def compare(digits: Digits, settings: DemoSettings, *, progress: bool = False) -> Comparison:
    """The paper's methods (i) to (vi), (vii): the exact Fisher information with both T and T_c, and (viii): autofit."""
    x, y = digits.test
    jobs = [(settings.seed + number, 0.0) for number in range(settings.members)] + [(settings.seed, settings.dropout)]
    *members, with_dropout = [
        train_network(digits.train, settings, seed=seed, dropout=dropout)
        for seed, dropout in track(jobs, f"Training {len(jobs)} networks", enabled=progress)
    ]
    network = members[0]
    by_dropout = dropout_pmf(with_dropout, x, samples=settings.dropout_samples, seed=settings.seed)
    proposed, scaled, both = choose_posteriors(network, digits, settings, progress=progress)
    certain = both.with_calibration(temperature=1.0, covariance_scale=0.0)
    tempered = errbar.calibrate(certain, digits.validation.data(), fit=("temperature",))
    choice = errbar.autofit(
        network,
        digits.train.data(),
        digits.validation.data(),
        candidates=settings.candidates,
        seed=settings.seed,
        progress=progress,
    )
    gaussian = choice.posterior.logits(x)

    prior, T, T_c = "λ {0.prior.precision:g}", "T {0.temperature:.2f}", "T_c {0.covariance_scale:.2g}"
    rows: dict[str, tuple[Tensor, str]] = {
        "(i) standard": (softmax_pmf(network, x), ""),
        "(ii) temp. scaling": (softmax_pmf(network, x, tempered.temperature), T.format(tempered)),
        f"(iii) ensemble of {settings.members}": (ensemble_pmf(members, x), ""),
        "(iv) MC dropout": (by_dropout, ""),
        "(v) proposed": (proposed.predict(x).pmf, prior.format(proposed)),
        "(vi) proposed, T_c": (scaled.predict(x).pmf, f"{prior} {T_c}".format(scaled)),
        "(vii) ggn, T and T_c": (both.predict(x).pmf, f"{prior} {T} {T_c}".format(both)),
        "(viii) autofit": (gaussian.predict().pmf, f"λ {_short(choice)} {T} {T_c}".format(choice.posterior)),
    }
    scores = tuple(score(method, pmf, y, note) for method, (pmf, note) in rows.items())
    return Comparison(scores, {method: pmf for method, (pmf, _) in rows.items()}, choice, gaussian, both.prior)


def _short(choice: errbar.Choice) -> str:
    """The precision of the prior, which the evidence need not round."""
    return f"{choice.posterior.prior.precision:.2g}"


def fuse_classifiers(
    digits: Digits, prior: errbar.Prior, settings: DemoSettings, *, progress: bool = False
) -> tuple[Score, ...]:
    """Two classifiers that share no training digit, for the sake of independence, and their fusion."""
    x, y = digits.test
    gaussians = []
    for part in track((0, 1), "Two more classifiers", enabled=progress):
        half = Samples(digits.train.x[part::2], digits.train.y[part::2])
        network = train_network(half, settings, seed=settings.seed + part)
        posterior = errbar.condition(errbar.collect(network, half.data(), last_layers=2), prior)
        gaussians.append(errbar.calibrate(posterior, digits.validation.data()).logits(x))
    pmfs = [gaussian.predict().pmf for gaussian in gaussians]
    return (
        score("classifier A", pmfs[0], y),
        score("classifier B", pmfs[1], y),
        score("mean of their PMFs", torch.stack(pmfs).mean(0), y),
        score("fused", errbar.fuse(gaussians).predict().pmf, y),
    )


def make_frames(x: Float[Tensor, "N 64"], frames: int, seed: int) -> Float[Tensor, "N C 64"]:
    """Each image seen `frames` times: turned by σ = 5°, shifted by σ = 0.3 pixels, with noise of σ = 0.05."""
    count = len(x) * frames
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(count, 3, generator=generator)
    angle = torch.deg2rad(5.0 * draws[:, 0])
    shift = 0.3 / 4 * draws[:, 1:]  # affine_grid measures in half widths of the image, 4 pixels
    rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1).reshape(count, 2, 2)
    motion = torch.cat([rotation, shift[:, :, None]], dim=2)
    grid = nn.functional.affine_grid(motion, [count, 1, 8, 8], align_corners=False)
    images = x.repeat_interleave(frames, dim=0).reshape(count, 1, 8, 8)
    views = nn.functional.grid_sample(images, grid, align_corners=False)
    noise = 0.05 * torch.randn(views.shape, generator=generator)
    return (views + noise).clamp(0, 1).reshape(len(x), frames, 64)


def fuse_digit_frames(
    posterior: errbar.Posterior, test: Samples, settings: DemoSettings, *, progress: bool = False
) -> tuple[Score, ...]:
    """Several frames of each digit: as a track, which weighs them by their precisions, and with R between them."""
    x, y = test.x[: settings.objects], test.y[: settings.objects]
    frames = make_frames(x, settings.frames, settings.seed)
    each = [posterior.logits(frames[:, number]) for number in range(settings.frames)]
    single = [gaussian.predict().pmf for gaussian in each]
    fused, joint = [], []
    for group in track(frames, f"Fusing {settings.frames} frames of each digit", enabled=progress):
        fused.append(errbar.Track(posterior).add(group).predict().pmf)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", errbar.FusionNotice)  # the table says it, and the line below it why
            joint.append(errbar.fuse_frames(posterior.joint_logits(group)).predict().pmf)
    return (
        score("one frame", single[0], y),
        score("mean of the PMFs", torch.stack(single).mean(0), y),
        score("fused as a track", torch.cat(fused), y),
        score("fused with R alone", torch.cat(joint), y),
    )


def most_ambiguous(pmf: Float[Tensor, "N M"]) -> int:
    """The input whose two most probable classes lie closest together."""
    first, second = pmf.topk(2).values.unbind(1)
    return int((first - second).argmin())


def assess_risk(posterior: errbar.Posterior, x: Float[Tensor, "1 64"], threshold: float) -> tuple[ClassRisk, ...]:
    """PMF, error bars and Pr{f_m > threshold} of each class for one input."""
    prediction = posterior.predict(x)
    lower, upper = prediction.interval(0.95)
    softmax, risk = softmax_pmf(posterior.model, x), prediction.risk(threshold)
    columns = (softmax, prediction.pmf, prediction.std, lower, upper, risk)
    rows = torch.stack([column[0] for column in columns], dim=1).tolist()
    return tuple(ClassRisk(label, *row) for label, row in enumerate(rows))


def draw(comparison: Comparison, test: Samples, output: Path) -> tuple[Path, Path]:
    """The reliability diagrams of all methods, and the paper's first figure, as PNG files in `output`."""
    reliability, figure_one = output / "reliability.png", output / "figure-one.png"
    diagrams = {method.replace("T_c", "$T_c$").replace(" T ", " $T$ "): pmf for method, pmf in comparison.pmfs.items()}
    write_figure(plots.reliability_grid(diagrams, test.y), reliability, dpi=160)
    everything = comparison.gaussian
    rows = list(contrasting(everything, everything.predict().pmf))
    gaussian = errbar.LogitGaussian(everything.mean[rows], everything.covariance[rows])
    images = test.x[rows].reshape(-1, 8, 8)
    titles = [f"labelled {label}" for label in test.y[rows].tolist()]
    write_figure(plots.figure_one(images, gaussian, gaussian.predict(), titles=titles), figure_one, dpi=160)
    return reliability, figure_one


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.show_edge, table.padding = False, (0, 1, 0, 0)  # narrow enough for 80 columns
    return table


def score_table(title: str, scores: Sequence[Score]) -> Table:
    """One row per method; the best of each column in bold."""
    table = _table(title)
    table.add_column("method", no_wrap=True)
    for heading in ("acc. ↑", "Σ ln f ↑", "Brier ↓", "ECE ↓"):
        table.add_column(heading, justify="right", no_wrap=True)
    with_fitted = any(row.fitted for row in scores)
    if with_fitted:
        table.add_column("fitted", no_wrap=True)
    values = [(row.accuracy, row.log_likelihood, -row.brier, -row.ece) for row in scores]
    best = [max(column) for column in zip(*values, strict=True)]
    for row, numbers in zip(scores, values, strict=True):
        texts = (f"{row.accuracy:.1%}", f"{row.log_likelihood:.1f}", f"{row.brier:.4f}", f"{row.ece:.2%}")
        cells = [
            f"[bold green]{text}[/]" if number == top else text
            for text, number, top in zip(texts, numbers, best, strict=True)
        ]
        table.add_row(row.method, *cells, *([row.fitted] if with_fitted else []))
    return table


def choice_table(choice: errbar.Choice) -> Table:
    """What autofit tried, in few columns: the baselines and the candidates, the chosen one in green."""
    table = _table("What autofit tried, by cross-validation on the validation digits")
    for heading in ("parameters", "prior by", "fitted", "NLL ↓", "minus T alone, 95 %"):
        is_number = heading.startswith(("NLL", "minus"))
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    for row in (*choice.baselines, *choice.rows):
        half = (row.interval[1] - row.interval[0]) / 2
        against = "" if row.link == "T" else f"{row.difference:+.4f} ± {half:.4f}"
        style = "bold green" if row is choice.chosen else ""
        table.add_row(row.parameters, row.prior_by, row.link, f"{row.nll:.4f}", against, style=style)
    return table


def risk_table(title: str, risks: Sequence[ClassRisk], threshold: float) -> Table:
    """One row per class; classes that can be ruled out are dim."""
    table = _table(title)
    for heading in ("class", "softmax", "PMF", "std", "95 % interval", f"Pr{{f > {threshold:g}}}"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in risks:
        cells = [f"{value:.3f}" for value in (row.softmax, row.pmf, row.std, row.risk)]
        cells.insert(3, f"{row.lower:.3f} – {row.upper:.3f}")
        table.add_row(str(row.label), *cells, style="dim" if row.risk < 0.01 else "")
    return table


# Nearly all of it are thousands of small products, which several threads would spend on waiting for each other.
@one_thread(0, torch.device("cpu"))
def run(
    output: Path, progress: bool = True, settings: DemoSettings | None = None, *, quiet: bool = False
) -> dict[str, Any]:
    """Run everything, print it as it comes unless `quiet`, and return it by name; figures are PNG files in `output`."""
    settings = DemoSettings() if settings is None else settings
    if output.exists() and not output.is_dir():
        raise ArgumentError(f"The output {output} is a file; expected a folder for the figures.")
    output.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, quiet=quiet)
    digits = load(settings)
    train_size, validation_size, test_size = (len(part.y) for part in digits)
    console.print(
        f"Handwritten digits of 8 × 8 pixels: {train_size} to train on, {validation_size} to calibrate on, "
        f"{test_size} to test on.\nA network of five layers (64–256–150–100–40–10), {settings.epochs} epochs; "
        "the covariance of (v) to (vii) is that of the 4450 parameters of its last two layers.\n"
    )
    comparison = compare(digits, settings, progress=progress)
    posterior = comparison.posterior
    console.print(score_table("Eight ways to a PMF, on the test digits", comparison.scores))
    console.print(
        "Fitted by NLL on the validation digits: prior precision λ out of "
        f"{', '.join(f'{precision:g}' for precision in settings.priors)}; temperature T; covariance scale T_c.\n"
    )
    console.print(choice_table(comparison.choice))
    console.print(f"{comparison.choice.reason}\n", markup=False)
    pair = fuse_classifiers(digits, comparison.prior, settings, progress=progress)
    console.print(score_table("Two classifiers, one half of the digits each", pair), "")
    frames = fuse_digit_frames(posterior, digits.test, settings, progress=progress)
    title = f"{settings.frames} noisy frames of each of {min(settings.objects, test_size)} test digits"
    console.print(score_table(title, frames))
    console.print("R alone takes every difference between frames for an error of the parameters; a track does not.\n")
    index = most_ambiguous(comparison.gaussian.predict().pmf)
    risks = assess_risk(posterior, digits.test.x[index : index + 1], settings.threshold)
    title = f"The most ambiguous test digit, number {index}, labelled {int(digits.test.y[index])}"
    console.print(risk_table(title, risks, settings.threshold), "")
    figures = draw(comparison, digits.test, output)
    for path in figures:
        console.print(f"Drawn: {path}")
    console.print("", _NEXT, sep="\n")
    tables: dict[str, Sequence[Any]] = {
        "methods": comparison.scores,
        "autofit": comparison.choice.rows,
        "classifiers": pair,
        "frames": frames,
        "risk": risks,
    }
    rows_by_table = {name: [asdict(row) for row in rows] for name, rows in tables.items()}
    return {"inputs": test_size, "figures": figures, **rows_by_table}
