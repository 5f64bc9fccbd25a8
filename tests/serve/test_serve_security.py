"""What a server refuses: too much, too slow, malformed, from elsewhere, without a token, or out of its folder."""

import io
import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("fastapi", reason="ping-llm serve needs the extra `serve`")

from starlette.testclient import TestClient

from ping_llm.core.errors import PingLlmError
from ping_llm.serve import server as app_module
from ping_llm.serve.access import Limits, ServeSettings
from ping_llm.serve.answers import ModelAnswers
from serving_fixtures import FILE, SOURCE, MedianOfSource, csv, question, quick_answers, refused, running, some_store

TOKEN = "correct-horse-battery-staple"
ASK = {"questions": [question()]}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with running(store=some_store()) as client:
        yield client


@pytest.fixture(scope="module")
def small() -> Iterator[TestClient]:
    limits = Limits(body_bytes=2_000, history=5, questions=3)
    with running(store=some_store(), limits=limits) as client:
        yield client


@pytest.fixture(scope="module")
def guarded() -> Iterator[TestClient]:
    with running(store=some_store(), token=TOKEN) as client:
        yield client


class TestLimits:
    def test_a_large_body_is_refused_by_what_it_announces(self, small: TestClient) -> None:
        assert "2,000 bytes" in refused(small.post("/api/v1/read", content=b"x" * 2_001, headers=FILE), 413)

    def test_a_large_body_that_announces_nothing_is_cut_off_while_it_arrives(self, small: TestClient) -> None:
        pieces = (b"x" * 500 for _ in range(100))
        refused(small.post("/api/v1/read", content=pieces, headers=FILE), 413)

    def test_too_many_questions_and_measurements_are_refused(self, small: TestClient) -> None:
        assert "4 questions" in refused(small.post("/api/v1/predict", json={"questions": [question()] * 4}), 413)
        history = [question(rtt=1.0, event_time=1_700_000_000)] * 6
        body = {"questions": [question()], "history": history}
        assert "6 measurements" in refused(small.post("/api/v1/predict", json=body), 413)
        four = {"src_addr": SOURCE, "dst_addrs": [f"192.0.2.{n}" for n in range(4)]}
        refused(small.post("/api/v1/rank", json=four), 413)
        lines = csv([(SOURCE, "192.0.2.2", 1)] * 6, "src_addr,dst_addr,rtt")
        refused(small.post("/api/v1/read", content=lines, headers=FILE), 413)
        refused(small.post("/api/v1/anomalies/file", content=lines, headers=FILE), 413)

    def test_a_small_file_that_unpacks_to_millions_of_rows_is_not_unpacked(self) -> None:
        count = 3_000_000
        codes = pa.array(np.zeros(count, np.int8))
        address = pa.DictionaryArray.from_arrays(codes, [SOURCE])
        content = io.BytesIO()
        pq.write_table(pa.table({"src_addr": address, "dst_addr": address, "rtt": codes}), content, compression="zstd")
        assert len(content.getvalue()) < 100_000
        with running() as client:
            message = refused(client.post("/api/v1/read", content=content.getvalue(), headers=FILE), 413)
        assert "3,000,000 measurements" in message

    def test_an_answer_that_takes_too_long_is_given_up(self) -> None:
        class Slow(ModelAnswers):
            def predict(self, queries: Any, known: Any) -> Any:
                while True:
                    time.sleep(0.01)
                    yield None

        with running(Slow(quick_answers().predictor), limits=Limits(seconds=0.2)) as client:
            reply = client.post("/api/v1/predict", json=ASK)
            assert "0.2 seconds" in refused(reply, 503)
            assert reply.headers["Retry-After"]
            assert client.post("/api/v1/rank", json={"src_addr": SOURCE, "dst_addrs": ["192.0.2.9"]}).status_code == 503
            assert client.get("/healthz").status_code == 200

    def test_when_too_many_wait_the_next_is_told_so(self) -> None:
        with running(limits=Limits(waiting=0)) as client:
            assert "busy" in refused(client.post("/api/v1/predict", json=ASK), 503)

    def test_scoring_stops_in_time_and_says_so(self) -> None:
        class Slow(MedianOfSource):
            def predict(self, *given: Any, **named: Any) -> Any:
                time.sleep(0.05)
                return super().predict(*given, **named)

        content = csv([(n, SOURCE, "192.0.2.2", 5) for n in range(1_700_000_000, 1_700_000_100)])
        with running(quick_answers(Slow), limits=Limits(seconds=0.5)) as client:
            reply = client.post("/api/v1/anomalies/file", content=content, headers=FILE)
        found = reply.json()
        assert reply.status_code == 200
        assert not found["complete"]
        assert 0 < len(found["bits"]) < 100
        assert found["event_time"][-1] == 1_700_000_099  # the latest come first


class TestMalformed:
    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b"[]", b"null", b'"text"', b'{"questions": 5}', b"\xff\xfe", b'{"questions": [{}]}',
         b'{"questions": [{"src_addr": 1e999, "dst_addr": {}}]}'],
    )  # fmt: skip
    def test_what_is_no_request_gets_one_line(self, client: TestClient, body: bytes) -> None:
        refused(client.post("/api/v1/predict", content=body, headers={"Content-Type": "application/json"}), 422)

    def test_nesting_without_end_is_refused(self, client: TestClient) -> None:
        for path, headers in (("predict", {"Content-Type": "application/json"}), ("read", FILE)):
            reply = client.post(f"/api/v1/{path}", content=b"[" * 100_000, headers=headers)
            assert reply.status_code in {400, 422}
            assert list(reply.json()) == ["error"]

    def test_numbers_without_bounds_are_refused(self, client: TestClient) -> None:
        for body in (b'{"questions":[{"src_addr":"192.0.2.1","dst_addr":"192.0.2.2","event_time":1e999}]}',
                     b'{"questions":[{"src_addr":"192.0.2.1","dst_addr":"192.0.2.2"}],"history":'
                     b'[{"src_addr":"192.0.2.1","dst_addr":"192.0.2.2","rtt":1e999,"event_time":1}]}'):  # fmt: skip
            refused(client.post("/api/v1/predict", content=body, headers={"Content-Type": "application/json"}), 422)

    def test_other_methods_and_paths_get_one_line(self, client: TestClient) -> None:
        refused(client.get("/api/v1/predict"), 405)
        refused(client.delete("/api/v1/model"), 405)
        refused(client.get("/nothing"), 404)


class TestOtherSites:
    """What a page of somebody else's can make a browser send."""

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
    def test_bodies_that_any_page_may_send_are_refused(self, client: TestClient, kind: str) -> None:
        refused(client.post("/api/v1/predict", content=json.dumps(ASK), headers={"Content-Type": kind}), 415)
        refused(client.post("/api/v1/anomalies/file", content=b"x", headers={"Content-Type": kind}), 415)

    @pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", ""])
    def test_a_foreign_name_that_points_here_is_refused(self, client: TestClient, host: str) -> None:
        refused(client.get("/api/v1/model", headers={"Host": host}), 421)

    @pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "LOCALHOST", "[::1]:8000"])
    def test_its_own_names_are_known(self, client: TestClient, host: str) -> None:
        assert client.get("/api/v1/model", headers={"Host": host}).status_code == 200

    def test_no_other_origin_is_allowed(self, client: TestClient) -> None:
        reply = client.get("/api/v1/model", headers={"Origin": "https://evil.example"})
        assert not [name for name in reply.headers if name.lower().startswith("access-control")]

    def test_every_reply_forbids_foreign_and_inline_scripts(self, client: TestClient) -> None:
        for path in ("/", "/docs", "/static/main.js", "/api/v1/model", "/nothing", "/openapi.json"):
            headers = client.get(path).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"

    def test_pages_hold_no_inline_script_nor_foreign_address(self) -> None:
        folder = Path(app_module.__file__).parent
        for file in [*(folder / "static").iterdir(), folder.parent / "report" / "static" / "chart.js"]:
            text = file.read_text(encoding="utf-8")
            foreign = set(re.findall(r"https?://[^\s\"'`)]*", text)) - {
                "http://www.w3.org/2000/svg",
                "http://[${text}]/",
            }
            assert not foreign, file
            assert not re.search(r"\.(innerHTML|outerHTML)\b|insertAdjacentHTML|document\.write|\beval\(", text), file
            if file.suffix == ".html":
                assert not re.search(r"<script(?![^>]* src=)|\son\w+=|\sstyle=|<style", text), file


class TestToken:
    @pytest.mark.parametrize(
        "sent",
        [
            "",
            "Bearer",
            "Bearer ",
            "Bearer wrong",
            f"Basic {TOKEN}",
            f"Bearer {TOKEN}x",
            f"Bearer {TOKEN[:-1]}",
            "Bearer ÿ",
        ],
    )
    def test_without_the_right_token_nothing_is_answered(self, guarded: TestClient, sent: str) -> None:
        headers = {b"Authorization": sent.encode("latin-1")}
        for reply in (
            guarded.get("/api/v1/model", headers=headers),
            guarded.post("/api/v1/predict", json=ASK, headers=headers),
            guarded.get(f"/api/v1/model?token={TOKEN}", headers=headers),
        ):
            refused(reply, 401)
            assert TOKEN not in reply.text

    def test_with_it_everything_is(self, guarded: TestClient) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert guarded.get("/api/v1/model", headers=headers).status_code == 200
        assert guarded.post("/api/v1/predict", json=ASK, headers=headers).status_code == 200

    def test_the_page_and_the_health_need_none(self, guarded: TestClient) -> None:
        assert guarded.get("/").status_code == 200
        assert guarded.get("/healthz").status_code == 200
        document = guarded.get("/openapi.json").json()
        assert document["paths"]["/api/v1/predict"]["post"]["security"] == [{"token": []}]

    def test_the_log_has_one_line_without_token_query_and_line_breaks(
        self, guarded: TestClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(logging.getLogger("ping_llm.serve"), "propagate", True)
        with caplog.at_level(logging.INFO, logger="ping_llm.serve"):
            guarded.get("/api/v1/model?token=secret-in-query", headers={"Authorization": f"Bearer {TOKEN}"})
            guarded.get("/x%0d%0a2026 fake line")
        # The client of the test logs requests, too, wherever something has set the root logger to INFO. Where a server
        # of another test has taken its logger out of the hierarchy, pytest listens to both and sees a record twice.
        records = dict.fromkeys(caplog.records)
        lines = [record.getMessage() for record in records if record.name == "ping_llm.serve"]
        assert len(lines) == 2
        assert all(len(line.splitlines()) == 1 for line in lines)
        assert not [line for line in lines if TOKEN in line or "secret" in line]

    def test_settings_never_print_it(self) -> None:
        assert TOKEN not in repr(ServeSettings(token=TOKEN))

    @pytest.mark.parametrize("token", ["", "short", "with space and more", "ünïcödé-is-not-fine"])
    def test_a_token_that_cannot_protect_or_be_sent_is_refused(self, token: str) -> None:
        with pytest.raises(PingLlmError, match="token"):
            ServeSettings(token=token)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
def test_other_machines_are_let_in_only_with_a_token_or_on_purpose(host: str) -> None:
    with pytest.raises(PingLlmError, match="other machines"):
        ServeSettings(host=host)
    assert ServeSettings(host=host, token=TOKEN).names is None
    assert ServeSettings(host=host, open_to_all=True).names is None
    assert ServeSettings(host="::1").names == frozenset({"localhost", "127.0.0.1", "[::1]"})


OUTSIDE = (
    "/static/../server.py",
    "/static/%2e%2e/server.py",
    "/static/..%2fserver.py",
    "/static/%2e%2e%2f%2e%2e%2f%2e%2e%2fetc/passwd",
    "/static//etc/passwd",
    "/..%5c..%5cwindows",
    "/static/",
    "/static/main.js/../../server.py",
    "/static/shared/../../server.py",
    "/static/shared/..%2f..%2fpage.py",
    "/static/main.js%00.css",
)


@pytest.mark.parametrize("path", OUTSIDE)
def test_no_path_leads_out_of_the_pages_own_files(client: TestClient, path: str) -> None:
    reply = client.get(path)
    assert reply.status_code == 404
    assert "import" not in reply.text


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_take_no_parameters(client: TestClient, path: str) -> None:
    plain = client.get(path).text
    for name in ("name", "path", "file"):
        assert client.get(path, params={name: "../server.py"}).text == plain


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "192.0.2.1\r\nSet-Cookie: a=b"]
)
def test_markup_in_addresses_comes_back_as_json_text_only(client: TestClient, text: str) -> None:
    replies = [
        client.post("/api/v1/predict", json={"questions": [question(text)]}),
        client.get("/api/v1/history", params={"src_addr": text}),
        client.post("/api/v1/read", content=csv([(1, text.split("\r")[0], SOURCE, 1)]), headers=FILE),
        client.get("/api/v1/addresses", params={"search": text, "source": SOURCE}),
    ]
    for reply in replies:
        assert reply.headers["content-type"] == "application/json"
        assert "set-cookie" not in reply.headers
        assert "\n" not in reply.text


def test_a_name_of_a_file_is_never_used(client: TestClient, tmp_path: Path) -> None:
    headers = FILE | {"Content-Disposition": f'attachment; filename="{tmp_path}/../../evil.csv"'}
    reply = client.post("/api/v1/read?name=../evil.csv", content=csv([(1, SOURCE, "192.0.2.2", 1)]), headers=headers)
    assert reply.status_code == 200
    assert not list(tmp_path.iterdir())
