"""`Monitor`: watches a stream of predictions whose labels come late or never, and raises alarms at a stated rate.

It is the one mutable value of errbar: a stream has a past. Its size does not grow with the stream: some hundred numbers
per test, and the PMFs that wait for their labels, at most `outstanding` of them.

**Inputs**, without labels. Their scores are compared with those of a reference by the tests
- "mutual_information": how much the class depends on which parameters are right,
- "entropy": the total uncertainty about the class,
- "classes": how often each class is predicted.
Each is a conformal test martingale (`errbar._monitor.martingales.RankTest`).

**Labels.** With f̂ the PMF, ŷ its most likely class and d = f̂_ŷ − 1(y = ŷ), the tests
- "overconfidence" and "underconfidence" bet on E[d] > δ and E[−d] > δ, δ = `tolerance`,
- "innovation" bets on E[ν] > M − 1 of the normalised innovation squared (`martingales.innovation_squared`).

*The role of the covariance of the PMF.* One label is distributed as f̂, whatever P^f is: the covariance of its unit
vector y is E[diag f − f fᵀ] + cov f = (diag f̂ − f̂ f̂ᵀ − P^f) + P^f = diag f̂ − f̂ f̂ᵀ. So P^f does not appear in ν; it
says how much of that covariance is due to the parameters. It matters between labels: cov(y_i, y_j) = cov(f_i, f_j),
because all inputs share the parameters. Hence the mean of d over many labels does not tend to 0 even for a correct
posterior, but to a number with a standard deviation of at most the mean of √P^f_ŷŷ (by Cauchy–Schwarz), and that is
the default of δ.

**Several labels** (`outputs="labels"`). The scores of inputs are sums over their labels, and "classes" is the most
probable label of an input, if one is more likely true than not. Labels of one input may depend on each other in any
way, so an input is one bet: d is the mean over its labels that are given, and ν that of theirs, each as of two classes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar._base.checks import stored_whole, whole_number
from errbar._distributions.prediction import Prediction
from errbar._distributions.sampling import require_seed
from errbar._model.outputs import require_outputs
from errbar._monitor.label_statistics import Agreement, Tally
from errbar._monitor.martingales import (
    GAP_BETS,
    INNOVATION_BETS,
    RANK_SIDES,
    SCORE_CELLS,
    Alarm,
    Evidence,
    RankTest,
    gap_factors,
    innovation_factors,
    innovation_squared,
    score_cells,
)
from errbar._monitor.pending import Identifier, PendingLabels, identifiers
from errbar._monitor.scores import Scores
from errbar._monitor.settings import INPUT_TESTS, LABEL_TESTS, MonitorSettings, require_between
from errbar.errors import ArgumentError, MismatchError

_LABEL_BETS = {"overconfidence": GAP_BETS, "underconfidence": GAP_BETS, "innovation": INNOVATION_BETS}
_LABEL_SIDES = {
    "overconfidence": "confidence above accuracy",
    "underconfidence": "confidence below accuracy",
    "innovation": "labels too surprising",
}
_FORMAT = {"format": "errbar.Monitor", "version": 1}


class Monitor:
    """Alarms for a stream of predictions: P(any false alarm, ever) ≤ `rate`.

    Each test gets an equal share of the rate (Bonferroni), so the bound holds for all of them together. It is a
    theorem under these assumptions: for the tests on inputs, reference and stream are exchangeable (for example
    independent and from one distribution); for those on labels, the mean gap is within `tolerance`, or the PMFs are
    right up to `label_noise`, whatever came before. Whether and when a label comes must not depend on the label
    itself. A test that has raised its alarm is silent until `reset`.

    Args:
        reference: predictions for held-out inputs like those expected in the stream, not used for training or
            calibration, made with the same posterior, samples and seed as the stream's. A shift can be detected while
            the stream since then is not much longer than the reference: use hundreds of inputs, better thousands.
        rate: the false-alarm rate of all tests together, over a run of any length.
        tests: which of "mutual_information", "entropy", "classes", "overconfidence", "underconfidence", "innovation".
        tolerance: how far apart mean confidence and accuracy may be; by default the mean of the standard deviations
            √P^f_ŷŷ of the reference.
        label_noise: the share of labels that may be wrong, as if drawn at random, without an alarm of "innovation".
        outstanding: how many predictions may wait for their labels; beyond that, the oldest are dropped and counted.
        seed: for the random numbers that break ties among ranks.
    """

    def __init__(
        self,
        reference: Prediction | Scores,
        *,
        rate: float = 0.01,
        tests: Sequence[str] = INPUT_TESTS + LABEL_TESTS,
        tolerance: float | None = None,
        label_noise: float = 0.01,
        outstanding: int = 10_000,
        seed: int = 0,
    ) -> None:
        scores = Scores.of(reference, "The reference", deviation=tolerance is None)
        limit = whole_number(outstanding)
        if limit is None or limit < 0:
            raise ArgumentError(f"outstanding is {outstanding!r}; expected a whole number of zero or more.")
        if tolerance is None:
            assert scores.deviation is not None
            tolerance = float(scores.deviation.mean())
        self._settings = MonitorSettings(
            classes=scores.classes,
            rate=rate,
            tests=(tests,) if isinstance(tests, str) else tuple(tests),
            tolerance=tolerance,
            label_noise=label_noise,
            seed=require_seed(seed),
            outputs=scores.outputs,
        )
        self._drawn = 0
        self._pending = PendingLabels(limit)
        self._generator = self._generator_at(0)
        self._refer_to(scores)
        self._begin()

    # ---------------------------------------------------------------------------------------------- the stream

    def observe(self, prediction: Prediction | Scores, ids: Sequence[Identifier] | Tensor | None = None) -> list[Alarm]:
        """The next predictions of the stream, in order; returns the alarms that they raise.

        `ids` are names (integers or strings) by which `label` refers to the inputs; without them no labels are
        expected.
        """
        scores = self._checked(prediction)
        names = None if ids is None else identifiers(ids, len(scores))
        self._pending.require_new(names or [])
        cells = {test: _cells(scores, test) for test in self._ranks}
        alarms: list[Alarm] = []
        for row in range(len(scores)):
            self._inputs += 1
            for test, ranks in self._ranks.items():
                uniform = self._uniform()
                if test not in self._alarms:
                    ranks.observe(int(cells[test][row]), uniform, self._inputs)
                    alarms += self._judge(test, ranks.evidence, self._inputs)
            if names is not None:
                self._pending.add(names[row], self._inputs, scores.pmf[row])
        return alarms

    def label(self, ids: Sequence[Identifier] | Tensor, labels: Any) -> list[Alarm]:
        """The labels of inputs that were observed before; returns the alarms that they raise.

        Labels are processed in the order in which they arrive, those of one call in the order of their inputs. Ids
        without a pending prediction (dropped, already labelled, or never observed) are counted in `unmatched`.
        Of several labels they are (B, L), 0, 1 and −1 for a missing one; an input without any says nothing.
        """
        names, settings = identifiers(ids), self._settings
        truth = settings.kind.labels_of(labels, size=len(names), columns=settings.classes, device=torch.device("cpu"))
        alarms: list[Alarm] = []
        for number, pmf, y in self._pending.take(names, truth.tolist()):
            decided = _decided(pmf, y, settings)
            if not decided:
                continue
            confidence, correct, innovation = zip(*decided, strict=True)
            # Of a class, M − 1; of labels each is one of two classes.
            excess, ways = float(np.mean(innovation)), settings.classes if settings.kind.has_gauge else 2
            self._tally.add(confidence, correct, excess / (ways - 1))
            for test, evidence in self._labelled.items():
                if test in self._alarms:
                    continue
                if test == "innovation":
                    factors = innovation_factors(excess, ways)
                else:
                    gap = (sum(confidence) - sum(correct)) / len(decided)
                    factors = gap_factors(gap if test == "overconfidence" else -gap, settings.tolerance)
                evidence.bet(factors, number)
                alarms += self._judge(test, evidence, number)
        return alarms

    def reset(self, reference: Prediction | Scores | None = None) -> None:
        """Begin a new run, with the same reference or another: no evidence, no alarms, no pending labels.

        The new run has a false-alarm rate of `rate` again. Predictions still waiting for labels are dropped and
        counted, since they belong to the previous run. For another posterior, make another monitor.
        """
        if reference is not None:
            self._refer_to(self._checked(reference, "The reference"))
        self._pending.drop_all()
        self._begin()

    # ------------------------------------------------------------------------------------------------ results

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """The alarms of this run, at most one per test."""
        return tuple(self._alarms.values())

    @property
    def rate(self) -> float:
        """The false-alarm rate of all tests together."""
        return self._settings.rate

    @property
    def rates(self) -> dict[str, float]:
        """The false-alarm rate of each test; they add up to `rate`."""
        return dict.fromkeys(self._settings.tests, self._share)

    @property
    def tolerance(self) -> float:
        """How far apart mean confidence and accuracy may be."""
        return self._settings.tolerance

    @property
    def evidence(self) -> dict[str, float]:
        """The capital of each test as a share of that which raises the alarm: an alarm is raised at 1."""
        every = {**{test: ranks.evidence for test, ranks in self._ranks.items()}, **self._labelled}
        return {test: every[test].capital * share for test, share in self.rates.items()}

    def agreement(self, level: float = 0.95) -> Agreement:
        """How labels and predictions agree in this run, with an interval that is valid at all times at once."""
        require_between("level", level, 0, 1)
        return self._tally.agreement(float(level))

    @property
    def inputs(self) -> int:
        """How many inputs were observed in this run."""
        return self._inputs

    @property
    def outstanding(self) -> int:
        """How many inputs wait for their labels."""
        return len(self._pending.entries)

    @property
    def dropped(self) -> int:
        """How many inputs were dropped before their labels came, since the monitor was made."""
        return self._pending.dropped

    @property
    def unmatched(self) -> int:
        """How many labels came without a pending input, since the monitor was made."""
        return self._pending.unmatched

    def __repr__(self) -> str:
        alarms = ", ".join(self._alarms) or "none"
        return f"Monitor({self._inputs} inputs, {self._tally.labels} labels, rate {self.rate:g}, alarms: {alarms})"

    # --------------------------------------------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """The whole state of the monitor as plain numbers, strings, lists and dictionaries, which `json` can write."""
        return {
            **_FORMAT,
            "settings": {**vars(self._settings), "tests": [*self._settings.tests]},
            "inputs": self._inputs,
            "drawn": self._drawn,
            "alarms": [vars(alarm).copy() for alarm in self.alarms],
            "ranks": {test: ranks.state() for test, ranks in self._ranks.items()},
            "labelled": {test: evidence.state() for test, evidence in self._labelled.items()},
            "tally": self._tally.state(),
            "waiting": self._pending.state(),
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Monitor:
        """The monitor with this `state`; it continues as if it had never stopped."""
        if not isinstance(state, Mapping) or {key: state.get(key) for key in _FORMAT} != _FORMAT:
            raise ArgumentError(
                f"This is not the state of a monitor; expected the result of `Monitor.state`, {_FORMAT}."
            )
        monitor = object.__new__(Monitor)
        try:
            monitor._restore(state)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ArgumentError(
                f"The state of the monitor is damaged ({type(error).__name__}: {error}); expected the unchanged result "
                "of `Monitor.state`."
            ) from error
        return monitor

    def _restore(self, state: Mapping[str, Any]) -> None:
        contents = copy.deepcopy(dict(state))  # a state may be reused, so the monitor shares nothing with it
        self._settings = MonitorSettings(**{**contents["settings"], "tests": tuple(contents["settings"]["tests"])})
        self._inputs, self._drawn = stored_whole(contents["inputs"]), stored_whole(contents["drawn"])
        self._generator = self._generator_at(self._drawn)
        self._alarms = {alarm["test"]: Alarm(**alarm) for alarm in contents["alarms"]}
        self._ranks = {
            test: RankTest.from_state(contents["ranks"][test], self._cells_of(test))
            for test in self._names(INPUT_TESTS)
        }
        self._labelled = {
            test: Evidence.from_state(contents["labelled"][test], _LABEL_BETS[test])
            for test in self._names(LABEL_TESTS)
        }
        self._tally = Tally.from_state(contents["tally"])
        if (self._tally.means is None) != self._settings.kind.has_gauge:
            raise ValueError(f"sums of labels that do not match outputs={self._settings.outputs!r}")
        self._pending = PendingLabels.from_state(contents["waiting"], self._settings.classes)

    # ------------------------------------------------------------------------------------------------- details

    @property
    def _share(self) -> float:
        return self._settings.rate / len(self._settings.tests)

    def _names(self, group: tuple[str, ...]) -> list[str]:
        return [name for name in self._settings.tests if name in group]

    def _cells_of(self, test: str) -> int:
        if test != "classes":
            return SCORE_CELLS
        # Of several labels there may be none.
        return self._settings.classes + (not self._settings.kind.has_gauge)

    def _refer_to(self, reference: Scores) -> None:
        self._ranks = {
            test: RankTest.against(_cells(reference, test), self._cells_of(test)) for test in self._names(INPUT_TESTS)
        }

    def _begin(self) -> None:
        self._inputs = 0
        self._alarms = {}
        self._tally = Tally(means=None if self._settings.kind.has_gauge else [0.0, 0.0])
        self._ranks = {test: RankTest.begin(ranks.reference) for test, ranks in self._ranks.items()}
        self._labelled = {test: Evidence.of(_LABEL_BETS[test]) for test in self._names(LABEL_TESTS)}

    def _generator_at(self, draws: int) -> np.random.Generator:
        """A generator determined by the seed and the number of earlier draws, so that two integers restore it."""
        return np.random.Generator(np.random.PCG64(self._settings.seed).advance(draws))

    def _uniform(self) -> float:
        self._drawn += 1
        return float(self._generator.random())

    def _judge(self, test: str, evidence: Evidence, at: int) -> list[Alarm]:
        if evidence.capital * self._share < 1:
            return []
        winner = evidence.winner
        alarm = Alarm(
            test=test,
            side=self._side(test, winner),
            at=at,
            since=evidence.start[winner],
            observations=evidence.steps,
            capital=evidence.capital,
            rate=self._share,
        )
        self._alarms[test] = alarm
        return [alarm]

    def _side(self, test: str, winner: int) -> str:
        if test == "classes":
            reference = self._ranks[test].reference
            stream = self._ranks[test].counts - reference
            excess = stream / stream.sum() - reference / reference.sum()
            most = int(excess.argmax())
            if self._settings.kind.has_gauge:
                return f"more of class {most}"
            return f"more of label {most - 1}" if most else "more without a label"
        return RANK_SIDES[winner] if test in INPUT_TESTS else _LABEL_SIDES[test]

    def _checked(self, prediction: Prediction | Scores, what: str = "The prediction") -> Scores:
        scores = Scores.of(prediction, what)
        if (scores.outputs, scores.classes) != (self._settings.outputs, self._settings.classes):
            own, noun = require_outputs(scores.outputs).noun, self._settings.kind.noun
            raise MismatchError(
                f"{what} has {scores.classes} {own} and the monitor's reference has {self._settings.classes} {noun}; "
                "expected predictions of one posterior."
            )
        return scores


def _decided(
    pmf: Float[np.ndarray, "M"], label: int | list[int], settings: MonitorSettings
) -> list[tuple[float, bool, float]]:
    """Confidence, whether it was right, and ν: of a class, or of each label that is given."""
    if isinstance(label, int):
        innovation = innovation_squared(pmf, label, settings.label_noise)
        return [(float(pmf.max()), int(pmf.argmax()) == label, innovation)]
    return [
        (max(f, 1 - f), (f > 0.5) == (y == 1), innovation_squared(np.array([1 - f, f]), y, settings.label_noise))
        for f, y in zip(pmf.tolist(), label, strict=True)
        if y >= 0
    ]


def _cells(scores: Scores, test: str) -> Int[np.ndarray, "B"]:
    if test == "classes":
        return scores.label
    return score_cells(scores.entropy if test == "entropy" else scores.mutual_information)
