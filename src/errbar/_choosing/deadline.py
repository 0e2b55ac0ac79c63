"""`Deadline`: the limit of time of `autofit`, looked at before every step that takes long.

Plans tell which candidates to begin with. How long a pass takes is measured while it runs: one whose pace says that it
cannot end in time is given up early, and the time that is left goes to something else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from errbar._model.batch import Batch, pieces

# The plans of seconds are right to about this factor.
PLAN_ERROR = 2.0
# The share of the time that is left for the last fit.
_SHARE_AT_END = 0.08
# A part of a pass should take about this share of the limit, and has no more samples than so many.
_PART_SHARE, _MOST_AT_ONCE = 0.01, 256
# Where parts can grow, the first has so many.
_FIRST_AT_ONCE = 8
# A pace counts once it was measured for this share of the limit.
_MEASURED_SHARE = 0.01


class TimeIsUpError(Exception):
    """The limit of time is reached, or would be."""


@dataclass(frozen=True)
class Deadline:
    """So many seconds from `begin`, or no limit.

    `decides` is false for several ranks, which decide together, between candidates.
    """

    seconds: float | None
    decides: bool = True
    begin: float = field(default_factory=lambda: time.monotonic())

    def left(self) -> float:
        """Seconds until the search must end, so that the last fit is done in time."""
        return self.left_in_all() - (0.0 if self.seconds is None else _SHARE_AT_END * self.seconds)

    def left_in_all(self) -> float:
        return float("inf") if self.seconds is None else self.begin + self.seconds - time.monotonic()

    def tick(self, needed: float = 0.0) -> None:
        """Raise where less than so many seconds are left for the search."""
        if self.decides and self.left() < needed:
            raise TimeIsUpError("the time was up.")

    def at_once(self, seconds_per_sample: float = 0.0) -> int | None:
        """Samples between two looks at the clock; None, for whole batches, without a limit."""
        if self.seconds is None:
            return None
        return int(min(max(_PART_SHARE * self.seconds / max(seconds_per_sample, 1e-12), 1), _MOST_AT_ONCE))

    def parts(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Within a limit in parts, which grow until one takes long enough to be timed."""
        if self.seconds is None:
            yield from batches
            return
        size, enough = _FIRST_AT_ONCE, _PART_SHARE * self.seconds

        def next_size() -> int:
            return size

        for part in (part for batch in batches for part in pieces(batch, next_size)):
            begin = time.monotonic()
            yield part
            taken = time.monotonic() - begin
            if taken < enough / 2:
                size = min(2 * size, _MOST_AT_ONCE)
            elif taken > enough:
                size = max(1, size // 2)


@dataclass(eq=False)
class Pace:
    """How fast a pass over `total` samples goes (None: unknown), after which `after` seconds are needed."""

    deadline: Deadline
    total: float | None
    after: float = 0.0
    done: int = 0
    since: tuple[float, int] | None = None

    def __call__(self, count: int) -> None:
        """To be called before each part of so many samples: raises where the pass cannot end in time."""
        needed = self.needed()
        if needed is not None and needed > self.deadline.left():
            raise TimeIsUpError(
                f"by its pace it would take about {needed:.0f} s more, and {max(self.deadline.left(), 0):.0f} s were "
                "left."
            )
        self.begin(count)

    def begin(self, count: int) -> None:
        self.deadline.tick()
        if self.since is None and self.done:
            # The part before has warmed up.
            self.since = time.monotonic(), self.done
        self.done += count

    def needed(self) -> float | None:
        """Seconds that the rest and what follows will take; None where that is not known, or there is no limit."""
        if self.since is None or self.total is None or self.deadline.seconds is None or not self.deadline.decides:
            return None
        start, before = self.since
        taken, rest = time.monotonic() - start, max(self.total - self.done, 0)
        if taken < _MEASURED_SHARE * self.deadline.seconds:
            return None
        return taken / (self.done - before) * rest + self.after

    def again(self) -> None:
        """From here on the pass goes at another pace."""
        self.since = None
