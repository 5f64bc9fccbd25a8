"""Files in an object store: one interface, failures that pass are survived, failures that stay are one clear line."""

import hashlib
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ping_llm.core.errors import PingLlmError
from ping_llm.storage import Location, MissingError, StorageError, locate
from ping_llm.storage.location import split_pattern
from ping_llm.storage.stores import file_system
from storage_fixtures import BUCKET, S3Server, bucket, run_python, s3, s3_server, slow, status, truncated

__all__ = ["bucket", "s3", "s3_server"]

names = st.text("abcXYZ0189._-", min_size=1, max_size=8).filter(lambda name: name not in {".", ".."})


class TestNames:
    @given(st.sampled_from(["s3://bucket", "gs://b", "/data", "rows"]), st.lists(names, min_size=1, max_size=4))
    def test_text_gives_a_location_and_a_location_its_text(self, start: str, parts: list[str]) -> None:
        text = "/".join([start, *parts])
        where = locate(text)
        assert str(where) == text
        assert locate(str(where)) == where == pickle.loads(pickle.dumps(where)) == locate(where)
        assert where.parent / where.name == where
        assert where.name == parts[-1]
        assert where.is_remote == ("://" in start)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("hdfs://a/b", "hdfs:// is not supported; use a local path, s3://, gs:// or file:///"),
            ("https://example.org/x", "not supported"),
            ("s3://", "names no bucket"),
            ("s3:/bucket/x", "two slashes"),
            ("file://x", "three slashes"),
        ],
    )
    def test_a_wrong_address_is_one_clear_line(self, text: str, said: str) -> None:
        with pytest.raises(PingLlmError, match=said) as caught:
            locate(text)
        assert "\n" not in str(caught.value)

    def test_a_path_that_lost_a_slash_is_still_remote(self) -> None:
        assert locate(Path("s3://bucket/a/b")) == locate("s3://bucket/a/b")

    def test_a_remote_location_has_no_local_path(self) -> None:
        with pytest.raises(PingLlmError, match="not on this machine"):
            _ = locate("s3://bucket/x").local

    def test_a_pattern_begins_at_the_first_folder_with_a_wildcard(self) -> None:
        assert split_pattern("bucket/2024/*/x?.csv") == ("bucket/2024", "*/x?.csv")


@pytest.fixture(params=["local", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    if request.param == "local":
        return locate(tmp_path / "folder")
    found: Location = request.getfixturevalue("bucket")
    return found


class TestFiles:
    def test_what_is_written_is_read(self, folder: Location) -> None:
        file = folder / "a.txt.gz"  # a name is only a name: nothing is compressed on the way
        assert not file.exists()
        file.write_text("grüß")
        assert file.exists()
        assert file.is_file()
        assert not file.is_dir()
        assert folder.is_dir()
        assert (file.read_text(), file.size()) == ("grüß", 6)

    def test_listings_have_sizes_and_may_go_deeper(self, folder: Location) -> None:
        for name, size in (("b.run", 3), ("a.run", 2), ("deep/er/c.run", 5), ("d.txt", 1)):
            (folder / name).write_bytes(b"x" * size)
        assert [(f.name, f.known_size) for f in folder.list()] == [("a.run", 2), ("b.run", 3), ("d.txt", 1)]
        assert [f.relative_to(folder) for f in folder.list(recursive=True)] == [
            "a.run",
            "b.run",
            "d.txt",
            "deep/er/c.run",
        ]
        assert (folder / "nothing").list() == []

    def test_globs_agree_with_pathlib(self, folder: Location, tmp_path: Path) -> None:
        for name in ("a.run", "b.run", "ab.txt", "[x].run", "d/c.run", "d/e/a.run", ".hidden.run"):
            (folder / name).write_bytes(b"")
            locate(tmp_path / "same" / name).write_bytes(b"")
        for pattern in ("*.run", "?.run", "[ab].run", "[!a].*", "**/*.run", "d/**/*.run", "*/c.run", "a**.run", "none"):
            found = sorted(p for p in (tmp_path / "same").glob(pattern.replace("a**", "a*")) if p.is_file())
            expected = [str(p.relative_to(tmp_path / "same")) for p in found]
            assert [f.relative_to(folder) for f in folder.glob(pattern)] == expected, pattern

    def test_up_and_down_again_gives_the_same_bytes(self, folder: Location, tmp_path: Path) -> None:
        data = bytes(range(256)) * 50_000  # of several parts
        (tmp_path / "up").write_bytes(data)
        (folder / "x/file").upload(tmp_path / "up")
        (folder / "x/file").download(tmp_path / "new/down", sha256=hashlib.sha256(data).hexdigest())
        assert (tmp_path / "new/down").read_bytes() == data
        assert [p.name for p in (tmp_path / "new").iterdir()] == ["down"]

    def test_a_wrong_checksum_leaves_no_file(self, folder: Location, tmp_path: Path) -> None:
        (folder / "file").write_bytes(b"one")
        with pytest.raises(StorageError, match="damaged"):
            (folder / "file").download(tmp_path / "down", sha256="0" * 64)
        assert not (tmp_path / "down").exists()

    def test_reads_at_any_offset(self, folder: Location) -> None:
        (folder / "file").write_bytes(bytes(range(100)))
        with (folder / "file").open_random() as file:
            assert file.seekable()
            assert file.size() == 100
            file.seek(-3, 2)
            assert file.read() == bytes([97, 98, 99])
        assert (folder / "file").open_random().read_at(5, 98) == bytes([98, 99])

    def test_parquet_by_ranges(self, folder: Location, tmp_path: Path) -> None:
        table = pa.table({"x": range(1000)})
        pq.write_table(table, tmp_path / "t.parquet", row_group_size=100)
        (folder / "t.parquet").upload(tmp_path / "t.parquet")
        with pq.ParquetFile((folder / "t.parquet").open_random()) as file:
            assert file.read_row_group(3)["x"].to_pylist() == list(range(300, 400))

    def test_deleting(self, folder: Location) -> None:
        for name in ("a", "b/c", "b/d"):
            (folder / name).write_bytes(b"x")
        (folder / "a").delete()
        (folder / "a").delete()
        (folder / "b").delete_tree()
        (folder / "b").delete_tree()
        assert folder.list(recursive=True) == []

    def test_a_folder_that_can_be_written_is_left_as_it_was(self, folder: Location) -> None:
        folder.check_writable()
        assert folder.list() == []

    def test_a_copy_within_a_store(self, folder: Location) -> None:
        (folder / "a").write_bytes(b"x" * 10)
        (folder / "a").copy_to(folder / "b")
        assert (folder / "b").read_bytes() == b"x" * 10

    def test_a_source_that_is_gone_is_not_the_stores_fault(self, folder: Location, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            (folder / "x").upload(tmp_path / "gone")

    def test_a_missing_file_is_one_line(self, folder: Location, tmp_path: Path) -> None:
        for attempt in (
            (folder / "no").read_bytes,
            (folder / "no").size,
            (folder / "no").open_random,
            lambda: (folder / "no").download(tmp_path / "x"),
        ):
            with pytest.raises(MissingError, match=r"no such (object|file)"):
                attempt()


class TestTrouble:
    def test_what_passes_is_survived(self, s3: S3Server, bucket: Location, tmp_path: Path) -> None:
        data = b"x" * 100_000
        (bucket / "file").write_bytes(data)
        for fault in (status(503), status(500), status(429), truncated):
            s3.fail(fault, times=2, method="GET", key="file")
            assert (bucket / "file").read_bytes() == data
            s3.fail(fault, times=2, method="GET", key="file")
            (bucket / "file").download(tmp_path / "file")
            assert (tmp_path / "file").read_bytes() == data
        s3.fail(status(503), times=2)
        (bucket / "other").upload(tmp_path / "file")
        s3.fail(status(503), times=2)
        assert (bucket / "other").size() == len(data)
        s3.fail(truncated, times=2, method="GET")
        assert len(bucket.list()) == 2

    @pytest.mark.parametrize("fault", [status(503), truncated])
    def test_what_stays_is_one_line_with_the_name_the_cause_and_the_tries(
        self, s3: S3Server, bucket: Location, fault: object
    ) -> None:
        (bucket / "file").write_bytes(b"x" * 1000)
        s3.requests.clear()
        s3.fail(fault, times=float("inf"), method="GET")  # type: ignore[arg-type]
        with pytest.raises(StorageError, match=r"/file: .*(503|UNAVAILABLE|partial).* \(tried 4 times in") as caught:
            (bucket / "file").read_bytes()
        assert "\n" not in str(caught.value)
        assert s3.count("GET", "file") == 4

    def test_a_stalled_request_is_given_up_and_tried_again(
        self, s3: S3Server, bucket: Location, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (bucket / "file").write_bytes(b"x")
        monkeypatch.setenv("PING_LLM_STALL_S", "1")
        file_system.cache_clear()
        s3.fail(slow(3), method="GET", key="file")
        assert (bucket / "file").read_bytes() == b"x"
        assert s3.count("GET", "file") == 2
        file_system.cache_clear()

    @pytest.mark.parametrize(
        ("name", "message"), [("no/such/key", "no such object"), (None, "no such bucket: nobody-has-this")]
    )
    def test_what_is_not_there_is_not_tried_again(
        self, s3: S3Server, bucket: Location, name: str | None, message: str
    ) -> None:
        where = bucket / name if name else locate("s3://nobody-has-this/x")
        with pytest.raises(MissingError, match=message):
            where.read_bytes()
        assert len(s3.requests) == 2  # for the object, and for its bucket

    def test_forbidden_is_not_tried_again(self, s3: S3Server, bucket: Location) -> None:
        s3.fail(status(403), times=99)
        with pytest.raises(StorageError, match="access denied: check the credentials"):
            (bucket / "x").write_bytes(b"x")
        with pytest.raises(StorageError, match="access denied: check the credentials"):
            bucket.check_writable()
        assert len(s3.requests) == 2

    def test_a_store_that_is_not_there(self, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        file_system.cache_clear()
        with pytest.raises(StorageError, match=r"connect.*tried 4 times"):
            locate(f"s3://{BUCKET}/x").read_bytes()
        file_system.cache_clear()

    def test_reads_of_an_open_file_are_tried_again_each(self, s3: S3Server, bucket: Location) -> None:
        (bucket / "file").write_bytes(bytes(range(200)))
        file = (bucket / "file").open_random()
        s3.fail(truncated, method="GET", key="file")
        assert file.read_at(100, 50) == bytes(range(50, 150))

    def test_many_threads_read_one_file_through_failures(self, s3: S3Server, bucket: Location) -> None:
        data = bytes(range(256)) * 100
        (bucket / "file").write_bytes(data)
        file = (bucket / "file").open_random()
        s3.fail(truncated, times=3, method="GET", key="file")
        with ThreadPoolExecutor(16) as threads:
            parts = threads.map(lambda at: file.read_at(100, at), range(0, len(data), 100))
            assert b"".join(parts) == data

    @pytest.mark.parametrize("name", ["PING_LLM_STORAGE_TRIES", "PING_LLM_STORAGE_SECONDS", "PING_LLM_STALL_S"])
    def test_a_wrong_setting_is_one_line(self, s3: S3Server, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setenv(name, "many")
        file_system.cache_clear()
        with pytest.raises(PingLlmError, match=f"{name}='many' is not a number"):
            locate(f"s3://{BUCKET}/x").read_bytes()
        file_system.cache_clear()

    def test_no_try_begins_after_the_time_that_was_set(
        self, s3: S3Server, bucket: Location, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PING_LLM_STORAGE_SECONDS", "0")
        s3.fail(status(503), times=float("inf"), method="GET")
        with pytest.raises(StorageError, match=r"\(tried once\)"):
            bucket.list()


def test_locations_work_in_other_processes(s3: S3Server, bucket: Location) -> None:
    (bucket / "file").write_text("hello")
    script = (
        "import sys, os; from ping_llm.storage import locate\n"
        "where = locate(sys.argv[1]); assert where.read_text() == 'hello'\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(0 if where.read_text() == 'hello' else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0"
    )
    process = run_python(script, bucket / "file")
    assert process.wait(60) == 0, process.stderr and process.stderr.read()
