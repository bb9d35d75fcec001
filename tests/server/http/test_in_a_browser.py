"""The pages in a headless Chromium, against a service that runs and a worker that measures on this processor.

Screenshots are kept in the folder that AUTOTUNER_TEST_SCREENSHOTS names, else in a temporary one.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from autotuner.database import Database, open_database
from tests.browser import Browser, browsing, chromium
from tests.made_up import FEED_FORWARD, without_compilers
from tests.server.http.listening import listening, wait_until

pytestmark = pytest.mark.slow

LIMIT_S = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Database]:
    chromium()
    with open_database(folder / "pages.sqlite") as database:
        yield database


@pytest.fixture(scope="module")
def url(served: Database) -> Iterator[str]:
    with listening(served) as server:
        yield server.url


@pytest.fixture
def browser(url: str, folder: Path) -> Iterator[Browser]:
    with browsing(url, folder / "screenshots") as found:
        yield found


def of_torch(folder: Path) -> Path:
    """Write the CPU's search space with torch's kernels alone, which need no compiler, and return its path."""
    path = without_compilers(folder)
    space = yaml.safe_load(path.read_text())
    space["kernels"] = {name: entry for name, entry in space["kernels"].items() if name.startswith("torch")}
    path.write_text(yaml.safe_dump(space))
    return path


@pytest.fixture(scope="module")
def worker(served: Database, folder: Path) -> Iterator[None]:
    """A worker in a process of its own."""
    command = [
        sys.executable, "-m", "autotuner.cli", "worker", "--database", str(folder / "pages.sqlite"),
        "--space", str(of_torch(folder)), "--threads", "1",
    ]  # fmt: skip
    with (folder / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            wait_until(lambda: bool(served.queue.workers()) or process.poll() is not None)
            assert process.poll() is None, (folder / "worker.log").read_text()
            yield
        finally:
            process.terminate()
            process.wait(60)


def paste(browser: Browser, *, features: int) -> None:
    """Submit a model file in the form, of so many features, since a request that has an answer makes no second one."""
    page = browser.page
    browser.open("/submit")
    page.get_by_label("A model file").check()
    page.get_by_label("Content of the model file").fill(FEED_FORWARD.replace("f: 12", f"f: {features}"))
    page.get_by_label("Preset of the file").fill("small")
    page.get_by_label("Gap, in percent").fill("100")
    page.get_by_label("time the plan end to end").uncheck()
    page.get_by_role("button", name="Submit the job").click()
    page.wait_for_selector("h1:has-text('feed-forward:small')")


def finish(browser: Browser) -> None:
    """Watch a job until it is finished, and open its plan."""
    page = browser.page
    page.wait_for_selector(".title .badge.finished", timeout=120_000)
    page.get_by_role("link", name="Open the plan").click()
    page.wait_for_selector("h1:has-text('Plan')")
    page.wait_for_selector(".graph .box")


@pytest.mark.timeout(LIMIT_S)
def test_a_job_is_submitted_from_a_preset_waits_and_is_cancelled(browser: Browser, served: Database) -> None:
    page = browser.page
    browser.open("/jobs")
    page.get_by_role("link", name="Submit a job").click()
    page.get_by_label("Model", exact=True).select_option("bert-encoder")
    page.get_by_label("Preset").first.select_option("tiny")
    page.get_by_label("l: position in the sequence").fill("32")
    browser.keep("submit")
    page.get_by_role("button", name="Submit the job").click()
    page.wait_for_selector("h1:has-text('bert-encoder:tiny')")
    assert "It waits for a worker." in page.inner_text("main")
    (job,) = served.queue.jobs()
    assert job.summary is not None
    assert job.summary["extents"]["l"] == 32
    browser.open("/fleet")
    assert "No worker is there for the device" in page.inner_text("main")
    browser.open(f"/jobs/{job.id}")
    page.get_by_role("button", name="Cancel the job").click()
    page.wait_for_selector(".title .badge.cancelled")
    browser.keep("cancelled")


@pytest.mark.timeout(LIMIT_S)
def test_what_is_not_valid_is_said_beside_the_form(url: str, folder: Path) -> None:
    with browsing(url, folder / "screenshots") as browser:
        page = browser.page
        browser.open("/submit")
        page.get_by_label("A model file").check()
        page.get_by_label("Content of the model file").fill("version: 1\nname: half")
        page.get_by_role("button", name="Submit the job").click()
        assert "it is missing" in page.wait_for_selector("form [role=alert]").inner_text()
        browser.wrong = [each for each in browser.wrong if "422" not in each]  # Chromium logs each refusal


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.usefixtures("worker")
def test_from_a_model_file_to_its_plan_its_candidates_and_a_comparison(browser: Browser) -> None:
    page = browser.page
    paste(browser, features=12)
    page.wait_for_selector(".title .badge.running, .title .badge.finished")
    browser.open("/fleet")
    page.wait_for_selector("text=Workers")
    browser.keep("fleet")
    browser.open("/jobs")
    page.get_by_role("link", name="feed-forward:small").first.click()
    finish(browser)
    _look_at_a_plan(browser)
    paste(browser, features=16)
    finish(browser)
    _compare(browser)


def _look_at_a_plan(browser: Browser) -> None:
    page = browser.page
    page.wait_for_selector("text=What did the choice of layouts win?")
    page.get_by_label("Search").fill("grad_weight1")
    assert page.locator(".box.hit").count() >= 1  # the operator, and perhaps conversions of what it makes
    assert page.locator(".box.dim").count() > page.locator(".box.hit").count()
    page.get_by_label("Search").fill("")
    page.get_by_role("button", name="Show all of it").click()
    page.locator(".box", has_text="product1").first.click()
    page.wait_for_selector(".panel canvas")
    said = page.inner_text(".panel")
    assert "Operator product1" in said
    assert "candidates have a time" in said
    assert page.locator(".panel table").last.locator(".badge", has_text="chosen").count() == 1
    page.wait_for_selector("text=In multiples of the best")
    browser.keep("plan")
    page.locator(".box.current").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(".panel[aria-busy]", state="detached")
    assert "Operator product1" not in page.inner_text(".panel h2")


def _compare(browser: Browser) -> None:
    page = browser.page
    browser.open("/configurations")
    page.get_by_label("Search").fill("nothing is named so")
    page.wait_for_selector("text=Nothing fits this search.")
    page.get_by_label("Search").fill("feed float32")
    page.wait_for_selector("th a")
    browser.keep("configurations")
    boxes = page.get_by_role("checkbox").all()
    assert len(boxes) == 2
    for box in boxes:
        box.check()
    page.get_by_role("button", name="Compare").click()
    page.wait_for_selector("text=Part by part")
    assert "product1" in page.inner_text("main")
    browser.keep("compare")


@pytest.mark.timeout(LIMIT_S)
def test_a_service_with_tokens_asks_for_one_and_an_admin_makes_another(tmp_path: Path) -> None:
    chromium()
    with open_database(tmp_path / "tokens.sqlite") as database:
        secret = database.tokens.create("ada", "admin")[1]
        with listening(database, local=False) as server, browsing(server.url, tmp_path / "screenshots") as browser:
            page = browser.page
            browser.open("/tokens")
            assert "A token is needed" in page.inner_text("main")
            page.get_by_role("button", name="Give a token").click()
            page.locator("#token").fill(secret)
            page.get_by_role("button", name="Use it").click()
            page.wait_for_selector("h1:has-text('Tokens')")
            page.get_by_label("Name").fill("ci")
            page.get_by_role("button", name="Make a token").click()
            made = page.get_by_label("The new token").input_value()
            assert database.tokens.find(made) is not None
            browser.keep("tokens")
            page.get_by_role("button", name="Revoke token 2").click()
            page.wait_for_selector(".badge:has-text('revoked')")
            browser.wrong = [each for each in browser.wrong if "401" not in each]
