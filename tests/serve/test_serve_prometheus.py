"""deploy/grafana and deploy/Dockerfile: against a real Prometheus, its checker, and the command line."""

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any, Final

import pytest
import yaml

pytest.importorskip("fastapi", reason="ping-llm serve needs the extra `serve`")

from ping_llm.rows.measurement_set import MeasurementSet
from ping_llm.serve.feeds import PrometheusFeed, from_queue
from ping_llm.serve.server import listen
from ping_llm.serve.store import measurements_of
from ping_llm.serve.watch import WatchSettings
from serving_fixtures import DESTINATION, listening, question, some_store

GRAFANA: Final = Path(__file__).parents[2] / "deploy" / "grafana"
VARIABLES: Final = {"$source": ".*", "$destination": ".*", "$__rate_interval": "10m", "[1m]": "[10m]"}
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="Debian's prometheus is not installed"
)


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GRAFANA / "dashboard.json").read_text())
    return found


def expressions() -> list[tuple[str, str]]:
    """Of every panel and variable of the dashboard: its title, and what it asks Prometheus for."""
    board = dashboard()
    found = [(panel["title"], one["expr"]) for panel in board["panels"] for one in panel.get("targets", ())]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            metric, _ = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            found.append((variable["name"], metric))
    return [*found, *((one["name"], one["expr"]) for one in board["annotations"]["list"])]


def without_variables(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


class TestDashboard:
    def test_panels_have_numbers_of_their_own_and_do_not_overlap(self) -> None:
        panels = dashboard()["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            at = panel["gridPos"]
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert not taken & cells, panel["title"]
            assert at["x"] + at["w"] <= 24
            taken |= cells

    def test_every_panel_asks_the_chosen_prometheus_with_letters_of_its_own(self) -> None:
        for panel in dashboard()["panels"]:
            asked = [one["refId"] for one in panel.get("targets", ())]
            assert len(set(asked)) == len(asked)
            for one in (panel, *panel.get("targets", ())) if asked else ():
                assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}

    def test_columns_of_tables_are_named_after_queries_that_are_there(self) -> None:
        for panel in dashboard()["panels"]:
            letters = {one["refId"] for one in panel.get("targets", ())}
            for change in panel.get("transformations", ()):
                named = set(change["options"].get("renameByName", {}))
                assert {name.removeprefix("Value #") for name in named} <= letters


class Prometheus:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=10
        ) as reply:
            return json.load(reply)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        end = time.monotonic() + 60
        while True:
            try:
                if found := self.query(expression):
                    return found
            except OSError:
                pass  # it is not there yet
            assert time.monotonic() < end, expression
            time.sleep(0.1)


@contextmanager
def scraping(port: int, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with the files of deploy/grafana, but at a server of the test, and every second."""
    settings = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())
    settings["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    assert settings["scrape_configs"][0]["static_configs"][0]["targets"] == ["localhost:8000"]
    settings["scrape_configs"][0]["static_configs"][0]["targets"] = [f"localhost:{port}"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    shutil.copy(GRAFANA / "alerts.yml", folder)
    with listen("127.0.0.1", 0) as free:
        own = free.getsockname()[1]
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{own}",
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield Prometheus(own)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """After a pair has begun to be slow: three results in a row that nobody expected."""
    arrivals = Queue[MeasurementSet]()
    watch = WatchSettings(feeds={"test": from_queue(arrivals)}, refresh_seconds=0.05)
    with (
        listening(store=some_store(), watch=watch) as (_, port),
        scraping(port, tmp_path_factory.mktemp("prometheus")) as prometheus,
    ):
        prometheus.wait_for("count_over_time(ping_llm_anomalies_total[1m]) >= 2")
        now = time.time()
        late = [question(rtt=900.0, event_time=now - 3 + n) for n in range(3)]
        arrivals.put(measurements_of([*late, question(destination="192.0.2.3", rtt=30.0, event_time=now)]))
        prometheus.wait_for("ping_llm_anomalies_total >= 3")
        prometheus.wait_for("sum(rate(ping_llm_anomalies_total[1m])) > 0")
        yield prometheus


@needs_prometheus
class TestPrometheus:
    def test_it_reads_every_sample(self, scraped: Prometheus) -> None:
        (up,) = scraped.wait_for("up")
        assert up["value"][1] == "1"
        (median,) = scraped.query(f'ping_llm_expected_rtt_seconds{{level="0.5", destination="{DESTINATION}"}}')
        assert median["metric"]["source"] == "192.0.2.1"
        assert 0.005 < float(median["value"][1]) < 0.1

    @pytest.mark.parametrize(("title", "expression"), expressions())
    def test_every_panel_shows_something(self, scraped: Prometheus, title: str, expression: str) -> None:
        assert scraped.wait_for(without_variables(expression)), title

    def test_what_it_has_got_can_be_followed(self, scraped: Prometheus) -> None:
        feed = PrometheusFeed(f"prometheus+{scraped.url}/?query=ping_llm_observed_rtt_seconds&step=1s")
        found = feed()
        assert found is not None
        assert {"192.0.2.1", DESTINATION} <= set(found.nodes)
        assert 900.0 in found.observations.rtt_ms

    def test_the_alert_of_the_pair_fires_and_that_of_the_others_does_not(self, scraped: Prometheus) -> None:
        scraped.wait_for('ALERTS{alertname="PingLlmUnusualRtt", alertstate="firing"}')
        alerts = [one for one in scraped.get("alerts")["alerts"] if one["state"] == "firing"]
        firing = {(one["labels"]["alertname"], one["labels"].get("destination")) for one in alerts}
        assert firing == {("PingLlmUnusualRtt", DESTINATION)}
        rules = [rule for group in scraped.get("rules")["groups"] for rule in group["rules"]]
        assert len(rules) > 6
        assert {rule["health"] for rule in rules} == {"ok"}

    @pytest.mark.parametrize("arguments", [["config", GRAFANA / "prometheus.yml"], ["rules", GRAFANA / "alerts.yml"]])
    def test_promtool_finds_nothing_wrong(self, arguments: list[Any]) -> None:
        checked = subprocess.run(["promtool", "check", *arguments], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr

    def test_promtool_finds_nothing_wrong_with_the_metrics(self) -> None:
        with listening(store=some_store(), watch=WatchSettings(refresh_seconds=0.05)) as (host, port):
            end = time.monotonic() + 20
            while b"ping_llm_extrapolating" not in (text := _scrape(host, port)):
                assert time.monotonic() < end
        checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
        assert checked.returncode == 0, checked.stderr.decode()


def _scrape(host: str, port: int) -> bytes:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as reply:
        found: bytes = reply.read()
    return found


PAIR: Final = 'source="a", destination="b", job="ping-llm", instance="x"'
SERVER: Final = 'job="ping-llm", instance="x"'


def timeouts(expected: float) -> dict[str, str]:
    return {
        f"ping_llm_observed_timeout{{{PAIR}}}": "0 0 1x60",
        f"ping_llm_expected_timeout_ratio{{{PAIR}}}": f"{expected}x60",
    }


@needs_prometheus
@pytest.mark.parametrize(
    ("alert", "series", "silent", "fires"),
    [
        ("PingLlmUnusualRtt", {f"ping_llm_anomalies_total{{{PAIR}}}": "0x4 1x30"}, "20m", None),
        ("PingLlmUnusualRtt", {f"ping_llm_anomalies_total{{{PAIR}}}": "0x4 4x30"}, "3m", "8m"),
        ("PingLlmUnexpectedTimeouts", timeouts(0.01), "10m", "15m"),
        ("PingLlmUnexpectedTimeouts", timeouts(0.9), "30m", None),
        (
            "PingLlmManyUnusualPairs",
            {f"ping_llm_watched_pairs{{{SERVER}}}": "12x60"}
            | {
                f'ping_llm_anomalies_total{{source="a", destination="{n}", {SERVER}}}': "0x4 1x30" if n < 4 else "0x30"
                for n in range(12)
            },
            "3m",
            "8m",
        ),
        ("PingLlmGuessing", {f"ping_llm_extrapolating{{{PAIR}}}": "1x500"}, "5h", "7h"),
        ("PingLlmDown", {f"up{{{SERVER}}}": "1 1 0x20"}, "6m", "10m"),
        ("PingLlmNoMeasurements", {f"ping_llm_observed_timestamp_seconds{{{PAIR}}}": "60x60"}, "16m", "25m"),
        ("PingLlmFeedErrors", {f'ping_llm_feed_errors_total{{feed="f", {SERVER}}}': "0x4 9x30"}, "3m", "8m"),
        (
            "PingLlmServerErrors",
            {f'ping_llm_http_requests_total{{status="503", {SERVER}}}': "0x4 0+60x60"},
            "10m",
            "30m",
        ),
    ],
)
def test_an_alert_fires_when_it_is_meant_to(
    tmp_path: Path, alert: str, series: dict[str, str], silent: str, fires: str | None
) -> None:
    expression = f'count by (alertname) (ALERTS{{alertname="{alert}", alertstate="firing"}})'
    firing = [{"labels": f'{{alertname="{alert}"}}', "value": 1}]
    asked: list[Any] = [{"expr": expression, "eval_time": silent, "exp_samples": []}]
    asked += [{"expr": expression, "eval_time": fires, "exp_samples": firing}] if fires else []
    given = [{"series": name, "values": values} for name, values in series.items()]
    test: Any = {"interval": "1m", "input_series": given, "promql_expr_test": asked}
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": [str(GRAFANA / "alerts.yml")], "tests": [test]}))
    command = ["promtool", "test", "rules", str(tmp_path / "test.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
