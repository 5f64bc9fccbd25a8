"""The page in a real browser: predictions, mistakes, the inverse question, ranking, upload, phones, dark, keyboard."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="ping-llm serve needs the extra `serve`")
pytest.importorskip("playwright", reason="Playwright for Python is not installed")

from playwright.sync_api import Browser, Page, expect, sync_playwright

from serving_fixtures import DESTINATION, OTHER, PLACES, SOURCE, csv, listening, some_store

CHROMIUM = Path("/usr/bin/chromium")
TOKEN = "correct-horse-battery-staple"

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="Debian's chromium is not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with listening(store=some_store(), places=PLACES) as (host, port):
        yield f"http://{host}:{port}"


@pytest.fixture(scope="module")
def bare() -> Iterator[str]:
    with listening() as (host, port):
        yield f"http://{host}:{port}"


COMPARED = f"#predict?src={SOURCE}&dst={DESTINATION}&dst2={OTHER}"


class Visit:
    """A page of which everything is noted that should not happen."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requested: list[str] = []
        self.faults: list[str] = []
        page.on("request", lambda request: self.requested.append(request.url))
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", lambda message: self.faults.append(message.text) if message.type == "error" else None)
        page.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(15_000)
    visit = Visit(page)
    yield visit
    page.close()
    unexpected = [fault for fault in visit.faults if "Failed to load resource" not in fault]
    assert not unexpected


def pair(source: str = SOURCE, destination: str = DESTINATION) -> str:
    return f"#predict?src={source}&dst={destination}"


def test_the_page_loads_offers_pairs_and_asks_nobody_else(visit: Visit, address: str) -> None:
    visit.page.goto(address)
    expect(visit.page.get_by_role("heading", name="How long would a ping take?")).to_be_visible()
    expect(visit.page.locator("#model")).to_contain_text("20 measurements")
    visit.page.get_by_role("link", name=re.compile(f"{SOURCE}.*{DESTINATION}")).click()
    expect(visit.page.locator(".headline")).to_contain_text("ms")
    expect(visit.page.locator(".support")).to_contain_text("Known: 10 measurements of this pair")
    visit.page.goto(f"{address}/{pair(DESTINATION, SOURCE)}")
    expect(visit.page.get_by_text("Only in the other direction.")).to_be_visible()
    visit.page.goto(f"{address}/{pair(destination='198.51.100.99')}")
    expect(visit.page.locator(".support")).to_contain_text("Extrapolated: the destination was never measured.")
    assert all(url.startswith(address) for url in visit.requested)


def test_a_pair_is_searched_for_by_keyboard_and_predicted(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(address)
    source = page.get_by_role("combobox", name="Source")
    source.fill("192.0")
    expect(page.get_by_role("option", name=SOURCE)).to_be_visible()
    source.press("ArrowDown")
    source.press("Enter")
    expect(source).to_have_value(SOURCE)
    destination = page.get_by_role("combobox", name="Destination")
    destination.press_sequentially(OTHER)
    destination.press("Escape")
    destination.press("Enter")
    expect(page.locator(".headline dd").first).to_contain_text("ms")
    expect(page.get_by_text("Measured before")).to_be_visible()
    assert f"src={SOURCE}" in page.url
    assert f"dst={OTHER}" in page.url


def test_a_shared_address_shows_the_same_and_the_chart_has_a_table_and_a_tip(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(f"{address}/{pair()}")
    chart = page.locator(".density-figure")
    plot = chart.locator(".plot")
    plot.hover()
    expect(chart.get_by_role("status")).to_contain_text("of the answers")
    page.mouse.move(0, 0)
    plot.focus()
    plot.press("ArrowRight")
    expect(chart.get_by_role("status")).to_contain_text("not longer")
    chart.get_by_role("button", name="Table").click()
    expect(chart.get_by_role("columnheader", name="probability")).to_be_visible()
    assert chart.get_by_role("row").count() > 50


def test_the_slider_moves_the_prediction(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(f"{address}/{pair()}")
    slider = page.get_by_role("slider")
    slider.focus()
    slider.press("Home")
    expect(page.locator("output")).to_contain_text("no measurement at all")
    without = page.locator("output strong").inner_text()
    slider.press("ArrowRight")
    expect(page.locator("output")).to_contain_text("most informative measurement")
    assert page.locator("output strong").inner_text() != without
    expect(page.locator(".density-figure .note")).to_contain_text("most informative")


def test_a_bad_address_is_named_at_its_field(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(address)
    page.get_by_role("combobox", name="Source").fill("192.0.2.999")
    page.get_by_role("combobox", name="Destination").fill(DESTINATION)
    page.get_by_role("button", name="Predict").click()
    expect(page.get_by_text("“192.0.2.999” is neither an address nor a name.")).to_be_visible()
    expect(page.get_by_role("combobox", name="Source")).to_be_focused()
    assert not [url for url in visit.requested if "/predict" in url.replace("predict.js", "")]


def test_two_families_are_refused_by_the_server_in_words(visit: Visit, address: str) -> None:
    visit.page.goto(f"{address}/{pair(SOURCE, '2001:db8::1')}")
    expect(visit.page.get_by_role("alert").filter(has_text="not of one family")).to_be_visible()


@pytest.mark.parametrize("text", ["<img src=x onerror=alert(1)>", '"><script>alert(1)</script>', "javascript:alert(1)"])
def test_markup_in_an_address_is_shown_as_text(visit: Visit, address: str, text: str) -> None:
    page = visit.page
    page.goto(address)
    page.evaluate(
        "text => { location.hash = `predict?src=${encodeURIComponent(text)}&dst=${encodeURIComponent(text)}` }", text
    )
    expect(page.locator(".results > *").first).to_be_visible()
    expect(page.get_by_role("combobox", name="Source")).to_have_value(text)
    assert page.locator("main img, main script").count() == 0


def test_the_inverse_question_leads_to_predictions(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(f"{address}/#find?src={SOURCE}&rtt=20")
    chart = page.locator(".find-figure")
    expect(chart).to_contain_text("Destinations at about 20.0 ms")
    chart.get_by_role("link", name=OTHER).click()
    expect(page.locator(".headline")).to_be_visible()
    assert f"dst={OTHER}" in page.url


def test_destinations_are_ranked(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(f"{address}/#rank?src={SOURCE}")
    chart = page.locator(".rank-figure")
    expect(chart).to_contain_text("2 destinations")
    expect(chart.get_by_role("row")).to_have_count(3)
    bars = [bar.bounding_box() for bar in chart.locator("tbody .range.inner").all()]
    assert all(bar and bar["width"] > 5 for bar in bars), "intervals are drawn"


def test_a_cell_of_the_matrix_says_what_it_is_and_opens_its_pair(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(f"{address}/#matrix")
    cells = page.locator(".heat td a")
    expect(cells).to_have_count(2)
    expect(cells.nth(1)).to_have_text("30")
    cells.nth(1).hover()
    expect(page.locator(".matrix-figure output")).to_contain_text("measured 30.0 ms, 10 times; predicted")
    page.get_by_label("Show", exact=True).select_option("predicted")
    expect(cells.nth(1)).to_have_text("10")  # what the stand-in for a model says of all destinations of a source
    cells.nth(1).click()
    expect(page.locator(".headline")).to_be_visible()
    assert f"dst={OTHER}" in page.url


def test_the_map_shows_the_places_that_are_known(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(f"{address}/#matrix")
    expect(page.locator(".map circle")).to_have_count(2)
    page.locator(".map a").focus()
    expect(page.locator(".map-figure output")).to_contain_text("Here → There: measured 10.0 ms")
    expect(page.locator(".heat thead")).to_contain_text("There")


def test_a_range_of_time_is_shown_alone(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(f"{address}/#matrix")
    page.get_by_label("Measured from (optional)").fill("2023-11-14T22:31:20Z")
    page.get_by_role("button", name="Show").click()
    expect(page.locator(".heat td a")).to_have_count(2)
    page.locator(".heat td a").first.hover()
    expect(page.locator(".matrix-figure output")).to_contain_text("1 time;")
    page.get_by_label("Measured from (optional)").fill("soon")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text("Write a time such as")).to_be_visible()
    expect(page.locator(".heat")).to_have_count(0)


def test_two_pairs_are_compared(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(f"{address}/{pair()}")
    expect(page.locator(".headline")).to_be_visible()
    page.get_by_text("Compare with another pair or time").click()
    page.get_by_label("Destination of B").fill(OTHER)
    page.get_by_label("Time of B").fill("2023-11-14T22:13:20Z")
    page.get_by_role("button", name="Predict").click()
    expect(page.locator(".compared")).to_contain_text("The median of B is 40")
    expect(page.locator(".compared")).to_contain_text(f"B: {SOURCE} → {OTHER}, 2023-11-14 22:13:20 UTC")
    expect(page.locator(".density-figure")).to_be_visible()
    expect(page.locator(".series-figure")).to_have_count(2)


@pytest.mark.parametrize(
    ("view", "name", "head"),
    [
        (pair(), "density", "from,to,probability,not longer"),
        (pair(), "series", "time,RTT"),
        (f"#rank?src={SOURCE}", "rank", "source,destination,median,"),
        (f"#find?src={SOURCE}&rtt=20", "find", "dst_addr,probability,"),
        ("#matrix", "matrix", "source,destination,measured,times,median,"),
        ("#anomalies?last=9", "worst", "pair,bits,RTT,expected,"),
    ],
)
def test_every_table_can_be_saved(visit: Visit, address: str, view: str, name: str, head: str) -> None:
    page = visit.page
    page.goto(f"{address}/{view}")
    with page.expect_download() as saved:
        page.get_by_role("button", name=f"Download {name} as CSV").click()
    assert saved.value.suggested_filename == f"ping-llm-{name}.csv"
    lines = saved.value.path().read_text().splitlines()
    assert lines[0].startswith(head)
    with page.expect_download() as saved:
        page.get_by_role("button", name=f"Download {name} as JSON").click()
    rows = json.loads(saved.value.path().read_text())
    assert len(rows) == len(lines) - 1 > 1
    assert ",".join(rows[0]).startswith(head)


def test_what_to_measure_next_is_suggested(visit: Visit, bare: str) -> None:
    page = visit.page
    page.goto(f"{bare}/#suggest")
    page.get_by_role("link", name="try an example").click()
    expect(page.locator(".suggest-figure")).to_contain_text("Measure 1 pair next")
    expect(page.locator(".suggest-figure")).to_contain_text("192.0.2.1 → 192.0.2.70")


def test_the_servers_own_measurements_are_scored(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(f"{address}/#anomalies")
    page.get_by_role("combobox", name="Source").fill(SOURCE)
    page.get_by_label("Score the latest").fill("6")
    page.get_by_role("button", name="Score them").click()
    expect(page.get_by_text("6 measurements of 20 scored.")).to_be_visible()
    expect(page.locator(".worst")).to_contain_text("expected")
    page.get_by_label("What to score").select_option("A file")
    expect(page.get_by_label("File of measurements")).to_be_visible()


def test_an_answer_does_not_stand_beside_a_question_that_cannot_be_asked(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(f"{address}/{pair()}")
    expect(page.locator(".headline")).to_be_visible()
    page.get_by_role("combobox", name="Destination").fill("10.0.0")
    page.get_by_role("button", name="Predict").click()
    expect(page.locator(".headline")).to_have_count(0)
    expect(page.get_by_text("Something is missing or wrong: see the form.")).to_be_visible()


def test_an_uploaded_file_is_scored_and_its_name_is_text(visit: Visit, bare: str) -> None:
    page = visit.page
    page.goto(f"{bare}/#anomalies")
    rows = [(1_700_000_000 + 60 * n, SOURCE, DESTINATION, 400 if n == 40 else 20) for n in range(60)]
    name = "<img src=x onerror=alert(1)>.csv"
    page.get_by_label("File of measurements").set_input_files(
        {"name": name, "mimeType": "text/csv", "buffer": csv(rows)}
    )
    page.get_by_role("button", name="Score them").click()
    expect(page.get_by_role("heading", name=f"Anomaly scores of {name}")).to_be_visible()
    expect(page.locator(".worst tbody tr").first).to_contain_text("400 ms")
    assert page.locator("main img:not([src^='/static'])").count() == 0


def test_a_file_that_cannot_be_read_says_why(visit: Visit, bare: str) -> None:
    page = visit.page
    page.goto(f"{bare}/#anomalies")
    page.get_by_role("button", name="Score them").click()
    expect(page.get_by_text("Choose a file first.")).to_be_visible()
    page.get_by_label("File of measurements").set_input_files(
        {"name": "a.csv", "mimeType": "text/csv", "buffer": b"a,b\n1,2"}
    )
    page.get_by_role("button", name="Score them").click()
    expect(page.get_by_role("alert").filter(has_text="no column")).to_be_visible()


def test_pasted_measurements_count_and_are_part_of_the_address_if_short(visit: Visit, bare: str) -> None:
    page = visit.page
    page.goto(bare)
    page.get_by_text("Your own measurements").click()
    lines = "\n".join(json.dumps({"src_addr": SOURCE, "dst_addr": DESTINATION, "rtt": 80 + n}) for n in range(9))
    page.get_by_label("Paste CSV or JSON lines").fill(lines)
    page.get_by_role("button", name="Use them").click()
    expect(page.get_by_text("9 measurements in use.")).to_be_visible()
    page.get_by_role("combobox", name="Source").fill(SOURCE)
    page.get_by_role("combobox", name="Destination").fill(DESTINATION)
    page.get_by_role("button", name="Predict").click()
    expect(page.locator(".headline dd").first).to_contain_text("84.")
    shared = page.url
    page.goto("about:blank")
    page.goto(shared)
    expect(page.locator(".headline dd").first).to_contain_text("84.")


def test_without_any_measurements_there_is_an_example(visit: Visit, bare: str) -> None:
    page = visit.page
    page.goto(bare)
    page.get_by_role("link", name="try an example").click()
    expect(page.locator(".headline")).to_be_visible()
    expect(page.get_by_text("Never: this pair is not among")).to_be_visible()


def test_a_token_is_asked_for_and_never_part_of_an_address(browser: Browser) -> None:
    with listening(store=some_store(), token=TOKEN) as (host, port):
        page = browser.new_page()
        visit = Visit(page)
        page.goto(f"http://{host}:{port}/{pair()}")
        page.get_by_label("Token").fill("wrong-wrong-wrong-wrong")
        page.get_by_role("button", name="Use it").click()
        expect(page.get_by_text("That token is wrong.")).to_be_visible()
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Use it").click()
        expect(page.locator(".headline")).to_be_visible()
        assert not [url for url in [*visit.requested, page.url] if TOKEN in url]
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "view",
    [pair(), f"#find?src={SOURCE}&rtt=20", f"#rank?src={SOURCE}", "#anomalies?last=9", "#predict", "#matrix", COMPARED],
)
def test_on_a_phone_everything_fits(browser: Browser, address: str, view: str, scheme: Any) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    page.goto(f"{address}/{view}")
    expect(page.locator(".results > *").first).to_be_visible()
    expect(page.locator(".spinner")).to_have_count(0)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == (scheme == "dark")
    page.close()


def test_dark_can_be_chosen_and_is_remembered(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(address)
    page.get_by_role("button", name="Change between dark and light").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_the_description_of_the_api_works_offline(visit: Visit, address: str) -> None:
    page = visit.page
    page.goto(f"{address}/docs")
    page.get_by_role("heading", name="/api/v1/predict").click()
    expect(page.locator("details[open]")).to_contain_text('"questions"')
    assert all(url.startswith(address) for url in visit.requested)


def test_a_server_that_is_gone_is_said_so(visit: Visit) -> None:
    page = visit.page
    with listening(store=some_store()) as (host, port):
        page.goto(f"http://{host}:{port}/")
        expect(page.get_by_role("heading", name="How long would a ping take?")).to_be_visible()
    page.evaluate(f"location.hash = '{pair()}'")
    expect(page.get_by_role("alert").filter(has_text="cannot be reached")).to_be_visible()
