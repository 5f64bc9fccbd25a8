"""The report of an Atlas import: every result is accounted for."""

import json
from pathlib import Path
from typing import Any

import pytest

from atlas_fixtures import several_files, written
from ping_llm.core.errors import PingLlmError
from ping_llm.sources.atlas import import_atlas


@pytest.fixture
def many_files(tmp_path: Path) -> list[Path]:
    return several_files(tmp_path)


class TestReport:
    @pytest.mark.parametrize("workers", [1, 2])
    @pytest.mark.parametrize("packets", ["min", "each"])
    def test_every_result_is_in_the_output_or_in_the_drops(
        self, tmp_path: Path, many_files: list[Path], workers: int, packets: Any
    ) -> None:
        report = import_atlas(many_files, tmp_path / "out", workers=workers, packets=packets)
        rows = written(tmp_path / "out")
        assert report.results == 3000 + 2999 + 2998
        assert report.dropped == {"not_ping": 180}
        assert report.kept == report.results - 180
        assert report.measurements == len(rows)
        assert report.failed == sum(row[-1] is None for row in rows)
        if packets == "min":
            assert report.measurements == report.kept
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

        report = import_atlas(many_files, tmp_path / "out", workers=workers, chunk_bytes=9999, on_progress=advance)
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
            import_atlas([many_files[1], broken], tmp_path / "out", workers=workers, strict=True, chunk_bytes=5000)
        assert str(error.value) == f"{many_files[1]}:1: not_ping: type is 'dns'"
        assert not (tmp_path / "out").exists()
