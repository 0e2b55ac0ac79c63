"""A bounded queue, and one thread that computes its contents in batches.

No request waits for others: the thread takes what is there, up to one batch. While it computes, the next requests
arrive, so batches grow with the load, and a lone request is answered at once. There is no timer that holds requests
back to fill batches: it would cost latency exactly when the service is idle.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from errbar.serve.limits import Limits, busy

Work = TypeVar("Work")
Answer = TypeVar("Answer")


@dataclass(frozen=True, eq=False)
class _Job(Generic[Work, Answer]):
    work: Work
    inputs: int
    future: Future[Answer] = field(default_factory=Future)


# A job with its answer, or with what was raised instead.
_Outcome = tuple[_Job[Work, Answer], Answer | None, Exception | None]


class Batcher(Generic[Work, Answer]):
    """`compute` maps a list of work items to their answers; only one thread calls it.

    If it raises, each item of the batch is computed alone, so that one bad input does not affect other answers.
    `observe(inputs, seconds)` is called after each batch, and `deliver(finish)` once for all answers of it: `finish`
    completes the futures in whatever thread calls it.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Work]], Sequence[Answer]],
        limits: Limits,
        observe: Callable[[int, float], None] = lambda inputs, seconds: None,
        deliver: Callable[[Callable[[], None]], None] = lambda finish: finish(),
    ) -> None:
        self._compute = compute
        self._limits = limits
        self._observe = observe
        self._deliver = deliver
        self._jobs: deque[_Job[Work, Answer]] = deque()
        self._inputs = 0
        self._seconds_per_input = 0.005
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="errbar-batches", daemon=True)
        self._thread.start()

    @property
    def queued_inputs(self) -> int:
        return self._inputs

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, work: Work, inputs: int) -> Future[Answer]:
        """Queue work with this number of inputs; raises a refusal (429) if there is no room for it."""
        job: _Job[Work, Answer] = _Job(work, inputs)
        with self._changed:
            if self._closed:
                raise busy("The service is stopping and takes no more requests; ask again when it is back.", 5, 503)
            if self._inputs + inputs > self._limits.queue_inputs:
                raise busy(
                    f"The queue is full: {self._inputs} inputs are waiting, and it holds {self._limits.queue_inputs}. "
                    "Try again after the seconds in Retry-After.",
                    self._inputs * self._seconds_per_input,
                )
            self._jobs.append(job)
            self._inputs += inputs
            self._changed.notify()
        return job.future

    def close(self, timeout: float | None = None) -> None:
        """Accept nothing more, and finish what was accepted."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while jobs := self._take():
            # Clients that stopped waiting get no answer.
            live_jobs = [job for job in jobs if job.future.set_running_or_notify_cancel()]
            if not live_jobs:
                continue
            start = time.perf_counter()
            outcomes = self._outcomes(live_jobs)
            seconds, inputs = time.perf_counter() - start, sum(job.inputs for job in live_jobs)
            self._seconds_per_input += 0.2 * (seconds / inputs - self._seconds_per_input)
            self._observe(inputs, seconds)
            self._deliver(partial(_finish, outcomes))

    def _take(self) -> list[_Job[Work, Answer]]:
        """The next batch: at least one job, or none once the queue is closed."""
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            batch: list[_Job[Work, Answer]] = []
            room = float(self._limits.batch_inputs)
            while self._jobs and (not batch or self._jobs[0].inputs <= room):
                job = self._jobs.popleft()
                batch.append(job)
                self._inputs -= job.inputs
                room -= job.inputs if self._limits.batch_inputs > 1 else math.inf
            return batch

    def _outcomes(self, jobs: Sequence[_Job[Work, Answer]]) -> list[_Outcome[Work, Answer]]:
        try:
            answers = self._compute([job.work for job in jobs])
        except Exception as error:
            if len(jobs) == 1:
                return [(jobs[0], None, error)]
            return [outcome for job in jobs for outcome in self._outcomes([job])]
        return [(job, answer, None) for job, answer in zip(jobs, answers, strict=True)]


def _finish(outcomes: Sequence[_Outcome[Any, Any]]) -> None:
    for job, answer, error in outcomes:
        if error is None:
            job.future.set_result(answer)
        else:
            job.future.set_exception(error)
