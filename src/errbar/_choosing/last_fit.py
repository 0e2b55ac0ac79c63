"""`LastFit`: what `autofit` chose is calibrated on all held-out data, with as many draws as there is time for."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property, partial

from jaxtyping import Int
from torch import Tensor

from errbar._calibration.held_out import HeldOut
from errbar._calibration.question import TWO
from errbar._calibration.search import LossRule, calibration_near, largest_covariance
from errbar._choosing.choice import Row, is_as_good
from errbar._choosing.deadline import Deadline, TimeIsUpError
from errbar._choosing.links import search_draws
from errbar._distributions.calibration import Calibration
from errbar._posterior.pushing import affordable_draws

# Those of `predict`: what is fitted to them is not worse with them.
_DRAWS = 1000
# Looks at all held-out inputs that a fit takes, at most.
_LOOKS = 100


@dataclass(frozen=True, eq=False)
class LastFit:
    """Of these held-out inputs, up to the end of the limit; the rank that leads does it for all."""

    held_out: HeldOut
    groups: Int[Tensor, "N"]
    deadline: Deadline
    seed: int

    def near(self, names: tuple[str, ...], row: Row) -> Calibration:
        """T_c moves towards 1 as far as the rule allows for what was never out of fold. The values of the row, where
        there is no time for that."""
        of_row = Calibration(row.temperature, row.covariance_scale, row.softening)
        try:
            return calibration_near(self._watched, names, of_row, self._draws(), self.seed, is_as_good=self._rule)
        except TimeIsUpError:
            return of_row

    def largest_covariance(self) -> Calibration | None:
        """The largest one that is as good as temperature scaling; None where there is no time to find out."""
        try:
            return largest_covariance(self._watched, self._draws(), self.seed, self._rule)
        except TimeIsUpError:
            return None

    @property
    def _rule(self) -> LossRule:
        return partial(is_as_good, groups=self.groups)

    @cached_property
    def _watched(self) -> HeldOut:
        def tick() -> None:
            if self.deadline.left_in_all() < 0:
                raise TimeIsUpError

        return replace(self.held_out, watch=tick)

    def _draws(self) -> int:
        most, left = affordable_draws(self.held_out.mean.shape[1], _DRAWS), self.deadline.left_in_all()
        if left == float("inf"):
            return most
        few = min(search_draws(self.held_out), most)
        begin = time.monotonic()
        self._watched.log_likelihood(Calibration(), self.held_out.draws(few, self.seed), TWO)
        each = max(time.monotonic() - begin, 1e-9) / few
        return int(min(max(left / (_LOOKS * each), few), most))
