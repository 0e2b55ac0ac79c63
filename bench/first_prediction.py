"""Memory of the first prediction with a last layer of many classes, in a separate process: prints a JSON object.

python bench/first_prediction.py 128 1000
"""

from __future__ import annotations

import json
import subprocess
import sys

from common import PRIOR, features, head, in_batches
from memory import ProcessMeter

import errbar

SAMPLES = 1000


def measured(inputs: int, classes: int) -> dict[str, float]:
    """MiB held by the posterior, and the peak above it during the first prediction of PMF and standard deviations."""
    meter = ProcessMeter()
    x, y = features(2048, inputs, classes)
    model = head([inputs, classes])
    small = errbar.fit(head([4, 3]), in_batches(*features(8, 4, 3), 8), last_layers=1, fisher="eta")
    small.predict(features(1, 4, 3)[0])  # what a process loads once
    empty = meter.start()
    posterior = errbar.fit(model, in_batches(x, y, 512), last_layers=1, prior=errbar.Prior(PRIOR), fisher="eta")
    held = meter.start()
    _ = posterior.predict(x[:1], samples=SAMPLES).std
    return {"posterior, MiB": (held - empty) / 2**20, "first prediction, MiB": (meter.peak() - held) / 2**20}


def in_a_fresh_process(inputs: int, classes: int) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", __file__, str(inputs), str(classes)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, float] = json.loads(printed)
    return found


if __name__ == "__main__":
    print(json.dumps(measured(int(sys.argv[1]), int(sys.argv[2]))))
