"""Files and options that the Atlas importer refuses, each with one line."""

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from atlas_fixtures import as_lines, ping, visible
from ping_llm.core.errors import PingLlmError
from ping_llm.sources.atlas import import_atlas
from ping_llm.sources.atlas import stream as atlas_stream


class TestBadFiles:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "the file is empty"),
            (b"\n \r\n", "the file is empty"),
            (bz2.compress(b""), "the file is empty"),
            (gzip.compress(b"\n"), "the file is empty"),
            (b"<html><body>502</body></html>", "not RIPE Atlas JSON: it starts with b'<html><b'"),
            (b"time,src,dst,rtt\n1,2,3,4\n", "not RIPE Atlas JSON"),
            (b"{{ template }}\n{ body }\n", "not RIPE Atlas JSON.* none of 2 is valid JSON"),
            (json.dumps(ping(), indent=2).encode(), "not RIPE Atlas JSON"),
            (b"\xfd7zXZ\x00abc", "is xz-compressed"),
            (b"\x28\xb5\x2f\xfdabc", "is zstd-compressed"),
            (b"PK\x03\x04abc", "is a zip archive"),
            (b"PAR1abc", "is a Parquet file"),
            (bz2.compress(as_lines([ping()]) * 99)[:-9], r"compressed data is cut off \(read \d+ of \d+ bytes\)"),
            (gzip.compress(as_lines([ping()]) * 99)[:-9], r"compressed data is cut off \(read \d+ of \d+ bytes\)"),
            (bz2.compress(as_lines([ping()])) + b"garbage", "compressed data is damaged"),
            (gzip.compress(as_lines([ping()])) + b"garbage", "compressed data is damaged"),
            (bz2.compress(as_lines([ping()])).replace(b"1AY&SY", b"1AY&SX"), "compressed data is damaged"),
            (gzip.compress(as_lines([ping()]))[:-8] + b"\0" * 8, "compressed data is damaged"),
            (json.dumps([ping(), ping()]).encode()[:-1], "array is cut off or damaged after element 1"),
            (json.dumps([ping(), ping()]).encode()[:-40], "array is cut off or damaged after element 1"),
            (b'[{"a": 1]}, {"a": 2}]', "brackets do not match"),
            (b'[{"a": 1}]]', "brackets do not match"),
            (b'[{"a": 1}] {"a": 2}', "brackets do not match"),
            (b"[]", "no ping measurement in 0 results"),
            (as_lines([ping(type="dns")] * 4), r"no ping measurement in 4 results \(not_ping 4\)"),
        ],
    )
    def test_one_line_says_what_is_wrong_and_nothing_is_left(
        self, tmp_path: Path, content: bytes, message: str
    ) -> None:
        file = tmp_path / "in"
        file.write_bytes(content)
        with pytest.raises(PingLlmError, match=message) as error:
            import_atlas([file], tmp_path / "out")
        assert "\n" not in str(error.value)
        assert visible(tmp_path) == ["in"]

    def test_a_missing_file_a_folder_a_file_given_twice_and_no_file(self, tmp_path: Path) -> None:
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping()]))
        for files, message in [
            ([file, tmp_path / "missing.json"], "missing.json: no such file"),
            ([tmp_path], "is not a file but a folder"),
            ([file, tmp_path / "." / "in.json"], "given twice"),
            ([], "no input file"),
        ]:
            with pytest.raises(PingLlmError, match=message):
                import_atlas(files, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_line_without_end_is_refused_before_it_fills_the_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(atlas_stream, "MAX_RESULT_BYTES", 1 << 20)
        monkeypatch.setattr(atlas_stream, "BLOCK_BYTES", 1 << 16)
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping()]) + b'{"a": "' + b"x" * (3 << 20))
        with pytest.raises(PingLlmError, match="line 2 is over 1,048,576 bytes"):
            import_atlas([file], tmp_path / "out", chunk_bytes=1 << 16)

    def test_bad_options_are_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping()]))
        bad: list[dict[str, Any]] = [{"packets": "max"}, {"workers": 0}, {"rows_per_file": 0}]
        for options in bad:
            with pytest.raises(PingLlmError, match="must be"):
                import_atlas([file], tmp_path / "out", **options)
