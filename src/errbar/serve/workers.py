"""Several processes that answer as one service: they share the socket, one monitor and the counters.

The process that starts them answers nothing. It holds the monitor, adds up the counters, replaces a worker that ended,
and stops them all. Each worker loads the model, and has a queue and limits of its own; a connection goes to whichever
worker takes it first. Workers are started anew and not forked: a fork has the locks of the threads of OpenMP and of
ONNX Runtime, but not the threads that would release them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from prometheus_client import Metric

from errbar.errors import ArgumentError
from errbar.serve.app import application
from errbar.serve.limits import Limits
from errbar.serve.monitoring import ServiceMonitor
from errbar.serve.server import grace, server_for, settle
from errbar.serve.service import Service
from errbar.serve.telemetry import Log, added

# Seconds between two looks at the workers, and that one has to tell its counters: one that hangs holds up nobody.
_LOOK, _TELL = 0.2, 0.5
# What the monitor needs of an answer (several labels have no `label`); covariances and points stay in the worker.
_OBSERVED = ("id", "label", "pmf", "std", "entropy", "mutual_information")
_OF_MONITOR = ("observe", "skip", "label", "told")


@dataclass(frozen=True)
class Job:
    """What each worker does. `prepare` makes the service in the worker, so it has to be importable by its name.

    `monitored` is the posterior that the monitor watches, None without one; `threads` are those of one worker.
    """

    prepare: Callable[[], Service]
    limits: Limits
    token: str | None = None
    hosts: tuple[str, ...] | None = None
    log: bool = True
    monitored: str | None = None
    threads: int = 1


class Line:
    """Questions to another process, one at a time, each with its answer."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock, self._number = pipe, threading.Lock(), 0

    def ask(self, name: str, *arguments: Any, seconds: float | None = None) -> Any:
        """The answer, or the error that the other process had; raises `TimeoutError` after `seconds`."""
        with self._lock:
            self._number += 1
            self._pipe.send((self._number, name, arguments))
            number = None
            while number != self._number:  # a lower one is of a question for which nobody waits any more
                if not self._pipe.poll(seconds):
                    raise TimeoutError
                number, is_answer, answer = self._pipe.recv()
        if not is_answer:
            raise answer
        return answer


def answer_all(pipe: Connection, answers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer the questions of a `Line` until its process has ended."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            number, name, arguments = pipe.recv()
            try:
                reply = number, True, answers[name](*arguments)
            except Exception as error:
                reply = number, False, error
            pipe.send(reply)


class SharedMonitor:
    """The monitor of all workers, as one of them has it: each call returns when it has been done there."""

    def __init__(self, posterior: str, line: Line) -> None:
        self.posterior, self._line = posterior, line

    def start(self) -> None:
        """Nothing: the process that holds the monitor starts it, and closes it."""

    def close(self) -> None:
        """Nothing."""

    def observe(self, entries: Sequence[Mapping[str, Any]]) -> None:
        self._line.ask("observe", [{name: entry[name] for name in _OBSERVED if name in entry} for entry in entries])

    def skip(self, inputs: int) -> None:
        self._line.ask("skip", inputs)

    def label(self, pairs: Sequence[tuple[str, int | list[int]]]) -> dict[str, Any]:
        found: dict[str, Any] = self._line.ask("label", pairs)
        return found

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = self._line.ask("told")
        return found


def work(job: Job, listener: socket.socket, asking: Connection, asked: Connection) -> None:
    """One worker, until it is told to stop or the process that started it has ended."""
    # uvicorn passes SIGTERM on when it has stopped: it should not kill the process before that has cleaned up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with contextlib.suppress(KeyboardInterrupt):
        torch.set_num_threads(job.threads)
        line, log = Line(asking), Log(enabled=job.log)
        monitor = None if job.monitored is None else SharedMonitor(job.monitored, line)
        app = application(
            job.prepare(),
            job.limits,
            token=job.token,
            hosts=job.hosts,
            log=log,
            monitor=monitor,
            counters=partial(line.ask, "counters"),
        )
        server = server_for(app, job.limits, log, partial(line.ask, "ready"))

        def answering() -> None:
            answer_all(asked, {"counters": app.metrics.families})
            server.should_exit = True

        threading.Thread(target=answering, name="errbar-counters", daemon=True).start()
        settle()
        server.run(sockets=[listener])


@dataclass(eq=False)
class _Worker:
    process: Any
    line: Line
    ready: threading.Event
    counters: list[Metric] = field(default_factory=list)


class Workers:
    """The processes, as that which started them sees them."""

    def __init__(
        self, job: Job, count: int, listener: socket.socket, log: Log, monitor: ServiceMonitor | None = None
    ) -> None:
        self._job, self._count, self._listener, self._log = job, count, listener, log
        watch = {} if monitor is None else {name: getattr(monitor, name) for name in _OF_MONITOR}
        self._answers: dict[str, Callable[..., Any]] = {"counters": self.counters, **watch}
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._past: list[Metric] = []

    def start(self, stop: threading.Event) -> None:
        """Start them, and return when all accept connections, or `stop` is set."""
        self._workers = [self._started() for _ in range(self._count)]
        while not all(worker.ready.wait(_LOOK) for worker in self._workers) and not stop.is_set():
            for worker in self._workers:
                if not worker.process.is_alive():
                    raise ArgumentError(
                        f"A worker ended with code {worker.process.exitcode} before it was ready; its message, if it "
                        f"had one, is above. Expected fewer than --workers {self._count} if the memory is too small: "
                        "each holds the model."
                    )

    def replace_ended(self) -> None:
        """Start a new worker for each that has ended, whose counts are kept as it told them last."""
        for place, worker in enumerate(self._workers):
            if not worker.process.is_alive():
                self._log.say("worker", code=worker.process.exitcode, message="A worker ended; another is started.")
                counted = [family for family in worker.counters if family.type in ("counter", "histogram")]
                self._past = added([self._past, counted])
                self._workers[place] = self._started()

    def counters(self) -> list[Metric]:
        """Those of all workers together; of one that does not answer in time as it told them last."""
        workers = tuple(self._workers)
        for worker in workers:
            with contextlib.suppress(TimeoutError, EOFError, OSError):
                worker.counters = worker.line.ask("counters", seconds=_TELL)
        return added([self._past, *(worker.counters for worker in workers)])

    def close(self) -> None:
        """Let the workers answer what they have accepted, and end."""
        for worker in self._workers:
            worker.process.terminate()
        end = time.monotonic() + grace(self._job.limits) + 5
        for worker in self._workers:
            worker.process.join(max(0.0, end - time.monotonic()))
            worker.process.kill()
            worker.process.join()

    def _started(self) -> _Worker:
        asking, answering = self._context.Pipe()
        ours, asked = self._context.Pipe()
        arguments = (self._job, self._listener, asking, asked)
        process = self._context.Process(target=work, args=arguments, name="errbar-worker")
        process.start()
        # The worker's ends of the pipes: only when nobody else holds them does one side see that the other has ended.
        asking.close()
        asked.close()
        worker = _Worker(process, Line(ours), threading.Event())
        answers = {**self._answers, "ready": worker.ready.set}
        threading.Thread(target=answer_all, args=(answering, answers), name="errbar-worker", daemon=True).start()
        return worker


def serve_by_workers(
    job: Job,
    count: int,
    listener: socket.socket,
    log: Log,
    monitor: ServiceMonitor | None = None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; `ready` is called once all workers accept connections."""
    workers = Workers(job, count, listener, log, monitor)
    with _stopped_by_signals() as stop:
        try:
            if monitor is not None:
                monitor.start()
            workers.start(stop)
            if not stop.is_set():
                ready()
            while not stop.wait(_LOOK):
                workers.replace_ended()
        finally:
            # Nobody accepts a connection here.
            listener.close()
            workers.close()
            if monitor is not None:
                monitor.close()


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set, while the block runs."""
    stop = threading.Event()
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(kind, lambda *_: stop.set()) for kind in kinds]
    try:
        yield stop
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
