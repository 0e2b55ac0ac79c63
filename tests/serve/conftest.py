"""A service of two posteriors, for the tests that ask it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serving import Running, member, service


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with service(member(), member("other", 1)) as service_of_two:
        yield service_of_two
