"""Import file by file: restartable, only what is missing or changed, a damaged file does not hold up the rest."""

import bz2
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from atlas_fixtures import as_lines, ping, several_files, visible, written
from ping_llm.core.errors import MeasurementError, PingLlmError
from ping_llm.sources.atlas import import_atlas, import_by_file
from ping_llm.tasks.engines import EngineChoice, Timing

ONE = EngineChoice(workers=1)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return several_files(tmp_path)


def entry(folder: Path, name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "ledger" / f"{name}.json").read_text())
    return found


def parquet(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


class TestContent:
    def test_each_file_becomes_one_with_the_measurements_that_the_plain_import_gives(
        self, tmp_path: Path, files: list[Path]
    ) -> None:
        report = import_by_file(files, tmp_path / "out", engine=ONE)
        plain = import_atlas(files, tmp_path / "plain", workers=1)
        assert sorted(parquet(tmp_path / "out")) == ["a.bz2.parquet", "b.gz.parquet", "c.json.parquet"]
        assert written(tmp_path / "out") == written(tmp_path / "plain")
        for name in ("results", "measurements", "failed", "dropped", "examples", "bytes"):
            assert getattr(report, name) == getattr(plain, name)
        assert (report.skipped, report.failures) == (0, {})

    def test_the_bytes_depend_on_the_file_alone(self, tmp_path: Path, files: list[Path]) -> None:
        import_by_file(files, tmp_path / "together", engine=EngineChoice(workers=2))
        for file in files:
            import_by_file([file], tmp_path / "alone", engine=ONE)
        assert parquet(tmp_path / "together") == parquet(tmp_path / "alone")

    def test_the_ledger_says_what_became_of_a_file(self, tmp_path: Path, files: list[Path]) -> None:
        import_by_file(files, tmp_path / "out", engine=ONE)
        found = entry(tmp_path / "out", "a.bz2")
        stat = files[0].stat()
        assert (found["file"], found["bytes"], found["modified_ns"]) == (
            str(files[0]),
            stat.st_size,
            stat.st_mtime_ns,
        )
        assert (found["results"], found["measurements"], found["dropped"]) == (3000, 2940, {"not_ping": 60})
        data = (tmp_path / "out" / "a.bz2.parquet").read_bytes()
        assert found["output_bytes"] == len(data)
        assert pq.read_metadata(tmp_path / "out" / "a.bz2.parquet").num_rows == found["measurements"]
        assert found["error"] is None

    def test_a_file_without_pings_is_done_and_leaves_no_parquet_file(self, tmp_path: Path) -> None:
        (tmp_path / "dns.json").write_bytes(as_lines([ping(type="dns")] * 3))
        import_by_file([tmp_path / "dns.json"], tmp_path / "out", engine=ONE)
        assert visible(tmp_path / "out") == ["ledger", "ledger/dns.json.json"]
        assert import_by_file([tmp_path / "dns.json"], tmp_path / "out", engine=ONE).skipped == 1


class TestAgain:
    def done_again(self, files: list[Path], out: Path, overwrite: bool = False) -> list[int | str]:
        """The names of the files that an import really read."""
        timings: list[Timing] = []
        import_by_file(files, out, engine=ONE, on_timing=timings.append, overwrite=overwrite)
        return [timing.task for timing in timings]

    def test_only_new_changed_lost_and_damaged_files_are_done_again(self, tmp_path: Path, files: list[Path]) -> None:
        out = tmp_path / "out"
        assert self.done_again(files[:2], out) == ["a.bz2", "b.gz"]
        assert self.done_again(files, out) == ["c.json"]
        before = parquet(out)
        os.utime(files[0], ns=(1, 1))
        assert self.done_again(files, out) == ["a.bz2"]
        (out / "b.gz.parquet").unlink()
        assert self.done_again(files, out) == ["b.gz"]
        (out / "c.json.parquet").write_bytes(b"cut off")
        assert self.done_again(files, out) == ["c.json"]
        assert parquet(out) == before
        assert self.done_again(files, out) == []
        assert len(self.done_again(files, out, overwrite=True)) == 3

    def test_a_changed_file_replaces_what_it_was(self, tmp_path: Path) -> None:
        file, out = tmp_path / "in.json", tmp_path / "out"
        file.write_bytes(as_lines([ping()] * 5))
        import_by_file([file], out, engine=ONE)
        file.write_bytes(as_lines([ping()] * 7))
        assert import_by_file([file], out, engine=ONE).measurements == 7
        assert len(written(out)) == 7
        file.write_bytes(as_lines([ping(type="dns")]))
        import_by_file([file], out, engine=ONE)
        assert parquet(out) == {}

    @pytest.mark.slow
    def test_an_import_that_was_killed_continues_where_it_was(self, tmp_path: Path) -> None:
        names = [tmp_path / f"{hour:02d}.bz2" for hour in range(12)]
        for hour, name in enumerate(names):
            name.write_bytes(bz2.compress(as_lines([ping(timestamp=1_600_000_000 + i + hour) for i in range(20_000)])))
        command = [sys.executable, "-m", "ping_llm", "import", "atlas", *map(str, names), "--per-file"]
        command += ["--output", str(tmp_path / "out"), "--workers", "2"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("out/ledger/*.json"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.5)  # the workers go with it
        done = len(list(tmp_path.glob("out/ledger/*.json")))
        assert 3 <= done < 12
        result = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True)
        report = json.loads(result.stdout)
        assert report["skipped"] == done
        assert report["measurements"] == 12 * 20_000
        import_by_file(names, tmp_path / "whole", engine=ONE)
        assert parquet(tmp_path / "out") == parquet(tmp_path / "whole")


class TestDamage:
    @pytest.fixture
    def damaged(self, tmp_path: Path, files: list[Path]) -> list[Path]:
        bad = tmp_path / "bad.bz2"
        bad.write_bytes(files[0].read_bytes()[:-30])
        return [files[0], bad, *files[1:]]

    def test_a_damaged_file_is_reported_and_the_rest_imported(self, tmp_path: Path, damaged: list[Path]) -> None:
        report = import_by_file(damaged, tmp_path / "out", engine=ONE)
        assert list(report.failures) == [str(damaged[1])]
        assert "the compressed data is cut off" in report.failures[str(damaged[1])]
        assert len(parquet(tmp_path / "out")) == 3
        assert "cut off" in str(entry(tmp_path / "out", "bad.bz2")["error"])

    def test_when_it_is_mended_only_it_is_done_again(self, tmp_path: Path, damaged: list[Path]) -> None:
        import_by_file(damaged, tmp_path / "out", engine=ONE)
        shutil.copy(damaged[0], damaged[1])
        report = import_by_file(damaged, tmp_path / "out", engine=ONE)
        assert (report.skipped, report.failures) == (3, {})
        assert len(parquet(tmp_path / "out")) == 4

    def test_strict_stops_at_once(self, tmp_path: Path, damaged: list[Path]) -> None:
        with pytest.raises(MeasurementError, match="not_ping"):
            import_by_file(damaged, tmp_path / "out", strict=True, engine=ONE)
        with pytest.raises(PingLlmError, match="cut off"):
            import_by_file(damaged[1:], tmp_path / "out", strict=True, engine=ONE)
        assert parquet(tmp_path / "out") == {}

    def test_the_exit_code_says_so_and_standard_output_has_the_report(
        self, tmp_path: Path, damaged: list[Path]
    ) -> None:
        command = [sys.executable, "-m", "ping_llm", "import", "atlas", *map(str, damaged), "--per-file", "--json"]
        result = subprocess.run(
            [*command, "-o", str(tmp_path / "out"), "--workers", "1"], capture_output=True, text=True, check=False
        )
        assert result.returncode == 1
        assert "not imported" in result.stderr
        assert "1 of 4 files could not be imported" in result.stderr
        assert list(json.loads(result.stdout)["failures"]) == [str(damaged[1])]


class TestRefused:
    def test_wrong_input_and_folders_are_one_line(self, tmp_path: Path, files: list[Path]) -> None:
        (tmp_path / "other").mkdir()
        namesake = tmp_path / "other" / "a.bz2"
        shutil.copy(files[0], namesake)
        import_atlas(files, tmp_path / "plain", workers=1)
        for given, out, message in [
            ([files[0], namesake], "out", "2 input files are called a.bz2"),
            ([tmp_path / "missing.bz2"], "out", "missing.bz2: no such file"),
            ([tmp_path / "other"], "out", "is not a file"),
            ([], "out", "no input file given"),
            (files, "plain", "not imported file by file"),
            (files, "a.bz2", "is a file"),
        ]:
            with pytest.raises(PingLlmError, match=message):
                import_by_file(given, tmp_path / out, engine=ONE)

    def test_one_folder_has_one_way_of_counting_packets(self, tmp_path: Path, files: list[Path]) -> None:
        import_by_file(files[:1], tmp_path / "out", engine=ONE)
        with pytest.raises(PingLlmError, match="was imported with --packets min"):
            import_by_file(files, tmp_path / "out", packets="each", engine=ONE)

    def test_the_plain_import_does_not_add_to_a_folder_with_a_ledger(self, tmp_path: Path, files: list[Path]) -> None:
        import_by_file(files, tmp_path / "out", engine=ONE)
        with pytest.raises(PingLlmError, match="--per-file"):
            import_atlas(files, tmp_path / "out", overwrite=True)
