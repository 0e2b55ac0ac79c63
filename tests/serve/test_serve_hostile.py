"""Malformed, huge, slow and hostile requests: always a 4xx with a sentence, and the service lives on."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch
from torch import nn

import errbar
from errbar.errors import ArgumentError
from errbar.serve import compute
from errbar.serve.limits import Limits
from errbar.serve.pictures import PictureRule
from errbar.serve.service import Served, served
from serving import Running, answered, data, member, network, png, posterior, service

LIMITS = Limits(
    body_bytes=20_000,
    inputs=8,
    frames=4,
    samples=500,
    seconds=5.0,
    body_seconds=1.0,
    header_seconds=1.0,
    pixels=10_000,
    connections=20,
    idle_seconds=1,
)
GOOD = {"inputs": [[0.0, 1.0, 2.0, 3.0]]}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with service(member(), limits=LIMITS) as made:
        yield made


@pytest.fixture(autouse=True)
def _lives_on(running: Running) -> Iterator[None]:
    """After whatever a test has done, a good request is answered, and nothing has failed inside."""
    yield
    assert running.ask("/v1/predict", GOOD).status_code == 200
    assert [line for line in running.lines() if line["event"] == "failure"] == []


def refused(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    content = response.json()
    assert set(content) == {"error", "kind"}
    assert content["error"].endswith((".", ")", "}"))
    return str(content["error"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"inputs": []}, "inputs: List should have at least 1 item"),
        ({"inputs": [[1.0, 2.0]]}, r"inputs.0: List should have at least 4 items"),
        ({"inputs": [[1, 2, 3, 4], [1, 2, 3, 4, 5]]}, "inputs.1: List should have at most 4 items"),
        ({"inputs": [1, 2, 3, 4]}, "inputs.0: Input should be a valid array"),
        ({"inputs": [[1, 2, 3, "4"]]}, "inputs.0.3: Input should be a valid number"),
        ({"inputs": [[1, 2, 3, True]]}, "inputs.0.3: Input should be a valid number"),
        ({"inputs": [[1, 2, 3, None]]}, "inputs.0.3: Input should be a valid number"),
        ({"inputs": [[[[[[1]]]]]]}, "inputs.0.0: Input should be a valid number"),
        ({"inputs": [[0.0] * 4] * 9}, "inputs: List should have at most 8 items"),
        ({"inputs": [[1e39, 0, 0, 0]]}, "NaN or infinite"),
        ({"samples": 0}, "samples: Input should be greater than or equal to 1"),
        ({"samples": 501}, "samples: Input should be less than or equal to 500"),
        ({"samples": 1.5}, "samples: Input should be a valid integer"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0"),
        ({"seed": 2**63}, "seed: Input should be less than"),
        ({"level": 1}, "level: Input should be less than 1"),
        ({"temperature": 0}, "temperature: Input should be greater than or equal to 0.001"),
        ({"covariance_scale": -1}, "covariance_scale: Input should be greater than or equal to 0"),
        ({"softening": -1}, "softening: Input should be greater than or equal to 0"),
        ({"risk": 1.5}, "risk"),
        ({"risk": [0.1, 0.2]}, "risk"),
        ({"posterior": "unknown"}, "There is no posterior with that name; expected one of tiny"),
        ({"include": ["everything"]}, "include.0: Input should be 'covariance'"),
        ({"nonsense": 1}, "nonsense: Extra inputs are not permitted"),
        ({"images": ["x"]}, "There are 2 of inputs, images; expected exactly one"),
    ],
)
def test_a_wrong_field_is_named(running: Running, change: dict[str, Any], sentence: str) -> None:
    assert sentence in refused(running.ask("/v1/predict", GOOD | change), 422)


def test_what_is_missing_is_named(running: Running) -> None:
    assert "There are 0 of inputs, images; expected exactly one" in refused(
        running.ask("/v1/predict", {"seed": 1}), 422
    )
    assert "thresholds: Field required" in refused(running.ask("/v1/risk", GOOD), 422)
    assert "There are 0 of inputs, images, gaussians" in refused(running.ask("/v1/fuse", {"seed": 1}), 422)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(running: Running, number: str) -> None:
    content = f'{{"inputs": [[0, 1, 2, {number}]]}}'
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{running.url}/v1/predict", content=content, headers=headers)
    assert "finite number" in refused(response, 422)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe\x00", 400),
        (b"null", 422),
        (b"[]", 422),
        (b'"text"', 422),
        (b"[" * 9000, 400),
        (b'{"inputs":' + b"[" * 900 + b"]" * 900 + b"}", 400),
        (b'{"a":' * 3000, 400),
        (b'{"inputs": [[1,2,3,' + b"9" * 5000 + b"]]}", 400),
        (b'{"seed": ' + b"9" * 5000 + b', "inputs": [[1,2,3,4]]}', 400),
        (b'{"inputs": [[1,2,3,4]], "inputs": [[1,2,3]]}', 422),
    ],
)
def test_what_is_no_json_or_not_the_right_one_is_refused(running: Running, content: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    refused(httpx.post(f"{running.url}/v1/predict", content=content, headers=headers), status)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_does_not_say_that_it_is_json_is_refused(running: Running, kind: str) -> None:
    response = httpx.post(f"{running.url}/v1/predict", content=json.dumps(GOOD), headers={"content-type": kind})
    assert "expected a JSON body" in refused(response, 415)


def test_fusion_refuses_what_cannot_be_fused(running: Running) -> None:
    frames = [[0.0, 1.0, 2.0, 3.0]] * 2
    assert "at most 4 items" in refused(running.ask("/v1/fuse", {"inputs": frames * 3}), 422)
    assert "One posterior is served" in refused(running.ask("/v1/fuse", {"inputs": frames, "over": "posteriors"}), 422)
    assert "certain" in refused(running.ask("/v1/fuse", {"inputs": frames, "covariance_scale": 0}), 422)
    eye = [[1.0, 0.0], [0.0, 1.0]]
    good = {"mean": [0.0, 1.0], "covariance": eye}
    for gaussian, sentence in (
        ({"mean": [0.0, 1.0], "covariance": [[1.0, 0.0], [0.0]]}, "at least 2 items"),
        ({"mean": [0.0, 1.0, 2.0], "covariance": eye}, "shape"),
        ({"mean": [0.0, 1.0], "covariance": [[1.0, 5.0], [5.0, 1.0]]}, "covariance"),
        ({"mean": [0.0, 1.0], "covariance": [[0.0, 0.0], [0.0, 0.0]]}, "singular"),
        ({"mean": [0.0, 1.0], "covariance": [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]}, "shape"),
        ({"mean": [0.0, 1.0, 2.0], "covariance": [[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]]}, "classes"),
    ):
        assert sentence in refused(running.ask("/v1/fuse", {"gaussians": [good, gaussian]}), 422)
    for name in ("temperature", "covariance_scale", "softening"):
        answer = running.ask("/v1/fuse", {"gaussians": [good], name: 2.0})
        assert "already include T, T_c and c" in refused(answer, 422)


def test_pictures_where_the_model_takes_none(running: Running) -> None:
    assert "takes no pictures" in refused(running.ask("/v1/predict", {"images": ["aGVsbG8="]}), 422)


@pytest.mark.parametrize(("path", "status"), [("/nothing", 404), ("/v1/predict", 405), ("/v1", 404), ("/page/x", 404)])
def test_addresses_and_methods_that_do_not_exist(running: Running, path: str, status: int) -> None:
    refused(running.ask(path), status)


def test_extreme_finite_inputs_get_an_answer_or_a_sentence(running: Running) -> None:
    for size in (1e10, 1e20, 3e38):
        for sign in ([1, 1, 1, 1], [1, -1, 1, -1], [0, 0, 0, -1]):
            response = running.ask("/v1/predict", {"inputs": [[size * one for one in sign]]})
            assert response.status_code in (200, 422), response.text
            if response.status_code == 200:
                (told,) = response.json()["predictions"]
                assert sum(told["pmf"]) == pytest.approx(1, abs=1e-4)


# ------------------------------------------------------------------------------------------------------ large and slow


def test_a_body_that_is_too_large_is_refused_by_its_length_and_by_its_bytes(running: Running) -> None:
    large = b" " * 30_000
    headers = {"content-type": "application/json"}
    assert "larger than 20,000 bytes" in refused(
        httpx.post(f"{running.url}/v1/predict", content=large, headers=headers), 413
    )
    parts = (large[:7000] for _ in range(6))
    refused(httpx.post(f"{running.url}/v1/predict", content=parts, headers=headers), 413)


def test_a_huge_announced_length_is_refused_before_anything_is_sent(running: Running) -> None:
    with running.connected() as connection:
        connection.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999\r\n\r\n")
        head = connection.recv(4096).decode()
    assert head.startswith("HTTP/1.1 413 ")


def test_an_endless_body_is_cut_off(running: Running) -> None:
    with running.connected() as connection:
        connection.sendall(
            b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
        start = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() < start + 20:
                connection.sendall(chunk)
                time.sleep(0.005)
        assert time.monotonic() < start + 10, "nobody stopped it"


def test_a_slow_body_is_refused(running: Running) -> None:
    with running.connected() as connection:
        connection.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        start = time.monotonic()
        text = answered(connection)
        assert 0.5 < time.monotonic() - start < 10
    assert text.startswith("HTTP/1.1 408 ")
    assert "did not arrive within 1 seconds" in text


@pytest.mark.parametrize("head", [b"", b"GET /v1/mo", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: "])
def test_a_slow_head_is_refused(running: Running, head: bytes) -> None:
    with running.connected() as connection:
        connection.sendall(head)
        start = time.monotonic()
        text = answered(connection)
        assert 0.5 < time.monotonic() - start < 10
    assert text.startswith("HTTP/1.1 408 ")


def test_a_head_that_trickles_is_refused_too(running: Running) -> None:
    with running.connected() as connection:
        start = time.monotonic()
        connection.sendall(b"GET / HTTP/1.1\r\n")
        try:
            while time.monotonic() < start + 10:
                connection.sendall(b"X: y\r\n")
                time.sleep(0.1)
        except OSError:
            pass
        assert time.monotonic() < start + 8


@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET /" + b"a" * 100_000,
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 30_000,
    ],
    ids=["tls", "words", "version", "hosts", "negative", "lengths", "encoding", "long path", "many headers"],
)
def test_what_is_not_http_gets_a_4xx(running: Running, head: bytes) -> None:
    with running.connected() as connection:
        with contextlib.suppress(OSError):
            connection.sendall(head)
        text = answered(connection)
    assert text == "" or text.startswith(("HTTP/1.1 400 ", "HTTP/1.1 408 ", "HTTP/1.1 421 ", "HTTP/1.1 501 ")), text[
        :80
    ]
    if len(head) < 50_000:  # A client that is still sending may lose the answer with the connection.
        assert '"error": ' in text


def test_more_connections_than_there_may_be_are_sent_away(running: Running) -> None:
    held: list[socket.socket] = []
    try:
        held += [socket.create_connection(running.place, timeout=20) for _ in range(LIMITS.connections + 5)]
        text = answered(held[-1])
        assert text.startswith("HTTP/1.1 429 ")
        assert "retry-after: 1" in text.lower()
    finally:
        for connection in held:
            connection.close()
    time.sleep(0.3)


def test_a_client_that_does_not_take_its_answer_is_dropped() -> None:
    limits = replace(LIMITS, inputs=64, body_bytes=200_000, samples=2000)
    body = json.dumps({"inputs": [[0.0] * 4] * 64, "include": ["points", "covariance", "logits"]}).encode()
    head = "POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with service(member(), limits=limits) as running, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(running.place)
        connection.sendall((head.encode() + body) * 12)
        deadline = time.monotonic() + 15
        while running.server.server_state.connections and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not running.server.server_state.connections


# --------------------------------------------------------------------------------------------------------- who may ask


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", "Basic a-long-token", "a-long-token", "Bearer a-long-tokenx"]
)
def test_without_the_token_nothing_is_told(header: str | None) -> None:
    with service(member(), token="a-long-token") as running:
        headers = {} if header is None else {"authorization": header}
        for method, path in (("POST", "/v1/predict"), ("GET", "/v1/model"), ("GET", "/metrics")):
            response = httpx.request(method, f"{running.url}{path}", headers=headers)
            assert "expected a header 'Authorization: Bearer TOKEN'" in refused(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
        assert httpx.get(f"{running.url}/healthz").status_code == 200
        assert httpx.get(running.url).status_code == 200
        assert running.ask("/v1/predict", GOOD).status_code == 200
        document = httpx.get(f"{running.url}/openapi.json").json()
        assert document["paths"]["/v1/predict"]["post"]["security"] == [{"token": []}]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""])
def test_on_loopback_other_names_are_refused(running: Running, host: str) -> None:
    response = running.ask("/v1/model", headers={"host": host})
    assert "answers only to" in refused(response, 421)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:8000"])
def test_on_loopback_its_own_names_are_taken(running: Running, host: str) -> None:
    assert running.ask("/v1/model", headers={"host": host}).status_code == 200


# --------------------------------------------------------------------------------------------------- too much at once


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Computation waits for this event."""
    opened = threading.Event()
    plain = compute.predict_together

    def waiting(works: Any) -> Any:
        assert opened.wait(20)
        return plain(works)

    monkeypatch.setattr(compute, "predict_together", waiting)
    yield opened
    opened.set()


def test_over_the_queue_clients_are_told_to_come_back(gate: threading.Event) -> None:
    limits = Limits(queue_inputs=8, inputs=4)
    body = {"inputs": [[0.0, 1.0, 2.0, 3.0]] * 4}
    with service(member(), limits=limits) as running, ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(running.ask, "/v1/predict", body)]
        while "errbar_queue_inputs 0.0" not in running.ask("/metrics").text or len(running.lines()) < 2:
            time.sleep(0.02)
        time.sleep(0.2)  # the first is being computed now
        waiting += [pool.submit(running.ask, "/v1/predict", body) for _ in range(2)]
        while "errbar_queue_inputs 8.0" not in running.ask("/metrics").text:
            time.sleep(0.02)
        response = running.ask("/v1/predict", body)
        assert "The queue is full: 8 inputs are waiting" in refused(response, 429)
        assert int(response.headers["retry-after"]) >= 1
        gate.set()
        assert [future.result(20).status_code for future in waiting] == [200, 200, 200]


def test_too_many_requests_at_once(gate: threading.Event) -> None:
    with service(member(), limits=Limits(requests=3)) as running, ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(running.ask, "/v1/predict", GOOD) for _ in range(3)]
        deadline = time.monotonic() + 10
        response = running.ask("/v1/model")
        while response.status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.02)
            response = running.ask("/v1/model")
        assert "There are already 3 requests" in refused(response, 429)
        assert running.ask("/healthz").status_code == 200
        gate.set()
        assert [future.result(20).status_code for future in waiting] == [200, 200, 200]


def test_an_answer_that_takes_too_long_is_not_waited_for(gate: threading.Event) -> None:
    with service(member(), limits=Limits(seconds=0.4)) as running:
        response = running.ask("/v1/predict", GOOD)
        assert "no answer within 0.4 seconds" in refused(response, 503)
        assert int(response.headers["retry-after"]) >= 1
        gate.set()
        deadline = time.monotonic() + 10
        while running.ask("/v1/predict", GOOD).status_code != 200:
            assert time.monotonic() < deadline
    assert [line for line in running.lines() if line["event"] == "failure"] == []


# ------------------------------------------------------------------------------------------------- pictures at once


def seer() -> Served:
    """A posterior for pictures of 2 × 2."""
    x, _ = data()
    fitted = errbar.fit(nn.Sequential(nn.Flatten(), network()), [(x.reshape(-1, 1, 2, 2),)], last_layers=2)
    return served("pictures", fitted, shape=(1, 2, 2))


PICTURE = png([[0, 255], [51, 102]])


@pytest.fixture
def slow_pictures(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowPictures]:
    slow = SlowPictures()
    plain = PictureRule.prepared

    def waiting(self: PictureRule, picture: Any) -> Any:
        slow.begun.append(picture.size)
        assert slow.open.wait(20)
        return plain(self, picture)

    monkeypatch.setattr(PictureRule, "prepared", waiting)
    yield slow
    slow.open.set()


class SlowPictures:
    """Decoding waits for `open`; `begun` has the sizes of what was begun."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun: list[tuple[int, int]] = []


def test_the_pictures_of_one_request_are_bounded_together() -> None:
    limits = Limits(pixels=4, request_pixels=10)
    with service(seer(), limits=limits) as running:
        assert running.ask("/v1/predict", {"images": [PICTURE] * 2}).status_code == 200
        response = running.ask("/v1/predict", {"images": [PICTURE] * 3})
        assert "The pictures have more than 10 pixels together" in refused(response, 422)
        assert running.told("/v1/model")["limits"]["request_pixels"] == 10


def test_pictures_wait_in_a_queue_of_their_own_which_has_an_end(slow_pictures: SlowPictures) -> None:
    limits = Limits(pixels=4, request_pixels=8, queue_pixels=12)
    with service(seer(), limits=limits) as running, ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(running.ask, "/v1/predict", {"images": [PICTURE] * count}) for count in (2, 1)]
        while "errbar_queue_pixels 12.0" not in running.ask("/metrics").text:
            time.sleep(0.02)
        response = running.ask("/v1/predict", {"images": [PICTURE]})
        assert "Pictures of 12 pixels are waiting, and there is room for 12" in refused(response, 429)
        assert int(response.headers["retry-after"]) >= 1
        # Who sends numbers does not wait for the pictures of others.
        assert running.ask("/v1/predict", {"inputs": [[[[0.0, 1.0], [0.2, 0.4]]]]}).status_code == 200
        slow_pictures.open.set()
        assert [future.result(20).status_code for future in waiting] == [200, 200]
        assert "errbar_queue_pixels 0.0" in running.ask("/metrics").text


def test_requests_with_pictures_take_turns(slow_pictures: SlowPictures) -> None:
    wide = png([[0, 255, 51], [102, 0, 7]])
    with service(seer()) as running, ThreadPoolExecutor(4) as pool:
        many = pool.submit(running.ask, "/v1/predict", {"images": [PICTURE] * 20})
        while len(slow_pictures.begun) < 1:
            time.sleep(0.02)
        one = pool.submit(running.ask, "/v1/predict", {"images": [wide]})
        while "errbar_queue_pixels 86.0" not in running.ask("/metrics").text:
            time.sleep(0.02)
        slow_pictures.open.set()
        assert (one.result(20).status_code, many.result(20).status_code) == (200, 200)
    assert slow_pictures.begun.index((3, 2)) <= 3


def test_the_clock_runs_while_pictures_are_decoded(slow_pictures: SlowPictures) -> None:
    with service(seer(), limits=Limits(seconds=0.3)) as running, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(running.ask, "/v1/predict", {"images": [PICTURE] * 5})
        while not slow_pictures.begun:
            time.sleep(0.02)
        time.sleep(0.5)
        slow_pictures.open.set()
        assert "no answer within 0.3 seconds" in refused(asked.result(20), 503)
        # What nobody waits for is not decoded.
        assert len(slow_pictures.begun) == 1


@pytest.mark.parametrize("sizes", [{"request_pixels": 10}, {"queue_pixels": 10}])
def test_limits_on_pixels_that_leave_no_room_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="expected each with room for at least one of those before it"):
        Limits(**sizes)


def test_a_graceful_stop_answers_what_was_accepted(gate: threading.Event) -> None:
    with ThreadPoolExecutor(8) as pool:
        with service(member()) as running:
            waiting = [pool.submit(running.ask, "/v1/predict", GOOD) for _ in range(6)]
            deadline = time.monotonic() + 10
            while len(running.server.server_state.tasks) < 6 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.1)
            running.server.should_exit = True
            time.sleep(0.3)
            gate.set()
        found = [future.result(20) for future in waiting]
    assert [response.status_code for response in found] == [200] * 6
    assert [response.headers["connection"] for response in found] == ["close"] * 6
    expected = posterior().predict(torch.tensor(GOOD["inputs"])).pmf[0].tolist()
    for response in found:
        assert response.json()["predictions"][0]["pmf"] == pytest.approx(expected, abs=1e-6)
    with pytest.raises(httpx.ConnectError, match="refused"):
        running.ask("/healthz")


def test_something_unforeseen_is_a_500_without_details(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(works: Any) -> Any:
        raise RuntimeError("private-words")

    monkeypatch.setattr(compute, "predict_together", broken)
    with service(member()) as running:
        response = running.ask("/v1/predict", GOOD)
        assert response.status_code == 500
        assert response.json()["kind"] == "InternalError"
        assert running.told("/healthz")["status"] == "ok"
    assert "private" not in response.text + running.log.getvalue()
    assert [line["type"] for line in running.lines() if line["event"] == "failure"] == ["RuntimeError"]


def test_weights_that_have_changed_are_no_fault_of_the_client() -> None:
    changed = member()
    with service(changed) as running:
        with torch.no_grad():
            next(changed.posterior.model.parameters()).add_(1.0)
        assert running.ask("/v1/predict", GOOD).status_code == 500
