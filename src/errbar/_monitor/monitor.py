"""`Monitor`: watches a stream of predictions, with labels that come late or never; alarms at a stated rate.

The one value of this package that changes: a stream has a past. What it keeps does not grow with the stream: some
hundred numbers for each test, and the PMFs whose labels are awaited, at most `outstanding` of them.

**Inputs**, without labels. Their scores are compared with those of a reference by the tests
- "mutual_information": how much the class depends on which parameters are right,
- "entropy": the total uncertainty about the class,
- "classes": which classes are predicted how often.
Each is a conformal test martingale (`errbar._monitor.martingales.RankTest`).

**Labels.** With f̂ the PMF, ŷ its most likely class and d = f̂_ŷ − 1(y = ŷ), the tests
- "overconfidence" and "underconfidence" bet on E[d] > δ and E[−d] > δ, δ = `tolerance`,
- "innovation" bets on E[ν] > M − 1 of the normalised innovation squared (`martingales.innovation_squared`).

*What the covariance of the PMF has to do with it.* One label is distributed as f̂, whatever P^f is: the covariance
of its unit vector y is E[diag f − f fᵀ] + cov f = (diag f̂ − f̂ f̂ᵀ − P^f) + P^f = diag f̂ − f̂ f̂ᵀ. So P^f has no
place in ν; it says how much of that covariance is the parameters' fault. It has one between labels: cov(y_i, y_j) =
cov(f_i, f_j), because all inputs share the parameters. Hence the mean of d over many labels does not go to 0 for a
posterior that is right, but to a number with a standard deviation of at most the mean of √P^f_ŷŷ (Cauchy and
Schwarz), and that is the default of δ.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from errbar._base.checks import stored_whole, whole_number
from errbar._distributions.prediction import Prediction
from errbar._distributions.sampling import require_seed
from errbar._model.batch import checked_labels
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
from errbar._monitor.pending import Identifier, Waiting, identifiers
from errbar._monitor.settings import INPUT_TESTS, LABEL_TESTS, MonitorSettings, require_between
from errbar.errors import ArgumentError, DataError, MismatchError

_LABEL_BETS = {"overconfidence": GAP_BETS, "underconfidence": GAP_BETS, "innovation": INNOVATION_BETS}
_LABEL_SIDES = {
    "overconfidence": "confidence above accuracy",
    "underconfidence": "confidence below accuracy",
    "innovation": "labels too surprising",
}
_FORMAT = {"format": "errbar.Monitor", "version": 1}


class Monitor:
    """Alarms for a stream of predictions: P(any false alarm, ever) ≤ `rate`.

    Each of the tests gets an equal share of the rate (Bonferroni), so the bound holds for all of them together. It
    is a theorem where its assumptions hold: reference and stream exchangeable (in particular: independent and from
    one distribution) for the tests on inputs, and for those on labels a mean gap within `tolerance`, or PMFs that
    are right up to `label_noise`, whatever came before. Whether and when a label comes must not depend on what it
    says. A test that has raised its alarm is silent until `reset`.

    Args:
        reference: predictions for held-out inputs as the stream should bring them, neither trained nor calibrated on,
            made with the same posterior, samples and seed as the stream's will be. A shift is seen against them as
            long as the stream since then is not much longer than they are many: some hundred, better thousands.
        rate: the false-alarm rate of all tests together, over a run of any length.
        tests: which of "mutual_information", "entropy", "classes", "overconfidence", "underconfidence", "innovation".
        tolerance: how far mean confidence and accuracy may be apart; by default the mean of the standard deviations
            √P^f_ŷŷ of the reference.
        label_noise: the share of labels that may be wrong, as if drawn by lot, without an alarm of "innovation".
        outstanding: how many predictions may wait for their labels; then the oldest are dropped and counted.
        seed: of the numbers that break ties among ranks.
    """

    def __init__(
        self,
        reference: Prediction,
        *,
        rate: float = 0.01,
        tests: Sequence[str] = INPUT_TESTS + LABEL_TESTS,
        tolerance: float | None = None,
        label_noise: float = 0.01,
        outstanding: int = 10_000,
        seed: int = 0,
    ) -> None:
        _require_prediction(reference, "The reference")
        limit = whole_number(outstanding)
        if limit is None or limit < 0:
            raise ArgumentError(f"outstanding is {outstanding!r}; expected a whole number of zero or more.")
        if tolerance is None:
            tolerance = float(reference.std.gather(1, reference.label[:, None]).double().mean())
        self._settings = MonitorSettings(
            classes=reference.sampler.classes,
            rate=rate,
            tests=(tests,) if isinstance(tests, str) else tuple(tests),
            tolerance=tolerance,
            label_noise=label_noise,
            seed=require_seed(seed),
        )
        self._drawn = 0
        self._waiting = Waiting(limit)
        self._generator = self._generator_at(0)
        self._refer_to(reference)
        self._begin()

    # ---------------------------------------------------------------------------------------------- the stream

    def observe(self, prediction: Prediction, ids: Sequence[Identifier] | Tensor | None = None) -> list[Alarm]:
        """The next predictions of the stream, in order; returns the alarms that they raise.

        `ids` are names (integers or strings) by which `label` will call the inputs; without them no labels are
        expected.
        """
        pmf = self._checked_pmf(prediction)
        names = None if ids is None else identifiers(ids, len(pmf))
        self._waiting.require_new(names or [])
        cells = {test: _cells(prediction, test) for test in self._ranks}
        alarms: list[Alarm] = []
        for row in range(len(pmf)):
            self._inputs += 1
            for test, ranks in self._ranks.items():
                uniform = self._uniform()
                if test not in self._alarms:
                    ranks.observe(int(cells[test][row]), uniform, self._inputs)
                    alarms += self._judge(test, ranks.evidence, self._inputs)
            if names is not None:
                self._waiting.add(names[row], self._inputs, pmf[row])
        return alarms

    def label(self, ids: Sequence[Identifier] | Tensor, labels: Any) -> list[Alarm]:
        """The labels of inputs that were observed before; returns the alarms that they raise.

        Labels are taken in the order in which they come, those of one call in the order of their inputs. Ids that
        do not wait for a label (dropped, labelled before, or never observed) are counted in `unmatched`.
        """
        names, settings = identifiers(ids), self._settings
        truth = checked_labels(labels, size=len(names), classes=settings.classes, device=torch.device("cpu"))
        alarms: list[Alarm] = []
        for number, pmf, y in self._waiting.take(names, truth.tolist()):
            confidence, correct = float(pmf.max()), int(pmf.argmax()) == y
            innovation = innovation_squared(pmf, y, settings.label_noise)
            self._tally.add(confidence, correct, innovation / (settings.classes - 1))
            for test, evidence in self._labelled.items():
                if test in self._alarms:
                    continue
                if test == "innovation":
                    factors = innovation_factors(innovation, settings.classes)
                else:
                    gap = confidence - correct
                    factors = gap_factors(gap if test == "overconfidence" else -gap, settings.tolerance)
                evidence.bet(factors, number)
                alarms += self._judge(test, evidence, number)
        return alarms

    def reset(self, reference: Prediction | None = None) -> None:
        """Begin a new run, with the same reference or another: no evidence, no alarms, no labels awaited.

        The new run has a false-alarm rate of `rate` again. Labels that are still awaited are dropped and counted,
        since they belong to the run that ended. Another posterior wants another monitor.
        """
        if reference is not None:
            self._checked_pmf(reference, "The reference")
            self._refer_to(reference)
        self._waiting.drop_all()
        self._begin()

    # ------------------------------------------------------------------------------------------- what it knows

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """The alarms of this run, at most one for each test."""
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
        """How far mean confidence and accuracy may be apart."""
        return self._settings.tolerance

    @property
    def evidence(self) -> dict[str, float]:
        """The capital of each test as a share of what raises the alarm, at 1."""
        every = {**{test: ranks.evidence for test, ranks in self._ranks.items()}, **self._labelled}
        return {test: every[test].capital * share for test, share in self.rates.items()}

    def agreement(self, level: float = 0.95) -> Agreement:
        """How labels and predictions agree in this run, with an interval that holds at all times at once."""
        require_between("level", level, 0, 1)
        return self._tally.agreement(float(level))

    @property
    def inputs(self) -> int:
        """How many inputs were observed in this run."""
        return self._inputs

    @property
    def outstanding(self) -> int:
        """How many inputs wait for their labels."""
        return len(self._waiting.entries)

    @property
    def dropped(self) -> int:
        """How many inputs had to stop waiting for their labels, since the monitor was made."""
        return self._waiting.dropped

    @property
    def unmatched(self) -> int:
        """How many labels came that no input waited for, since the monitor was made."""
        return self._waiting.unmatched

    def __repr__(self) -> str:
        alarms = ", ".join(self._alarms) or "none"
        return f"Monitor({self._inputs} inputs, {self._tally.labels} labels, rate {self.rate:g}, alarms: {alarms})"

    # --------------------------------------------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """Everything that the monitor knows, as plain numbers, strings, lists and dictionaries: `json` can write it."""
        return {
            **_FORMAT,
            "settings": {**vars(self._settings), "tests": [*self._settings.tests]},
            "inputs": self._inputs,
            "drawn": self._drawn,
            "alarms": [vars(alarm).copy() for alarm in self.alarms],
            "ranks": {test: ranks.state() for test, ranks in self._ranks.items()},
            "labelled": {test: evidence.state() for test, evidence in self._labelled.items()},
            "tally": self._tally.state(),
            "waiting": self._waiting.state(),
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Monitor:
        """The monitor whose `state` this is; it goes on as if it had never stopped."""
        if not isinstance(state, Mapping) or {key: state.get(key) for key in _FORMAT} != _FORMAT:
            raise ArgumentError(f"This is no state of a monitor; expected what `Monitor.state` returned, {_FORMAT}.")
        monitor = object.__new__(Monitor)
        try:
            monitor._restore(state)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ArgumentError(
                f"The state of the monitor is damaged ({type(error).__name__}: {error}); expected what `Monitor.state` "
                "returned, unchanged."
            ) from error
        return monitor

    def _restore(self, state: Mapping[str, Any]) -> None:
        known = copy.deepcopy(dict(state))  # a state may be used again: nothing in it is shared with the monitor
        self._settings = MonitorSettings(**{**known["settings"], "tests": tuple(known["settings"]["tests"])})
        self._inputs, self._drawn = stored_whole(known["inputs"]), stored_whole(known["drawn"])
        self._generator = self._generator_at(self._drawn)
        self._alarms = {alarm["test"]: Alarm(**alarm) for alarm in known["alarms"]}
        self._ranks = {
            test: RankTest.from_state(known["ranks"][test], self._cells_of(test)) for test in self._names(INPUT_TESTS)
        }
        self._labelled = {
            test: Evidence.from_state(known["labelled"][test], _LABEL_BETS[test]) for test in self._names(LABEL_TESTS)
        }
        self._tally = Tally.from_state(known["tally"])
        self._waiting = Waiting.from_state(known["waiting"], self._settings.classes)

    # ------------------------------------------------------------------------------------------------- details

    @property
    def _share(self) -> float:
        return self._settings.rate / len(self._settings.tests)

    def _names(self, known: tuple[str, ...]) -> list[str]:
        return [name for name in self._settings.tests if name in known]

    def _cells_of(self, test: str) -> int:
        return self._settings.classes if test == "classes" else SCORE_CELLS

    def _refer_to(self, reference: Prediction) -> None:
        self._ranks = {
            test: RankTest.against(_cells(reference, test), self._cells_of(test)) for test in self._names(INPUT_TESTS)
        }

    def _begin(self) -> None:
        self._inputs = 0
        self._alarms = {}
        self._tally = Tally()
        self._ranks = {test: RankTest.begin(ranks.reference) for test, ranks in self._ranks.items()}
        self._labelled = {test: Evidence.of(_LABEL_BETS[test]) for test in self._names(LABEL_TESTS)}

    def _generator_at(self, drawn: int) -> np.random.Generator:
        """Numbers that follow from the seed and how many were drawn before, so that the state holds two integers."""
        return np.random.Generator(np.random.PCG64(self._settings.seed).advance(drawn))

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
            return f"more of class {int(excess.argmax())}"
        return RANK_SIDES[winner] if test in INPUT_TESTS else _LABEL_SIDES[test]

    def _checked_pmf(self, prediction: Prediction, what: str = "The prediction") -> Float[np.ndarray, "B M"]:
        _require_prediction(prediction, what)
        if prediction.sampler.classes != self._settings.classes:
            raise MismatchError(
                f"{what} has {prediction.sampler.classes} classes and the monitor's reference has "
                f"{self._settings.classes}; expected predictions of one posterior."
            )
        pmf: NDArray[np.float64] = prediction.pmf.detach().double().cpu().numpy()
        return pmf


def _cells(prediction: Prediction, test: str) -> Int[np.ndarray, "B"]:
    if test == "classes":
        labels: NDArray[np.int64] = prediction.label.cpu().numpy()
        return labels
    scores = prediction.entropy if test == "entropy" else prediction.mutual_information
    return score_cells(scores.detach().double().cpu().numpy())


def _require_prediction(prediction: Prediction, what: str) -> None:
    if not isinstance(prediction, Prediction):
        raise ArgumentError(
            f"{what} is {type(prediction).__name__}; expected a Prediction, as `posterior.predict(x)` returns it."
        )
    if len(prediction) == 0:
        raise DataError(f"{what} holds no inputs; expected at least one.")
    if not bool(prediction.pmf.isfinite().all()):
        raise DataError(f"{what} holds NaN or infinite probabilities; expected finite ones.")
