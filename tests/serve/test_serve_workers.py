"""Several workers as one service: one monitor, counters that add up, and lines between processes that keep in step."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CONTENT_TYPE_LATEST

import serving
from errbar.errors import ArgumentError
from errbar.serve.limits import Limits
from errbar.serve.monitoring import ServiceMonitor, monitor_for
from errbar.serve.service import Service
from errbar.serve.telemetry import Log, Metrics, added, text_of
from errbar.serve.workers import Job, Line, SharedMonitor, Workers, answer_all
from serving import member, service


@contextmanager
def line_to(**answers: Callable[..., Any]) -> Iterator[Line]:
    """A line to a thread that answers as another process would."""
    here, there = multiprocessing.Pipe()
    thread = threading.Thread(target=answer_all, args=(there, answers))
    thread.start()
    yield Line(here)
    here.close()
    thread.join(10)
    assert not thread.is_alive()


def monitor() -> ServiceMonitor:
    return monitor_for(member(reference=False), [serving.data(300)], "held.npz", None)


def test_two_workers_with_one_monitor_are_one_service() -> None:
    alone, shared = monitor(), monitor()
    x = serving.data(80)[0]
    answers = {name: getattr(shared, name) for name in ("observe", "skip", "label", "told")}
    with (
        line_to(**answers) as one,
        line_to(**answers) as other,
        service(member(reference=False), monitor=alone) as whole,
        service(member(reference=False), monitor=SharedMonitor("tiny", one)) as first,
        service(member(reference=False), monitor=SharedMonitor("tiny", other)) as second,
    ):
        names: list[str] = []
        for place in range(0, 80, 8):
            body = {"inputs": x[place : place + 8].tolist()}
            whole.told("/v1/predict", body)
            asked = (first, second)[place // 8 % 2]
            names += [one["id"] for one in asked.told("/v1/predict", body)["predictions"]]
        assert len(set(names)) == 80
        second.told("/v1/predict", {"inputs": x[:3].tolist(), "seed": 1})
        # What one worker answered may be labelled at the other.
        labels = [{"id": name, "label": 1} for name in names]
        assert second.told("/v1/labels", labels)["matched"] == 80
        assert first.ask("/v1/labels", [{"id": "a", "label": 1}, {"id": "a", "label": 2}]).status_code == 422
        told, expected = first.told("/v1/monitor"), whole.told("/v1/monitor")
        assert (told["inputs"], told["labels"], told["skipped"]) == (80, 80, 3)
        by_inputs = [[test["evidence"] for test in one["tests"][:3]] for one in (told, expected)]
        assert by_inputs[0] == pytest.approx(by_inputs[1])


def test_counters_of_several_processes_add_up() -> None:
    served = member(reference=False)
    each = [Metrics(lambda: 3.0, lambda: 0.0) for _ in range(2)]
    entries = [{"class": "ant", "confidence": 0.7, "mutual_information": 0.01}]
    for metrics, count in zip(each, (2, 5), strict=True):
        metrics.answers(served, count * entries, is_usual=True)
        metrics.batch(count, 0.5)
    families = [metrics.families() for metrics in each]
    lines = text_of(added(families)).decode().splitlines()
    for line in (
        'errbar_answers_total{class="ant",posterior="tiny"} 7.0',
        'errbar_confidence_bucket{le="0.7",posterior="tiny"} 7.0',
        'errbar_confidence_bucket{le="0.6",posterior="tiny"} 0.0',
        "errbar_batch_seconds_sum 1.0",
        "errbar_queue_inputs 6.0",
        "# TYPE errbar_answers_total counter",
    ):
        assert line in lines
    (start,) = (line for line in lines if line.startswith("process_start_time_seconds "))
    (alone,) = (line for line in text_of(families[0]).decode().splitlines() if line.startswith("process_start_time"))
    assert start == alone
    # Of one process they are what it has.
    assert sorted(text_of(added(families[:1])).splitlines()) == sorted(text_of(families[0]).splitlines())


def test_any_worker_tells_the_counters_of_all() -> None:
    metrics = Metrics(lambda: 0.0, lambda: 0.0)
    metrics.batch(11, 0.1)
    with line_to(counters=metrics.families) as line, served_with(lambda: line.ask("counters")) as url:
        import httpx

        response = httpx.get(f"{url}/metrics")
        assert response.headers["content-type"] == CONTENT_TYPE_LATEST
        assert "errbar_inputs_total 11.0" in response.text


@contextmanager
def served_with(counters: Callable[[], Any]) -> Iterator[str]:
    from errbar.serve.app import application
    from errbar.serve.server import Address, running, url_of

    bound, log = Address(port=0).bind(), Log(enabled=False)
    app = application(Service((member(reference=False),)), log=log, counters=counters)
    with running(app, bound, Limits(), log):
        yield url_of(bound)


def test_a_line_passes_errors_on_and_drops_answers_that_come_too_late() -> None:
    def refused() -> None:
        raise ArgumentError("Not so.")

    late = threading.Event()

    def slow() -> str:
        late.wait(10)
        return "late"

    with line_to(refused=refused, slow=slow, twice=lambda number: 2 * number) as line:
        assert line.ask("twice", 4) == 8
        with pytest.raises(ArgumentError, match=r"^Not so\.$"):
            line.ask("refused")
        with pytest.raises(TimeoutError):
            line.ask("slow", seconds=0.01)
        late.set()
        assert line.ask("twice", 5) == 10


def workers(count: int, *states: tuple[bool, int | None]) -> Workers:
    """Workers that never were: whether each that is started lives, and its exit code."""
    listener: Any = None
    made = Workers(Job(lambda: Service((member(),)), Limits()), count, listener, Log(enabled=False))
    stubs = iter(states)

    def started() -> Any:
        alive, code = next(stubs)
        process = SimpleNamespace(is_alive=lambda: alive, exitcode=code)
        return SimpleNamespace(process=process, ready=threading.Event(), counters=[], line=None)

    made._started = started  # type: ignore[method-assign]
    return made


def test_a_worker_that_cannot_start_is_told() -> None:
    with pytest.raises(ArgumentError, match=r"A worker ended with code -9 .* fewer than --workers 2 if the memory"):
        workers(2, (True, None), (False, -9)).start(threading.Event())


def test_the_counts_of_a_worker_that_ended_are_kept() -> None:
    made = workers(1, (False, -9), (True, None))
    stop = threading.Event()
    stop.set()
    made.start(stop)
    metrics = Metrics(lambda: 5.0, lambda: 0.0)
    metrics.batch(4, 0.1)
    made._workers[0].counters = metrics.families()
    made.replace_ended()
    assert made._workers[0].process.is_alive()
    text = text_of(made._past).decode()
    assert "errbar_inputs_total 4.0" in text
    assert "errbar_queue_inputs" not in text
