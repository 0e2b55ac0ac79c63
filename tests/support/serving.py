"""Services on loopback for the tests, in a thread of this process, and clients that ask them."""

from __future__ import annotations

import base64
import io
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import errbar
from errbar.serve.app import application
from errbar.serve.limits import Limits
from errbar.serve.monitoring import ServiceMonitor
from errbar.serve.server import Address, running, url_of
from errbar.serve.service import Served, Service, served
from errbar.serve.telemetry import Log

CLASSES = ("ant", "bee", "cat")


def network(seed: int = 0, dtype: torch.dtype = torch.float32, inputs: int = 4) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def data(count: int = 90, inputs: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    y = torch.arange(count) % 3
    return torch.randn(count, inputs, generator=generator) + 1.5 * torch.eye(3, inputs)[y], y


def posterior(seed: int = 0, dtype: torch.dtype = torch.float32) -> errbar.Posterior:
    x, y = data()
    fitted = errbar.fit(network(seed, dtype), [(x, y)], last_layers=2, prior=errbar.Prior(2.0))
    return fitted.with_calibration(temperature=1.3, covariance_scale=0.7)


def member(name: str = "tiny", seed: int = 0, dtype: torch.dtype = torch.float32, reference: bool = True) -> Served:
    known = [data()] if reference else None
    return served(name, posterior(seed, dtype), classes=CLASSES, reference=known, about="A tiny one.")


@dataclass(frozen=True, eq=False)
class Running:
    """A service that runs: where, what it has logged, and its server."""

    url: str
    log: io.StringIO
    server: Any
    headers: dict[str, str] = field(default_factory=dict)

    def ask(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        with httpx.Client(base_url=self.url, headers=self.headers, timeout=30) as client:
            return client.get(path, **options) if body is None else client.post(path, json=body, **options)

    def told(self, path: str, body: Any = None) -> Any:
        response = self.ask(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    @property
    def place(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        with socket.create_connection(self.place, timeout=20) as made:
            yield made

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.getvalue().splitlines()]


@contextmanager
def service(
    *members: Served,
    limits: Limits | None = None,
    token: str | None = None,
    monitor: ServiceMonitor | None = None,
    port: int = 0,
) -> Iterator[Running]:
    """These posteriors behind HTTP while the block runs."""
    limits = Limits() if limits is None else limits
    stream = io.StringIO()
    log = Log(stream)
    address = Address("127.0.0.1", port)
    bound = address.bind()
    app = application(Service(members), limits, token=token, hosts=address.hosts, log=log, monitor=monitor)
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    with running(app, bound, limits, log) as server:
        yield Running(url_of(bound), stream, server, headers)


def png(values: Any, mode: str = "L") -> str:
    """A picture of values 0 … 255 in base64."""
    target = io.BytesIO()
    Image.fromarray(np.asarray(values, dtype=np.uint8)).convert(mode).save(target, "PNG")
    return base64.b64encode(target.getvalue()).decode()


def answered(connection: socket.socket) -> str:
    """All that comes until the other side closes."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts).decode()
