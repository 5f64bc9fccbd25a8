"""The JSON API: what each route answers, and how it says no."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="ping-llm serve needs the extra `serve`")

from starlette.testclient import TestClient

from ping_llm.core.errors import PingLlmError
from ping_llm.serve.server import read_places
from ping_llm.serve.store import MeasurementStore
from ping_llm.sources.nodes import Node
from serving_fixtures import (
    DESTINATION,
    FILE,
    NODES,
    OTHER,
    PLACES,
    SOURCE,
    csv,
    good,
    question,
    refused,
    running,
    some_store,
)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with running(store=some_store()) as client:
        yield client


@pytest.fixture(scope="module")
def bare() -> Iterator[TestClient]:
    with running() as client:
        yield client


class TestPredict:
    def test_many_questions_are_answered_in_their_order(self, client: TestClient) -> None:
        asked = [question(), question(DESTINATION, SOURCE), question(destination=OTHER)]
        found = good(client.post("/api/v1/predict", json={"questions": asked}))["predictions"]
        assert [(one["src_addr"], one["dst_addr"]) for one in found] == [
            (one["src_addr"], one["dst_addr"]) for one in asked
        ]
        assert found[0]["median"] == pytest.approx(found[2]["median"])
        assert found[1]["median"] == pytest.approx(50, rel=0.02)  # it never measured anything

    def test_densities_add_up_and_hold_the_median(self, client: TestClient) -> None:
        body = {"questions": [question()], "bins": 64, "quantiles": [0.25, 0.5, 0.75]}
        (found,) = good(client.post("/api/v1/predict", json=body))["predictions"]
        edges, shares = np.array(found["density"]["edges"]), np.array(found["density"]["probability"])
        assert len(edges) == 65
        assert (np.diff(edges) > 0).all()
        assert shares.sum() == pytest.approx(0.98, abs=0.01)
        until = np.cumsum(shares) + 0.01
        assert edges[1:][np.argmax(until >= 0.5)] == pytest.approx(found["median"], rel=0.05)
        assert found["quantiles"]["0.25"] < found["quantiles"]["0.5"] == found["median"] < found["quantiles"]["0.75"]

    def test_a_history_in_the_request_counts_and_the_rows_can_be_left_out(self, client: TestClient) -> None:
        history = [question(rtt=200.0, event_time=1_700_000_000 + n) for n in range(5)]
        alone = {"questions": [question()], "history": history, "use_rows": False}
        (found,) = good(client.post("/api/v1/predict", json=alone))["predictions"]
        assert found["median"] == pytest.approx(200, rel=0.02)

    def test_nothing_that_was_measured_later_is_used(self, client: TestClient) -> None:
        body = {"questions": [question(event_time="2023-11-14T22:13:20Z"), question(event_time=1_700_000_001)]}
        before, after = good(client.post("/api/v1/predict", json=body))["predictions"]
        assert before["median"] == pytest.approx(50, rel=0.02)
        assert after["median"] == pytest.approx(10, rel=0.02)

    def test_an_address_and_its_name_in_the_nodes_file_are_one_node(self) -> None:
        named = replace(
            some_store().measured, nodes=("here", *NODES[1:]), described={"here": Node(name="here", address=SOURCE)}
        )
        history = [question(destination=OTHER, rtt=200.0, event_time=1_700_100_000 + n) for n in range(50)]
        with running(store=MeasurementStore(named)) as client:
            body = {"questions": [question("here"), question(SOURCE)]}
            for more, median in (({}, 10), ({"history": history}, 200)):
                found = good(client.post("/api/v1/predict", json=body | more))["predictions"]
                assert [one["median"] for one in found] == pytest.approx([median] * 2, rel=0.02)
            shown = good(client.get("/api/v1/history", params={"src_addr": SOURCE, "dst_addr": DESTINATION}))
        assert shown["total"] == 10

    def test_spellings_of_an_address_are_one_address(self, client: TestClient) -> None:
        body = {"questions": [question(" 192.0.2.1 "), question("2001:DB8:0::1", "2001:db8::0:2")]}
        found = good(client.post("/api/v1/predict", json=body))["predictions"]
        assert [one["src_addr"] for one in found] == ["192.0.2.1", "2001:db8::1"]

    @pytest.mark.parametrize(
        ("asked", "says"),
        [
            (question("10.0.0.300"), "'10.0.0.300' is neither an address nor a name"),
            (question("192.0.2.1", "2001:db8::1"), "not of one family"),
            (question(event_time="yesterday"), "not a time"),
            (question(event_time=-5.0), "not a time"),
            ({"src_addr": SOURCE}, "questions.0.dst_addr"),
            (question(colour="red"), "questions.0.colour"),
        ],
    )
    def test_a_bad_question_is_named_in_one_line(self, client: TestClient, asked: Any, says: str) -> None:
        assert says in refused(client.post("/api/v1/predict", json={"questions": [asked]}), 422)

    def test_measurements_without_times_do_not_mix_with_those_that_have_some(self, client: TestClient) -> None:
        untimed = {"questions": [question()], "history": [question(rtt=5.0)]}
        assert "no times" in refused(client.post("/api/v1/predict", json=untimed), 422)
        assert good(client.post("/api/v1/predict", json=untimed | {"use_rows": False}))

    def test_without_rows_and_history_there_is_still_an_answer(self, bare: TestClient) -> None:
        (found,) = good(bare.post("/api/v1/predict", json={"questions": [question()]}))["predictions"]
        assert found["median"] == pytest.approx(50, rel=0.02)
        assert found["support"] == {
            "pair_measurements": 0,
            "src_measurements": 0,
            "dst_measurements": 0,
            "chain": None,
            "distance_km": None,
            "extrapolating": True,
            "reason": "neither end was ever measured",
        }

    def test_a_body_that_is_not_json_and_a_wrong_route_say_what_to_do(self, client: TestClient) -> None:
        broken = client.post("/api/v1/predict", content=b"{bad", headers={"Content-Type": "application/json"})
        assert "not JSON" in refused(broken, 422)
        assert "/docs" in refused(client.get("/api/v1/predict"), 405)
        assert "/docs" in refused(client.get("/api/v1/nosuch"), 404)


class TestContext:
    def test_steps_go_from_nothing_to_all_and_name_what_was_looked_at(self, client: TestClient) -> None:
        found = good(client.post("/api/v1/context", json={"question": question(), "bins": 32}))
        sizes = [step["size"] for step in found["steps"]]
        assert sizes[0] == 0
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == len(found["context"]["rtt"]) == found["context"]["total"]
        assert found["context"]["dst_addr"][0] == DESTINATION  # the pair itself says most
        assert found["steps"][0]["median"] == pytest.approx(50, rel=0.02)
        assert found["steps"][1]["median"] == pytest.approx(10, rel=0.02)
        edges = [step["density"]["edges"] for step in found["steps"]]
        assert all(one == edges[0] for one in edges)

    def test_sizes_beyond_what_is_known_are_all_there_is(self, client: TestClient) -> None:
        found = good(client.post("/api/v1/context", json={"question": question(), "sizes": [0, 3, 5000]}))
        assert [step["size"] for step in found["steps"]] == [0, 3, 20]


class TestRankAndDestinations:
    def test_the_ranking_is_by_median(self, client: TestClient) -> None:
        body = {"src_addr": SOURCE, "dst_addrs": [OTHER, DESTINATION, OTHER]}
        medians = [one["median"] for one in good(client.post("/api/v1/rank", json=body))["ranking"]]
        assert len(medians) == 2
        assert medians == sorted(medians)

    def test_a_completer_looks_among_the_destinations_that_were_measured(self, client: TestClient) -> None:
        found = good(client.post("/api/v1/destinations", json={"src_addr": SOURCE, "rtt": 20, "count": 5}))
        assert found["among"] == "candidates"
        assert {one["dst_addr"] for one in found["destinations"]} == {DESTINATION, OTHER}
        chances = [one["probability"] for one in found["destinations"]]
        assert chances == sorted(chances, reverse=True)

    def test_a_completer_without_any_destination_says_what_it_needs(self, bare: TestClient) -> None:
        message = refused(bare.post("/api/v1/destinations", json={"src_addr": SOURCE, "rtt": 20}), 422)
        assert "candidates" in message
        assert "RTT" in refused(
            bare.post("/api/v1/destinations", json={"src_addr": SOURCE, "candidates": [OTHER]}), 422
        )

    def test_a_completer_completes_no_address(self, client: TestClient) -> None:
        body = {"src_addr": SOURCE, "prefix": "193.0."}
        message = refused(client.post("/api/v1/complete", json=body), 422)
        assert "a completer knows no addresses" in message
        assert "/" not in message, "no path of the server"


class TestRows:
    def test_search_finds_beginnings_before_middles_and_says_how_often(self, client: TestClient) -> None:
        found = good(client.get("/api/v1/addresses", params={"role": "destination", "search": "2.3"}))["addresses"]
        assert found == [{"address": OTHER, "measurements": 10}]
        assert not good(client.get("/api/v1/addresses", params={"search": "<script>"}))["addresses"]

    def test_the_history_of_a_pair_is_in_time_order_with_failures(self, client: TestClient) -> None:
        found = good(client.get("/api/v1/history", params={"src_addr": SOURCE, "dst_addr": OTHER, "count": 8}))
        assert found["total"] == 10
        assert len(found["rtt"]) == 8
        assert found["event_time"] == sorted(found["event_time"])
        assert None in found["rtt"]

    def test_an_unknown_pair_has_no_history(self, client: TestClient) -> None:
        found = good(client.get("/api/v1/history", params={"src_addr": "203.0.113.9"}))
        assert found["total"] == 0

    def test_the_model_is_described_with_what_it_knows(self, client: TestClient, bare: TestClient) -> None:
        about = good(client.get("/api/v1/model"))
        assert about["kind"] == "completer"
        assert about["rows"]["measurements"] == 20
        assert about["rows"]["examples"][0] == {"src_addr": SOURCE, "dst_addr": DESTINATION}
        assert good(bare.get("/api/v1/model"))["rows"] is None


class TestRange:
    BEGIN = "2023-11-14T22:18:20Z"  # the sixth measurement

    def test_a_history_can_be_of_a_range_of_time(self, client: TestClient) -> None:
        asked = {"src_addr": SOURCE, "begin": self.BEGIN, "end": "2023-11-14T22:20:20Z"}
        found = good(client.get("/api/v1/history", params=asked))
        assert found["event_time"] == [1_700_000_000 + 60 * n for n in (5, 6, 7)]
        assert "not a time" in refused(client.get("/api/v1/history", params=asked | {"end": "soon"}), 422)

    def test_the_matrix_has_medians_and_numbers_of_measurements(self, client: TestClient) -> None:
        found = good(client.post("/api/v1/matrix", json={}))
        assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in found.pop("colours"))
        assert found == {
            "sources": [SOURCE],
            "destinations": [DESTINATION, OTHER],
            "median": [[10, 30]],
            "measurements": [[10, 10]],
        }
        late = good(client.post("/api/v1/matrix", json={"begin": "2023-11-14T22:31:20Z", "count": 1}))
        assert (late["destinations"], late["measurements"]) == ([DESTINATION], [[1]])
        assert not good(client.post("/api/v1/matrix", json={"begin": "2030-01-01"}))["sources"]

    def test_a_median_is_between_the_two_in_the_middle_and_timeouts_have_none(self, bare: TestClient) -> None:
        rtts: dict[str, list[float | None]] = {DESTINATION: [5, None, 9, 1, 3], OTHER: [None, None]}
        history = [question(destination=end, rtt=rtt) for end, own in rtts.items() for rtt in own]
        found = good(bare.post("/api/v1/matrix", json={"history": history}))
        assert found["median"] == [[4, None]]
        assert found["measurements"] == [[5, 2]]

    def test_without_any_measurement_there_is_no_matrix(self, bare: TestClient) -> None:
        assert good(bare.post("/api/v1/matrix", json={}))["median"] == []


class TestSuggest:
    def test_pairs_that_were_never_measured_come_with_their_predictions(self, bare: TestClient) -> None:
        pairs = [("192.0.2.1", "192.0.2.2", 9), ("192.0.2.2", "192.0.2.3", 8), ("192.0.2.3", "192.0.2.4", 7)]
        history = [question(source, destination, rtt=rtt) for source, destination, rtt in pairs]
        found = good(bare.post("/api/v1/suggest", json={"history": history, "budget": 2}))
        assert found["complete"]
        measured = {frozenset(pair[:2]) for pair in pairs}
        suggested = [{one["src_addr"], one["dst_addr"]} for one in found["suggestions"]]
        assert len(suggested) == 2
        assert not measured & {frozenset(pair) for pair in suggested}
        assert all(one["support"]["pair_measurements"] == 0 for one in found["suggestions"])

    def test_where_all_was_measured_there_is_nothing_to_suggest(self, client: TestClient) -> None:
        assert good(client.post("/api/v1/suggest", json={})) == {"suggestions": [], "complete": True}

    def test_without_measurements_it_says_so(self, bare: TestClient) -> None:
        assert "measurements" in refused(bare.post("/api/v1/suggest", json={}), 422)


class TestOwnRows:
    def test_the_servers_rows_are_scored_beside_what_was_expected(self, client: TestClient) -> None:
        found = good(client.post("/api/v1/anomalies/rows", json={"src_addr": SOURCE, "dst_addr": OTHER, "last": 4}))
        assert found["total"] == 10
        assert found["dst_addr"] == [OTHER] * 4
        assert found["complete"]
        for low, expected, high in zip(found["low"], found["expected"], found["high"], strict=True):
            assert low < expected < high

    def test_a_range_without_measurements_is_said_so(self, client: TestClient) -> None:
        assert "no such" in refused(client.post("/api/v1/anomalies/rows", json={"begin": "2030-01-01"}), 422)
        assert "needs src_addr" in refused(client.post("/api/v1/anomalies/rows", json={"dst_addr": OTHER}), 422)


def test_places_are_those_that_the_server_was_given() -> None:
    with running(store=some_store(), places=PLACES) as client:
        assert [one["name"] for one in good(client.get("/api/v1/places"))["places"]] == ["Here", "There"]
        assert good(client.get("/api/v1/model"))["places"] == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [("a,b\n1,2\n", "no column name"), ("name,latitude,longitude\nhere,95,3\n", "degrees"), ("", "nodes.csv")],
)
def test_a_file_without_places_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "nodes.csv").write_text(text)
    with pytest.raises(PingLlmError, match=says):
        read_places(str(tmp_path / "nodes.csv"))


@pytest.mark.parametrize(("limit", "kept"), [(20, range(20)), (7, range(14, 20)), (2, [18, 19]), (1, [19])])
def test_a_completer_gets_as_many_of_the_latest_of_every_pair_as_there_is_room_for(limit: int, kept: Any) -> None:
    store = MeasurementStore(some_store().measured, max_for_completer=limit)
    times = store.latest(None, np.nan, 0).observations.time_s
    assert times.tolist() == [1_700_000_000 + 60 * index for index in kept]


class TestFiles:
    ROWS = tuple((f"2024-05-01T00:{minute:02}:00Z", SOURCE, DESTINATION, 10 + minute) for minute in range(30))

    def test_measurements_of_a_csv_file_come_back_as_columns(self, bare: TestClient) -> None:
        content = csv([*self.ROWS, ("2024-05-01T01:00:00Z", "192.0.2", DESTINATION, 1)])
        found = good(bare.post("/api/v1/read", content=content, headers=FILE))
        assert found["rtt"][:3] == [10, 11, 12]
        assert found["dropped"] == {"bad_src_addr": 1}

    def test_json_lines_and_lists_are_understood(self, bare: TestClient) -> None:
        lines = b'{"src": "192.0.2.1", "dst": "192.0.2.2", "rtt": 5}\n{"src": "192.0.2.1", "dst": "192.0.2.2"}\n'
        found = good(bare.post("/api/v1/read", content=lines, headers=FILE))
        assert found["rtt"] == [5.0, None]
        as_list = b"[" + lines.strip().replace(b"\n", b",") + b"]"
        assert good(bare.post("/api/v1/read", content=as_list, headers=FILE)) == found

    def test_atlas_results_are_understood(self, bare: TestClient) -> None:
        result = (
            b'{"fw":5080,"af":4,"prb_id":7,"msm_id":1,"type":"ping","timestamp":1700000000,"src_addr":"192.0.2.1",'
            b'"dst_addr":"192.0.2.2","from":"192.0.2.1","sent":1,"rcvd":1,"min":7.5,"max":7.5,"avg":7.5,'
            b'"result":[{"rtt":7.5}]}\n'
        )
        found = good(bare.post("/api/v1/read", content=result, headers=FILE))
        assert found["rtt"] == [7.5]

    def test_anomalies_are_scored_for_the_latest_of_a_file(self, bare: TestClient) -> None:
        found = good(bare.post("/api/v1/anomalies/file?last=4", content=csv(self.ROWS), headers=FILE))
        assert found["total"] == 30
        assert len(found["bits"]) == 4
        assert found["complete"]
        assert found["rtt"] == [36, 37, 38, 39]

    def test_an_outlier_has_the_highest_score(self, bare: TestClient) -> None:
        measured = [question(rtt=20.0 if n != 15 else 400.0, event_time=1_700_000_000 + n) for n in range(20)]
        found = good(bare.post("/api/v1/anomalies", json={"measurements": measured}))
        assert int(np.argmax(found["bits"][1:])) + 1 == 15

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (b"", "empty"),
            (b"\x1f\x8b\x08\x00nothing", "compressed"),
            (b"a,b\n1,2\n", "no column"),
            (b"PAR1 this is none", "Parquet"),
            (b'{"not json}\n', "JSON"),
            (b"[1, 2]", "no column"),
            (b"src_addr,dst_addr,rtt\n1.2,y,1\n", "no usable measurement"),
            (b"\xff\xfe", "must name the columns"),
            (b"\xff\xfe\x00\x00", "no column"),
            (b"\x93NUMPY\x01\x00", "is an array"),
        ],
    )
    def test_what_is_no_file_of_measurements_is_refused_in_one_line(
        self, bare: TestClient, content: bytes, says: str
    ) -> None:
        message = refused(bare.post("/api/v1/read", content=content, headers=FILE), 422)
        assert says in message
        assert "/tmp" not in message
        assert "--columns" not in message


def test_the_page_the_description_and_the_health_are_there(bare: TestClient) -> None:
    assert "<title>ping-llm</title>" in bare.get("/").text
    assert bare.get("/docs").status_code == 200
    assert good(bare.get("/healthz")) == {"status": "ok"}
    paths = good(bare.get("/openapi.json"))["paths"]
    assert {"/api/v1/predict", "/api/v1/anomalies/file", "/healthz"} <= paths.keys()
    tag = bare.get("/static/main.js").headers["etag"]
    assert bare.get("/static/main.js", headers={"If-None-Match": tag}).status_code == 304
