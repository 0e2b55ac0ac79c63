"""The page in a real Chromium: what is drawn is predicted, and the numbers on the page are those of the library."""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Browser, Page, expect
from torch import Tensor

import errbar
import serving
import strokes
from errbar.serve.digits import digits
from errbar.serve.service import Served, served
from serving import Running, member, service

pytestmark = pytest.mark.browser

THREE = [(80, 70), (140, 45), (195, 80), (150, 130), (195, 180), (145, 225), (80, 200)]
SEVEN = [(70, 60), (205, 60), (120, 230)]


@pytest.fixture(scope="session")
def known() -> Served:
    return digits()


@pytest.fixture(scope="session")
def running(known: Served) -> Iterator[Running]:
    with service(known) as made:
        yield made


@pytest.fixture
def page(browser: Browser, running: Running) -> Iterator[Page]:
    with opened(browser, running.url) as made:
        yield made


class opened:  # noqa: N801 - used as a function
    """A new page at `url`; at the end nothing may have failed inside, and nothing been asked of elsewhere."""

    def __init__(self, browser: Browser, url: str, errors: bool = False, **context: Any) -> None:
        self.browser, self.url, self.errors, self.context = browser, url, errors, context
        self.troubles: list[str] = []

    def __enter__(self) -> Page:
        self.made = self.browser.new_context(
            viewport=self.context.pop("viewport", {"width": 1320, "height": 1000}), **self.context
        )
        self.made.set_default_timeout(20000)
        page = self.made.new_page()
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on(
            "console",
            lambda said: self.troubles.append(said.text) if said.type == "error" and not self.errors else None,
        )
        page.on(
            "request",
            lambda asked: (
                None if asked.url.startswith((self.url, "data:", "blob:")) else self.troubles.append(asked.url)
            ),
        )
        page.goto(self.url)
        return page

    def __exit__(self, kind: Any, *_: object) -> None:
        self.made.close()
        assert kind is not None or self.troubles == []


def settled(page: Page, state: str = "ready") -> None:
    expect(page.locator("html")).to_have_attribute("data-state", state, timeout=20000)


def draw(page: Page, points: list[tuple[int, int]]) -> None:
    """A stroke on the pad, whose side is 280 whatever its size on the screen."""
    box = page.locator("#pad").bounding_box()
    assert box is not None
    places = [(box["x"] + x * box["width"] / 280, box["y"] + y * box["height"] / 280) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=6)
    page.mouse.up()
    settled(page)
    page.wait_for_timeout(50)
    settled(page)


def on_the_pad(page: Page) -> str:
    return str(page.evaluate("document.getElementById('pad').toDataURL('image/png')"))


def share(text: str) -> float:
    """A percentage as it is shown."""
    found = re.search(r"([<>] )?([\d.]+) ?%", text)
    assert found is not None, text
    value = float(found[2]) / 100
    return value / 2 if found[1] == "< " else (value + 1) / 2 if found[1] == "> " else value


def shown(page: Page) -> dict[str, tuple[float, float, float]]:
    """PMF, standard deviation and risk of each class, read off the page."""
    rows = {}
    for row in page.locator("#rows .row").all():
        numbers = row.locator(".numbers").inner_text()
        deviation = float(numbers.split("±")[1]) / 100
        rows[str(row.get_attribute("data-class"))] = (
            share(numbers),
            deviation,
            share(row.locator(".gauge b").inner_text()),
        )
    return rows


def expected(known: Served, page: Page, **calibration: float) -> tuple[errbar.Prediction, Tensor]:
    assert known.pictures is not None
    x = known.pictures.read(on_the_pad(page), 10**6)[None]
    return known.posterior.with_calibration(**calibration).predict(x), x


def require_same(found: dict[str, tuple[float, float, float]], truth: errbar.Prediction, gamma: Any = 0.05) -> None:
    risk = truth.risk(gamma)[0].tolist()
    pmf, std = truth.pmf[0].tolist(), truth.std[0].tolist()
    assert list(found) == [str(label) for label in range(10)]
    for label, (f, deviation, danger) in enumerate(found.values()):
        assert f == pytest.approx(pmf[label], abs=0.0006)
        assert deviation == pytest.approx(std[label], abs=0.0006)
        assert danger == pytest.approx(risk[label], abs=0.0051)


def test_a_drawn_digit_has_the_numbers_of_the_library(page: Page, known: Served) -> None:
    settled(page)
    draw(page, THREE)
    truth, x = expected(known, page)
    require_same(shown(page), truth)
    best = int(truth.label)
    lower, upper = (part[0, best].item() for part in truth.interval(0.95))
    verdict = page.locator("#verdict-numbers").inner_text()
    numbers = [float(number) / 100 for number in re.findall(r"([\d.]+) %", verdict)]
    assert verdict.startswith(f"{best}: ")
    assert numbers == pytest.approx([float(truth.confidence), 0.95, lower, upper], abs=0.0006)
    assert page.locator("#plane ellipse").count() == 2
    assert page.locator("#plane .dot-a, #plane .dot-b").count() == 200
    assert page.locator("#heat .cell").count() == 100
    told = known.outlier(known.posterior.predict(x).mutual_information.item())
    assert told is not None
    assert 1 < told["percentile"] < 99
    assert f"than of {told['percentile']:.0f} % of 2000 training inputs" in page.locator("#outlier-note").inner_text()


def test_the_heat_map_tells_its_cells_by_keyboard(page: Page, known: Served) -> None:
    draw(page, SEVEN)
    truth, _ = expected(known, page)
    page.locator("#heat svg").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    words = page.locator("#heat-note").inner_text()
    assert words.startswith("f(1) has a standard deviation of ")
    assert share(words) == pytest.approx(truth.std[0, 1].item(), abs=0.0006)


def test_a_threshold_of_one_class_moves_its_risk_alone(page: Page, known: Served) -> None:
    draw(page, THREE)
    before = shown(page)
    slider = page.get_by_label("Threshold γ of class 3")
    slider.focus()
    slider.press("End")
    slider.press("ArrowLeft")
    settled(page)
    page.wait_for_timeout(100)
    settled(page)
    truth, _ = expected(known, page)
    gamma = torch.full((10,), 0.05)
    gamma[3] = 0.995
    require_same(shown(page), truth, gamma)
    after = shown(page)
    assert {name: row for name, row in after.items() if name != "3"} == {n: r for n, r in before.items() if n != "3"}


def test_t_and_t_c_change_the_answer_and_can_be_put_back(page: Page, known: Served) -> None:
    draw(page, THREE)
    before = shown(page)
    for name in ("temperature", "scale"):
        page.locator(f"#{name}").press("End")
    page.wait_for_timeout(150)
    settled(page)
    values = {name: float(page.locator(f"#{name}").input_value()) for name in ("temperature", "scale")}
    chosen = {name: float(f"{10**value:.4g}") for name, value in values.items()}
    truth, _ = expected(known, page, temperature=chosen["temperature"], covariance_scale=chosen["scale"])
    require_same(shown(page), truth)
    assert shown(page) != before
    page.get_by_role("button", name="As fitted").click()
    page.wait_for_timeout(150)
    settled(page)
    assert shown(page) == before


def test_other_views_are_fused(page: Page, known: Served) -> None:
    draw(page, THREE)
    frames = []
    for _ in range(2):
        frames.append(known.pictures.read(on_the_pad(page), 10**6))  # type: ignore[union-attr]
        page.get_by_role("button", name="Another view").click()
        page.wait_for_timeout(150)
        settled(page)
    frames.append(known.pictures.read(on_the_pad(page), 10**6))  # type: ignore[union-attr]
    x = torch.stack(frames)
    assert len({tuple(frame.tolist()) for frame in frames}) == 3
    truth = {
        "fused": errbar.Track(known.posterior).add(x).predict(),
        "single": known.posterior.predict(x[2:]),
    }
    for text in page.locator("#fusion text[data-kind]").all():
        kind, label = text.get_attribute("data-kind"), text.get_attribute("data-class")
        assert kind is not None
        assert share(str(text.text_content())) == pytest.approx(truth[kind].pmf[0, int(str(label))].item(), abs=0.0011)
    assert page.locator("#fusion text[data-kind]").count() == 6
    expect(page.locator("#views .thumb")).to_have_count(3)
    page.get_by_role("button", name="Remove view 1").click()
    expect(page.locator("#views .thumb")).to_have_count(2)
    settled(page)


def test_everything_can_be_done_by_keyboard(page: Page, known: Served) -> None:
    settled(page)
    page.locator("#pad").focus()
    keyboard = page.keyboard
    for key in ["Space", *["ArrowDown"] * 9, "Space"]:
        keyboard.press(key)
    settled(page)
    page.wait_for_timeout(100)
    settled(page)
    truth, _ = expected(known, page)
    require_same(shown(page), truth)
    keyboard.press("Delete")
    settled(page, "empty")
    assert page.locator("#verdict").inner_text() == "–"
    reached = set()
    for _ in range(70):
        keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('aria-label')"))
    wanted = {"clear", "file", "temperature", "scale", "theme", "Threshold γ of class 0", "Threshold γ of class 9"}
    assert wanted | {"Class 3 is dangerous"} <= reached
    assert any(str(name).startswith("Example 1,") for name in reached)


def test_an_example_and_a_pasted_array(page: Page, known: Served) -> None:
    settled(page)
    page.get_by_role("button", name="Example 5, labelled 4").click()
    page.wait_for_timeout(100)
    settled(page)
    x, _ = known.examples[4]
    require_same(shown(page), known.posterior.predict(x[None]))
    page.get_by_text("Paste an array", exact=True).click()
    page.get_by_label("Values of one input").fill(str(known.examples[7][0].tolist()))
    page.get_by_role("button", name="Use it").click()
    page.wait_for_timeout(100)
    settled(page)
    require_same(shown(page), known.posterior.predict(known.examples[7][0][None]))


DROPPED = """(content) => {
    const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], "one.png", { type: "image/png" }));
    return transfer;
}"""


@pytest.mark.parametrize("way", ["chosen", "dropped"])
def test_a_picture_from_a_file(page: Page, known: Served, tmp_path: Path, way: str) -> None:
    picture = Image.new("L", (90, 120), 230)
    picture.paste(20, (40, 20, 52, 100))
    picture.save(tmp_path / "one.png")
    content = base64.b64encode((tmp_path / "one.png").read_bytes()).decode()
    settled(page)
    if way == "chosen":
        page.locator("#file").set_input_files(tmp_path / "one.png")
    else:
        transfer = page.evaluate_handle(DROPPED, content)
        for event in ("dragenter", "dragover", "drop"):
            page.dispatch_event("#drop", event, {"dataTransfer": transfer})
    settled(page)
    assert known.pictures is not None
    truth = known.posterior.predict(known.pictures.read(content, 10**6)[None])
    require_same(shown(page), truth)


# ----------------------------------------------------------------------------------------------------- what goes wrong


def require_no_answer(page: Page) -> None:
    """Nothing of an older answer is left beside the sentence that says what is wrong."""
    expect(page.locator("#verdict")).to_have_text("No answer.")
    assert page.locator("#verdict-numbers").text_content() == ""
    assert set(page.locator("#rows .numbers, #rows .gauge b").all_text_contents()) == {"–"}
    assert not any(bar.is_visible() for bar in page.locator("#rows .bar, #rows .whisker").all())
    assert page.locator("#plane svg, #heat svg, #fusion svg, #outlier .mark").count() == 0
    assert page.locator('#rows [data-leading="true"]').count() == 0


def test_any_mistake_clears_the_answer_and_does_not_move_the_pad(
    browser: Browser, running: Running, tmp_path: Path
) -> None:
    (tmp_path / "words.txt").write_text("no picture")
    Image.new("L", (50, 50), 255).save(tmp_path / "white.png")
    for viewport in ({"width": 1320, "height": 1000}, {"width": 390, "height": 844}):
        with opened(browser, running.url, errors=True, viewport=viewport) as page:
            settled(page)
            page.get_by_text("Paste an array", exact=True).click()
            page.evaluate("scrollTo(0, 0)")
            place = page.locator("#pad").bounding_box()

            def file(name: str, page: Page = page) -> None:
                page.locator("#file").set_input_files(tmp_path / name)

            def array(text: str, page: Page = page) -> None:
                page.get_by_label("Values of one input").fill(text)
                page.get_by_role("button", name="Use it").click()

            for mistake, sentence in (
                (lambda: file("words.txt"), "words.txt is not a picture"),
                (lambda: file("white.png"), "The picture is empty"),
                (lambda: array("1 2 x"), "expected finite numbers separated by commas or spaces"),
                (lambda: array("1 2 3"), "has 3 numbers; this model takes 64"),
                (lambda: array(" ".join(["1e300"] * 64)), "NaN or infinite"),
            ):
                page.get_by_role("button", name="Example 8, labelled 7").click()
                settled(page)
                expect(page.locator("#verdict")).to_contain_text("7")
                mistake()
                expect(page.locator("#message")).to_contain_text(sentence)
                require_no_answer(page)
                page.evaluate("scrollTo(0, 0)")
                assert page.locator("#pad").bounding_box() == place
            draw(page, THREE)
            expect(page.locator("#message")).to_be_empty()


@pytest.mark.parametrize("status", [401, 422, 429, 500])
def test_whatever_the_service_refuses_clears_the_answer(browser: Browser, running: Running, status: int) -> None:
    def refused(route: Any) -> None:
        headers = {"retry-after": "0.01"}
        route.fulfill(status=status, headers=headers, json={"error": "Refused, in words.", "kind": "Refused"})

    with opened(browser, running.url, errors=True) as page:
        settled(page)
        page.route("**/v1/predict", refused)
        page.get_by_role("button", name="Example 2, labelled 1").click()
        settled(page, "token" if status == 401 else "error")
        if status != 401:
            expect(page.locator("#message")).to_have_text("Refused, in words.")
        require_no_answer(page)


def test_an_empty_pad_has_no_answer(page: Page) -> None:
    settled(page)
    page.get_by_role("button", name="Clear").click()
    settled(page, "empty")
    assert page.locator("#verdict").inner_text() == "–"
    assert set(page.locator("#rows .numbers").all_text_contents()) == {"–"}


def test_a_service_that_is_gone_is_told_and_found_again(browser: Browser, known: Served) -> None:
    with service(known) as running:
        page_of = opened(browser, running.url, errors=True)
        page = page_of.__enter__()
        settled(page)
        port = running.place[1]
    page.get_by_role("button", name="Example 1, labelled 0").click()
    settled(page, "offline")
    expect(page.locator("#message")).to_contain_text("The service does not answer")
    require_no_answer(page)
    with service(known, port=port):
        settled(page)
        require_same(shown(page), known.posterior.predict(known.examples[0][0][None]))
        expect(page.locator("#message")).to_be_empty()
        page_of.__exit__(None)


def test_a_token_is_asked_for_and_a_wrong_one_is_said_to_be_wrong(browser: Browser) -> None:
    with service(member(), token="a-long-token") as running, opened(browser, running.url, errors=True) as page:
        settled(page, "token")
        assert page.locator("#token-trouble").text_content() == ""
        page.get_by_role("textbox", name="Token").fill("a-long-tokeN")
        page.get_by_role("button", name="Continue").click()
        expect(page.locator("#token-trouble")).to_have_text("That token is wrong. Try another one.")
        page.get_by_role("textbox", name="Token").fill("a-long-token")
        page.get_by_role("button", name="Continue").click()
        settled(page)


def test_a_busy_service_is_asked_again(browser: Browser, running: Running, known: Served) -> None:
    refusals = []

    def sometimes(route: Any) -> None:
        if refusals:
            route.continue_()
        else:
            refusals.append(1)
            route.fulfill(status=429, headers={"retry-after": "1"}, json={"error": "Full.", "kind": "TooManyRequests"})

    with opened(browser, running.url, errors=True) as page:
        settled(page)
        page.route("**/v1/predict", sometimes)
        page.get_by_role("button", name="Example 2, labelled 1").click()
        settled(page)
        require_same(shown(page), known.posterior.predict(known.examples[1][0][None]))
    assert refusals


def probabilities(page: Page) -> list[float]:
    return [row[0] for row in shown(page).values()]


def test_inputs_that_are_no_pictures_have_a_table_of_values(browser: Browser) -> None:
    tiny = member()
    x, y = serving.data()
    with service(tiny) as running, opened(browser, running.url) as page:
        settled(page)
        assert not page.locator("#drop").is_visible()
        assert not page.get_by_text("Open …").is_visible()
        # Real inputs with their labels, of all classes; the page is on one of them.
        labels = [label for _, label in tiny.examples]
        assert labels == ["ant"] * 4 + ["bee"] * 3 + ["cat"] * 3
        for inputs, label in tiny.examples:
            assert any(
                torch.equal(inputs, row) and serving.CLASSES[int(k)] == label for row, k in zip(x, y, strict=True)
            )
        page.get_by_role("button", name="Example 6, labelled bee").click()
        settled(page)
        expect(page.locator("#verdict-numbers")).to_contain_text("This example is labelled bee.")
        truth = tiny.posterior.predict(tiny.examples[5][0][None]).pmf[0]
        assert list(shown(page)) == list(serving.CLASSES)
        assert probabilities(page) == pytest.approx(truth.tolist(), abs=0.0006)
        # Sliders from the smallest to the largest value of the training inputs, by keyboard too.
        slider = page.get_by_label("Value 2", exact=True)
        ends = [float(str(slider.get_attribute(name))) for name in ("min", "max")]
        assert ends == pytest.approx([x[:, 1].min().item(), x[:, 1].max().item()])
        slider.press("End")
        page.get_by_label("Value 3 as a number").fill("-9.5")
        settled(page)
        page.wait_for_timeout(100)
        settled(page)
        changed = tiny.examples[5][0].clone()
        changed[1], changed[2] = float(slider.input_value()), -9.5
        assert float(slider.input_value()) == pytest.approx(ends[1], rel=0.01)
        truth = tiny.posterior.predict(changed[None]).pmf[0]
        assert probabilities(page) == pytest.approx(truth.tolist(), abs=0.0006)
        assert "labelled" not in page.locator("#verdict-numbers").inner_text()
        page.get_by_role("button", name="Typical values").click()
        page.wait_for_timeout(100)
        settled(page)
        truth = tiny.posterior.predict(x.median(0).values[None]).pmf[0]
        assert probabilities(page) == pytest.approx(truth.tolist(), abs=0.0006)
        page.get_by_role("button", name="Another view").click()
        expect(page.locator("#views .thumb")).to_have_count(2)


def test_another_model_shows_its_classes_and_takes_arrays(browser: Browser) -> None:
    tiny = member(reference=False)
    with service(tiny) as running, opened(browser, running.url) as page:
        settled(page)
        assert page.get_by_label("Value 4 as a number").input_value() == "0"
        expect(page.locator("#outlier-note")).to_contain_text("--reference")
        page.get_by_text("Paste an array", exact=True).click()
        page.get_by_label("Values of one input").fill("[1, 0.5, -1, 2]")
        page.get_by_role("button", name="Use it").click()
        page.wait_for_timeout(100)
        settled(page)
        truth = tiny.posterior.predict(torch.tensor([[1, 0.5, -1, 2]]))
        found = shown(page)
        assert list(found) == list(serving.CLASSES)
        assert [row[0] for row in found.values()] == pytest.approx(truth.pmf[0].tolist(), abs=0.0006)
        assert page.get_by_label("Value 4 as a number").input_value() == "2"


def test_vectors_that_are_pictures_are_shown_as_pictures(browser: Browser, known: Served) -> None:
    x = 16 * torch.stack([example for example, _ in known.examples])
    y = torch.tensor([int(label) for _, label in known.examples])
    shape = served("it", known.posterior, reference=[(x, y)], layout=(1, 8, 8))
    with service(shape) as running, opened(browser, running.url) as page:
        settled(page)
        told = running.told("/v1/model")
        assert told["picture"] == {"shape": [1, 8, 8], "low": 0, "high": 16}
        assert page.locator("#examples canvas").count() == 10
        assert page.locator("#drop").is_visible()
        assert not page.locator("#values").is_visible()
        data = "document.querySelector('#examples canvas').getContext('2d').getImageData(0, 0, 8, 8).data"
        shade = page.evaluate(f"[...{data}].filter((_, place) => place % 4 == 0)")
        first = torch.tensor(told["examples"][0]["input"])
        assert shade == pytest.approx((255 * first / 16).tolist(), abs=1)


def test_many_classes_show_the_leading_ones(browser: Browser) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 40)
        many = errbar.fit(model, [torch.randn(50, 4)], last_layers=1, structure="kron")
    with service(served("many", many)) as running, opened(browser, running.url) as page:
        settled(page)
        page.get_by_text("Paste an array", exact=True).click()
        page.get_by_label("Values of one input").fill("1 0 0 1")
        page.get_by_role("button", name="Use it").click()
        page.wait_for_timeout(100)
        settled(page)
        truth = many.predict(torch.tensor([[1.0, 0, 0, 1]])).pmf[0]
        assert list(shown(page)) == [str(label) for label in truth.argsort(descending=True)[:12].tolist()]
        assert page.locator("#heat .cell").count() == 144


# ------------------------------------------------------------------------------------------------- what it looks like


def test_the_page_opens_on_the_hardest_example_already_answered(page: Page, known: Served) -> None:
    settled(page)
    x = torch.stack([example for example, _ in known.examples])
    leading = known.posterior.predict(x).pmf.topk(2).values
    hardest = int((leading[:, 0] - leading[:, 1]).argmin())
    truth = known.posterior.predict(x[hardest : hardest + 1])
    require_same(shown(page), truth)
    # Words come first, and hold no number but the name of the class.
    verdict = page.locator("#verdict").inner_text()
    assert re.match(r"(Probably an? \d\.|Perhaps an? \d, perhaps an? \d\.|No digit stands out\.)", verdict)
    assert "%" not in verdict
    order = "document.querySelector('#verdict').compareDocumentPosition(document.querySelector('#verdict-numbers'))"
    assert page.evaluate(order) == 4
    expect(page.locator("#verdict-numbers")).to_contain_text(f"This example is labelled {known.examples[hardest][1]}.")


def said(page: Page, pmf: list[float], lower: float, upper: float, percentile: float | None, **about: Any) -> str:
    """What the rule of words.js says of a prediction."""
    best = pmf.index(max(pmf))
    prediction = {
        "pmf": pmf,
        "confidence": max(pmf),
        "lower": [lower if place == best else 0 for place in range(len(pmf))],
        "upper": [upper if place == best else 1 for place in range(len(pmf))],
        "outlier": None if percentile is None else {"percentile": percentile},
        "risk": about.pop("risk", None),
    }
    rule = (
        "async ([prediction, about]) => (await import('/page/words.js')).words(prediction, about).sentences.join(' ')"
    )
    return str(page.evaluate(rule, [prediction, {"classes": list("0123456789"), "digits": True} | about]))


def test_the_words_follow_from_outlier_score_confidence_and_interval(page: Page) -> None:
    def digit(best: int, confidence: float, second: float = 0.0) -> list[float]:
        rest = (1 - confidence - second) / 8
        return [confidence if place == best else second if place == (best + 1) % 10 else rest for place in range(10)]

    unlike = "looks unlike the digits it was trained on."
    for pmf, lower, upper, percentile, sentence in (
        (digit(8, 0.995), 0.95, 1, 50, "Almost certainly an 8."),
        (digit(3, 0.995), 0.85, 1, 50, "Probably a 3."),
        (digit(3, 0.98), 0.95, 1, 50, "Probably a 3."),
        (digit(3, 0.995), 0.95, 1, 98.9, "Almost certainly a 3."),
        (digit(8, 0.995), 0.95, 1, 99, f"Probably an 8. But this {unlike}"),
        (digit(8, 0.7), 0.2, 0.95, 99, f"Probably an 8. But this {unlike}"),
        (digit(8, 0.7), 0.2, 0.69, 50, "Probably an 8."),
        (digit(8, 0.7), 0.2, 0.95, 50, "Probably an 8. But the model itself is unsure."),
        (digit(8, 0.7), 0.2, 0.95, None, "Probably an 8. But the model itself is unsure."),
        (digit(8, 0.5, 0.4), 0.3, 0.7, 50, "Perhaps an 8, perhaps a 9."),
        (digit(8, 0.5, 0.4), 0.1, 0.9, 50, "Perhaps an 8, perhaps a 9. The model itself is unsure."),
        (digit(0, 0.4, 0.2), 0.3, 0.7, 50, "No digit stands out."),
        (digit(0, 0.2, 0.1), 0.1, 0.3, 79, "No digit stands out."),
        (digit(0, 0.2, 0.1), 0.1, 0.3, 80, f"No digit stands out. This {unlike}"),
    ):
        assert said(page, pmf, lower, upper, percentile) == sentence
    others = {"classes": ["ant", "bee", "2"], "digits": False}
    assert said(page, [0.7, 0.2, 0.1], 0.6, 0.8, 99.5, **others) == (
        "Probably “ant”. But this looks unlike the inputs it was trained on."
    )
    assert said(page, [0.1, 0.45, 0.45], 0.3, 0.6, 5, **others) == "Perhaps “bee”, perhaps class 2."
    danger = {"risk": [0.4, 0.9, 0.6], "marked": [0, 1]}
    assert said(page, [0.7, 0.2, 0.1], 0.6, 0.8, 5, **others, **danger) == (
        "Probably “ant”. Danger: “bee” is more probable than accepted."
    )


def test_numbers_are_written_as_people_write_them(page: Page) -> None:
    write = """async ([name, values, short]) => {
        const found = (await import('/page/numbers.js'))[name];
        return values.map((value) => found(value, { short }));
    }"""
    values = [0, 1e-7, 2e-4, 0.004, 0.5, 0.98765, 0.9995, 0.99999999, 1]
    assert page.evaluate(write, ["percent", values, False]) == [
        "0 %", "less than 0.01 %", "0.02 %", "0.4 %", "50.0 %", "98.8 %", "99.95 %", "more than 99.99 %", "100 %",
    ]  # fmt: skip
    assert page.evaluate(write, ["percent", [1e-7, 1 - 1e-7], True]) == ["< 0.01 %", "> 99.99 %"]
    assert page.evaluate(write, ["whole", [0, 0.001, 0.25, 0.999, 1], False]) == [
        "0 %",
        "< 1 %",
        "25 %",
        "> 99 %",
        "100 %",
    ]
    values = [0, 1e-4, 3.21e-5, -0.5, 123.456, 12345, 1e-9]
    assert page.evaluate(write, ["plain", values, False]) == [
        "0",
        "0.0001",
        "0.0000321",
        "−0.5",
        "123",
        "12300",
        "about 0",
    ]


def test_labels_of_the_axis_stand_over_their_gridlines(browser: Browser, running: Running) -> None:
    middle = (
        "nodes => nodes.map(node => { const box = node.getBoundingClientRect(); return box.left + box.width / 2; })"
    )
    for width in (1320, 800, 390):
        with opened(browser, running.url, viewport={"width": width, "height": 844}) as page:
            settled(page)
            labels = page.locator(".axis i").evaluate_all(middle)
            lines = page.locator("#rows .row >> nth=3").locator(".scale i").evaluate_all(middle)
            shown_labels = [place for place, label in enumerate(page.locator(".axis i").all()) if label.is_visible()]
            assert len(shown_labels) >= 3
            for place in shown_labels:
                assert labels[place] == pytest.approx(lines[place], abs=1)


def test_only_classes_marked_as_dangerous_are_coloured(page: Page) -> None:
    settled(page)
    page.get_by_role("button", name="Example 8, labelled 7").click()
    page.wait_for_timeout(100)
    settled(page)
    risk = page.locator('#rows [data-class="7"] .gauge b')
    colour = "node => getComputedStyle(node).color"
    other = page.locator('#rows [data-class="1"] .gauge b').evaluate(colour)
    assert risk.inner_text().endswith("%")
    assert risk.evaluate(colour) == other
    button = page.get_by_role("button", name="Class 7 is dangerous")
    button.focus()
    page.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "true"
    assert risk.evaluate(colour) != other
    expect(page.locator("#verdict")).to_contain_text("Danger: a 7 is more probable than accepted.")
    page.keyboard.press("Space")
    assert risk.evaluate(colour) == other
    assert "Danger" not in page.locator("#verdict").inner_text()


def test_the_plane_keeps_its_scale(page: Page) -> None:
    settled(page)
    ranges = set()
    for button in page.locator("#examples button").all():
        button.click()
        page.wait_for_timeout(100)
        settled(page)
        ranges.add(page.locator("#plane svg").get_attribute("data-range"))
    assert len(ranges) == 1


def test_digits_drawn_on_the_pad_are_recognised_and_a_dot_or_noise_is_foreign(page: Page, tmp_path: Path) -> None:
    right = 0
    for label, lines in strokes.DIGITS[::3]:
        page.get_by_role("button", name="Clear").click()
        for line in lines:
            draw(page, line)
        right += f" {label}." in page.locator("#verdict").inner_text()
    assert right >= 9
    page.get_by_role("button", name="Clear").click()
    draw(page, strokes.DOT[0])
    expect(page.locator("#verdict")).to_contain_text("looks unlike the digits it was trained on")
    noise = torch.randint(0, 256, (100, 100), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    Image.fromarray(noise.numpy()).save(tmp_path / "noise.png")
    page.locator("#file").set_input_files(tmp_path / "noise.png")
    page.wait_for_timeout(100)
    settled(page)
    expect(page.locator("#verdict")).to_contain_text("looks unlike the digits it was trained on")


def test_on_a_telephone_the_answer_is_above_the_fold_with_the_pad(browser: Browser, running: Running) -> None:
    with opened(browser, running.url, viewport={"width": 390, "height": 844}, has_touch=True) as page:
        settled(page)
        for name in ("#verdict", "#verdict-numbers", "#pad"):
            box = page.locator(name).bounding_box()
            assert box is not None
            assert box["y"] >= 0, name
            assert box["y"] + box["height"] <= 844, name
        before = page.locator("#pad").bounding_box()
        draw(page, SEVEN)
        assert page.locator("#pad").bounding_box() == before


@pytest.mark.parametrize(("width", "scale"), [(1320, 1), (900, 1), (660, 2)])
def test_numbers_stay_in_their_columns_also_at_200_per_cent(
    browser: Browser, running: Running, width: int, scale: int
) -> None:
    viewport = {"width": width, "height": 500}
    with opened(browser, running.url, viewport=viewport, device_scale_factor=scale) as page:
        page.get_by_role("button", name="Example 3, labelled 2").click()
        settled(page)
        assert "<" in "".join(page.locator("#rows .numbers").all_inner_texts())
        wider = "nodes => Math.max(...nodes.map(node => node.scrollWidth - node.clientWidth))"
        assert page.locator("#rows .numbers, #rows .gauge").evaluate_all(wider) <= 1
        assert page.evaluate("document.documentElement.scrollWidth") <= width


# What the labels say that reach into the border of their card.
OUTSIDE = """nodes => nodes.filter(node => {
    const [text, card] = [node, node.closest(".card")].map(one => one.getBoundingClientRect());
    return text.left < card.left + 2 || text.right > card.right - 2;
}).map(node => node.textContent)"""


@pytest.mark.parametrize("width", [360, 768, 1320])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_on_any_screen(browser: Browser, running: Running, width: int, scheme: str) -> None:
    viewport = {"width": width, "height": 800}
    with opened(browser, running.url, viewport=viewport, color_scheme=scheme, has_touch=width < 500) as page:
        page.get_by_role("button", name="Example 3, labelled 2").click()
        settled(page)
        page.get_by_role("button", name="Another view").click()
        page.wait_for_timeout(100)
        settled(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("#fusion text").count() > 6
        assert page.locator(".chart text").evaluate_all(OUTSIDE) == []
        folder = os.environ.get("ERRBAR_SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=str(Path(folder) / f"{width}-{scheme}.png"), full_page=True)
        picture = Image.open(io.BytesIO(page.screenshot())).convert("L")
        ground = picture.getpixel((3, 3))
        assert isinstance(ground, int)
        assert (ground > 200) == (scheme == "light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(browser: Browser, running: Running, scheme: str) -> None:
    with opened(browser, running.url, color_scheme=scheme) as page:
        draw(page, SEVEN)
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
