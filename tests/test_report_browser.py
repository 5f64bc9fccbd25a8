"""The report in a real browser: no error, no request, and everything that can be clicked does what it says."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ping_llm.report.page import write_report
from report_fixtures import PIPELINE, finished

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM:
        pytest.skip("there is no chromium here; CHROMIUM may name one")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    scores = {"median_re": 0.2, "p90_re": 0.9, "questions": 9}
    evaluation = {"protocols": {name: {"model": scores, "vivaldi": scores} for name in ("unseen_pair", "seen_pair")}}
    run = finished(
        folder / "<script>alert(1)<script>",
        steps=120,
        pipeline=PIPELINE,
        evaluation=evaluation,
        network_train_files="<img src=x onerror=alert(2)>",
    )
    return write_report([run], folder / "page.html")


@pytest.fixture
def page(browser: Any, report: Path) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page = context.new_page()
    trouble: list[str] = []
    page.on("console", lambda message: trouble.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
    page.on("dialog", lambda dialog: trouble.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: trouble.append(request.url) if request.url != report.as_uri() else None)
    page.goto(report.as_uri())
    yield page
    assert trouble == []
    context.close()


def test_the_theme_follows_the_system_until_it_is_chosen(page: Any) -> None:
    def background() -> str:
        return page.evaluate("getComputedStyle(document.documentElement).backgroundColor")

    light = background()
    page.get_by_role("button", name="Switch to dark colours").click()
    dark = background()
    assert dark != light
    page.emulate_media(color_scheme="dark")
    page.get_by_role("button", name="Switch to light colours").click()
    assert background() == light


def test_a_chart_has_a_table_a_tooltip_and_other_scales(page: Any) -> None:
    chart = page.locator("figure.chart").first
    assert not chart.locator("table").first.is_visible()
    chart.get_by_text("Data", exact=True).click()
    assert chart.locator("table").first.is_visible()
    plot = chart.locator(".plot")
    plot.focus()
    page.keyboard.press("End")
    assert "step 120" in chart.locator(".tip").inner_text()
    page.keyboard.press("Escape")
    assert not chart.locator(".tip").is_visible()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 30, box["y"] + 20)
    assert "step 120" in chart.locator(".tip").inner_text(), "the nearest step"
    page.mouse.move(0, 0)
    drawn = {pictures(page)[0]}
    for scale in ("log", "log–log"):
        chart.get_by_role("button", name=scale, exact=True).click()
        assert chart.locator("[aria-pressed=true]").inner_text() == scale
        drawn.add(pictures(page)[0])
    assert len(drawn) == 3, "each scale is another picture"


def pictures(page: Any) -> list[str]:
    return page.evaluate("() => [...document.querySelectorAll('canvas')].map((canvas) => canvas.toDataURL())")


def test_every_chart_is_drawn_in_the_colours_of_the_theme(page: Any) -> None:
    light = pictures(page)
    assert len(light) == page.locator("figure.chart").count()
    page.get_by_role("button", name="Switch to dark colours").click()
    assert not set(light) & set(pictures(page))


def test_tabs_are_moved_through_by_keys(page: Any) -> None:
    first, second = page.get_by_role("tab", name="Unseen pairs"), page.get_by_role("tab", name="Seen pairs", exact=True)
    assert page.get_by_role("tabpanel", name="Unseen pairs").is_visible()
    first.focus()
    page.keyboard.press("ArrowRight")
    assert second.get_attribute("aria-selected") == "true"
    assert not page.get_by_role("tabpanel", name="Unseen pairs", include_hidden=True).is_visible()


def test_keys_of_the_configuration_can_be_searched(page: Any) -> None:
    page.locator("#configuration summary").click()
    rows = page.locator("#configuration details tbody tr:visible")
    every = rows.count()
    page.get_by_role("searchbox").fill("adam weight")
    assert 0 < rows.count() < every
    assert "adam_weight_decay" in rows.first.inner_text()


def test_nothing_is_wider_than_a_phone(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_all_panels_are_printed(page: Any) -> None:
    page.emulate_media(media="print")
    assert page.get_by_role("tabpanel", include_hidden=True).last.is_visible()
