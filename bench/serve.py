"""The service on loopback against a bare FastAPI endpoint that only runs the network: throughput and latency.

Both serve the demo's digits network from separate processes, with the same uvicorn. Clients are connections of one
other process that request one input at a time, the next as soon as the answer arrives. "errbar" answers with PMF,
standard deviations, intervals, entropy and mutual information from 1000 draws, computed by ONNX Runtime or by torch;
"bare" with the softmax of the logits. At last 24 requests of 64 pictures each come at once, and ordinary ones beside
them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from common import save, show
from fastapi import FastAPI
from pydantic import BaseModel

CLIENTS = (1, 8, 64)
SECONDS = 5.0
ROUNDS = 3
SERVERS = ("errbar", "errbar, by torch", "bare")
# The pictures of the attack: as many pixels as a request may have, and more.
ATTACKERS, PICTURES, SIDES = 24, 64, (500, 1900)


def serve(kind: str) -> None:
    """One of the servers, which prints its port when it is ready."""
    import uvicorn

    from errbar.serve.app import application
    from errbar.serve.digits import digits
    from errbar.serve.limits import Limits
    from errbar.serve.server import Address, server_for, settle
    from errbar.serve.service import Service
    from errbar.serve.telemetry import Log

    torch.set_num_threads(1)
    made = digits()
    bound = Address("127.0.0.1", 0).bind()
    port = bound.getsockname()[1]
    if kind == "bare":
        server = uvicorn.Server(uvicorn.Config(bare(made.posterior.model), log_level="warning", http="h11"))
    else:
        limits, engine = Limits(), "torch" if "torch" in kind else "onnx"
        service = Service((made.with_engine(engine),))
        server = server_for(application(service, limits, log=Log(enabled=False)), limits, Log(enabled=False))
    settle()  # as `errbar serve` does; for both alike
    bound.listen(128)  # connections wait until the server takes them
    print(port, flush=True)
    server.run(sockets=[bound])


class Inputs(BaseModel):
    """The request of the bare endpoint."""

    inputs: list[list[float]]


def bare(network: torch.nn.Module) -> Any:
    """A minimal service: a list of inputs in, their softmax out."""
    app = FastAPI()

    @app.post("/v1/predict")
    async def predict(body: Inputs) -> list[list[float]]:
        with torch.no_grad():
            pmf: list[list[float]] = torch.softmax(network(torch.tensor(body.inputs)), 1).tolist()
        return pmf

    return app


async def client(
    port: int, requests: list[bytes], number: int, end: float, taken: list[float], failed: list[int]
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    turn = number
    while (start := time.perf_counter()) < end:
        writer.write(requests[turn % len(requests)])
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        )
        await reader.readexactly(length)
        if head.startswith(b"HTTP/1.1 200"):
            taken.append(time.perf_counter() - start)
        else:
            failed.append(int(head[9:12]))
        turn += 1
    writer.close()


async def load(port: int, clients: int, seconds: float, requests: list[bytes]) -> tuple[list[float], list[int], float]:
    taken: list[float] = []
    failed: list[int] = []
    start = time.perf_counter()
    await asyncio.gather(*(client(port, requests, n, start + seconds, taken, failed) for n in range(clients)))
    return taken, failed, time.perf_counter() - start


async def attack(port: int, ordinary: list[bytes], side: int) -> dict[str, Any]:
    """Seconds of ordinary requests while as many attackers as there are have not been answered yet."""
    pictures = [picture(side)] * PICTURES
    hostile = request_of({"images": pictures})
    statuses: list[int] = []
    taken: list[float] = []

    async def attacker() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(hostile)
        statuses.append(int((await reader.readuntil(b"\r\n\r\n"))[9:12]))
        writer.close()

    start = time.perf_counter()
    attackers = [asyncio.create_task(attacker()) for _ in range(ATTACKERS)]
    await asyncio.sleep(0.05)
    failed: list[int] = []
    while not all(one.done() for one in attackers) or not taken:
        await client(port, ordinary, len(taken), time.perf_counter() + 0.01, taken, failed)
    await asyncio.gather(*attackers)
    return {
        "pictures of": f"{side} × {side}",
        "answered": statuses.count(200),
        "refused": len(statuses) - statuses.count(200),
        "attack, s": time.perf_counter() - start,
        "ordinary requests": len(taken),
        "longest, s": max(taken),
        "not answered": len(failed),
    }


def picture(side: int) -> str:
    """Noise in a frame, in base64: a digit to the service, that compresses to some kilobytes."""
    import base64
    import io

    import numpy
    from PIL import Image

    values = numpy.full((side, side), 255, numpy.uint8)
    values[side // 4 : -side // 4 : 7, side // 4 : -side // 4] = 0
    target = io.BytesIO()
    Image.fromarray(values).save(target, "PNG")
    return base64.b64encode(target.getvalue()).decode()


def request_of(content: dict[str, Any]) -> bytes:
    body = json.dumps(content).encode()
    head = "POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def asked() -> list[bytes]:
    from errbar import demo

    x = demo.load(demo.DemoSettings()).test.x[:100]
    return [request_of({"inputs": [row]}) for row in x.tolist()]


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(math.ceil(share * len(values)), len(values)) - 1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    requests = asked()
    processes, ports = {}, {}
    rows: list[dict[str, Any]] = []
    try:
        for kind in SERVERS:
            command = [sys.executable, __file__, "--serve", kind]
            processes[kind] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            ports[kind] = int(processes[kind].stdout.readline())  # type: ignore[union-attr]
        for kind in SERVERS:
            _, failed, _ = asyncio.run(load(ports[kind], 4, 1.0, requests))
            assert not failed, f"{kind} does not answer: {failed[:3]}"
        for clients in CLIENTS:
            measured: dict[str, list[tuple[list[float], list[int], float]]] = {kind: [] for kind in SERVERS}
            # In turn, so that a slow spell of the machine affects all.
            for _ in range(ROUNDS):
                for kind in SERVERS:
                    measured[kind].append(asyncio.run(load(ports[kind], clients, arguments.seconds, requests)))
            for kind, runs in measured.items():
                rows.append(
                    {
                        "service": kind,
                        "clients": clients,
                        "answers per second": statistics.median(len(taken) / seconds for taken, _, seconds in runs),
                        "least": min(len(taken) / seconds for taken, _, seconds in runs),
                        "most": max(len(taken) / seconds for taken, _, seconds in runs),
                        "p50, ms": 1e3 * statistics.median(quantile(taken, 0.5) for taken, _, _ in runs),
                        "p99, ms": 1e3 * statistics.median(quantile(taken, 0.99) for taken, _, _ in runs),
                        "not answered": sum(len(failed) for _, failed, _ in runs),
                    }
                )
            bare_rate = rows[-1]["answers per second"]
            for row in rows[-len(SERVERS) :]:
                row["times slower than bare"] = bare_rate / row["answers per second"]
            show(f"{clients} clients", rows[-len(SERVERS) :])
        attacks = [asyncio.run(attack(ports["errbar"], requests, side)) for side in SIDES]
        show(f"{ATTACKERS} requests of {PICTURES} pictures at once", attacks)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    save(
        "serve",
        rows,
        attacks=attacks,
        samples=1000,
        seconds=arguments.seconds,
        rounds=ROUNDS,
        threads_of_each_service=1,
    )


if __name__ == "__main__":
    main()
