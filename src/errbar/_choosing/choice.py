"""`Choice`: what `autofit` tried, what it took, and why."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxtyping import Float, Int
from torch import Tensor

from errbar._base.memory import readable
from errbar._calibration.folds import standard_error
from errbar._choosing.links import Scores
from errbar._distributions.calibration import Calibration
from errbar._files.choice_table import ChoiceTable
from errbar._files.save import save_posterior
from errbar._posterior.posterior import Posterior

# In nats per sample: how much worse than temperature scaling a candidate may be, out of fold, and how much worse it
# might be by the upper end of the 95 % interval.
TOLERANCE, AT_MOST = 3e-4, 1e-3
# Standard errors within which a candidate counts as good as the best: of an exact structure, and of any other.
_NEAR = {True: 2.0, False: 1.0}
_NORMAL_95 = 1.96


@dataclass(frozen=True)
class Row:
    """A candidate and what it is worth, out of fold: everything was fitted on the other folds.

    Attributes:
        parameters: which parameters take part, in words; empty for a baseline.
        structure: of the information.
        fisher: of the information.
        n_parameters: how many parameters take part.
        exact: whether the structure is the exact one.
        link: what was fitted: "T", "T, T_c" or "T, T_c, c".
        temperature: T, fitted on all held-out data, as are
        covariance_scale: T_c and
        softening: c.
        prior: the precision of the prior.
        prior_by: "evidence" of the training data, "nll" of the held-out data, or "default".
        nll: mean −ln f_y out of fold, and
        standard_error: of it.
        ece: expected calibration error out of fold.
        brier: Brier score out of fold.
        difference: in NLL to temperature scaling, paired, and
        interval: of 95 % for it.
        seconds: to fit.
        microseconds: to predict one input.
        bytes: of the posterior.
    """

    parameters: str
    structure: str
    fisher: str
    n_parameters: int
    exact: bool
    link: str
    temperature: float
    covariance_scale: float
    softening: float
    prior: float
    prior_by: str
    nll: float
    standard_error: float
    ece: float
    brier: float
    difference: float
    interval: tuple[float, float]
    seconds: float
    microseconds: float
    bytes: int


@dataclass(frozen=True, eq=False)
class Trial:
    """A row with −ln f_y of each held-out input, out of fold."""

    row: Row
    losses: Float[Tensor, "N"]


def best_trial(trials: Sequence[Trial], scaling: Float[Tensor, "N"], groups: Int[Tensor, "N"]) -> Trial | None:
    """The rule of `autofit` (docs/design.md): None where nothing is as good as temperature scaling, `scaling`.

    1. Candidates whose NLL exceeds that of temperature scaling by more than 3e-4 are dropped, and those that might be
       worse by more than 1e-3: by the upper end of the 95 % interval of the paired difference.
    2. Those as good as the best remain: within one standard error of the paired difference, within two for an exact
       structure.
    3. Of these, the one with the most parameters in an exact structure; then one with a softening; then one whose prior
       is that of the evidence; then the one with the lower NLL.
    """
    good = [trial for trial in trials if is_as_good(trial.losses - scaling, groups)]
    if not good:
        return None
    best = min(good, key=lambda trial: trial.row.nll)

    def is_near(trial: Trial) -> bool:
        difference = trial.losses - best.losses
        return float(difference.mean()) <= _NEAR[trial.row.exact] * standard_error(difference, groups)

    def order(trial: Trial) -> tuple[float, ...]:
        row = trial.row
        return (-row.n_parameters * row.exact, row.softening == 0, row.prior_by != "evidence", row.nll)

    return min(filter(is_near, good), key=order)


def is_as_good(difference: Float[Tensor, "N"], groups: Int[Tensor, "N"]) -> bool:
    """Whether losses exceed others by little, and surely not by much."""
    mean = float(difference.mean())
    return mean <= TOLERANCE and mean + _NORMAL_95 * standard_error(difference, groups) <= AT_MOST


def paired(losses: Float[Tensor, "N"], scaling: Float[Tensor, "N"], groups: Int[Tensor, "N"]) -> tuple[float, float]:
    """The mean difference to temperature scaling, and half the width of its 95 % interval."""
    difference = losses - scaling
    return float(difference.mean()), _NORMAL_95 * standard_error(difference, groups)


def scored_row(name: str, link: str, at: Calibration, own: Scores, scaling: Scores, groups: Int[Tensor, "N"]) -> Row:
    """A baseline, or a candidate that is yet to be described."""
    difference, half = paired(own.losses, scaling.losses, groups)
    return Row(
        parameters=name,
        structure="",
        fisher="",
        n_parameters=0,
        exact=False,
        link=link,
        **at.described(),
        prior=0.0,
        prior_by="",
        nll=own.nll,
        standard_error=standard_error(own.losses, groups),
        ece=own.ece,
        brier=own.brier,
        difference=difference,
        interval=(difference - half, difference + half),
        seconds=0.0,
        microseconds=0.0,
        bytes=0,
    )


@dataclass(frozen=True, eq=False)
class Choice:
    """What `autofit` chose; print it for the table.

    Attributes:
        posterior: the chosen one, calibrated on all held-out data.
        rows: every candidate that was tried, by falling merit out of fold.
        baselines: the plain softmax, and temperature scaling.
        chosen: the row of `posterior`; None where none was as good as temperature scaling.
        reason: the choice in a sentence.
        not_tried: candidates that were left out, each with the reason.
        temperature_scaling: a posterior with T alone, whose PMF is softmax(ĝ/T).
    """

    posterior: Posterior
    rows: tuple[Row, ...]
    baselines: tuple[Row, Row]
    chosen: Row | None
    reason: str
    not_tried: tuple[str, ...]
    temperature_scaling: Posterior = field(repr=False)

    def __str__(self) -> str:
        return table_of(self)

    def __repr__(self) -> str:
        return f"Choice: {self.reason}\n{self.posterior!r}"

    def save(
        self, path: str | os.PathLike[str], *, factors: bool = False, classes: Sequence[str] | None = None
    ) -> None:
        """Write the posterior as `Posterior.save` does, with the table: `errbar.info(path).choice` and reports have it.

        `update`, `forget` and `calibrate` make other posteriors, whose files have no table.
        """
        table = ChoiceTable.of(cells_of(self), self.reason, self.not_tried)
        save_posterior(self.posterior, path, classes, factors=factors, choice=table)

    def _repr_html_(self) -> str:
        head, *rest = cells_of(self)
        lines = ["<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"]
        for cells in rest:
            style = ' style="font-weight:bold"' if cells[-1] else ""
            row = "".join(f'<td style="text-align:right">{html.escape(cell)}</td>' for cell in cells)
            lines.append(f"<tr{style}>{row}</tr>")
        notes = "".join(f"<li>Not tried: {html.escape(note)}</li>" for note in self.not_tried)
        return f"<p>{html.escape(self.reason)}</p><table>{''.join(lines)}</table><ul>{notes}</ul>"


HEADERS = (
    "parameters",
    "structure",
    "n",
    "prior",
    "T",
    "T_c",
    "c",
    "NLL",
    "against T alone",
    "ECE %",
    "Brier",
    "fit",
    "an input",
    "held",
    "",
)


def cells_of(choice: Choice) -> list[tuple[str, ...]]:
    """The table: a line of headers, the baselines, and the candidates, the best first."""
    lines = [HEADERS, *(_cells(row, "") for row in choice.baselines)]
    return lines + [_cells(row, "chosen" if row is choice.chosen else "") for row in choice.rows]


def _cells(row: Row, note: str) -> tuple[str, ...]:
    scores = (f"{row.nll:.4f}", f"{100 * row.ece:.2f}", f"{row.brier:.4f}")
    difference = f"{row.difference:+.4f} [{row.interval[0]:+.4f}, {row.interval[1]:+.4f}]"
    if not row.structure:
        against = "" if row.link == "T" else difference
        return (
            row.parameters,
            "",
            "",
            "",
            f"{row.temperature:.3g}",
            "",
            "",
            scores[0],
            against,
            *scores[1:],
            *[""] * 4,
        )
    return (
        row.parameters,
        row.structure + (", drawn" if row.fisher == "sampled" else ""),
        f"{row.n_parameters:,}",
        f"{row.prior:.3g} ({row.prior_by})",
        f"{row.temperature:.3g}",
        f"{row.covariance_scale:.2g}",
        f"{row.softening:.2g}" if row.softening else "",
        scores[0],
        difference,
        *scores[1:],
        f"{row.seconds:.3g} s",
        f"{row.microseconds:,.0f} µs",
        readable(row.bytes),
        note,
    )


# The printed table: of a candidate one line with its costs, and below it its rows, so that all fits into 100 columns.
_PRINTED = ("prior", "T", "T_c", "c", "NLL", "against T alone", "ECE %", "Brier")


def table_of(choice: Choice) -> str:
    rows = {
        row: list(cells) for row, cells in zip((*choice.baselines, *choice.rows), cells_of(choice)[1:], strict=True)
    }
    columns = [HEADERS.index(name) for name in _PRINTED]

    def line_of(row: Row) -> list[str]:
        first, *rest = (rows[row][column] for column in columns)
        return [("* " if row is choice.chosen else "  ") + first if row.structure else row.parameters, *rest]

    candidates: dict[tuple[object, ...], list[Row]] = {}
    for row in choice.rows:
        candidates.setdefault((row.parameters, row.structure, row.fisher, row.n_parameters), []).append(row)
    lines: list[str | list[str]] = [["  prior", *_PRINTED[1:]], *map(line_of, choice.baselines)]
    for own in candidates.values():
        lines += [_costs(own[0]), *map(line_of, own)]
    cells = [line for line in lines if not isinstance(line, str)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_PRINTED))]

    def laid_out(line: str | list[str]) -> str:
        if isinstance(line, str):
            return line
        pairs = list(zip(line, widths, strict=True))
        return "  ".join([pairs[0][0].ljust(pairs[0][1]), *(cell.rjust(width) for cell, width in pairs[1:])]).rstrip()

    chosen = "" if choice.chosen is None else "* "
    notes = (f"Not tried: {note}" for note in choice.not_tried)
    return "\n".join([*map(laid_out, lines), chosen + choice.reason, *notes])


def _costs(row: Row) -> str:
    drawn = ", drawn" if row.fisher == "sampled" else ""
    return (
        f"{row.parameters} ({row.structure}{drawn}): n = {row.n_parameters:,}, fit {row.seconds:.3g} s, "
        f"input {row.microseconds:,.0f} µs, {readable(row.bytes)}"
    )


def reason_for(row: Row, rows: Sequence[Row]) -> str:
    """`rows` by NLL; the best of them need not have passed the first step of the rule."""
    lowest = rows[0]
    fitted = row.link if row.prior_by == "default" else f"{row.link} and the prior by {row.prior_by}"
    start = f"Chosen: {row.parameters} ({row.structure}), with {fitted}: {_against(row)}"
    if row is lowest:
        return f"{start}, the best of {len(rows)}."
    best = next(other for other in rows if other is row or _has_passed(other))
    if best is row:
        low, high = lowest.interval
        return (
            f"{start}, the best of those that are surely as good as that; the lowest NLL ({_in_brief(lowest)} "
            f"[{low:+.4f}, {high:+.4f}]) is not."
        )
    near = "two standard errors" if row.exact else "a standard error"
    return (
        f"{start}; the best by NLL ({_in_brief(best)}) is within {near} of that, and this one has "
        f"{_advantage(row, best)}."
    )


def _has_passed(row: Row) -> bool:
    """`is_as_good`, by what a row has."""
    return row.difference <= TOLERANCE and row.interval[1] <= AT_MOST


def _in_brief(row: Row) -> str:
    return f"{row.parameters}, {row.structure}, {row.link}: {row.difference:+.4f}"


def _advantage(row: Row, best: Row) -> str:
    """By which step of the rule the row comes before the best."""
    if row.n_parameters * row.exact > best.n_parameters * best.exact:
        return "more parameters in an exact structure"
    if bool(row.softening) != bool(best.softening):
        return "a softening"
    return "a prior that the held-out data did not choose"


def _against(row: Row) -> str:
    return f"NLL {row.nll:.4f} out of fold, {row.difference:+.4f} against temperature scaling"


def reason_without(rows: Sequence[Row], at: Calibration | None) -> str:
    """`at` is None where there was no time for it."""
    (low, high), best = rows[0].interval, rows[0]
    difference = f"{best.difference:+.4f} [{low:+.4f}, {high:+.4f}] nats"
    start = (
        "No candidate is surely as good as temperature scaling (the best against it: "
        f"{best.parameters}, {best.structure}, {difference})"
    )
    if at is None:
        return (
            f"{start}, and there was no time to find out how large a covariance may be: this is temperature scaling, "
            "and there are no error bars; more seconds would allow some."
        )
    if at.covariance_scale == 0:
        return f"{start}, not even with a small covariance: this is temperature scaling, and there are no error bars."
    return (
        f"{start}: this is the smallest one with T_c = {at.covariance_scale:.2g}, the largest that costs at most "
        "0.0003 nats, and surely less than 0.001; more held-out data would allow more."
    )
