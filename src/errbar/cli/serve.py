"""`errbar serve`: a posterior, or the demo's digits, behind HTTP, with a page to look at it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import errbar
from errbar.cli import options
from errbar.errors import ArgumentError, FileError

if TYPE_CHECKING:
    import torch

    from errbar.serve.monitoring import ServiceMonitor
    from errbar.serve.service import Served, Service


EngineName = Literal["auto", "onnx", "torch"]


@dataclass(frozen=True)
class ServiceRequest:
    """What is to be served, as it was typed; without posteriors the demo's digits."""

    posteriors: tuple[Path, ...] = ()
    models: tuple[str, ...] = ()
    weights: tuple[Path, ...] = ()
    input_shape: str | None = None
    reference: str | None = None
    picture_shape: str | None = None

    def load(self, device: torch.device, *, progress: bool = False) -> Service:
        return _files(self, device) if self.posteriors else _digits(progress)


def serve(
    posterior: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[POSTERIOR]...", help="Files to serve; without any, the demo's digits."),
    ] = None,
    model: options.Models = None,
    weights: options.WeightsFiles = None,
    host: Annotated[str, typer.Option("--host", help="Where to listen; other machines reach 0.0.0.0.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="Holds the token that clients must send; or ERRBAR_TOKEN."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines without a token: whoever reaches --host can ask.")
    ] = False,
    input_shape: Annotated[
        str | None,
        typer.Option("--input-shape", metavar="SHAPE", help="Shape of one input: 784, or 3x32x32 for pictures."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option("--reference", metavar="DATA", help="Training data, to say how unusual an input is."),
    ] = None,
    picture_shape: Annotated[
        str | None,
        typer.Option("--picture-shape", metavar="SHAPE", help="For the page: inputs are pictures of 8x8 or 3x32x32."),
    ] = None,
    engine: Annotated[
        EngineName,
        typer.Option("--engine", help="What computes: ONNX Runtime, torch, or the former where it can and is quicker."),
    ] = "auto",
    monitor: Annotated[
        str | None,
        typer.Option(
            "--monitor", metavar="HELD_OUT", help="Raise alarms when inputs or labels differ from these data."
        ),
    ] = None,
    monitor_state: Annotated[
        Path | None,
        typer.Option(
            "--monitor-state", metavar="FILE", help="Keeps the monitor over restarts; by default beside POSTERIOR."
        ),
    ] = None,
    monitor_rate: Annotated[
        float, typer.Option("--monitor-rate", help="False-alarm rate of the monitor, of all tests and for ever.")
    ] = 0.01,
    max_inputs: Annotated[int, typer.Option("--max-inputs", min=1, help="Most inputs in one request.")] = 64,
    max_body: Annotated[int, typer.Option("--max-body", min=1, help="Largest request, in MiB.")] = 4,
    max_samples: Annotated[
        int, typer.Option("--max-samples", min=1, help="Most Monte Carlo draws for one request.")
    ] = 10000,
    queue: Annotated[
        int, typer.Option("--queue", min=1, help="Most inputs that wait; beyond it clients get 429.")
    ] = 512,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Inputs in a run of the network; 1 joins no requests.")
    ] = 64,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds until an answer.")] = 10.0,
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="Processes that answer; each holds the model, all have one monitor.")
    ] = 1,
    log: Annotated[bool, typer.Option("--log/--no-log", help="One JSON line for each request, on standard error.")] = (
        True
    ),
    device: options.Device = "auto",
    as_json: options.Json = False,
    progress: options.Progress = True,
) -> None:
    """Serve predictions with error bars over HTTP, and a page to explore them. Ctrl-C stops it."""
    from errbar.cli.extras import extra

    for module, package in (("fastapi", "FastAPI"), ("uvicorn", "uvicorn"), ("prometheus_client", "prometheus-client")):
        extra(module, "Serving", package, "serve")
    extra("PIL.Image", "Serving", "Pillow", "serve")
    import torch

    from errbar._base.progress import track
    from errbar.cli.session import session
    from errbar.serve.app import application
    from errbar.serve.limits import Limits
    from errbar.serve.server import Address, server_for, settle, url_of
    from errbar.serve.telemetry import Log
    from errbar.serve.workers import Job, serve_by_workers

    with session("serve", as_json=as_json, progress=progress, device=device) as here:
        limits = Limits(
            body_bytes=max_body * 2**20,
            held_bytes=16 * max_body * 2**20,
            inputs=max_inputs,
            samples=max_samples,
            queue_inputs=max(queue, max_inputs),
            batch_inputs=batch_size,
            seconds=timeout,
        )
        token = _token(token_file)
        address = Address(host, port)
        address.require_protected(token, insecure=insecure)
        if monitor is None and monitor_state is not None:
            raise ArgumentError("There is --monitor-state and no --monitor; expected the data to compare answers with.")
        # Before the model is made: a port that is taken is told at once.
        bound = address.bind()
        try:
            if not posterior:
                _require_nothing(
                    model=model,
                    weights=weights,
                    reference=reference,
                    input_shape=input_shape,
                    picture_shape=picture_shape,
                )
            request = ServiceRequest(
                tuple(posterior or ()), tuple(model or ()), tuple(weights or ()), input_shape, reference, picture_shape
            )
            service = request.load(here.device, progress=here.progress)
            members = track(service.members, "Preparing the engine", enabled=here.progress)
            service = replace(service, members=tuple(member.with_engine(engine) for member in members))
            request_log = Log(enabled=log)
            watch = None
            if monitor is not None:
                watch = _monitor(service.first, monitor, _state_of(posterior, monitor_state), monitor_rate)
            url, names = url_of(bound), [member.name for member in service.members]

            def ready() -> None:
                sentence = f"errbar serves {names[0]} at {url} – open it in a browser; Ctrl-C stops it."
                here.answer({"url": url, "posteriors": names}, sentence)
                sys.stdout.flush()

            if workers > 1:
                # All answer by the engine that was chosen here, by which the monitor's reference was predicted.
                engines = tuple((member.engine.name, member.engine.reason) for member in service.members)
                job = Job(
                    partial(_prepared, request, here.device, engines),
                    limits,
                    token,
                    address.hosts,
                    log,
                    None if watch is None else watch.posterior,
                    max(1, torch.get_num_threads() // workers),
                )
                del service, members  # the workers hold the model
                serve_by_workers(job, workers, bound, request_log, watch, ready)
                return
            app = application(service, limits, token=token, hosts=address.hosts, log=request_log, monitor=watch)
            # uvicorn has finished its requests by the time it passes Ctrl-C on.
            with contextlib.suppress(KeyboardInterrupt):
                settle()
                server_for(app, limits, request_log, ready).run(sockets=[bound])
        finally:
            bound.close()


def _monitor(served: Served, where: str, state: Path | None, rate: float) -> ServiceMonitor:
    from errbar.cli.inputs import NEW, DataRequest
    from errbar.serve.monitoring import monitor_for

    source = DataRequest(where, 256).open(NEW, served.classes, labelled=False)
    return monitor_for(served, source.loader, where, state, rate=rate)


def _state_of(posteriors: Sequence[Path] | None, state: Path | None) -> Path | None:
    """Where the monitor is kept: beside the first posterior, unless told; nowhere for the demo's digits."""
    if state is not None or not posteriors:
        return state
    return posteriors[0].with_suffix(".monitor.json")


def _token(file: Path | None) -> str | None:
    """The token of a file, or of the environment; a command line would show it to every user of the machine."""
    text = os.environ.get("ERRBAR_TOKEN")
    where = "ERRBAR_TOKEN"
    if file is not None:
        where = str(file)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(f"The token file {file} cannot be read: {error}.") from error
    if text is None:
        return None
    token = text.strip()
    if not re.fullmatch(r"[!-~]{8,}", token):
        raise ArgumentError(
            f"The token of {where} cannot be used; expected 8 or more printable characters without spaces, for "
            "example of: python -c 'import secrets; print(secrets.token_urlsafe())'."
        )
    return token


def _require_nothing(**options_: object) -> None:
    for name, value in options_.items():
        if value:
            raise ArgumentError(f"There is --{name.replace('_', '-')} and no POSTERIOR; expected a file of errbar fit.")


def _prepared(request: ServiceRequest, device: torch.device, engines: Sequence[tuple[EngineName, str]]) -> Service:
    """The service in a worker, with engines that were chosen, and why; what has been said already is not said again."""
    from errbar.serve.service import Service

    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        members = []
        for member, (name, reason) in zip(request.load(device).members, engines, strict=True):
            made = member.with_engine(name)
            members.append(replace(made, engine=replace(made.engine, reason=reason)))
        return Service(tuple(members))


def _digits(progress: bool) -> Service:
    from errbar.serve.digits import digits
    from errbar.serve.service import Service

    return Service((digits(progress=progress),))


def _files(typed: ServiceRequest, device: torch.device) -> Service:
    from errbar.cli.inputs import TRAINING, DataRequest
    from errbar.cli.posteriors import classifier_requests
    from errbar.report.pictures import picture_shape
    from errbar.serve.service import Service, served

    requests = classifier_requests(typed.posteriors, typed.models, typed.weights)
    size = None if typed.input_shape is None else _shape(typed.input_shape)
    layout = None if typed.picture_shape is None else picture_shape(typed.picture_shape)
    members: list[Served] = []
    for number, request in enumerate(requests, start=1):
        loaded = request.load(device)
        data = None
        if typed.reference is not None:
            data = DataRequest(typed.reference, 256).open(TRAINING, loaded.classes, labelled=True).loader()
        path = request.path
        about = f"{path.name}, {_described(loaded.classifier)}."
        name = path.stem if all(path.stem != member.name for member in members) else f"{path.stem}-{number}"
        member = served(
            name, loaded.classifier, classes=loaded.classes, shape=size, reference=data, about=about, layout=layout
        )
        members.append(member)
    return Service(tuple(members))


def _described(classifier: errbar.Posterior | errbar.FusedClassifier) -> str:
    if isinstance(classifier, errbar.Posterior):
        return f"a posterior of {classifier.information.n_samples:g} training inputs"
    return f"{len(classifier)} networks fused"


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){0,4}", text):
        raise ArgumentError(f"The input shape is {text!r}; expected sizes with x between them, for example 3x32x32.")
    return tuple(int(part) for part in text.split("x"))
