"""Preparation from and to an object store: the same rows as on the local disk."""

import bz2
import gzip
import json
import shutil
from pathlib import Path

import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest

from conftest import random_measurements
from ping_llm.core.errors import PingLlmError
from ping_llm.data.documents import matching
from ping_llm.rows.manifest import Manifest
from ping_llm.rows.measurement_set import read_observations
from ping_llm.rows.prepare import PrepareSettings, prepare
from ping_llm.sources import files
from ping_llm.storage import Location, locate
from ping_llm.storage.cache import work_folder
from storage_fixtures import S3Server, bucket, s3, s3_server, status, truncated

__all__ = ["bucket", "s3", "s3_server"]


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """Measurements in every kind of file."""
    folder = tmp_path / "raw"
    folder.mkdir()
    table = random_measurements(6_000)
    pq.write_table(table.slice(0, 3000), folder / "a.parquet", row_group_size=500)
    with gzip.open(folder / "b.csv.gz", "wb") as file:
        arrow_csv.write_csv(table.slice(3000, 1500), file)
    arrow_csv.write_csv(table.slice(4500, 1500), folder / "c.csv")
    lines = [
        {"type": "ping", "from": f"10.0.0.{n % 9}", "dst_addr": "10.1.0.1", "timestamp": 1_700_000_000 + n}
        | {"af": 4, "prb_id": 1, "msm_id": 1, "fw": 5000, "result": [{"rtt": 1.0 + n}], "min": 1.0 + n}
        for n in range(200)
    ]
    (folder / "d.json.bz2").write_bytes(bz2.compress("\n".join(map(json.dumps, lines)).encode()))
    return folder


@pytest.fixture
def stored(local: Path, bucket: Location) -> Location:
    for file in locate(local).list():
        (bucket / "raw" / file.name).upload(file.local)
    return bucket / "raw"


def prepared(inputs: object, output: object, **options: object) -> Manifest:
    settings = {"workers": 1} | options
    return prepare(PrepareSettings(inputs=(str(inputs),), output=output, **settings))[0]  # type: ignore[arg-type]


def test_rows_prepared_from_store_to_store_have_the_fingerprint_of_local_ones(
    local: Path, stored: Location, bucket: Location, tmp_path: Path
) -> None:
    here = prepared(local, tmp_path / "rows")
    there = prepared(stored, bucket / "rows")
    assert here.fingerprint == there.fingerprint
    assert (here.read, here.dropped) == (there.read, there.dropped)
    assert Manifest.load(bucket / "rows").fingerprint == here.fingerprint
    assert {f.name for f in (bucket / "rows").list()} == {f.name for f in locate(tmp_path / "rows").list()}


def test_the_same_command_again_has_nothing_to_do(stored: Location, bucket: Location, s3: S3Server) -> None:
    settings = PrepareSettings(inputs=(str(stored),), output=str(bucket / "rows"), workers=1)
    assert prepare(settings)[1]
    s3.requests.clear()
    assert not prepare(settings)[1]
    assert s3.count("PUT", "arrayrecord") == 0


@pytest.mark.parametrize("pattern", ["*.parquet", "?.csv*", "d.json.bz2", ""])
def test_patterns_files_and_folders_name_the_same_as_locally(local: Path, stored: Location, pattern: str) -> None:
    here = [file.name for file in files.expand([str(local / pattern)])]
    there = [file.name for file in files.expand([f"{stored}/{pattern}"])]
    assert here == there
    assert here


@pytest.mark.parametrize("name", ["a.parquet", "b.csv.gz", "c.csv", "d.json.bz2"])
def test_a_file_is_read_through_failures_that_pass(local: Path, stored: Location, s3: S3Server, name: str) -> None:
    s3.fail(truncated, times=2, method="GET", key=name)
    s3.fail(status(503), times=1, method="GET", key=name)
    here, there = (read_observations([where]) for where in (local / name, str(stored / name)))
    assert here.nodes == there.nodes
    assert here.observations.rtt_ms.tobytes() == there.observations.rtt_ms.tobytes()


@pytest.mark.parametrize("name", ["a.parquet", "b.csv.gz", "c.csv", "d.json.bz2"])
def test_a_failure_that_stays_is_one_line_that_names_the_file(stored: Location, s3: S3Server, name: str) -> None:
    s3.fail(status(503), times=float("inf"), method="GET", key=name)
    with pytest.raises(PingLlmError, match=rf"{name}: .*tried 4 times") as caught:
        read_observations([str(stored / name)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["no.parquet", "*.none", "x/*"])
def test_nothing_there_is_said(stored: Location, name: str) -> None:
    with pytest.raises(PingLlmError, match="no input file matches 's3://"):
        files.expand([f"{stored}/{name}"])


def test_an_upload_that_failed_resumes_where_it_stopped(
    local: Path, stored: Location, bucket: Location, s3: S3Server, tmp_path: Path
) -> None:
    s3.fail(status(403), times=float("inf"), method="PUT", key="train.index")
    with pytest.raises(PingLlmError, match=r"train.index: access denied"):
        prepared(stored, bucket / "rows")
    assert not (bucket / "rows" / "manifest.json").exists()
    s3.heal()
    there = prepared(stored, bucket / "rows")
    assert there.fingerprint == prepared(local, tmp_path / "rows").fingerprint
    assert s3.count("PUT", "train-00000") == 0
    assert s3.count("PUT", "train.index") == 1
    assert ".upload.json" not in [file.name for file in (bucket / "rows").list()]


def test_another_machine_finishes_an_upload(local: Path, stored: Location, bucket: Location, s3: S3Server) -> None:
    s3.fail(status(403), times=float("inf"), method="PUT", key="train.index")
    with pytest.raises(PingLlmError, match="access denied"):
        prepared(stored, bucket / "rows")
    s3.heal()
    shutil.rmtree(work_folder(bucket / "rows"))
    assert prepared(stored, bucket / "rows").fingerprint == Manifest.load(bucket / "rows").fingerprint
    assert s3.count("PUT", "train-00000") == 0


def test_a_bucket_that_is_not_there_is_said_before_the_work(stored: Location, s3: S3Server) -> None:
    s3.requests.clear()
    with pytest.raises(PingLlmError, match="no such bucket: nobody-has-this"):
        prepared(stored, "s3://nobody-has-this/rows")
    assert not list(Path(work_folder(locate("s3://nobody-has-this/rows"))).glob("runs/*"))


def test_documents_in_a_store_are_refused_clearly() -> None:
    with pytest.raises(PingLlmError, match=r"grain_train_files: s3://b/\*.parquet is not a local path"):
        matching("s3://b/*.parquet", "grain_train_files")
