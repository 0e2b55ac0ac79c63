"""Small work runs on one thread, and nobody else sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from errbar._base import threads
from errbar._base.threads import one_thread

CPU = torch.device("cpu")
SMALL, LARGE = 1000, 10**9

pytestmark = pytest.mark.skipif(threads._libraries() is None, reason="torch was built without OpenMP")


def _in_threads(*works: Callable[[], Any]) -> list[Any]:
    """Each in a thread of its own with three threads of OpenMP, all at the same time."""
    libraries = threads._libraries()
    assert libraries is not None
    found: list[Any] = [None] * len(works)

    def run(place: int) -> None:
        torch.get_num_threads()  # torch sets its own number when a thread asks first
        libraries[0](3)
        found[place] = works[place]()

    running = [threading.Thread(target=run, args=(place,)) for place in range(len(works))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(timeout=60)
    return found


def test_two_threads_of_the_user_see_each_other_never() -> None:
    inside, compared = threading.Barrier(3, timeout=60), threading.Barrier(3, timeout=60)

    def work(numbers: int) -> Callable[[], list[int]]:
        def run() -> list[int]:
            with one_thread(numbers, CPU):
                inside.wait()
                during = torch.get_num_threads()
                torch.ones(300, 300) @ torch.ones(300, 300)
                compared.wait()
            return [during, torch.get_num_threads()]

        return run

    def bystander() -> list[int]:
        inside.wait()
        during = torch.get_num_threads()
        # Also what begins meanwhile.
        late: list[int] = []
        thread = threading.Thread(target=lambda: late.append(torch.get_num_threads()))
        thread.start()
        thread.join(timeout=60)
        compared.wait()
        return [during, *late]

    usual = torch.get_num_threads()
    assert _in_threads(work(SMALL), work(LARGE), bystander) == [[1, 3], [3, 3], [3, usual]]
    assert torch.get_num_threads() == usual


def test_a_failure_leaves_the_number_of_threads_as_it_was() -> None:
    def fails() -> int:
        def failing() -> None:
            with one_thread(SMALL, CPU):
                assert torch.get_num_threads() == 1
                raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            failing()
        return torch.get_num_threads()

    assert _in_threads(fails) == [3]


def test_inside_of_itself_it_changes_nothing_more() -> None:
    def nested() -> list[int]:
        with one_thread(SMALL, CPU):
            with one_thread(SMALL, CPU):
                pass
            within = torch.get_num_threads()
        return [within, torch.get_num_threads()]

    assert _in_threads(nested) == [[1, 3]]


@pytest.mark.parametrize("name", ["demo", "serve.digits"])
def test_the_demo_and_the_digits_model_are_computed_on_one_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    from errbar import demo
    from errbar.errors import DataError
    from errbar.serve.digits import digits

    def load(settings: demo.DemoSettings) -> None:
        raise DataError(f"{torch.get_num_threads()} threads for seed {settings.seed}")

    monkeypatch.setattr(demo, "load", load)

    def run() -> int:
        with pytest.raises(DataError, match=r"^1 threads for seed 0"):
            demo.run(tmp_path, progress=False) if name == "demo" else digits()
        return torch.get_num_threads()

    assert _in_threads(run) == [3]


def test_a_search_for_a_calibration_runs_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import nn

    import errbar
    from errbar._calibration import search

    torch.manual_seed(0)
    model = nn.Linear(2, 3).double()
    x, y = torch.randn(30, 2).double(), torch.arange(30) % 3
    posterior = errbar.fit(model, [(x, y)], last_layers=1, prior=errbar.Prior(1.0))
    seen = []
    answer = search._Plain.answer
    monkeypatch.setattr(search._Plain, "answer", lambda plain: (seen.append(torch.get_num_threads()), answer(plain))[1])

    def calibrated() -> int:
        errbar.calibrate(posterior, [(x + 0.1, y)], samples=20)
        return torch.get_num_threads()

    assert _in_threads(calibrated) == [3]
    assert seen == [1]
