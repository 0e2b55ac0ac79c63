"""One browser for all tests that need one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
OPTIONS += ["--disable-component-update", "--disable-sync"]


def chromium() -> str:
    found = os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(
            "There is no chromium; the tests of the page need one. On Debian and Ubuntu: apt-get install chromium. "
            "Elsewhere install Chrome, or set CHROMIUM to the program.",
            pytrace=False,
        )
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = chromium()
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=OPTIONS)
        yield launched
        launched.close()
