"""The routes: a request is read, checked and queued, and its answer sent; errors become sentences."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, Metric
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from torch import Tensor

import errbar
from errbar._base.quantiles import quantiles
from errbar._distributions.covariance import FullCovariance
from errbar.errors import ArgumentError, DataError, ErrbarError, MismatchError, WeightsChangedError
from errbar.serve import schemas
from errbar.serve.batching import Batcher
from errbar.serve.compute import (
    Answer,
    AnswerOptions,
    FuseFrames,
    FuseGaussians,
    FusePosteriors,
    Predict,
    Work,
    compute,
    is_usual,
)
from errbar.serve.decoding import Decoder
from errbar.serve.guard import KINDS, Guard
from errbar.serve.limits import LARGEST, Limits, Refusal, busy
from errbar.serve.monitoring import Watch
from errbar.serve.service import Served, Service
from errbar.serve.telemetry import Log, Metrics, Record, text_of

PAGE = Path(__file__).parent / "page"
# The limits that a client can keep to, as /v1/model tells them.
_TOLD_LIMITS = ("inputs", "frames", "samples", "body_bytes", "seconds", "pixels", "request_pixels")

Route = Callable[[Request], Awaitable[Response]]


class Json(JSONResponse):
    """Written by pydantic, many times as fast as by the standard library."""

    def render(self, content: Any) -> bytes:
        body = to_json(content)
        # JSON has neither: the standard library refuses the numbers, and writes class names that have such letters.
        return super().render(content) if b"NaN" in body or b"Infinity" in body else body


def application(
    service: Service,
    limits: Limits | None = None,
    *,
    token: str | None = None,
    hosts: Collection[str] | None = None,
    log: Log | None = None,
    monitor: Watch | None = None,
    counters: Callable[[], list[Metric]] | None = None,
) -> Record:
    """The service as an ASGI application: `Record` around `Guard` around the routes.

    `counters` are those of all processes that answer, where there are several.
    """
    limits = Limits() if limits is None else limits
    log = Log() if log is None else log
    desk = Desk(service, limits, monitor, log, counters)
    return Record(Guard(_routes(desk, token), limits, token, hosts), desk.metrics, log)


class Desk:
    """What the routes share: the queue, the counters, the monitor, the names of answers, and the reading of inputs."""

    def __init__(
        self,
        service: Service,
        limits: Limits,
        monitor: Watch | None,
        log: Log,
        counters: Callable[[], list[Metric]] | None,
    ) -> None:
        self.service, self.limits, self.monitor, self._log = service, limits, monitor, log
        self.metrics = Metrics(lambda: self.batcher.queued_inputs, lambda: self.decoder.queued_pixels)
        self.counters = self.metrics.families if counters is None else counters
        self.batcher: Batcher[Work, Answer] = Batcher(self._computed, limits, self.metrics.batch, self._deliver)
        self._loop: asyncio.AbstractEventLoop | None = None
        # The names of answers differ from those before a restart, whose labels may still come.
        self._start, self._count = secrets.token_hex(4), itertools.count()
        self.decoder = Decoder(limits)

    def ids(self, count: int) -> tuple[str, ...]:
        """Names for so many answers."""
        return tuple(f"{self._start}-{next(self._count)}" for _ in range(count))

    def _computed(self, works: Sequence[Work]) -> list[Answer]:
        """The answers, which are counted and monitored before anybody has them: their labels cannot come earlier."""
        answers = compute(works)
        for work, answer in zip(works, answers, strict=True):
            if isinstance(work, Predict):
                for entry, name in zip(answer, work.ids, strict=True):
                    entry["id"] = name
                usual = is_usual(work.served, work.options)
                self.metrics.answers(work.served, answer, is_usual=usual)
                if self.monitor is not None:
                    self._monitored(self.monitor, work, answer, is_usual=usual)
        return answers

    def _monitored(self, monitor: Watch, work: Predict, answer: Answer, *, is_usual: bool) -> None:
        try:
            if is_usual and work.monitored and work.served.name == monitor.posterior:
                monitor.observe(answer)
            else:
                monitor.skip(len(answer))
        except Exception as error:  # An answer is not lost because it could not be monitored.
            self._log.failure(error)

    async def answer(self, request: Request, work: Work, inputs: int) -> Answer:
        """Queue work, and wait for its answer."""
        request.scope["errbar"] = {"inputs": inputs}
        self._loop = asyncio.get_running_loop()
        waiting: asyncio.Future[Answer] = self._loop.create_future()

        def tell(done: Future[Answer]) -> None:
            if waiting.done():
                return
            if (error := done.exception()) is not None:
                waiting.set_exception(error)
            else:
                waiting.set_result(done.result())

        computed = self.batcher.submit(work, inputs)
        computed.add_done_callback(tell)
        try:
            return await waiting
        except asyncio.CancelledError:
            computed.cancel()
            raise

    def _deliver(self, finish: Callable[[], None]) -> None:
        """All answers of a batch by one call, since each wakes the loop and hands it the interpreter's lock."""
        if self._loop is not None:
            # Of a loop that is closed nobody waits.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(finish)

    def in_time(self, route: Route) -> Route:
        """The route with the time limit: the clock starts when the request is there, before anything is decoded."""

        @wraps(route)
        async def timed(request: Request) -> Response:
            try:
                async with asyncio.timeout(self.limits.seconds):
                    return await route(request)
            except TimeoutError:
                raise busy(
                    f"There was no answer within {self.limits.seconds:g} seconds. Ask again, with fewer inputs, "
                    "pictures or samples.",
                    self.limits.seconds / 2,
                    503,
                ) from None

        return timed

    async def inputs(self, body: Any, served: Served) -> Tensor:
        """A request's inputs or images as a tensor for the network."""
        if body.inputs is not None:
            return served.tensor(body.inputs)
        rule = served.pictures
        if rule is None:
            raise DataError(
                "This model takes no pictures, or their size is unknown; expected inputs. For pictures, start the "
                "service with --input-shape, for example 3x32x32."
            )
        return await self.decoder.inputs(rule, body.images)

    def require_small(self, rows: int, classes: int, samples: int) -> None:
        if rows * classes * samples > LARGEST:
            raise DataError(
                f"{rows} inputs of {classes} classes with {samples} samples are {rows * classes * samples:,} numbers; "
                f"expected at most {LARGEST:,}. Ask for fewer inputs or samples at once."
            )

    def require_joint(self, frames: int, classes: int) -> None:
        if (frames * classes) ** 2 > LARGEST:
            raise DataError(
                f"{frames} frames of {classes} classes have a joint covariance of {(frames * classes) ** 2:,} numbers; "
                f"expected at most {LARGEST:,}. Fuse fewer frames at once."
            )


def _routes(desk: Desk, token: str | None) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if desk.monitor is not None:
            desk.monitor.start()
        yield
        await anyio.to_thread.run_sync(desk.batcher.close)
        if desk.monitor is not None:
            await anyio.to_thread.run_sync(desk.monitor.close)

    app = FastAPI(
        title="errbar",
        version=errbar.__version__,
        description="Error bars on the class probabilities of a neural-network classifier.",
        lifespan=lifespan,
        docs_url=None,  # It would load scripts from other sites.
        redoc_url=None,
    )
    predict_model, fuse_model, risk_model = schemas.request_models(desk.service, desk.limits)
    of_labels = desk.service.of_labels
    models = (predict_model, fuse_model, risk_model, schemas.LabelLists if of_labels else schemas.Labels)
    _add_errors(app)

    async def predict(request: Request) -> Response:
        """PMFs of inputs, with error bars."""
        body = await _parsed(request, predict_model)
        served = desk.service.member(body.posterior)
        x = await desk.inputs(body, served)
        desk.require_small(len(x), len(served.classes), body.samples)
        extras = frozenset(body.include)
        if "points" in extras and served.of_labels:
            raise ArgumentError(
                "points are of the two leading classes, and the posterior is of outputs='labels', where none leads; "
                "expected include without points. Use logits."
            )
        options = _options(body, body.risk, extras)
        work = Predict(served, x, options, desk.ids(len(x)), monitored=body.monitor)
        predictions = await desk.answer(request, work, len(x))
        answer = _about(body, served) | {"level": body.level, "predictions": predictions}
        if "input" in extras:
            answer["inputs"] = x.tolist()
        return Json(answer)

    async def fuse(request: Request) -> Response:
        """Several frames of one object, several posteriors, or logits of several services, as one PMF."""
        body = await _parsed(request, fuse_model)
        options = _options(body, body.risk)
        work: Work
        if body.gaussians is not None:
            over, rows = "gaussians", len(body.gaussians)
            classes = len(body.gaussians[0].mean)
            work = _gaussians(body, options, desk.service.first)
        elif body.over == "posteriors":
            over, members = "posteriors", desk.service.members
            _require_same_classes(members)
            x = await desk.inputs(body, members[0])
            rows, classes = len(x) * len(members), len(members[0].classes)
            work = FusePosteriors(members, x, options)
        else:
            over, served = "frames", desk.service.member(body.posterior)
            x = await desk.inputs(body, served)
            rows, classes = len(x), len(served.classes)
            if body.joint:
                desk.require_joint(rows, classes)
            work = FuseFrames(served, x, options, body.joint)
        desk.require_small(rows, classes, body.samples)
        objects = await desk.answer(request, work, rows)
        common = {"samples": body.samples, "seed": body.seed, "level": body.level}
        return Json({"over": over, **common, "objects": objects})

    async def risk(request: Request) -> Response:
        """Pr{f_m > γ_m}: the probability that a class is more probable than is acceptable."""
        body = await _parsed(request, risk_model)
        served = desk.service.member(body.posterior)
        x = await desk.inputs(body, served)
        desk.require_small(len(x), len(served.classes), body.samples)
        work = Predict(served, x, _options(body, body.thresholds), desk.ids(len(x)))
        predictions = await desk.answer(request, work, len(x))
        thresholds = body.thresholds
        answer = _about(body, served)
        answer["thresholds"] = thresholds if isinstance(thresholds, list) else [thresholds] * len(served.classes)
        answer["risks"] = [
            {"risk": one["risk"], "pmf": one["pmf"], "worst": served.classes[one["risk"].index(max(one["risk"]))]}
            for one in predictions
        ]
        return Json({name: answer[name] for name in schemas.RiskAnswer.model_fields})

    for path, function, model, answer_model in (
        ("/v1/predict", predict, predict_model, schemas.LabelPredictAnswer if of_labels else schemas.PredictAnswer),
        ("/v1/fuse", fuse, fuse_model, schemas.FuseLabelsAnswer if of_labels else schemas.FuseAnswer),
        ("/v1/risk", risk, risk_model, schemas.RiskAnswer),
    ):
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        app.add_api_route(
            path,
            desk.in_time(function),
            methods=["POST"],
            response_class=JSONResponse,
            responses={200: {"model": answer_model}, **_problems(400, 401, 408, 413, 415, 421, 422, 429, 503)},
            openapi_extra={"requestBody": {"required": True, "content": content}},
        )
    _add_monitor(app, desk)
    _add_reading(app, desk)
    app.openapi = partial(_document, app, models, token)  # type: ignore[method-assign]
    return app


def _add_monitor(app: FastAPI, desk: Desk) -> None:
    """The routes of the monitor: labels for what was answered, and what the monitor has seen."""
    model = schemas.LabelLists if desk.service.of_labels else schemas.Labels

    def watching() -> Watch:
        if desk.monitor is None:
            raise Refusal(404, "Answers are not monitored; start errbar serve with --monitor HELD_OUT.")
        return desk.monitor

    async def labels(request: Request) -> Response:
        """Labels of inputs that were answered, by the ids of their answers; in any order, late or never."""
        monitor = watching()
        body = await _validated(request, model)
        classes = next(m.classes for m in desk.service.members if m.name == monitor.posterior)
        pairs: list[tuple[str, int | list[int]]]
        if desk.service.of_labels:
            pairs = [(given.id, _one_each(given.labels, classes)) for given in body.root]
        else:
            pairs = [(given.id, _label_number(given.label, classes)) for given in body.root]
        return JSONResponse(await anyio.to_thread.run_sync(monitor.label, pairs))

    async def monitor() -> Response:
        """What the monitor has seen: evidence over time, alarms, since when, and how labels agree."""
        return JSONResponse(await anyio.to_thread.run_sync(watching().told))

    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    app.add_api_route(
        "/v1/labels",
        labels,
        methods=["POST"],
        responses={200: {"model": schemas.LabelsAnswer}, **_problems(400, 401, 404, 408, 413, 415, 421, 422, 429)},
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
    told: dict[int | str, dict[str, Any]] = {200: {"model": schemas.MonitorAnswer}}
    app.add_api_route("/v1/monitor", monitor, responses={**told, **_problems(401, 404, 408, 413, 421, 429)})


def _label_number(label: int | str, classes: Sequence[str]) -> int:
    """The number of a class that is given by number or by name."""
    if isinstance(label, str) and label in classes:
        return classes.index(label)
    if isinstance(label, str) or label >= len(classes):
        raise DataError(
            f"A label is none of the {len(classes)} classes; expected a name or a number from 0 that GET /v1/model has "
            "among its classes."
        )
    return label


def _one_each(labels: list[int], classes: Sequence[str]) -> list[int]:
    """The labels of an input, if there is one for each that the posterior has."""
    if len(labels) != len(classes):
        raise DataError(
            f"An input has {len(labels)} labels; expected {len(classes)}, each 0, 1, or -1 for a missing one, in the "
            "order of GET /v1/model."
        )
    return labels


def _add_reading(app: FastAPI, desk: Desk) -> None:
    """The routes for reading: the model, the health of the service, its counters, and the page."""

    async def model() -> Response:
        """What is served: classes, inputs, calibration and limits."""
        return JSONResponse(_description(desk.service, desk.limits) | {"monitor": desk.monitor is not None})

    async def healthz() -> Response:
        """200 if requests are being computed, else 503."""
        alive = desk.batcher.is_alive
        content = {"status": "ok" if alive else "stopped", "queued_inputs": desk.batcher.queued_inputs}
        return JSONResponse(content, 200 if alive else 503)

    async def metrics() -> Response:
        """Counters for Prometheus."""
        families = await anyio.to_thread.run_sync(desk.counters)
        return Response(text_of(families), media_type=CONTENT_TYPE_LATEST)

    async def page() -> Response:
        return FileResponse(PAGE / "index.html")

    common = _problems(401, 408, 413, 421, 429)
    app.add_api_route("/v1/model", model, responses={200: {"model": schemas.ModelAnswer}, **common})
    health: dict[int | str, dict[str, Any]] = {200: {"model": schemas.Health}, 503: {"model": schemas.Health}}
    app.add_api_route("/healthz", healthz, responses={**health, **_problems(408, 413, 421)})
    text: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text."}
    }
    app.add_api_route("/metrics", metrics, response_class=Response, responses={**text, **common})
    app.add_api_route("/", page, include_in_schema=False)
    app.mount("/page", StaticFiles(directory=PAGE))


async def _validated(request: Request, model: type[BaseModel]) -> Any:
    """The body as `model`, or a refusal that says where it is wrong."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, "The request is not JSON; expected a JSON body and 'Content-Type: application/json'.")
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        raise _refused(error) from None


async def _parsed(request: Request, model: type[BaseModel]) -> Any:
    """The body as a request with inputs in one of their forms."""
    body = await _validated(request, model)
    sources = [name for name in ("inputs", "images", "gaussians") if getattr(body, name, None) is not None]
    if len(sources) != 1:
        names = [name for name in ("inputs", "images", "gaussians") if name in model.model_fields]
        raise Refusal(422, f"There are {len(sources)} of {', '.join(names)}; expected exactly one of them.")
    return body


def _refused(error: ValidationError) -> Refusal:
    """The first mistake and its place. Its value is not repeated: it may be large or private."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return Refusal(400, f"The request is not JSON. {first['msg']}.")
    place = ".".join(str(part)[:40] for part in first["loc"][:6]) or "The request"
    return Refusal(422, f"{place}: {first['msg'].rstrip('.')}. GET /openapi.json says what is expected.")


def _options(body: Any, thresholds: Any, include: frozenset[str] = frozenset()) -> AnswerOptions:
    limits = tuple(thresholds) if isinstance(thresholds, list) else thresholds
    scales = body.temperature, body.covariance_scale, body.softening
    return AnswerOptions(*scales, body.samples, body.seed, body.level, limits, include)


def _about(body: Any, served: Served) -> dict[str, Any]:
    calibration = served.calibration(body.temperature, body.covariance_scale, body.softening)
    return {
        "posterior": served.name,
        "samples": body.samples,
        "seed": body.seed,
        **vars(calibration),
    }


def _gaussians(body: Any, options: AnswerOptions, first: Served) -> FuseGaussians:
    if any(scale is not None for scale in (options.temperature, options.covariance_scale, options.softening)):
        raise ArgumentError("Gaussians already include T, T_c and c; expected none of them in the request.")
    gaussians = []
    for source in body.gaussians:
        try:
            mean = torch.tensor([source.mean], dtype=torch.float64)
            covariance = torch.tensor([source.covariance], dtype=torch.float64)
        except ValueError as error:
            raise MismatchError("A covariance is ragged; expected as many rows and columns as classes.") from error
        # Checked in float32, because the numbers may have been computed in it: centred covariances have an eigenvalue
        # of zero, which rounding may take below zero. Fusion ignores that direction.
        kind = first.posteriors[0].information.task.kind
        errbar.LogitGaussian(mean.float(), covariance.float(), kind=kind)
        gaussians.append(errbar.LogitGaussian(mean, FullCovariance(covariance), kind=kind))
    count = gaussians[0].mean.shape[1]
    names = first.classes if len(first.classes) == count else tuple(str(number) for number in range(count))
    return FuseGaussians(names, tuple(gaussians), options)


def _require_same_classes(members: Sequence[Served]) -> None:
    if len(members) < 2:
        raise ArgumentError("One posterior is served; expected two or more to fuse. Start errbar serve with several.")
    if any(member.classes != members[0].classes for member in members):
        raise MismatchError("The posteriors served have different classes; expected the same to fuse them.")


def _description(service: Service, limits: Limits) -> dict[str, Any]:
    served = service.first
    each = [posterior.information for posterior in served.posteriors]
    rule, reference = served.pictures, served.reference
    own = served.posteriors[0] if served.posteriors[0].label_factors is not None else None
    spread = None
    if reference is not None:
        spread = quantiles(reference, [share / 100 for share in range(101)]).tolist()
    return {
        "posterior": served.name,
        "posteriors": [member.name for member in service.members],
        "about": served.about,
        "version": errbar.__version__,
        "outputs": "labels" if served.of_labels else "classes",
        "classes": list(served.classes),
        "input_shape": None if served.shape is None else list(served.shape),
        "pictures": None if rule is None else rule.sentence,
        "digits": rule is not None and rule.digit,
        "picture": None if rule is None else {"shape": list(rule.layout), "low": rule.low, "high": rule.high},
        "values": None if served.values is None else [vars(one) for one in served.values],
        "integers": served.integers,
        "networks": len(each),
        "parameters": sum(information.n_parameters for information in each),
        "layers": _layers(each),
        "structure": ", ".join(dict.fromkeys(information.structure for information in each)),
        "fisher": ", ".join(dict.fromkeys(information.fisher for information in each)),
        "samples": max(information.n_samples for information in each),
        **vars(served.posterior.calibration),
        "label_temperatures": None if own is None else list(own.label_temperatures),
        "label_covariance_scales": None if own is None else list(own.label_covariance_scales),
        "calibrated": served.posterior.is_calibrated,
        "reference": spread,
        "examples": [{"input": x.tolist(), "label": label} for x, label in served.examples],
        "engine": served.engine.name,
        "engine_reason": served.engine.reason,
        "limits": {name: getattr(limits, name) for name in _TOLD_LIMITS},
    }


def _layers(each: Sequence[errbar.Information]) -> list[str]:
    """The layers that have parameters in a posterior; of several networks with the number of the network before it."""
    layers = [dict.fromkeys(name.rpartition(".")[0] or name for name in one.parameter_names) for one in each]
    return [*layers[0]] if len(layers) == 1 else [f"{c}.{name}" for c, own in enumerate(layers) for name in own]


def _problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    responses: dict[int | str, dict[str, Any]] = {status: {"model": schemas.Problem} for status in statuses}
    for status in (429, 503):
        if status in responses:
            header = {"description": "Seconds to wait before asking again.", "schema": {"type": "integer"}}
            responses[status] = {**responses[status], "headers": {"Retry-After": header}}
    return responses


def _add_errors(app: FastAPI) -> None:
    def problem(status: int, sentence: str, kind: str, headers: Any = None) -> Response:
        return JSONResponse({"error": sentence, "kind": kind}, status, headers)

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return problem(error.status, error.sentence, KINDS.get(error.status, "Refused"), error.headers)

    async def mistaken(_: Request, error: Exception) -> Response:
        if isinstance(error, WeightsChangedError):
            raise error
        return problem(422, " ".join(str(error).split()), type(error).__name__)

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        sentences = {
            404: "There is nothing at this address; GET /openapi.json lists all addresses.",
            405: "This address does not take that method; GET /openapi.json says which it takes.",
        }
        sentence = sentences.get(error.status_code, f"{error.detail}.")
        return problem(error.status_code, sentence, KINDS.get(error.status_code, "Refused"), error.headers)

    async def failed(_: Request, error: Exception) -> Response:
        return problem(500, "The service failed; its log says where.", "InternalError")

    app.add_exception_handler(Refusal, refused)
    app.add_exception_handler(ErrbarError, mistaken)
    app.add_exception_handler(HTTPException, unknown)
    app.add_exception_handler(Exception, failed)


def _document(app: FastAPI, models: Sequence[type[BaseModel]], token: str | None) -> dict[str, Any]:
    """The OpenAPI document, made once: FastAPI's own, plus the models of the requests."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, extra = models_json_schema(
            [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
        )
        components = document.setdefault("components", {})
        components.setdefault("schemas", {}).update(extra.get("$defs", {}))
        if token is not None:
            components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            for path, operations in document["paths"].items():
                if path != "/healthz":
                    for operation in operations.values():
                        operation["security"] = [{"token": []}]
        app.openapi_schema = json.loads(json.dumps(document))
    return app.openapi_schema
