"""Ten minutes of more than the service can do: memory flat, and no answer lost or wrong.

`ERRBAR_OVERLOAD_SECONDS` makes it shorter or longer.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import errbar
from command_line import Workspace
from processes import service_process

SECONDS = float(os.environ.get("ERRBAR_OVERLOAD_SECONDS", "600"))
CLIENTS = 48


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


class Client(threading.Thread):
    """Asks without a pause, and compares each answer with what the library says."""

    def __init__(self, place: tuple[str, int], questions: list[tuple[bytes, Any]], number: int, end: float) -> None:
        super().__init__(daemon=True)
        self.place, self.questions, self.number, self.end = place, questions, number, end
        self.statuses: Counter[int] = Counter()
        self.wrong = 0
        self.lost: list[str] = []

    def run(self) -> None:
        connection = http.client.HTTPConnection(*self.place, timeout=30)
        turn = self.number
        while time.monotonic() < self.end:
            body, expected = self.questions[turn % len(self.questions)]
            turn += 1
            try:
                connection.request("POST", "/v1/predict", body, {"content-type": "application/json"})
                response = connection.getresponse()
                content = json.loads(response.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.lost.append(repr(error))
                connection.close()
                continue
            self.statuses[response.status] += 1
            if response.status == 200:
                found = torch.tensor([one["pmf"] for one in content["predictions"]], dtype=torch.float64)
                self.wrong += int(float((found - expected).abs().max()) > 1e-10)
            elif response.status != 429 or int(response.headers["retry-after"]) < 1 or "error" not in content:
                self.lost.append(f"{response.status}: {content}")
        connection.close()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
def test_overload_loses_no_answer_and_takes_no_more_memory(workspace: Workspace) -> None:
    fitted = errbar.fit(workspace.model, [workspace.train], last_layers=2, prior=errbar.Prior(2.0))
    fitted.save("overload.safetensors")
    questions = []
    for number in range(40):
        x = workspace.test[0][number % 50 : number % 50 + 1 + number % 8]
        body = {"inputs": x.tolist(), "seed": number % 20, "samples": 1000}
        questions.append((json.dumps(body).encode(), fitted.predict(x, 1000, number % 20).pmf))
    arguments = ["overload.safetensors", "--model", "tiny_net:trained", "--queue", "64", "--no-log"]
    arguments += ["--engine", "torch"]  # answers are compared to more digits than a graph has in common with torch
    with service_process(workspace.folder, *arguments) as (process, said):
        host, _, port = said["url"].removeprefix("http://").rpartition(":")
        end = time.monotonic() + SECONDS
        clients = [Client((host, int(port)), questions, number, end) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        memory: list[int] = []
        while time.monotonic() < end:
            time.sleep(SECONDS / 100)
            memory.append(resident_bytes(process.pid))
        for client in clients:
            client.join(60)
        statuses = sum((client.statuses for client in clients), Counter())
        lost = [text for client in clients for text in client.lost]
        assert not any(client.is_alive() for client in clients)
        assert lost == []
        assert sum(client.wrong for client in clients) == 0
        assert statuses[200] > 10 * SECONDS
        assert statuses[429] > 0, "the service was never overloaded, so nothing was tested"
        # After a fifth of the time everything has been seen once; from then on memory may only waver.
        settled = memory[len(memory) // 5 :]
        early, late = max(settled[: len(settled) // 3]), max(settled[-len(settled) // 3 :])
        assert late - early < 16 * 2**20, [round(size / 2**20) for size in memory]
        print(f"{dict(statuses)}, memory {early / 2**20:.0f} to {late / 2**20:.0f} MiB")  # noqa: T201 - seen with -s
