"""A service that monitors its own answers: ids, labels, alarms, and a state that survives a restart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import errbar
import serving
from errbar.errors import ArgumentError, DataError, FileError
from errbar.serve import monitoring, schemas
from errbar.serve.monitoring import ServiceMonitor, monitor_for
from serving import Running, member, service


def inputs(count: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (count,), generator=generator)
    return torch.randn(count, 4, generator=generator) + 1.5 * torch.eye(3, 4)[y] + shift


REFERENCE = inputs(300, 1)


def watch(path: Path | None = None, where: str = "held.npz", **changes: Any) -> ServiceMonitor:
    return monitor_for(member(reference=False, **changes), [REFERENCE], where, path)


@contextmanager
def monitored(monitor: ServiceMonitor) -> Iterator[Running]:
    with service(member(reference=False), monitor=monitor) as running:
        yield running


def predicted(running: Running, x: torch.Tensor, **more: Any) -> list[str]:
    found: list[str] = []
    for part in x.split(60):
        told = running.told("/v1/predict", {"inputs": part.tolist(), **more})
        found += [one["id"] for one in told["predictions"]]
    return found


def test_the_service_monitors_what_it_answers_as_the_library_does() -> None:
    plain = errbar.Monitor(serving.posterior().predict(REFERENCE))
    x, y = inputs(240, 2), torch.randint(0, 3, (240,), generator=torch.Generator().manual_seed(3))
    with monitored(watch()) as running:
        names = predicted(running, x)
        assert len(set(names)) == 240
        for part in x.split(60):
            plain.observe(serving.posterior().predict(part))
        told = running.told("/v1/monitor")
        schemas.MonitorAnswer.model_validate(told, strict=True)
        assert (told["inputs"], told["labels"], told["waiting"], told["reference_inputs"]) == (240, 0, 240, 300)
        assert told["agreement"]["accuracy"] is None
        found = {test["name"]: test["evidence"] for test in told["tests"]}
        for test in ("mutual_information", "entropy", "classes"):
            assert found[test] == pytest.approx(max(plain.evidence[test], 1e-6), rel=1e-3)
        assert told["tolerance"] == pytest.approx(plain.tolerance, rel=1e-5)
        assert told["history"]["input"] == [60, 120, 180, 240]
        late = [{"id": name, "label": int(label)} for name, label in zip(names[:50], y, strict=False)]
        late += [{"id": names[50], "label": "bee"}, {"id": "unknown", "label": 0}]
        answer = running.told("/v1/labels", late)
        assert (answer["matched"], answer["unmatched"]) == (51, 1)
        told = running.told("/v1/monitor")
        assert (told["labels"], told["waiting"], told["unmatched"]) == (51, 189, 1)
        assert 0 <= told["agreement"]["accuracy"] <= 1


def test_a_change_raises_an_alarm_that_says_since_when() -> None:
    with monitored(watch()) as running:
        predicted(running, inputs(120, 2))
        assert running.told("/v1/monitor")["alarms"] == []
        predicted(running, inputs(240, 4, shift=6.0))
        told = running.told("/v1/monitor")
        alarm = told["alarms"][0]
        assert 60 < alarm["since"] <= alarm["at"] <= 360
        assert told["started"] <= alarm["since_time"] <= alarm["time"]
        assert alarm["sentence"].startswith(f"{alarm['test']}: {alarm['side']}, since about input")
        (test,) = (one for one in told["tests"] if one["name"] == alarm["test"])
        assert test["alarm"] == alarm
        assert test["evidence"] >= 1


@pytest.mark.parametrize("body", [{"seed": 1}, {"samples": 10}, {"temperature": 3.0}, {"monitor": False}])
def test_answers_that_cannot_be_compared_are_counted_and_left_out(body: dict[str, Any]) -> None:
    with monitored(watch()) as running:
        predicted(running, inputs(5, 2), **body)
        told = running.told("/v1/monitor")
        assert (told["inputs"], told["skipped"], told["waiting"]) == (0, 5, 0)


def test_its_state_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    with monitored(watch(path)) as running:
        names = predicted(running, inputs(120, 2))
        before = running.told("/v1/monitor")
    with monitored(watch(path)) as running:
        after = running.told("/v1/monitor")
        assert after == before
        assert set(predicted(running, inputs(60, 3))).isdisjoint(names)
        assert running.told("/v1/labels", [{"id": names[7], "label": 2}])["matched"] == 1
        assert running.told("/v1/monitor")["inputs"] == 180


def test_the_state_is_written_while_the_service_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "SAVE_SECONDS", 0.05)
    path = tmp_path / "state.json"
    with monitored(watch(path)) as running:
        predicted(running, inputs(30, 2))
        import time

        deadline = time.monotonic() + 20
        while json.loads(path.read_text())["monitor"]["inputs"] < 30:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"where": "others.npz"}, "is of another reference"),
        ({"name": "other"}, "is of another posterior"),
        ({"seed": 1}, "is of another fingerprint"),
    ],
)
def test_a_state_of_something_else_is_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    path = tmp_path / "state.json"
    watch(path).save()
    with pytest.raises(ArgumentError, match=sentence):
        watch(path, **change)


@pytest.mark.parametrize(
    "damage", [lambda text: "", lambda text: "[]", lambda text: text[:-9], lambda text: text.replace("wealth", "weal")]
)
def test_a_damaged_state_is_refused(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "state.json"
    watch(path).save()
    path.write_text(damage(path.read_text()))
    with pytest.raises(FileError, match=r"cannot be read .* remove the file to begin anew"):
        watch(path)


def test_its_history_stays_small_and_keeps_the_beginning() -> None:
    monitor = watch()
    (entry,) = monitoring.answered(member(reference=False), [REFERENCE[:1]])
    for number in range(3 * monitoring.POINTS):
        monitor.observe([{**entry, "id": str(number)}])
    history = monitor.told()["history"]
    assert 100 < len(history["input"]) <= monitoring.POINTS + 1
    assert history["input"][0] == 1
    assert history["input"][-1] == 3 * monitoring.POINTS
    gaps = [b - a for a, b in zip(history["input"][:-2], history["input"][1:-1], strict=True)]
    assert max(gaps) <= 8


def test_without_a_monitor_there_is_nothing_to_tell(running: Running) -> None:
    assert running.told("/v1/model")["monitor"] is True
    with service(member(reference=False)) as plain:
        assert plain.told("/v1/model")["monitor"] is False
        for response in (plain.ask("/v1/monitor"), plain.ask("/v1/labels", [{"id": "a", "label": 0}])):
            assert response.status_code == 404
            assert "start errbar serve with --monitor" in response.text
        assert len(predicted(plain, inputs(3, 2))) == 3


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ([{"id": "a", "label": 3}], "A label is none of the 3 classes"),
        ([{"id": "a", "label": "dog"}], "A label is none of the 3 classes"),
        ([{"id": "a", "label": 1}, {"id": "a", "label": 2}], "the same name twice"),
        ([{"id": "a"}], "0.label: Field required"),
        ([], "at least 1 item"),
        ({"id": "a", "label": 1}, "valid array"),
    ],
)
def test_labels_that_cannot_be_meant_are_refused(body: Any, sentence: str) -> None:
    with monitored(watch()) as running:
        response = running.ask("/v1/labels", body)
        assert response.status_code == 422
        assert sentence in response.text


def test_data_that_are_no_reference_are_refused() -> None:
    with pytest.raises(DataError, match="The data for the monitor are empty"):
        monitor_for(member(reference=False), [], "held.npz", None)


def test_counters_show_what_answers_say() -> None:
    with service(member()) as running:
        told = running.told("/v1/predict", {"inputs": inputs(40, 2, shift=3.0).tolist()})["predictions"]
        running.told("/v1/predict", {"inputs": inputs(9, 2).tolist(), "seed": 3})
        text = running.ask("/metrics").text
    usual = sorted(serving.posterior().predict(serving.data()[0]).mutual_information.tolist())
    limit = float(torch.quantile(torch.tensor(usual, dtype=torch.float64), 0.95))

    def value(name: str) -> float:
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]

    assert value('errbar_compared_total{posterior="tiny"}') == 40
    assert value('errbar_outliers_total{posterior="tiny"}') == sum(one["mutual_information"] > limit for one in told)
    assert value('errbar_confidence_count{posterior="tiny"}') == 40
    total = sum(one["confidence"] for one in told)
    assert value('errbar_confidence_sum{posterior="tiny"}') == pytest.approx(total, rel=1e-6)
    assert value('errbar_mutual_information_count{posterior="tiny"}') == 40
    counts = re.findall(r'^errbar_answers_total\{class="\w+",posterior="tiny"\} (\S+)$', text, re.MULTILINE)
    assert sum(map(float, counts)) == 49
