"""Logs and counters: one line of JSON per request, and counters for Prometheus.

Neither contains anything that a client has sent: no input, no path that is not one of the routes, no token. Of answers
the counters have how many there were of each class, and how confidence and mutual information are spread.
"""

from __future__ import annotations

import collections
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector, generate_latest

from errbar.serve.compute import total_information
from errbar.serve.service import Served

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
_NATS = (1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Log:
    """JSON lines on standard error, or on `stream`; silent unless `enabled`."""

    def __init__(self, stream: TextIO | None = None, *, enabled: bool = True) -> None:
        self._stream = stream
        self._enabled = enabled

    def say(self, event: str, **facts: Any) -> None:
        if self._enabled:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f".{time.time_ns() // 10**6 % 1000:03d}Z"
            line = json.dumps({"time": stamp, "event": event, **facts}, ensure_ascii=False)
            stream = sys.stderr if self._stream is None else self._stream
            stream.write(line + "\n")
            stream.flush()

    def failure(self, error: BaseException) -> None:
        """An unexpected error: its type and place. Its message is omitted, for it may quote what a client has sent."""
        frames = traceback.extract_tb(error.__traceback__)[-6:]
        where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
        self.say("failure", type=type(error).__name__, where=where)


class LogHandler(logging.Handler):
    """Messages of uvicorn, as lines of the same log."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.INFO)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._log.failure(record.exc_info[1])
        else:
            self._log.say("server", level=record.levelname.lower(), message=record.getMessage())


class Metrics:
    """Counters of one service, in a registry of its own."""

    def __init__(self, queued_inputs: Callable[[], float], queued_pixels: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        names = ["route", "status"]
        self.requests = Counter("errbar_requests", "Requests answered.", names, registry=self.registry)
        self.seconds = Histogram(
            "errbar_request_seconds", "From headers to answer.", ["route"], buckets=_SECONDS, registry=self.registry
        )
        self.batches = Histogram(
            "errbar_batch_inputs", "Inputs in a run of the network.", buckets=_SIZES, registry=self.registry
        )
        self.compute = Histogram(
            "errbar_batch_seconds", "Seconds of a run of the network.", buckets=_SECONDS, registry=self.registry
        )
        self.inputs = Counter("errbar_inputs", "Inputs computed.", registry=self.registry)
        Gauge("errbar_queue_inputs", "Inputs waiting.", registry=self.registry).set_function(queued_inputs)
        pixels = Gauge("errbar_queue_pixels", "Pixels of pictures waiting or being decoded.", registry=self.registry)
        pixels.set_function(queued_pixels)
        self.active = Gauge("errbar_active_requests", "Requests being read or answered.", registry=self.registry)
        ProcessCollector(registry=self.registry)
        # What answers say, so that drift shows: each of the posterior that was asked.
        each = ["posterior"]
        self.classes = Counter(
            "errbar_answers",
            "Predictions by their most likely class, or by each label more likely true than not.",
            [*each, "class"],
            registry=self.registry,
        )
        self.confidence = Histogram(
            "errbar_confidence", "Probability of the most likely class.", each, buckets=_SHARES, registry=self.registry
        )
        self.information = Histogram(
            "errbar_mutual_information",
            "In nats; of several labels the sum.",
            each,
            buckets=_NATS,
            registry=self.registry,
        )
        self.compared = Counter(
            "errbar_compared", "Predictions whose outlier score could be compared.", each, registry=self.registry
        )
        self.outliers = Counter(
            "errbar_outliers",
            "Of these, predictions less usual than 95 % of the training inputs.",
            each,
            registry=self.registry,
        )

    def answers(self, served: Served, entries: Sequence[Mapping[str, Any]], *, is_usual: bool) -> None:
        """Count predictions; those with T, T_c, c, samples or seed of the request only by their class.

        Of several labels each that is more likely true than not is counted, and mutual informations are added.
        """
        name = served.name
        decided = collections.Counter(
            one for entry in entries for one in (entry["likely"] if served.of_labels else (entry["class"],))
        )
        for one, count in decided.items():
            self.classes.labels(name, one).inc(count)
        if not is_usual:
            return
        totals = [total_information(entry) for entry in entries]
        information = self.information.labels(name)
        for total in totals:
            information.observe(total)
        if not served.of_labels:  # there is no one label to be confident of
            confidence = self.confidence.labels(name)
            for entry in entries:
                confidence.observe(entry["confidence"])
        if served.usual_limit is not None:
            self.compared.labels(name).inc(len(entries))
            self.outliers.labels(name).inc(sum(total > served.usual_limit for total in totals))

    def batch(self, inputs: int, seconds: float) -> None:
        self.batches.observe(inputs)
        self.compute.observe(seconds)
        self.inputs.inc(inputs)

    def families(self) -> list[Metric]:
        """All counters as they are now."""
        return list(self.registry.collect())


class _Families:
    """Counters of any origin, as `generate_latest` takes them."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families


def text_of(families: Sequence[Metric]) -> bytes:
    """Counters in the format of Prometheus."""
    return generate_latest(_Families(families))


def added(each: Sequence[Sequence[Metric]]) -> list[Metric]:
    """The counters of several processes as one: the sum of each, and of moments the earliest."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for family in (family for families_of_one in each for family in families_of_one):
        families.setdefault(family.name, family)
        known = values.setdefault(family.name, {})
        for sample in family.samples:
            place = sample.name, tuple(sample.labels.items())
            is_moment = sample.name.endswith(("_created", "_start_time_seconds"))
            if place not in known:
                known[place] = sample.value
            else:
                known[place] = min(known[place], sample.value) if is_moment else known[place] + sample.value
    made = []
    for name, family in families.items():
        whole = Metric(name, family.documentation, family.type)
        for (sample_name, labels), value in values[name].items():
            whole.add_sample(sample_name, dict(labels), value)
        made.append(whole)
    return made


class Record:
    """The outermost wrapper: counts and logs each request, and answers 500 if nothing else did."""

    def __init__(self, app: Any, metrics: Metrics, log: Log) -> None:
        self._app, self.metrics, self._log = app, metrics, log

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status = 0

        async def noting(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.metrics.active.inc()
        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            self._log.failure(error)
            if status == 0:
                await _internal_error(noting)
        finally:
            self.metrics.active.dec()
            seconds = time.perf_counter() - start
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(seconds)
            method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD") else "other"
            facts = scope.get("errbar", {})
            self._log.say("request", method=method, route=route, status=status, seconds=round(seconds, 6), **facts)


async def _internal_error(send: Any) -> None:
    body = json.dumps(
        {
            "error": "The service failed on this request; its log says where. It is still running.",
            "kind": "InternalError",
        }
    ).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})
