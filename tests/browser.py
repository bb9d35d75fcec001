"""A headless Chromium for tests: what its pages log, which hosts they ask, and what axe-core finds wrong with them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

MISSING = "needs Chromium: install Debian's package `chromium` (scripts/setup does, as root)"
SERIOUS = ("serious", "critical")
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
SCREENSHOTS = "AUTOTUNER_TEST_SCREENSHOTS"
"""Names the folder that screenshots are kept in."""

PATIENCE_MS = 60_000
AXE = "axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations.map((each) => ({" \
    "id: each.id, impact: each.impact, html: each.nodes.map((node) => node.html.slice(0, 200))})))"  # fmt: skip


def chromium() -> str:
    """Return the path of Chromium, or skip the test."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip(MISSING)
    return found


class Browser:
    """A page of a service, in a browser that notes what goes wrong.

    Args:
        page: of Playwright.
        url: of the service.
        folder: for screenshots.
    """

    def __init__(self, page: Any, url: str, folder: Path) -> None:
        self.page, self.url = page, url
        self.wrong: list[str] = []
        self._folder = Path(os.environ.get(SCREENSHOTS) or folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("request", self._asked)
        page.on("dialog", lambda dialog: dialog.accept())

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(f"{message.type}: {message.text} {message.location}")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.url, "blob:", "data:", "about:")):
            self.wrong.append(f"request to {request.url}")

    def open(self, path: str) -> None:
        """Go to a page by its path behind the #."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}/#{path}")
        self.page.wait_for_selector("h1")

    def keep(self, name: str) -> None:
        """Keep screenshots at every width, in light and dark, and check each for accessibility and for its width."""
        for size, (width, height) in SIZES.items():
            self.page.set_viewport_size({"width": width, "height": height})
            for scheme in ("light", "dark"):
                self.page.emulate_media(color_scheme=scheme)
                self.page.wait_for_timeout(100)
                path = self._folder / f"{name}-{size}-{scheme}.png"
                self.page.screenshot(path=str(path), full_page=True)
                self._check(f"{name}, {size}, {scheme}")
            assert self.page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than {size}"
        width, height = SIZES["desktop"]
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme="light")

    def _check(self, where: str) -> None:
        import axe_playwright_python

        (script,) = Path(axe_playwright_python.__path__[0]).glob("axe.min.js")
        # Evaluated, and so without a script in the page, which its policy would forbid.
        self.page.evaluate(f"{script.read_text()}; 0")
        found = [each for each in self.page.evaluate(AXE) if each["impact"] in SERIOUS]
        assert not found, f"{where}: {found}"


@contextmanager
def browsing(url: str, folder: Path) -> Iterator[Browser]:
    """Yield a browser; nothing may have gone wrong in it by the end."""
    program = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Debian's Chromium has a sandbox that root cannot use; nothing but this service is looked at.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            found = Browser(browser.new_page(), url, folder)
            yield found
            assert not found.wrong, "\n".join(found.wrong)
        finally:
            browser.close()
