"""The Monitor tab of the page: only there with a monitor, in words first, and as the monitor itself tells it."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Request, expect
from test_page import opened, settled

from errbar.serve.monitoring import monitor_for
from serving import Running, member, service

pytestmark = pytest.mark.browser


def inputs(count: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (count,), generator=generator)
    return torch.randn(count, 4, generator=generator) + 1.5 * torch.eye(3, 4)[y] + shift


def ask_for(running: Running, x: torch.Tensor) -> list[str]:
    found: list[str] = []
    for part in x.split(60):
        found += [one["id"] for one in running.told("/v1/predict", {"inputs": part.tolist()})["predictions"]]
    return found


@pytest.fixture
def running() -> Iterator[Running]:
    first = member()
    with service(first, monitor=monitor_for(first, [inputs(300, 1)], "held.npz", None)) as made:
        yield made


def test_without_a_monitor_there_is_no_tab(browser: Browser) -> None:
    with service(member()) as plain, opened(browser, plain.url) as page:
        page.evaluate("location.hash = 'monitor'")
        page.reload()
        settled(page)
        expect(page.locator("#prediction")).to_be_visible()
        assert page.get_by_role("tab").count() == 0
        assert not page.locator("#monitor").is_visible()


def test_it_says_what_the_monitor_says_of_other_clients(browser: Browser, running: Running) -> None:
    sent: list[Any] = []

    def note(request: Request) -> None:
        if request.url.endswith("/v1/predict"):
            sent.append(request.post_data_json["monitor"])

    with opened(browser, running.url) as page:
        page.on("request", note)
        page.reload()
        settled(page)
        expect(page.locator("#monitor")).to_be_hidden()
        page.get_by_role("button", name="Example 3,").click()
        settled(page)
        page.wait_for_timeout(100)
        settled(page)
        page.get_by_role("tab", name="Monitor").click()
        verdict = page.locator("#monitor-verdict")
        expect(verdict).to_have_text("No answers yet.")
        expect(page.locator("#monitor-inputs")).to_have_text("No answers yet.")
        told = running.told("/v1/monitor")
        # What was tried on the page is left out: the opening, all examples at once, and what was chosen.
        assert len(sent) >= 3
        assert not any(sent)
        assert (told["inputs"], told["skipped"] >= 12) == (0, True)
        names = ask_for(running, inputs(120, 2))
        expect(verdict).to_have_text("No sign of change in 120 answers.")
        expect(page.locator("#monitor-detail")).to_contain_text("No labels have come")
        assert page.locator("#monitor-alarms-card").is_hidden()
        running.told("/v1/labels", [{"id": names[0], "label": 1}])
        expect(verdict).to_have_text("No sign of change in 120 answers and 1 label.")
        agreement = running.told("/v1/monitor")["agreement"]
        gap = f"a gap of {100 * agreement['gap']:.1f} points".replace("-", "−")
        expect(page.locator("#monitor-detail")).to_contain_text(gap)
        ask_for(running, inputs(240, 4, shift=6.0))
        expect(page.locator("#monitor")).to_have_attribute("data-state", "alarm")
        told = running.told("/v1/monitor")
        alarm = told["alarms"][0]
        expect(verdict).to_have_text(
            f"Alarm: the inputs differ from the reference since about answer {alarm['since']}."
        )
        expect(page.locator("#monitor-alarms li")).to_have_count(len(told["alarms"]))
        expect(page.locator("#monitor-alarms li").first).to_contain_text(f"Noticed at answer {alarm['at']} (")
        assert page.locator("#monitor-inputs circle.alarm").count() == len(told["alarms"])
        assert page.locator("#monitor-inputs path.limit").count() == 1
        expect(page.locator("#monitor-inputs .began + text")).to_have_text(f"changed since about {alarm['since']}")
        assert page.locator("#monitor-inputs path.evidence").count() == 3
        expect(page.locator("#monitor-facts dd").first).to_have_text("360")
        for _ in ("light", "dark"):
            found = Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
            page.locator("#theme").click()


def test_it_is_asked_only_while_it_is_seen_and_says_what_goes_wrong(browser: Browser, running: Running) -> None:
    asked: list[str] = []
    refuses = [False]

    def count(route: Any) -> None:
        asked.append(route.request.url)
        if refuses[0]:
            route.fulfill(status=500, json={"error": "Refused, in words.", "kind": "Refused"})
        else:
            route.continue_()

    with opened(browser, running.url, errors=True) as page:
        page.route("**/v1/monitor", count)
        settled(page)
        ask_for(running, inputs(60, 2))
        page.wait_for_timeout(500)
        assert asked == []
        page.get_by_role("tab", name="Monitor").click()
        expect(page.locator("#monitor-verdict")).to_have_text("No sign of change in 60 answers.")
        refuses[0] = True
        expect(page.locator("#monitor-message")).to_have_text("Refused, in words.")
        expect(page.locator("#monitor-verdict")).to_have_text("No answer.")
        assert page.locator("#monitor-inputs svg, #monitor-facts dd").count() == 0
        refuses[0] = False
        expect(page.locator("#monitor-verdict")).to_have_text("No sign of change in 60 answers.")
        expect(page.locator("#monitor-message")).to_be_empty()
        page.get_by_role("tab", name="Prediction").click()
        before = len(asked)
        page.wait_for_timeout(3500)
        assert len(asked) == before


def test_the_tabs_are_chosen_with_the_keyboard_and_kept_over_a_reload(browser: Browser, running: Running) -> None:
    with opened(browser, running.url, viewport={"width": 390, "height": 844}) as page:
        settled(page)
        for _ in range(3):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == "prediction-tab":
                break
        keys = {"ArrowRight": "monitor", "Home": "prediction", "End": "monitor", "ArrowLeft": "prediction"}
        for key, shown in [*keys.items(), ("ArrowLeft", "monitor"), ("ArrowRight", "prediction"), ("End", "monitor")]:
            page.keyboard.press(key)
            assert page.evaluate("document.activeElement.id") == f"{shown}-tab"
            assert page.locator("[role=tabpanel]:visible").get_attribute("id") == shown
            assert page.locator('[role=tab][aria-selected="true"]').get_attribute("id") == f"{shown}-tab"
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "monitor"
        page.reload()
        expect(page.locator("#monitor-verdict")).to_have_text("No answers yet.")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def said(page: Page, **changes: Any) -> str:
    """What the rule of monitor_words.js says."""
    tests = [("entropy", "inputs"), ("classes", "inputs"), ("overconfidence", "labels")]
    evidence = changes.pop("evidence", {})
    told = {
        "inputs": 1240, "labels": 0, "reference_inputs": 300, "alarms": [],
        "tests": [{"name": name, "kind": kind, "evidence": evidence.get(name, 0.01)} for name, kind in tests],
        "agreement": {"labels": 0},
    } | changes  # fmt: skip
    rule = """async (told) => {
        const words = (await import('/page/monitor_words.js')).monitorWords(told, { classes: ['ant', 'bee', 'cat'] });
        return [...words.sentences, ...words.alarms].join(' | ');
    }"""
    return str(page.evaluate(rule, told))


def test_the_words_follow_from_the_answer(browser: Browser, running: Running) -> None:
    def alarm(test: str, side: str, since: int, time: float | None = None) -> dict[str, Any]:
        return {"test": test, "side": side, "since": since, "at": since + 49, "time": time, "since_time": None}

    more = alarm("classes", "more of class 1", 812)
    surer = alarm("overconfidence", "confidence above accuracy", 1900)
    higher = alarm("entropy", "higher", 12, datetime.datetime(2026, 5, 3, 12).timestamp())
    with opened(browser, running.url) as page:
        settled(page)
        assert said(page) == "No sign of change in 1,240 answers."
        assert said(page, inputs=1, labels=2) == "No sign of change in 1 answer and 2 labels."
        assert said(page, inputs=0) == "No answers yet."
        assert said(page, evidence={"entropy": 0.0999}) == "No sign of change in 1,240 answers."
        assert said(page, evidence={"entropy": 0.1}) == (
            "No sign of change in 1,240 answers. | But an alarm is near: doubt about the class."
        )
        assert said(page, alarms=[more]) == (
            "Alarm: the inputs differ from the reference since about answer 812. | "
            "More answers are “bee” than in the reference, since about answer 812. Noticed at answer 861."
        )
        assert said(page, alarms=[surer]) == (
            "Alarm: the labels differ from the predictions since about answer 1,900. | "
            "The model is surer than it is right, since about answer 1,900. Noticed at answer 1,949."
        )
        both = said(page, alarms=[surer, more, higher])
        assert both.startswith(
            "Alarm: the inputs differ from the reference since about answer 812, "
            "and the labels differ from the predictions since about answer 1,900. | "
        )
        assert re.search(
            r"The doubt about the class is higher than in the reference, since about answer 12\. "
            r"Noticed at answer 61 \(3 May 2026,? (at )?12:00\)\.$",
            both,
        )
