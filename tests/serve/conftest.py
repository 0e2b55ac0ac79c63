"""A service of two posteriors, for the tests that ask it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from errbar.serve.monitoring import monitor_for
from serving import Running, data, member, service


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    first = member()
    monitor = monitor_for(first, [data()], "held.npz", None)
    with service(first, member("other", 1), monitor=monitor) as service_of_two:
        yield service_of_two
