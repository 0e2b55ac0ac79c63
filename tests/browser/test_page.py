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
        self.made.set_default_timeout(8000)
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
    expect(page.locator("html")).to_have_attribute("data-state", state, timeout=8000)


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
    found = re.search(r"(< )?([\d.]+) ?%", text)
    assert found is not None, text
    return 0.0005 if found[1] else float(found[2]) / 100


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
    settled(page, "empty")
    draw(page, THREE)
    truth, x = expected(known, page)
    require_same(shown(page), truth)
    best = int(truth.label)
    lower, upper = (part[0, best].item() for part in truth.interval(0.95))
    verdict = page.locator("#verdict").inner_text()
    numbers = [float(number) / 100 for number in re.findall(r"([\d.]+) %", verdict)]
    assert verdict.startswith(str(best))
    assert numbers == pytest.approx([float(truth.confidence), 0.95, lower, upper], abs=0.0006)
    assert page.locator("#plane ellipse").count() == 2
    assert page.locator("#plane .dot-a, #plane .dot-b").count() == 200
    assert page.locator("#heat .cell").count() == 100
    told = known.outlier(known.posterior.predict(x).mutual_information.item())
    assert told is not None
    percentile = float(re.findall(r"about ([\d.]+) %", page.locator("#outlier-note").inner_text())[0])
    assert percentile == pytest.approx(told["percentile"], abs=0.2)


def test_the_heat_map_tells_its_cells_by_keyboard(page: Page, known: Served) -> None:
    draw(page, SEVEN)
    truth, _ = expected(known, page)
    page.locator("#heat svg").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    words = page.locator("#heat-note").inner_text()
    assert words.startswith("Var f(1) = ")
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
    for _ in range(60):
        keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('aria-label')"))
    wanted = {"clear", "file", "temperature", "scale", "theme", "Threshold γ of class 0", "Threshold γ of class 9"}
    assert wanted <= reached
    assert any(str(name).startswith("Example 1,") for name in reached)


def test_an_example_and_a_pasted_array(page: Page, known: Served) -> None:
    page.get_by_role("button", name="Example 5, labelled 4").click()
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


def test_mistakes_are_told_on_the_page(browser: Browser, running: Running, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("no picture")
    with opened(browser, running.url, errors=True) as page:
        settled(page, "empty")
        page.locator("#file").set_input_files(tmp_path / "words.txt")
        expect(page.locator("#message")).to_contain_text("words.txt is not a picture")
        page.get_by_text("Paste an array", exact=True).click()
        page.get_by_label("Values of one input").fill("1 2 x")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#message")).to_contain_text("expected finite numbers separated by commas or spaces")
        page.get_by_label("Values of one input").fill("1 2 3")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#message")).to_contain_text("has 3 numbers; this model takes 64")
        page.get_by_label("Values of one input").fill(" ".join(["1e300"] * 64))
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#message")).to_contain_text("NaN or infinite")
        draw(page, THREE)
        expect(page.locator("#message")).to_be_empty()


def test_a_service_that_is_gone_is_told(browser: Browser, known: Served) -> None:
    with service(known) as running:
        page_of = opened(browser, running.url, errors=True)
        page = page_of.__enter__()
        settled(page, "empty")
    page.get_by_role("button", name="Example 1, labelled 0").click()
    expect(page.locator("#message")).to_contain_text("The service does not answer")
    page_of.__exit__(None)


def test_a_token_is_asked_for(browser: Browser) -> None:
    with service(member(), token="a-long-token") as running, opened(browser, running.url, errors=True) as page:
        settled(page, "token")
        page.get_by_role("textbox", name="Token").fill("a-long-tokeN")
        page.get_by_role("button", name="Continue").click()
        page.wait_for_timeout(200)
        settled(page, "token")
        page.get_by_role("textbox", name="Token").fill("a-long-token")
        page.get_by_role("button", name="Continue").click()
        settled(page, "empty")


def test_a_busy_service_is_asked_again(browser: Browser, running: Running, known: Served) -> None:
    refusals = []

    def sometimes(route: Any) -> None:
        if refusals:
            route.continue_()
        else:
            refusals.append(1)
            route.fulfill(status=429, headers={"retry-after": "1"}, json={"error": "Full.", "kind": "TooManyRequests"})

    with opened(browser, running.url, errors=True) as page:
        page.route("**/v1/predict", sometimes)
        page.get_by_role("button", name="Example 2, labelled 1").click()
        settled(page)
        require_same(shown(page), known.posterior.predict(known.examples[1][0][None]))
    assert refusals


def test_another_model_shows_its_classes_and_takes_arrays(browser: Browser) -> None:
    tiny = member(reference=False)
    with service(tiny) as running, opened(browser, running.url) as page:
        settled(page, "empty")
        expect(page.locator("#outlier-note")).to_contain_text("--reference")
        page.get_by_text("Paste an array", exact=True).click()
        page.get_by_label("Values of one input").fill("[1, 0.5, -1, 2]")
        page.get_by_role("button", name="Use it").click()
        settled(page)
        truth = tiny.posterior.predict(torch.tensor([[1, 0.5, -1, 2]]))
        found = shown(page)
        assert list(found) == list(serving.CLASSES)
        assert [row[0] for row in found.values()] == pytest.approx(truth.pmf[0].tolist(), abs=0.0006)


def test_many_classes_show_the_leading_ones(browser: Browser) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 40)
        many = errbar.fit(model, [torch.randn(50, 4)], last_layers=1, structure="kron")
    with service(served("many", many)) as running, opened(browser, running.url) as page:
        page.get_by_text("Paste an array", exact=True).click()
        page.get_by_label("Values of one input").fill("1 0 0 1")
        page.get_by_role("button", name="Use it").click()
        settled(page)
        truth = many.predict(torch.tensor([[1.0, 0, 0, 1]])).pmf[0]
        assert list(shown(page)) == [str(label) for label in truth.argsort(descending=True)[:12].tolist()]
        assert page.locator("#heat .cell").count() == 144


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
