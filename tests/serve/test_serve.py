"""The service answers what the library says, alone and in batches, and tells the truth about itself."""

from __future__ import annotations

import io
import json
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import errbar
import serving
from errbar.errors import ArgumentError, DataError, MismatchError
from errbar.serve import schemas
from errbar.serve.app import Json
from errbar.serve.batching import Batcher
from errbar.serve.compute import leading
from errbar.serve.limits import Limits, Refusal
from errbar.serve.pictures import PictureRule, rule_for
from errbar.serve.service import Service, served, training_reference
from errbar.serve.telemetry import Log
from serving import CLASSES, Running, member, posterior, service

X = serving.data()[0]
SCALES = ("temperature", "covariance_scale", "softening")
# For many requests at once on a machine that is busy with other things.
PATIENT = Limits(seconds=60.0)


@pytest.fixture(scope="module")
def known() -> errbar.Posterior:
    return posterior()


# -------------------------------------------------------------------------------------------------- what is answered


def test_a_prediction_is_that_of_the_library_to_the_last_bit(running: Running, known: errbar.Posterior) -> None:
    body = {"inputs": X[:5].tolist(), "samples": 300, "seed": 7, "level": 0.9, "risk": 0.4}
    body["include"] = ["covariance", "logits", "points", "outlier", "input"]
    told = running.told("/v1/predict", body)
    expected = known.predict(X[:5], 300, 7)
    lower, upper = expected.interval(0.9)
    truth = {
        "label": expected.label,
        "confidence": expected.confidence,
        "entropy": expected.entropy,
        "mutual_information": expected.mutual_information,
        "pmf": expected.pmf,
        "std": expected.std,
        "standard_error": expected.standard_error,
        "lower": lower,
        "upper": upper,
        "risk": expected.risk(0.4),
        "covariance": expected.covariance,
    }
    for name, values in truth.items():
        assert [one[name] for one in told["predictions"]] == values.tolist(), name
    assert [one["class"] for one in told["predictions"]] == [CLASSES[label] for label in expected.label.tolist()]
    assert told["inputs"] == X[:5].double().tolist()
    about = {name: told[name] for name in ("posterior", "samples", "seed", *SCALES, "level")}
    assert about == {
        "posterior": "tiny",
        "samples": 300,
        "seed": 7,
        "temperature": 1.3,
        "covariance_scale": 0.7,
        "softening": 0.0,
        "level": 0.9,
    }


def test_where_little_is_left_the_next_class_is_that_of_the_largest_logit() -> None:
    pmf = torch.tensor([[0.9, 0.001, 0.003, 0.004], [0.5, 0.1, 0.4, 0.0], [0.2, 0.3, 0.1, 0.4]])
    mean = torch.tensor([[2.0, 9.0, 8.0, -20.0], [3.0, 9.0, 2.0, 1.0], [0.0, 1.0, 2.0, 3.0]])
    # In the first row the most probable of the others is one of them by its large variance.
    assert leading(pmf, mean).tolist() == [[0, 1], [0, 2], [3, 1]]


def test_logits_and_points_are_centred_and_of_the_same_draws(running: Running, known: errbar.Posterior) -> None:
    body = {"inputs": X[:2].tolist(), "samples": 250, "include": ["logits", "points"]}
    for row, told in enumerate(running.told("/v1/predict", body)["predictions"]):
        gaussian = known.logits(X[row : row + 1]).centered()
        torch.testing.assert_close(torch.tensor(told["logits"]["mean"]), gaussian.mean[0])
        torch.testing.assert_close(torch.tensor(told["logits"]["covariance"]), gaussian.covariance[0])
        assert told["points"]["classes"] == torch.tensor(told["pmf"]).topk(2).indices.tolist()
        # softmax of all classes' draws gives the samples of the PMF; of two, their ratio.
        a, b = told["points"]["classes"]
        samples = known.predict(X[row : row + 1], 250).samples()[0, : len(told["points"]["logits"])]
        difference = torch.tensor(told["points"]["logits"]).T
        torch.testing.assert_close(
            (difference[0] - difference[1]), (samples[:, a] / samples[:, b]).log(), atol=1e-4, rtol=1e-4
        )


def test_t_and_t_c_can_be_chosen(running: Running, known: errbar.Posterior) -> None:
    body = {"inputs": X[:3].tolist(), "temperature": 2.5, "covariance_scale": 4.0}
    told = running.told("/v1/predict", body)
    chosen = known.with_calibration(temperature=2.5, covariance_scale=4.0)
    assert [one["pmf"] for one in told["predictions"]] == chosen.predict(X[:3]).pmf.tolist()
    assert (told["temperature"], told["covariance_scale"]) == (2.5, 4.0)
    certain = running.told("/v1/predict", body | {"covariance_scale": 0})["predictions"]
    assert max(max(one["std"]) for one in certain) < 1e-6


def test_the_softening_can_be_chosen_and_is_the_posteriors_own_otherwise(known: errbar.Posterior) -> None:
    softened = known.with_calibration(softening=3.0)
    with service(served("soft", softened, classes=CLASSES, reference=[serving.data()])) as own:
        assert own.told("/v1/model")["softening"] == 3.0
        body = {"inputs": X[:3].tolist(), "include": ["outlier"]}
        told = own.told("/v1/predict", body)
        assert told["softening"] == 3.0
        assert [one["pmf"] for one in told["predictions"]] == softened.predict(X[:3]).pmf.tolist()
        without = own.told("/v1/predict", body | {"softening": 0})
        assert without["softening"] == 0
        assert [one["pmf"] for one in without["predictions"]] == known.predict(X[:3]).pmf.tolist()
        assert [one["outlier"] for one in without["predictions"]] == [one["outlier"] for one in told["predictions"]]
        frames = own.told("/v1/fuse", {"inputs": X[:2].tolist()})["objects"][0]
        fused = errbar.Track(softened).add(X[:2]).predict()
        assert frames["fused"]["pmf"] == pytest.approx(fused.pmf[0].tolist(), abs=1e-6)


def test_another_posterior_is_asked_by_its_name(running: Running) -> None:
    told = running.told("/v1/predict", {"inputs": X[:2].tolist(), "posterior": "other"})
    assert [one["pmf"] for one in told["predictions"]] == posterior(1).predict(X[:2]).pmf.tolist()


def test_risk_takes_one_threshold_for_each_class(running: Running, known: errbar.Posterior) -> None:
    told = running.told("/v1/risk", {"inputs": X[:4].tolist(), "thresholds": [0.1, 0.5, 0.9]})
    expected = known.predict(X[:4]).risk(torch.tensor([0.1, 0.5, 0.9]))
    assert [one["risk"] for one in told["risks"]] == expected.tolist()
    assert [one["worst"] for one in told["risks"]] == [CLASSES[place] for place in expected.argmax(1).tolist()]
    assert told["thresholds"] == [0.1, 0.5, 0.9]


def test_the_outlier_score_is_a_percentile_of_the_training_inputs(running: Running, known: errbar.Posterior) -> None:
    usual = known.predict(X).mutual_information
    foreign = 20 * torch.randn(200, X.shape[1], generator=torch.Generator().manual_seed(0))
    strange = foreign[known.predict(foreign).mutual_information.argmax()]
    inputs = [X[0].tolist(), strange.tolist()]
    near, far = running.told("/v1/predict", {"inputs": inputs, "include": ["outlier"]})["predictions"]
    share = 100 * float((usual < usual[0]).double().mean())
    assert near["outlier"]["percentile"] == pytest.approx(share, abs=1.2)
    assert far["outlier"]["percentile"] == 100
    assert far["outlier"]["times_the_median"] > 1
    assert far["outlier"]["training_inputs"] == len(X)
    # It compares with the training data, whatever T and T_c are.
    scaled = running.told("/v1/predict", {"inputs": inputs, "include": ["outlier"], "covariance_scale": 50.0})
    assert scaled["predictions"][0]["outlier"]["percentile"] == near["outlier"]["percentile"]


def test_frames_are_fused_as_a_track(running: Running, known: errbar.Posterior) -> None:
    told = running.told("/v1/fuse", {"inputs": X[:3].tolist(), "risk": 0.3})
    (found,) = told["objects"]
    fused = errbar.Track(known).add(X[:3]).predict()
    assert found["fused"]["pmf"] == fused.pmf[0].tolist()
    assert found["fused"]["risk"] == fused.risk(0.3)[0].tolist()
    assert [one["pmf"] for one in found["single"]] == known.predict(X[:3]).pmf.tolist()
    assert (found["independent"], found["rank"], told["over"]) == (None, None, "frames")


@pytest.mark.filterwarnings("ignore::errbar.FusionNotice")
def test_frames_are_fused_with_the_covariance_between_them_if_asked(running: Running, known: errbar.Posterior) -> None:
    told = running.told("/v1/fuse", {"inputs": X[:3].tolist(), "risk": 0.3, "joint": True})
    (found,) = told["objects"]
    fused = errbar.fuse_frames(known.joint_logits(X[:3]))
    assert found["fused"]["pmf"] == fused.predict().pmf[0].tolist()
    assert found["fused"]["risk"] == fused.predict().risk(0.3)[0].tolist()
    assert found["rank"] == fused.rank
    each = known.logits(X[:3])
    assert [one["pmf"] for one in found["single"]] == known.predict(X[:3]).pmf.tolist()
    naive = errbar.fuse([each[row : row + 1] for row in range(3)]).predict()
    assert found["independent"]["pmf"] == naive.pmf[0].tolist()
    assert told["over"] == "frames"


def test_the_same_frame_twice_changes_nothing_except_for_the_naive(running: Running) -> None:
    frame = X[0].tolist()
    (once,) = running.told("/v1/fuse", {"inputs": [frame], "joint": True})["objects"]
    (twice,) = running.told("/v1/fuse", {"inputs": [frame, frame], "joint": True})["objects"]
    assert twice["fused"]["std"] == pytest.approx(once["fused"]["std"], abs=1e-4)
    assert max(twice["independent"]["std"]) < 0.9 * max(once["fused"]["std"])


def test_posteriors_and_given_gaussians_are_fused_as_independent(running: Running, known: errbar.Posterior) -> None:
    gaussians = [known.logits(X[:2]), posterior(1).logits(X[:2])]
    expected = errbar.fuse(gaussians).predict().pmf
    told = running.told("/v1/fuse", {"inputs": X[:2].tolist(), "over": "posteriors"})
    assert [one["fused"]["pmf"] for one in told["objects"]] == expected.tolist()
    assert told["objects"][1]["single"][0]["pmf"] == gaussians[0].predict().pmf[1].tolist()
    names = ("tiny", "other")
    answers = [
        running.told("/v1/predict", {"inputs": X[:1].tolist(), "posterior": n, "include": ["logits"]}) for n in names
    ]
    sent = [answer["predictions"][0]["logits"] for answer in answers]
    (found,) = running.told("/v1/fuse", {"gaussians": sent})["objects"]
    assert found["fused"]["pmf"] == pytest.approx(expected[0].tolist(), abs=1e-4)


def test_the_model_is_described(running: Running, known: errbar.Posterior) -> None:
    told = running.told("/v1/model")
    assert told["classes"] == list(CLASSES)
    assert (told["input_shape"], told["pictures"]) == ([4], None)
    assert told["posteriors"] == ["tiny", "other"]
    assert told["parameters"] == known.information.n_parameters
    assert told["calibrated"]
    assert len(told["reference"]) == 101
    assert told["reference"] == sorted(told["reference"])
    assert told["examples"][0] == {"input": X[0].tolist(), "label": "ant"}
    schemas.ModelAnswer.model_validate(told)


def test_health_and_metrics(running: Running) -> None:
    assert running.told("/healthz") == {"status": "ok", "queued_inputs": 0}
    running.told("/v1/predict", {"inputs": X[:3].tolist()})
    text = running.ask("/metrics").text
    assert re.search(r'^errbar_requests_total\{route="/v1/predict",status="200"\} [1-9]', text, re.MULTILINE)
    assert re.search(r"^errbar_inputs_total [1-9]", text, re.MULTILINE)
    assert re.search(r"^errbar_queue_inputs 0\.0$", text, re.MULTILINE)


# -------------------------------------------------------------------------------------------------- alone or together


def questions(count: int) -> list[dict[str, Any]]:
    """Requests of different sizes, seeds, samples, T and T_c."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for number in range(count):
        size = 1 + number % 5
        x = 2 * torch.randn(size, 4, generator=generator)
        body = {"inputs": x.tolist(), "seed": number % 3, "samples": 100 + 50 * (number % 2), "include": ["covariance"]}
        if number % 4 == 0:
            body |= {"temperature": 2.0, "covariance_scale": 3.0}
        made.append(body)
    return made


def difference(told: dict[str, Any], body: dict[str, Any], known: errbar.Posterior) -> float:
    """The largest between an answer and the library, over PMFs and covariances."""
    own = known.with_calibration(temperature=body.get("temperature"), covariance_scale=body.get("covariance_scale"))
    expected = own.predict(torch.tensor(body["inputs"]), body["samples"], body["seed"])
    worst = 0.0
    for name, values in (("pmf", expected.pmf), ("covariance", expected.covariance)):
        found = torch.tensor([one[name] for one in told["predictions"]], dtype=torch.float64)
        worst = max(worst, float((found - values.double()).abs().max()))
    return worst


def test_one_sample_has_no_standard_error(running: Running) -> None:
    told = running.told("/v1/predict", {"inputs": X[:2].tolist(), "samples": 1})
    assert [one["standard_error"] for one in told["predictions"]] == [None, None]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_answers_do_not_depend_on_the_batch_they_were_in(dtype: torch.dtype, tolerance: float) -> None:
    known = posterior(0, dtype)
    bodies = questions(96)
    with service(member(dtype=dtype), limits=PATIENT) as running, ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda body: running.told("/v1/predict", body), bodies))
        text = running.ask("/metrics").text
    together = float(re.search(r"^errbar_batch_inputs_sum (\S+)", text, re.MULTILINE)[1])  # type: ignore[index]
    batches = float(re.search(r"^errbar_batch_inputs_count (\S+)", text, re.MULTILINE)[1])  # type: ignore[index]
    assert together == sum(len(body["inputs"]) for body in bodies)
    assert batches < len(bodies), "no two requests were computed together, so nothing was tested"
    assert max(difference(told, body, known) for told, body in zip(answers, bodies, strict=True)) < tolerance


def test_with_a_batch_size_of_one_answers_are_exact_whoever_else_asks() -> None:
    known = posterior()
    bodies = questions(48)
    with service(member(), limits=replace(PATIENT, batch_inputs=1)) as running, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda body: running.told("/v1/predict", body), bodies))
    assert [difference(told, body, known) for told, body in zip(answers, bodies, strict=True)] == [0.0] * len(bodies)


class Gate:
    """A computation that waits until it is let go on, and notes what it was given together."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.batches: list[list[int]] = []

    def __call__(self, works: Sequence[int]) -> list[int]:
        self.batches.append(list(works))
        self.entered.set()
        assert self.open.wait(20)
        if any(work < 0 for work in works):
            raise DataError("Negative.")
        return [2 * work for work in works]


def test_what_waits_is_computed_together_up_to_a_batch() -> None:
    gate = Gate()
    batcher = Batcher(gate, Limits(batch_inputs=8))
    futures = [batcher.submit(0, 1)]
    assert gate.entered.wait(20)
    futures += [batcher.submit(number, 3) for number in range(1, 6)]
    assert batcher.queued_inputs == 15
    gate.open.set()
    assert [future.result(20) for future in futures] == [0, 2, 4, 6, 8, 10]
    assert gate.batches == [[0], [1, 2], [3, 4], [5]]
    batcher.close()


def test_the_answers_of_a_batch_are_delivered_together() -> None:
    gate = Gate()
    deliveries: list[Callable[[], None]] = []
    batcher = Batcher(gate, Limits(), deliver=deliveries.append)
    futures = [batcher.submit(0, 1)]
    assert gate.entered.wait(20)
    futures += [batcher.submit(number, 1) for number in (1, -1, 2)]
    gate.open.set()
    batcher.close(20)
    assert len(deliveries) == 2
    assert not any(future.done() for future in futures)
    for finish in deliveries:
        finish()
    assert [futures[place].result(0) for place in (0, 1, 3)] == [0, 2, 4]
    with pytest.raises(DataError, match="Negative"):
        futures[2].result(0)


def test_an_answer_is_json_whatever_classes_are_called() -> None:
    answer = {"class": "NaN", "pmf": [0.1, 1e-30, 1.0], "rank": None, "name": "Infinity, ü"}
    assert json.loads(bytes(Json(answer).body)) == answer
    for number in (math.nan, -math.inf):
        with pytest.raises(ValueError, match="not JSON compliant"):
            Json({"pmf": [number]})


def test_one_bad_input_spoils_no_other_answer() -> None:
    gate = Gate()
    batcher = Batcher(gate, Limits())
    first = batcher.submit(0, 1)
    assert gate.entered.wait(20)
    futures = [batcher.submit(number, 1) for number in (1, -1, 2)]
    gate.open.set()
    assert (first.result(20), futures[0].result(20), futures[2].result(20)) == (0, 2, 4)
    with pytest.raises(DataError, match="Negative"):
        futures[1].result(20)
    batcher.close()


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    gate = Gate()
    batcher = Batcher(gate, Limits(queue_inputs=10, inputs=10))
    futures = [batcher.submit(0, 1)]
    assert gate.entered.wait(20)
    futures += [batcher.submit(1, 6), batcher.submit(2, 4)]
    with pytest.raises(Refusal, match=r"The queue is full: 10 inputs are waiting, and it holds 10") as refused:
        batcher.submit(3, 1)
    assert refused.value.status == 429
    assert int(refused.value.headers["Retry-After"]) >= 1
    gate.open.set()
    assert [future.result(20) for future in futures] == [0, 2, 4]
    batcher.close()


def test_closing_finishes_what_was_accepted_and_takes_nothing_more() -> None:
    gate = Gate()
    batcher = Batcher(gate, Limits())
    futures = [batcher.submit(number, 1) for number in range(5)]
    assert gate.entered.wait(20)
    closing = threading.Thread(target=batcher.close)
    closing.start()
    time.sleep(0.2)
    with pytest.raises(Refusal, match="stopping"):
        batcher.submit(9, 1)
    gate.open.set()
    closing.join(20)
    assert [future.result(0) for future in futures] == [0, 2, 4, 6, 8]
    assert not batcher.is_alive


def test_work_that_nobody_waits_for_is_not_done() -> None:
    gate = Gate()
    batcher = Batcher(gate, Limits())
    first = batcher.submit(0, 1)
    assert gate.entered.wait(20)
    gone, kept = batcher.submit(1, 1), batcher.submit(2, 1)
    assert gone.cancel()
    gate.open.set()
    assert (first.result(20), kept.result(20)) == (0, 4)
    assert gate.batches == [[0], [2]]
    batcher.close()


# ---------------------------------------------------------------------------------------------------------- pictures


def test_a_picture_is_resized_and_divided_by_255() -> None:
    rule = rule_for((1, 2, 2))
    assert rule is not None
    values = [[0, 255], [51, 102]]
    assert rule.read(serving.png(values), 100).tolist() == [[[0.0, 1.0], [pytest.approx(0.2), pytest.approx(0.4)]]]
    assert rule.read(f"data:image/png;base64,{serving.png(values)}", 100).shape == (1, 2, 2)
    colours = rule_for((3, 2, 2))
    assert colours is not None
    red = colours.read(serving.png([[[255, 0, 0]] * 2] * 2, "RGB"), 100)
    assert red.mean((1, 2)).tolist() == [1, 0, 0]


def test_shapes_that_are_no_pictures_have_no_rule() -> None:
    assert [rule_for(shape) for shape in (None, (64,), (5, 8, 8), (2, 3, 4, 5))] == [None] * 4


def test_inputs_of_another_shape_are_pictures_if_they_have_a_layout() -> None:
    rule = rule_for((4,), (1, 2, 2))
    assert rule is not None
    assert rule.read(serving.png([[0, 255], [51, 102]]), 100).tolist() == pytest.approx([0, 1, 0.2, 0.4])
    wide = rule_for((4,), (1, 2, 2), (0.0, 16.0))
    assert wide is not None
    assert wide.read(serving.png([[0, 255], [51, 102]]), 100).tolist() == pytest.approx([0, 16, 3.2, 6.4])
    assert "with values from 0 to 16, as the training inputs have them" in wide.sentence
    assert rule_for((4,), (1, 2, 2), (0.1, 0.9)) == rule
    with pytest.raises(MismatchError, match="An input has 5 numbers; expected 1 × 2 × 2 for a picture"):
        rule_for((5,), (1, 2, 2))


def test_the_page_is_told_examples_of_all_classes_and_the_range_of_each_value() -> None:
    x, y = serving.data()
    order = y.argsort(stable=True)
    sorted_by_class = [(x[order][start : start + 7], y[order][start : start + 7]) for start in range(0, len(x), 7)]
    known = training_reference(posterior(), sorted_by_class, CLASSES)
    assert [label for _, label in known.examples] == ["ant"] * 4 + ["bee"] * 3 + ["cat"] * 3
    for k, name in enumerate(CLASSES):
        mine = torch.stack([row for row, label in known.examples if label == name])
        assert torch.equal(mine, x[y == k][: len(mine)])
    assert known.values is not None
    for place, one in enumerate(known.values):
        column = x[:, place].double()
        assert (one.low, one.middle, one.high) == (column.min(), column.median(), column.max())
    assert known.ends == (x.min(), x.max())
    assert training_reference(posterior(), [x[:5]], CLASSES).examples[0][1] == ""


def test_a_digit_is_cut_out_enlarged_and_centred_dark_or_light() -> None:
    rule = PictureRule((64,), digit=True)
    paper = torch.full((100, 60), 255)
    paper[20:60, 30:40] = 0  # a stroke four times as high as wide
    found = rule.read(serving.png(paper), 10_000).reshape(8, 8)
    expected = torch.zeros(8, 8)
    expected[:, 3:5] = 1
    torch.testing.assert_close(found, expected)
    inverted = rule.read(serving.png(255 - paper), 10_000).reshape(8, 8)
    torch.testing.assert_close(inverted, expected)
    moved = torch.full((100, 60), 255)
    moved[50:90, 5:15] = 0
    torch.testing.assert_close(rule.read(serving.png(moved), 10_000).reshape(8, 8), expected)


def test_what_is_not_painted_is_paper() -> None:
    from PIL import Image

    canvas = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    canvas.paste((0, 0, 0, 255), (15, 10, 25, 30))
    target = io.BytesIO()
    canvas.save(target, "PNG")
    import base64

    found = PictureRule((64,), digit=True).read(base64.b64encode(target.getvalue()).decode(), 10_000)
    assert found.reshape(8, 8)[:, 2:6].min() == 1
    assert found.sum() == 32


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("%%%", "is not base64"),
        ("aGVsbG8=", "cannot be read; expected an undamaged file in one of the formats PNG"),
        (serving.png([[255] * 9] * 9)[:40], "not base64|cannot be read"),
        (serving.png([[255] * 9] * 9), "The picture is empty"),
        (serving.png([[0] * 200] * 200), r"has 200 × 200 pixels; expected at most 10,000"),
    ],
)
def test_what_is_no_picture_is_refused_in_words(text: str, match: str) -> None:
    with pytest.raises(DataError, match=match):
        PictureRule((64,), digit=True).read(text, 10_000)


def test_pictures_are_predicted_like_their_values() -> None:
    model = serving.network(inputs=4)
    fitted = errbar.fit(torch.nn.Sequential(torch.nn.Flatten(), model), [(X.reshape(-1, 1, 2, 2),)], last_layers=2)
    with service(served("pictures", fitted, shape=(1, 2, 2))) as running:
        told = running.told("/v1/predict", {"images": [serving.png([[0, 255], [51, 102]])], "include": ["input"]})
        (values,) = told["inputs"]
        assert told["predictions"][0]["pmf"] == fitted.predict(torch.tensor([values])).pmf[0].tolist()
        assert "Resized to 2 × 2" in running.told("/v1/model")["pictures"]


# ------------------------------------------------------------------------------------------------------ what is served


def test_the_shape_of_inputs_is_found_or_told() -> None:
    known = posterior()
    assert served("it", known).shape == (4,)
    flat = errbar.fit(
        torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(2, 3)),
        [(torch.randn(5, 1, 3, 3),)],
        last_layers=1,
    )
    assert served("it", flat).shape is None
    assert served("it", flat, shape=(1, 3, 3)).pictures is not None
    assert served("it", flat, reference=[torch.randn(5, 1, 3, 3)]).shape == (1, 3, 3)


def test_two_posteriors_of_one_name_are_refused() -> None:
    with pytest.raises(ArgumentError, match="different names"):
        Service((member(reference=False), member(reference=False)))


@pytest.mark.parametrize(
    ("limits", "match"),
    [({"inputs": 0}, "inputs is 0; expected a positive number"), ({"inputs": 600}, "room for at least")],
)
def test_limits_that_cannot_be_meant_are_refused(limits: dict[str, int], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        Limits(**limits)  # type: ignore[arg-type]


def test_the_log_is_json_and_holds_nothing_that_was_sent() -> None:
    with service(member(), token="a-long-token") as running:
        running.told("/v1/predict", {"inputs": [[0.123456789, 1, 2, 3]]})
        running.ask("/v1/predict", {"inputs": [["private-words", 1, 2, 3]]})
        running.ask("/secret-path?secret-query=1")
        running.ask("/v1/model", headers={"authorization": "Bearer wrong-secret"})
    text = running.log.getvalue()
    for private in ("123456789", "private", "secret", "a-long-token", "Bearer"):
        assert private not in text
    lines = [line for line in running.lines() if line["event"] == "request"]
    assert [(line["route"], line["status"]) for line in lines] == [
        ("/v1/predict", 200),
        ("/v1/predict", 422),
        ("other", 404),
        ("other", 401),
    ]
    assert lines[0]["inputs"] == 1
    assert all(line["seconds"] >= 0 for line in lines)


def test_a_failure_is_told_by_type_and_place_without_its_message() -> None:
    stream = io.StringIO()
    try:
        raise RuntimeError("private-words")
    except RuntimeError as error:
        Log(stream).failure(error)
    line = json.loads(stream.getvalue())
    assert (line["event"], line["type"]) == ("failure", "RuntimeError")
    assert line["where"][0].startswith("test_serve.py:")
    assert "private" not in stream.getvalue()


# ---------------------------------------------------------------------------------------------------------- the page


def test_the_page_comes_with_the_package_and_loads_nothing_from_elsewhere(running: Running) -> None:
    response = running.ask("/")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in response.headers["content-security-policy"]
    folder = Path(errbar.__file__).parent / "serve" / "page"
    linked = set(re.findall(r'(?:src|href)="/page/([^"]+)"', response.text))
    names = {path.name for path in folder.iterdir()}
    for path in folder.glob("*.js"):
        linked |= set(re.findall(r'from "\./([^"]+)"', path.read_text(encoding="utf-8")))
    assert linked == names - {"index.html"}
    for name in names - {"index.html"}:
        assert running.ask(f"/page/{name}").status_code == 200
    for path in folder.iterdir():
        addresses = set(re.findall(r"https?://[^\s'\"%)]+", path.read_text(encoding="utf-8")))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path.name


def test_there_are_no_documentation_pages_that_would_load_scripts_from_elsewhere(running: Running) -> None:
    assert (running.ask("/docs").status_code, running.ask("/redoc").status_code) == (404, 404)
    assert running.ask("/page/../app.py").status_code == 404
    assert running.ask("/page/%2e%2e/app.py").status_code == 404


# ------------------------------------------------------------------------------------------------- networks fused


def fused_pair(**numbers: Any) -> errbar.FusedClassifier:
    return errbar.FusedClassifier([posterior(), posterior(1)], **numbers)


def test_a_fused_classifier_is_served_like_a_posterior() -> None:
    fused = fused_pair(discrepancies=(0.3, 0.8), temperature=1.2, covariance_scale=0.6)
    with service(served("both", fused, classes=CLASSES, reference=[serving.data()])) as both:
        body = {"inputs": X[:4].tolist(), "samples": 300, "seed": 7, "risk": 0.4, "include": ["outlier", "logits"]}
        told = both.told("/v1/predict", body)
        expected = fused.predict(X[:4], 300, 7)
        assert [one["pmf"] for one in told["predictions"]] == expected.pmf.tolist()
        assert [one["risk"] for one in told["predictions"]] == expected.risk(0.4).tolist()
        assert (told["temperature"], told["covariance_scale"], told["softening"]) == (1.2, 0.6, 0.0)
        tempered = fused.logits(X[:4]).tempered(1.2)
        for row, one in enumerate(told["predictions"]):
            torch.testing.assert_close(torch.tensor(one["logits"]["mean"]), tempered.mean[row])
            assert 0 <= one["outlier"]["percentile"] <= 100
        other = both.told("/v1/predict", body | {"temperature": 2.0, "covariance_scale": 0.1})
        changed = fused.with_calibration(temperature=2.0, covariance_scale=0.1).predict(X[:4], 300, 7)
        assert [one["pmf"] for one in other["predictions"]] == changed.pmf.tolist()
        about = both.told("/v1/model")
        assert (about["networks"], about["calibrated"], about["layers"]) == (2, True, ["0.0", "0.2", "1.0", "1.2"])
        assert both.ask("/v1/predict", body | {"softening": 0.5}).status_code == 422
        assert both.ask("/").status_code == 200


def test_frames_of_a_fused_classifier_are_weighted_by_their_precisions() -> None:
    fused = fused_pair(discrepancies=(0.3, 0.8), temperature=1.2)
    with service(served("both", fused, classes=CLASSES)) as both:
        told = both.told("/v1/fuse", {"inputs": X[:3].tolist(), "samples": 200, "seed": 1})
        each = [fused.unrounded_logits(X[row : row + 1]).tempered(1.2) for row in range(3)]
        expected = errbar.fuse(each).predict(200, 1).pmf[0]
        torch.testing.assert_close(torch.tensor(told["objects"][0]["fused"]["pmf"]), expected, rtol=0, atol=1e-5)
        refused = both.ask("/v1/fuse", {"inputs": X[:3].tolist(), "joint": True})
        assert refused.status_code == 422
        assert "no covariance between frames in common" in refused.text


def test_frames_of_a_fused_classifier_without_a_width_are_fused_by_what_they_were_weighted_by() -> None:
    fused = fused_pair(discrepancies=(0.3, 0.8), temperature=1.2, covariance_scale=0.0)
    mean = fused_pair(discrepancies=(float("inf"),) * 2, temperature=1.2, covariance_scale=0.0)
    with service(served("narrow", fused, classes=CLASSES), served("mean", mean, classes=CLASSES)) as both:
        (narrow,) = both.told("/v1/fuse", {"posterior": "narrow", "inputs": X[:3].tolist()})["objects"]
        wide = fused.with_calibration(covariance_scale=1.0)
        logits = errbar.fuse([wide.unrounded_logits(X[row : row + 1]) for row in range(3)]).mean
        torch.testing.assert_close(torch.tensor([narrow["fused"]["pmf"]]), torch.softmax(logits / 1.2, 1))
        assert max(narrow["fused"]["std"]) == 0
        (plain,) = both.told("/v1/fuse", {"posterior": "mean", "inputs": X[:3].tolist()})["objects"]
        expected = torch.softmax(mean.logits(X[:3]).mean.mean(0, keepdim=True) / 1.2, 1)
        torch.testing.assert_close(torch.tensor([plain["fused"]["pmf"]]), expected)


def test_a_fusion_without_a_width_has_none_to_choose() -> None:
    mean = fused_pair(discrepancies=(float("inf"),) * 2, covariance_scale=0.0)
    with service(served("mean", mean, classes=CLASSES)) as both:
        told = both.told("/v1/predict", {"inputs": X[:2].tolist()})
        expected = torch.softmax(mean.logits(X[:2]).mean, 1)
        torch.testing.assert_close(torch.tensor([one["pmf"] for one in told["predictions"]]), expected)
        refused = both.ask("/v1/predict", {"inputs": X[:2].tolist(), "covariance_scale": 1.0})
        assert refused.status_code == 422
        assert "discrepancies are all infinite" in refused.text
