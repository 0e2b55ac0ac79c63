"""The report in a real browser: accessible, without scripts and requests, and no wider than a telephone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser
from torch import nn

import errbar
from errbar import report
from networks import trained

pytestmark = pytest.mark.browser

SIZES = {"desktop": (1200, 900), "telephone": (360, 740)}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A report with all of its parts, about small pictures."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(200, 1, 6, 6, generator=generator), torch.arange(200) % 4
    for number in range(4):
        x[y == number, :, number] += 0.4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, 4))
    trained(model, x[:100], y[:100], steps=60, lr=0.02)
    posterior = errbar.fit(model, [(x[:100], y[:100])], last_layers=2)
    posterior = posterior.with_calibration(temperature=1.2, covariance_scale=0.5)
    foreign = [torch.rand(50, 1, 6, 6, generator=generator) * 3]
    names = ("a class with a rather long name", "bee", "<b>bold</b>", "cat & dog")
    found = report.assess(posterior, [(x[100:], y[100:])], outliers=foreign, classes=names)
    path: Path = tmp_path_factory.mktemp("report") / "report.html"
    report.write(found, path)
    return path.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_report_is_accessible_and_fits(size: str, scheme: str, address: str, browser: Browser) -> None:
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    requests: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.goto(address)
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    assert said == []
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    context.close()


def test_the_report_prints_on_few_pages(address: str, browser: Browser) -> None:
    page = browser.new_page()
    page.goto(address)
    data = page.pdf(prefer_css_page_size=True)
    assert data.startswith(b"%PDF")
    assert 3 <= data.count(b"/Type /Page\n") <= 10
    page.close()
