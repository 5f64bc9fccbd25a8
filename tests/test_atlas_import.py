"""What an Atlas import writes (the same bytes for any number of workers, whole or not at all) and reports."""

import json
import signal
import subprocess
import sys
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atlas_fixtures import TIME, as_lines, ping, several_files, visible, written
from ping_llm.core.errors import MeasurementError, PingLlmError
from ping_llm.sources.atlas import ROWS_PER_GROUP, import_atlas, write_measurements
from ping_llm.sources.atlas_results import ATLAS_SCHEMA
from ping_llm.sources.objects import ReadSizes


@pytest.fixture
def many_files(tmp_path: Path) -> list[Path]:
    return several_files(tmp_path)


class TestOutput:
    def test_files_have_the_measurement_schema_dictionaries_and_zstd(self, tmp_path: Path) -> None:
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping(), ping(result=[{"x": "*"}])]))
        import_atlas([file], tmp_path / "out")
        assert visible(tmp_path / "out") == ["measurements-00000.parquet"]
        parquet = pq.ParquetFile(tmp_path / "out" / "measurements-00000.parquet")
        assert parquet.schema_arrow.equals(ATLAS_SCHEMA)
        columns = [parquet.metadata.row_group(0).column(i) for i in range(5)]
        assert {column.compression for column in columns} == {"ZSTD"}
        assert {c.path_in_schema for c in columns if c.has_dictionary_page} == {"src_addr", "dst_addr"}
        moment = datetime.fromtimestamp(TIME, UTC)
        assert written(tmp_path / "out") == [
            (moment, "198.51.100.1", "192.0.2.7", 4, 20.5),
            (moment, "198.51.100.1", "192.0.2.7", 4, None),
        ]

    def test_the_bytes_do_not_depend_on_workers_or_chunks(self, tmp_path: Path, many_files: list[Path]) -> None:
        def imported(name: str, files: list[Path], **options: Any) -> dict[str, bytes]:
            import_atlas(files, tmp_path / name, rows_per_file=2000, **options)
            return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

        alone = imported("one", many_files, workers=1)
        assert sorted(alone) == [f"measurements-{i:05d}.parquet" for i in range(5)]
        small = ReadSizes(chunk=77777, block=5000)
        assert imported("small chunks", many_files, workers=1, sizes=ReadSizes(chunk=5000, block=5000)) == alone
        assert imported("by file", many_files, workers=2, sizes=small) == alone
        assert imported("by chunk", many_files[:1], workers=2, sizes=small) == imported(
            "one file", many_files[:1], workers=1
        )

    def test_files_and_row_groups_have_their_exact_size_however_the_batches_are_cut(self, tmp_path: Path) -> None:
        rows = ROWS_PER_GROUP + 2007
        times = pa.array(range(TIME, TIME + rows), pa.int64()).cast(ATLAS_SCHEMA.field("event_time").type)
        text = pa.array([f"198.51.100.{i * i % 251}" for i in range(rows)])
        ones, ids = pa.array([4] * rows, pa.int8()), pa.array(range(rows), pa.int64())
        batch = pa.RecordBatch.from_arrays(
            [times, text, text, ones, ones.cast(pa.float32()), ids, ids], schema=ATLAS_SCHEMA
        )
        contents = []
        for number, cuts in enumerate([[], [1, 5000, 5000, 23_456, ROWS_PER_GROUP + 1], list(range(0, rows, 977))]):
            folder = tmp_path / str(number)
            folder.mkdir()
            batches = (batch.slice(start, end - start) for start, end in pairwise([0, *cuts, rows]))
            files = write_measurements(batches, folder, rows_per_file=ROWS_PER_GROUP + 1000)
            contents.append([file.read_bytes() for file in files])
        assert contents[0] == contents[1] == contents[2]
        metadata = [pq.ParquetFile(file).metadata for file in files]
        groups = [[one.row_group(i).num_rows for i in range(one.num_row_groups)] for one in metadata]
        assert groups == [[ROWS_PER_GROUP, 1000], [1007]]

    def test_measurements_already_there_are_kept_unless_overwriting(self, tmp_path: Path) -> None:
        file, out = tmp_path / "in.json", tmp_path / "out"
        file.write_bytes(as_lines([ping(), ping()]))
        import_atlas([file], out, rows_per_file=1)
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        with pytest.raises(PingLlmError, match="already holds measurements"):
            import_atlas([file], out, packets="each")
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        import_atlas([file], out, packets="each", overwrite=True)
        assert visible(out) == ["measurements-00000.parquet"]
        assert len(written(out)) == 6

    def test_a_failed_overwrite_keeps_what_was_there(self, tmp_path: Path) -> None:
        file, bad, out = tmp_path / "in.json", tmp_path / "bad.json", tmp_path / "out"
        file.write_bytes(as_lines([ping()]))
        bad.write_bytes(as_lines([ping(), ping(type="dns")]))
        import_atlas([file], out)
        with pytest.raises(MeasurementError):
            import_atlas([bad], out, overwrite=True, strict=True)
        assert len(written(out)) == 1

    def test_other_files_in_the_folder_are_left_alone(self, tmp_path: Path) -> None:
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping()]))
        import_atlas([file], tmp_path)
        assert visible(tmp_path) == ["in.json", "measurements-00000.parquet"]

    def test_an_output_that_is_a_file_or_cannot_be_written_is_one_line(self, tmp_path: Path) -> None:
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping()]))
        with pytest.raises(PingLlmError, match="is a file"):
            import_atlas([file], file)
        with pytest.raises(PingLlmError, match="cannot be written"):
            import_atlas([file], file / "folder")

    def test_two_imports_into_one_folder_at_a_time_are_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping()]))
        refused: list[object] = []

        def second_import(amount: float = 1, *, total: float | None = None) -> None:
            if total is None and not refused:
                with pytest.raises(PingLlmError, match="is in use by process") as error:
                    import_atlas([file], tmp_path / "out")
                refused.append(error)

        assert import_atlas([file], tmp_path / "out", on_progress=second_import).measurements == 1
        assert refused

    def test_a_killed_import_leaves_nothing_that_looks_finished_and_the_next_one_cleans_up(
        self, tmp_path: Path
    ) -> None:
        file, out = tmp_path / "in.json", tmp_path / "out"
        file.write_bytes(as_lines([ping()] * 100))
        script = (
            "import os, signal, sys; from ping_llm.sources.atlas import import_atlas\n"
            "def die(amount, *, total=None):\n"
            "    if amount: os.kill(os.getpid(), signal.SIGKILL)\n"
            "import_atlas(sys.argv[1:2], sys.argv[2], workers=1, rows_per_file=9, on_progress=die)\n"
        )
        killed = subprocess.run([sys.executable, "-c", script, str(file), str(out)], timeout=60)
        assert killed.returncode == -signal.SIGKILL
        assert any(out.rglob("*.parquet"))  # it was in the middle of writing
        assert not any(out.glob("*.parquet"))
        assert import_atlas([file], out).measurements == 100
        assert visible(out) == ["measurements-00000.parquet"]


class TestReport:
    @pytest.mark.parametrize(("workers", "packets"), [(1, "min"), (2, "each")])
    def test_every_result_is_in_the_output_or_in_the_drops(
        self, tmp_path: Path, many_files: list[Path], workers: int, packets: Any
    ) -> None:
        report = import_atlas(many_files, tmp_path / "out", workers=workers, packets=packets)
        rows = written(tmp_path / "out")
        assert report.results == 3000 + 2999 + 2998
        assert report.dropped == {"not_ping": 180}
        assert report.measurements == len(rows)
        assert report.failed == sum(row[-1] is None for row in rows)
        if packets == "min":
            assert report.measurements == report.results - 180
        for name in ("results", "measurements", "failed", "bytes"):
            assert getattr(report, name) == sum(getattr(one, name) for one in report.inputs)
        assert [one.file for one in report.inputs] == [str(file) for file in many_files]
        assert [one.dropped for one in report.inputs] == [{"not_ping": 60}] * 3
        assert report.examples == {"not_ping": f"{many_files[0]}:1: type is 'dns'"}
        assert report.bytes == sum(file.stat().st_size for file in many_files)

    def test_the_report_is_json(self, tmp_path: Path, many_files: list[Path]) -> None:
        report = import_atlas(many_files, tmp_path / "out", workers=1)
        loaded = json.loads(json.dumps(report.to_json()))
        assert loaded["dropped"] == {"not_ping": 180}
        assert loaded["files"] == ["measurements-00000.parquet"]
        assert loaded["inputs"][2]["results"] == 2998
        assert loaded["seconds"] > 0

    @pytest.mark.parametrize("workers", [1, 2])
    def test_progress_ends_at_the_size_of_the_input(self, tmp_path: Path, many_files: list[Path], workers: int) -> None:
        told: list[float] = []
        totals: list[float] = []

        def advance(amount: float = 1, *, total: float | None = None) -> None:
            told.append(amount)
            totals.extend([] if total is None else [total])

        report = import_atlas(
            many_files, tmp_path / "out", workers=workers, sizes=ReadSizes(chunk=9999), on_progress=advance
        )
        assert totals == [report.bytes]
        assert sum(told) == report.bytes
        assert min(told) >= 0

    @pytest.mark.parametrize("workers", [1, 2])
    def test_strict_reports_the_first_problem_of_the_first_file(
        self, tmp_path: Path, many_files: list[Path], workers: int
    ) -> None:
        broken = tmp_path / "broken.bz2"
        broken.write_bytes(many_files[0].read_bytes()[:-30])
        with pytest.raises(PingLlmError) as error:
            import_atlas(
                [many_files[1], broken], tmp_path / "out", workers=workers, strict=True, sizes=ReadSizes(chunk=5000)
            )
        assert str(error.value) == f"{many_files[1]}:1: not_ping: type is 'dns'"
        assert not (tmp_path / "out").exists()
