"""What a frame costs a track: `Track.add` of an input against `posterior.logits` of it, for 10 and for 43 classes.

    python bench/track.py

`add over logits` should be below 2. `late` is `add` after 1000 frames, `fused` the time to read `track.logits`.
"""

from __future__ import annotations

from typing import Any

from common import PRIOR, alternate, features, head, save, show

import errbar

SAMPLES, WIDTH, HIDDEN = 500, 100, 40


def compare(classes: int, last_layers: int) -> dict[str, Any]:
    x, y = features(SAMPLES, WIDTH, classes)
    network = head([WIDTH, HIDDEN, classes])
    posterior = errbar.fit(network, [(x, y)], last_layers=last_layers, prior=errbar.Prior(PRIOR))
    first = errbar.Track(posterior).add(x[:1])
    long = first.add(x).add(x)
    times = alternate(
        {
            "logits": lambda: posterior.logits(x[:1]),
            "add": lambda: first.add(x[:1]),
            "late": lambda: long.add(x[:1]),
            "fused": lambda: first.logits,
        }
    )
    row: dict[str, Any] = {"classes": classes, "last layers": last_layers}
    row |= {f"{name} ms": 1e3 * seconds["median"] for name, seconds in times.items()}
    return row | {"add over logits": times["add"]["median"] / times["logits"]["median"]}


def main() -> None:
    rows = [compare(classes, last_layers) for classes in (10, 43) for last_layers in (1, 2)]
    show("Track.add against posterior.logits, one frame", rows)
    save("track", rows)


if __name__ == "__main__":
    main()
