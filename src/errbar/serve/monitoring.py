"""The monitor of a service: errbar.Monitor on the answers that can be compared with a reference, kept over restarts.

The tests assume that reference and stream are exchangeable, so both are predicted by the same engine, with the same T,
T_c, c, samples and seed; answers to requests that choose others are counted and left out.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from errbar._base.atomic import require_writable_folder, write_file
from errbar._base.checks import stored_whole
from errbar._model.batch import batches
from errbar._monitor.martingales import Alarm
from errbar._monitor.monitor import Monitor
from errbar._monitor.scores import Scores
from errbar._monitor.settings import INPUT_TESTS
from errbar.errors import ArgumentError, DataError, FileError
from errbar.serve.compute import AnswerOptions, Predict, compute
from errbar.serve.engine import SAMPLES, SEED
from errbar.serve.service import Served

# Points of the history: one in two is dropped when there are more.
POINTS = 500
# Seconds between two writings of the state: as much of the stream is lost when the process is killed.
SAVE_SECONDS = 5.0
_FORMAT = {"format": "errbar serve monitor", "version": 1}
# What evidence is told as: of a martingale below that, only the exponent changes; JSON has no infinity.
_LEAST, _MOST = 1e-6, 1e12
_BATCH = 64


@dataclass(frozen=True)
class Subject:
    """What is monitored, and what it is compared with; a state of another subject is not continued."""

    posterior: str
    fingerprint: str
    reference: str
    reference_inputs: int
    engine: str
    samples: int = SAMPLES
    seed: int = SEED


@dataclass
class _History:
    """The evidence over time, each point `stride` inputs and labels after the one before it."""

    points: list[dict[str, Any]]
    stride: int = 1

    def add(self, point: dict[str, Any]) -> None:
        if self.points and _count(point) - _count(self.points[-1]) < self.stride:
            return
        self.points.append(point)
        if len(self.points) >= POINTS:
            del self.points[1::2]
            self.stride = max(2 * self.stride, (_count(point) - _count(self.points[0])) * 2 // POINTS)

    def time_of(self, number: int) -> float | None:
        """About when an input came."""
        return next((point["time"] for point in self.points if point["input"] >= number), None)


def _count(point: Mapping[str, Any]) -> int:
    return int(point["input"]) + int(point["labels"])


class Watch(Protocol):
    """What a service needs of its monitor, which may be in another process: what `ServiceMonitor` has."""

    @property
    def posterior(self) -> str: ...
    def start(self) -> None: ...
    def close(self) -> None: ...
    def observe(self, entries: Sequence[Mapping[str, Any]]) -> None: ...
    def skip(self, inputs: int) -> None: ...
    def label(self, pairs: Sequence[tuple[str, int | list[int]]]) -> dict[str, Any]: ...
    def told(self) -> dict[str, Any]: ...


class ServiceMonitor:
    """A `Monitor` for the threads of a service, with times, and with its state in a file.

    `observe` and `label` take a lock; every `SAVE_SECONDS` a thread writes what has changed, and `close` what is left.
    """

    def __init__(
        self, subject: Subject, monitor: Monitor, path: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.subject, self._monitor, self._path, self._clock = subject, monitor, path, clock
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._history = _History([])
        self._times: dict[str, float] = {}
        self._started, self._skipped, self._changed = clock(), 0, True
        self._thread: threading.Thread | None = None
        self._labels = 0

    @property
    def posterior(self) -> str:
        """The name of that which is monitored."""
        return self.subject.posterior

    def start(self) -> None:
        """Write the state now, so that a file that cannot be written is told at once, and from now on regularly."""
        if self._path is not None:
            self.save()
            self._thread = threading.Thread(target=self._save_regularly, name="errbar-monitor", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self.save()

    # ---------------------------------------------------------------------------------------------- the stream

    def observe(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Answers, in the order in which they were computed, each with its `id`."""
        scores = scores_of(entries)
        with self._lock:
            self._note(self._monitor.observe(scores, [entry["id"] for entry in entries]))

    def skip(self, inputs: int) -> None:
        """So many inputs were answered in another way than the reference."""
        with self._lock:
            self._skipped += inputs
            self._changed = True

    def label(self, pairs: Sequence[tuple[str, int | list[int]]]) -> dict[str, Any]:
        """Labels, or lists of several, by the ids of the answers: what became of them, as `schemas.LabelsAnswer`."""
        names, labels = [name for name, _ in pairs], torch.tensor([label for _, label in pairs])
        with self._lock:
            before = self._monitor.unmatched
            alarms = self._monitor.label(names, labels)
            unmatched = self._monitor.unmatched - before
            self._labels = self._monitor.agreement().labels
            self._note(alarms)
            told = [self._alarm(alarm) for alarm in alarms]
        return {"matched": len(pairs) - unmatched, "unmatched": unmatched, "alarms": told}

    def _note(self, alarms: Iterable[Alarm]) -> None:
        now = self._clock()
        for alarm in alarms:
            self._times[alarm.test] = now
        self._history.add(self._point(now))
        self._changed = True

    def _point(self, now: float) -> dict[str, Any]:
        evidence = {test: min(max(value, _LEAST), _MOST) for test, value in self._monitor.evidence.items()}
        return {"input": self._monitor.inputs, "labels": self._labels, "time": now, "evidence": evidence}

    # ------------------------------------------------------------------------------------------------- results

    def told(self) -> dict[str, Any]:
        """All of `schemas.MonitorAnswer`."""
        with self._lock:
            monitor, subject = self._monitor, asdict(self.subject)
            del subject["fingerprint"]
            alarms = {alarm.test: self._alarm(alarm) for alarm in monitor.alarms}
            points = list(self._history.points)
            now = self._point(self._clock())
            if not points or _count(points[-1]) < _count(now):
                points.append(now)
            agreement = vars(monitor.agreement()).copy()
            rates, evidence = monitor.rates, now["evidence"]
            counts = {
                "inputs": monitor.inputs,
                "skipped": self._skipped,
                "labels": agreement["labels"],
                "waiting": monitor.outstanding,
                "dropped": monitor.dropped,
                "unmatched": monitor.unmatched,
            }
            scale = {"started": self._started, "rate": monitor.rate, "tolerance": monitor.tolerance}
        tests = [
            {
                "name": test,
                "kind": "inputs" if test in INPUT_TESTS else "labels",
                "rate": rate,
                "evidence": evidence[test],
                "alarm": alarms.get(test),
            }
            for test, rate in rates.items()
        ]
        history = {name: [point[name] for point in points] for name in ("input", "labels", "time")}
        series = {test: [point["evidence"][test] for point in points] for test in rates}
        return {
            **subject,
            **scale,
            **counts,
            "tests": tests,
            "alarms": sorted(alarms.values(), key=lambda alarm: alarm["time"] or 0.0),
            "agreement": {name: _finite(value) for name, value in agreement.items()},
            "history": {**history, "evidence": series},
        }

    def _alarm(self, alarm: Alarm) -> dict[str, Any]:
        times = {"time": self._times.get(alarm.test), "since_time": self._history.time_of(alarm.since)}
        return {**vars(alarm), "capital": min(alarm.capital, _MOST), **times, "sentence": str(alarm)}

    # --------------------------------------------------------------------------------------------------- state

    def save(self) -> None:
        """Write the state, if it has changed: as a whole, or the file stays as it was."""
        if self._path is None:
            return
        with self._lock:
            if not self._changed:
                return
            self._changed = False
            state = {
                **_FORMAT,
                "subject": asdict(self.subject),
                "started": self._started,
                "skipped": self._skipped,
                "times": dict(self._times),
                "stride": self._history.stride,
                "history": list(self._history.points),
                "monitor": self._monitor.state(),
            }
        try:
            write_file(self._path, json.dumps(state).encode())
        except FileError:
            self._changed = True
            raise

    def _save_regularly(self) -> None:
        while not self._stop.wait(SAVE_SECONDS):
            try:
                self.save()
            except FileError:
                continue  # A full disk: the next time, or `close`, tells or mends it.

    def restore(self, content: Any) -> None:
        """Take over the times, counts and history that `save` has written beside the state of the monitor."""
        self._started, self._skipped = float(content["started"]), stored_whole(content["skipped"])
        self._times = {str(test): float(moment) for test, moment in content["times"].items()}
        points = content["history"]
        for point in points:
            if set(point["evidence"]) != set(self._monitor.rates) or _count(point) < 0 or float(point["time"]) < 0:
                raise ValueError("a point of the history")
        self._history = _History(list(points), stored_whole(content["stride"]))
        self._labels = self._monitor.agreement().labels


def _finite(value: Any) -> Any:
    """JSON has no NaN: what is unknown is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scores_of(entries: Sequence[Mapping[str, Any]]) -> Scores:
    """What a monitor needs, from answers."""

    def column(name: str) -> np.ndarray:
        return np.array([entry[name] for entry in entries])

    if "label" not in entries[0]:  # several labels
        return Scores.of_labels(column("pmf"), column("entropy"), column("mutual_information"), column("std"))
    deviation = np.array([entry["std"][entry["label"]] for entry in entries])
    return Scores(column("pmf"), column("label"), column("entropy"), column("mutual_information"), deviation)


def answered(served: Served, data: Any) -> list[dict[str, Any]]:
    """The answers of the service to held-out data, by the engine that answers the stream."""
    entries: list[dict[str, Any]] = []
    for batch in batches(data, served.posterior.unpack):
        if len(batch.args) != 1 or batch.kwargs or not isinstance(batch.args[0], Tensor):
            raise DataError(
                "The data for the monitor have several inputs in each row; expected one, as the service takes."
            )
        for x in batch.args[0].split(_BATCH):
            entries += compute([Predict(served, x, AnswerOptions())])[0]
    if not entries:
        raise DataError("The data for the monitor are empty: expected held-out inputs like those of the stream.")
    return entries


def monitor_for(served: Served, data: Any, where: str, path: Path | None, *, rate: float = 0.01) -> ServiceMonitor:
    """A monitor of what a posterior answers, against held-out data; it continues from the file at `path`, if any."""
    fingerprint = served.identity
    if path is not None:
        require_writable_folder(path)
        if path.exists():
            return _continued(path, served, where, fingerprint)
    entries = answered(served, data() if callable(data) else data)
    subject = Subject(served.name, fingerprint, where, len(entries), served.engine.name)
    return ServiceMonitor(subject, Monitor(scores_of(entries), rate=rate), path)


def _continued(path: Path, served: Served, where: str, fingerprint: str) -> ServiceMonitor:
    try:
        content = json.loads(path.read_bytes())
        if {key: content[key] for key in _FORMAT} != _FORMAT:
            raise ValueError("the format")
        subject = Subject(**content["subject"])
        made = ServiceMonitor(subject, Monitor.from_state(content["monitor"]), path)
        made.restore(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArgumentError) as error:
        raise FileError(
            f"The monitor state {path} cannot be read ({type(error).__name__}: {error}); expected one "
            "that errbar serve has written. Give another --monitor-state, or remove the file to begin anew."
        ) from error
    expected = Subject(served.name, fingerprint, where, subject.reference_inputs, served.engine.name)
    different = [name for name, value in asdict(expected).items() if asdict(subject)[name] != value]
    if different:
        raise ArgumentError(
            f"The monitor state {path} is of another {' and '.join(different)}; expected that of what is served now. "
            "Give another --monitor-state, or remove the file to begin anew."
        )
    return made
