"""Whether held-out samples were among the data of the fit.

T, T_c and a prior by held-out NLL are meant for data that the network has not seen. On its training data a network is
nearly always right, so they come out for a network that is nearly always right. `Information.seen` keeps the keys of
some samples of the fit; held-out samples are compared with them as they are read.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

from errbar._base.checks import Checks
from errbar._distributed.team import Team
from errbar._model.batch import Batch
from errbar._posterior.information import Information
from errbar._posterior.seen import keys_of
from errbar.errors import CalibrationWarning

# The share of held-out samples from which on it is said. Sets of images have up to some per cent of exact duplicates
# between their splits, which move T and T_c by less than their own standard error.
NOTICED_SHARE = 0.05


class Overlap:
    """Counts held-out samples that were among the data of the fit, while a stream of them is read."""

    def __init__(self, information: Information) -> None:
        self._network, self._seen = information.network, information.seen
        self.compared, self.found = 0, 0

    def watching(self, stream: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches."""
        for batch in stream:
            self._count(batch)
            yield batch

    def _count(self, batch: Batch) -> None:
        seen = self._seen
        # Data that repeat themselves, such as rows of a few categories, may well equal those of the fit.
        if seen is None or seen.is_repetitive() or len(batch) == 0:
            return
        keys = keys_of(self._network.prepare_whole(batch, Checks(self._network.device)))
        below = [] if keys is None else keys[keys < seen.limit].tolist()
        self.compared += len(below)
        self.found += sum(key in seen.counts for key in below)

    def warn(self, team: Team, *, stacklevel: int = 2) -> None:
        """Warn of held-out data that are not held out; on all ranks alike. A collective call."""
        compared, found = (sum(numbers) for numbers in zip(*team.exchange((self.compared, self.found)), strict=True))
        if found <= NOTICED_SHARE * compared:
            return
        warnings.warn(
            f"About {found / compared:.0%} of the held-out samples were in the data of the fit ({found} of {compared} "
            "that were compared). On those the network is right far more often than on new data, so what is fitted "
            "to them makes predictions over-confident and error bars too narrow. Use samples that took part in "
            "neither the training nor the fit.",
            CalibrationWarning,
            stacklevel=stacklevel + 1,
        )


def warn_of_training_data(
    information: Information, held_out: Iterable[Batch], team: Team, *, stacklevel: int = 2
) -> None:
    """Warn if many of these batches' samples were among the data of the fit. A collective call."""
    overlap = Overlap(information)
    for _ in overlap.watching(held_out):
        pass
    overlap.warn(team, stacklevel=stacklevel + 1)
