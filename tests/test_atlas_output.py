"""What an Atlas import leaves on disk: the same bytes for any number of workers, whole or not at all."""

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
from ping_llm.core.measurements import SCHEMA
from ping_llm.sources.atlas import import_atlas
from ping_llm.sources.atlas import stream as atlas_stream
from ping_llm.sources.atlas.output import ROWS_PER_GROUP, MeasurementWriter


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
        assert parquet.schema_arrow.equals(SCHEMA)
        columns = [parquet.metadata.row_group(0).column(i) for i in range(5)]
        assert {column.compression for column in columns} == {"ZSTD"}
        assert {c.path_in_schema for c in columns if c.has_dictionary_page} == {"src_addr", "dst_addr"}
        moment = datetime.fromtimestamp(TIME, UTC)
        assert written(tmp_path / "out") == [
            (moment, "198.51.100.1", "192.0.2.7", 4, 20.5),
            (moment, "198.51.100.1", "192.0.2.7", 4, None),
        ]

    def test_the_bytes_do_not_depend_on_workers_or_chunks(
        self, tmp_path: Path, many_files: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def imported(name: str, files: list[Path], **options: Any) -> dict[str, bytes]:
            import_atlas(files, tmp_path / name, rows_per_file=2000, **options)
            return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

        alone = imported("one", many_files, workers=1)
        assert sorted(alone) == [f"measurements-{i:05d}.parquet" for i in range(5)]
        monkeypatch.setattr(atlas_stream, "BLOCK_BYTES", 5000)
        assert imported("small chunks", many_files, workers=1, chunk_bytes=5000) == alone
        assert imported("by file", many_files, workers=2, chunk_bytes=77777) == alone
        assert imported("by chunk", many_files[:1], workers=2, chunk_bytes=77777) == imported(
            "one file", many_files[:1], workers=1
        )

    def test_files_and_row_groups_have_their_exact_size_however_the_batches_are_cut(self, tmp_path: Path) -> None:
        rows = ROWS_PER_GROUP + 2007
        times = pa.array(range(TIME, TIME + rows), pa.int64()).cast(SCHEMA.field("event_time").type)
        text = pa.array([f"198.51.100.{i * i % 251}" for i in range(rows)])
        ones = pa.array([4] * rows, pa.int8())
        batch = pa.RecordBatch.from_arrays([times, text, text, ones, ones.cast(pa.float32())], schema=SCHEMA)
        contents = []
        for number, cuts in enumerate([[], [1, 5000, 5000, 23_456, ROWS_PER_GROUP + 1], list(range(0, rows, 977))]):
            folder = tmp_path / str(number)
            folder.mkdir()
            with MeasurementWriter(folder, rows_per_file=ROWS_PER_GROUP + 1000) as writer:
                for start, end in pairwise([0, *cuts, rows]):
                    writer.write(batch.slice(start, end - start))
            files = [folder / f"{name}.tmp" for name in writer.names]
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
                with pytest.raises(PingLlmError, match="another import") as error:
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
        left = visible(out)
        assert [name for name in left if name.endswith(".tmp")]  # it was in the middle of writing
        assert [name for name in left if name.endswith(".parquet")] == []
        assert import_atlas([file], out).measurements == 100
        assert visible(out) == ["measurements-00000.parquet"]
