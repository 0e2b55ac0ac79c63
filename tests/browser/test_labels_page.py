"""The page of a service with several labels: a row for each, and no word of one class."""

from __future__ import annotations

import pytest
import torch
from playwright.sync_api import Browser, expect

import errbar
import serving
from errbar.serve.service import served

pytestmark = pytest.mark.browser

NAMES = ("red", "round", "ripe")


def test_the_page_shows_each_label_with_its_own_bar(browser: Browser) -> None:
    x, classes = serving.data()
    y = torch.nn.functional.one_hot(classes, 3)
    y[:, 2] = 1 - y[:, 0]
    posterior = errbar.fit(serving.network(), [(x, y)], last_layers=1, outputs="labels")
    member = served("tiny", posterior, classes=NAMES, reference=[(x, y)], about="Several labels.")
    expected = posterior.predict(x[:1])
    with serving.service(member) as running:
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(running.url)
        expect(page.locator("html")).to_have_attribute("data-state", "ready")
        # The first input, pasted.
        if page.locator("#array").is_hidden():
            page.locator("summary").click()
        page.locator("#array").fill(str(x[0].tolist()))
        page.locator("#use-array").click()
        expect(page.locator("html")).to_have_attribute("data-state", "ready")
        for name, f in zip(NAMES, expected.pmf[0].tolist(), strict=True):
            expect(page.locator(f'[data-class="{name}"] .numbers')).to_contain_text(f"{100 * f:.1f} %")
        likely = [name for name, f in zip(NAMES, expected.pmf[0], strict=True) if f > 0.5]
        expect(page.locator("#verdict")).to_contain_text(f"“{likely[0]}”" if likely else "No label")
        assert "class" not in page.locator("main").inner_text().lower()
        assert not page.locator("#plane").is_visible()
        assert errors == []
        page.close()
