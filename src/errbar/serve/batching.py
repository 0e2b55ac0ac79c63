"""A bounded queue and one thread that computes what waits in it, together.

No request waits for others to come: the thread takes what is there, up to a batch. While it computes the next ones
arrive, so batches grow with the load and a request alone is answered at once. A timer that holds requests back to fill
batches was left out: it costs latency exactly when the service has nothing to do.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from errbar.serve.limits import Limits, busy

Work = TypeVar("Work")
Answer = TypeVar("Answer")


@dataclass(frozen=True, eq=False)
class _Job(Generic[Work, Answer]):
    work: Work
    inputs: int
    future: Future[Answer] = field(default_factory=Future)


class Batcher(Generic[Work, Answer]):
    """`compute` maps a list of works to the list of their answers; it is called by one thread only.

    Where it raises, each work of the batch is computed alone, so that one bad input spoils no other's answer.
    `observe(inputs, seconds)` is told of each batch.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Work]], Sequence[Answer]],
        limits: Limits,
        observe: Callable[[int, float], None] = lambda inputs, seconds: None,
    ) -> None:
        self._compute = compute
        self._limits = limits
        self._observe = observe
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
        """Queue a work that has so many inputs; a refusal (429) where there is no room for it."""
        job: _Job[Work, Answer] = _Job(work, inputs)
        with self._changed:
            if self._closed:
                raise busy("The service is stopping and takes no more requests; ask again when it is back.", 5, 503)
            if self._inputs + inputs > self._limits.queue_inputs:
                raise busy(
                    f"The queue is full: {self._inputs} inputs wait, and it holds {self._limits.queue_inputs}. Try "
                    "again after the seconds in Retry-After.",
                    self._inputs * self._seconds_per_input,
                )
            self._jobs.append(job)
            self._inputs += inputs
            self._changed.notify()
        return job.future

    def close(self, timeout: float | None = None) -> None:
        """Finish what was accepted, and accept nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while jobs := self._take():
            # Whoever has stopped waiting for an answer gets none.
            wanted = [job for job in jobs if job.future.set_running_or_notify_cancel()]
            if not wanted:
                continue
            start = time.perf_counter()
            self._finish(wanted)
            seconds, inputs = time.perf_counter() - start, sum(job.inputs for job in wanted)
            self._seconds_per_input += 0.2 * (seconds / inputs - self._seconds_per_input)
            self._observe(inputs, seconds)

    def _take(self) -> list[_Job[Work, Answer]]:
        """The next batch: at least one job, none at the end."""
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            taken: list[_Job[Work, Answer]] = []
            room = float(self._limits.batch_inputs)
            while self._jobs and (not taken or self._jobs[0].inputs <= room):
                job = self._jobs.popleft()
                taken.append(job)
                self._inputs -= job.inputs
                room -= job.inputs if self._limits.batch_inputs > 1 else math.inf
            return taken

    def _finish(self, jobs: Sequence[_Job[Work, Answer]]) -> None:
        try:
            answers = self._compute([job.work for job in jobs])
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].future.set_exception(error)
                return
            for job in jobs:
                self._finish([job])
            return
        for job, answer in zip(jobs, answers, strict=True):
            job.future.set_result(answer)
