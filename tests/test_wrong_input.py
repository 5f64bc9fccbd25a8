"""Commands with wrong input: paths that are not there, empty files, files for folders, unknown keys and values.

Each ends with one line that says what is wrong, and leaves everything as it was.
"""

import shlex
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from ping_llm.cli.main import app
from ping_llm.cli.options import check_folder, write_table
from ping_llm.core.errors import PingLlmError, explained
from ping_llm.evaluate.split import write_split
from ping_llm.rows.manifest import MANIFEST
from ping_llm.rows.measurement_set import read_observations
from ping_llm.rows.prepare import PrepareSettings, prepare
from ping_llm.sources import ROWS_FILE
from ping_llm.sources.simulator import SimulatorSettings, simulate

HEADER = "event_time,src_addr,dst_addr,rtt\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a newcomer may have lying about."""
    folder = tmp_path_factory.mktemp("newcomer")
    simulate(SimulatorSettings(measurements=5_000), folder / "raw")
    write_split(read_observations([folder / "raw"]), folder / "split")
    prepare(PrepareSettings(inputs=(str(folder / "split" / "train"),), output=folder / "rows", workers=1))
    for name in ("empty.csv", "empty.parquet", "empty.json", "empty.yml"):
        (folder / name).touch()
    for name in ("nothing", "folder.csv"):
        (folder / name).mkdir()
    (folder / "other.csv").write_text("foo,bar\n1,2\n")
    (folder / "one.csv").write_text(HEADER + "1700000000,10.0.0.1,10.0.0.2,5\n1700000001,10.0.0.1,10.0.0.3,7\n")
    (folder / "timed.csv").write_text("src,dst,time\n10.0.0.1,10.0.0.2,1700000000\n")
    (folder / "unusable.csv").write_text(HEADER + "1700000000,10.0.0,there,5\n")
    (folder / "rows.yml").write_text("network_train_files: rows\n")
    (folder / "latin1.md").write_bytes("é".encode("latin-1"))
    return folder


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


CASES = [
    ("simulate -o empty.csv", "empty.csv is a file; the output must be a folder"),
    ("simulate -o empty.csv/x", "empty.csv/x: Not a directory"),
    ("simulate -o new --set nosuch=1", "unknown simulator setting 'nosuch': there are seed, measurements, "),
    ("simulate -o new --set ipv6_shar=0", "unknown simulator setting 'ipv6_shar': did you mean ipv6_share?"),
    ("simulate -o new --set seed", "write NAME=VALUE"),
    ("simulate -o new --set days=x", "days must be a number"),
    ("simulate -o raw", "raw already holds measurements"),
    ("import atlas nosuch.json -o new", "nosuch.json: no such file"),
    ("import atlas empty.json -o new", "the file is empty"),
    ("import atlas nothing -o new", "is not a file but a folder"),
    ("import atlas empty.json --packets max -o new", "packets must be 'min' or 'each'"),
    ("prepare -i nosuch -o new", "no input file matches 'nosuch'"),
    ("prepare -i empty.parquet -o new", "empty.parquet is empty"),
    ("prepare -i nothing -o new", "the folder nothing holds no measurement file"),
    ("prepare -i rows -o new", "the folder rows holds no measurement file"),
    ("prepare -i split -o new", "the folder split is a split: what may be learned from is in split/train"),
    ("prepare -i raw -o empty.csv", "cannot write to empty.csv"),
    ("prepare -i raw -o new --columns foo=bar", "there is no 'foo' to be named, but event_time, src_addr"),
    ("prepare -i raw -o new --rtt-unit m", "the unit of RTTs 'm': write s, ms, us or ns"),
    ("prepare -i raw -o new --delimiter ab", "the delimiter 'ab': write one character"),
    ("prepare -i raw -o new --date-order ymd", "the order of dates 'ymd': write dmy or mdy"),
    ("prepare -i raw -o new --nodes nosuch.csv", "nosuch.csv"),
    ("prepare -i raw -o new --nodes other.csv", "other.csv: no column name"),
    ("prepare -i raw -o new --columns rtt", "write COLUMN=NAME"),
    ("prepare -i raw -o new --max-row-size-mb 0", "largest row size"),
    ("prepare -i raw -o new --columns rtt=nosuch", "no column 'nosuch'"),
    ("prepare -i raw -o new --memory-limit-gb nan", "--memory-limit-gb nan: write a number"),
    ("prepare -i raw -o new --max-row-size-mb inf", "--max-row-size-mb inf: write a number"),
    ("prepare -i unusable.csv -o new", "no usable measurement in the input"),
    ("prepare -i unusable.csv --strict -o new", "unusable.csv"),
    ("inspect rows nosuch", "no such folder: nosuch"),
    ("inspect rows nothing", "nothing has no manifest.json"),
    ("inspect rows empty.csv", "empty.csv is a file"),
    ("inspect rows rows --split foo", "rows has no split 'foo'"),
    ("inspect batch", "name a folder that `ping-llm prepare` wrote, or a --config"),
    ("inspect batch empty.csv", "empty.csv is a file"),
    ("inspect batch --config nosuch.yml", "cannot read the configuration 'nosuch.yml'"),
    ("inspect batch --config empty.yml", "network_train_files is not set"),
    ("inspect batch --config rows.yml --split foo", "--split 'foo': write train or eval"),
    ("inspect batch rows --set data_shuffle_seed=3", "give either the folder rows or a configuration"),
    ("inspect batches nosuch", "no such folder: nosuch"),
    ("inspect batches nothing", "nothing has no manifest.json"),
    ("inspect batches rows --steps foo", "write first:end"),
    ("inspect batches rows --config rows.yml", "give either the folder rows or a configuration"),
    ("inspect batches --config rows.yml --split foo", "--split 'foo': write train or eval"),
    ("train --config nosuch.yml", "cannot read the configuration 'nosuch.yml'"),
    ("train --config nothing", "cannot read the configuration 'nothing'"),
    ("train nosuch=1", "unknown key 'nosuch'"),
    ("train base_output_directory=empty.csv", "base_output_directory=empty.csv: empty.csv is a file, not a folder"),
    ("train network_train_files=rows eval_interval=5", "network_eval_files is empty"),
    ("train network_train_files=rows network_eval_files=nosuch eval_interval=5", "nosuch"),
    ("train network_train_files=nosuch", "nosuch"),
    ("train network_train_files=rows load_parameters_path=nothing", "nothing holds no trained model"),
    ("split nosuch -o new", "no input file matches 'nosuch'"),
    ("split empty.csv -o new", "empty.csv is empty"),
    ("split split -o new", "the folder split is a split"),
    ("split raw -o split", "split already exists"),
    ("split raw -o rows --overwrite", "something else than a split"),
    ("split raw -o new --later 0", "later must be above 0"),
    ("evaluate --data nosuch", "no input file matches 'nosuch'"),
    ("evaluate --data empty.csv", "empty.csv is empty"),
    ("evaluate --rows empty.csv", "empty.csv is a file"),
    ("evaluate --data split --protocol foo", "there are no questions of foo"),
    ("evaluate nosuch --data split", "nosuch holds no trained model"),
    ("evaluate --data split --world empty.csv", "empty.csv holds no world.json"),
    ("evaluate --data split --plots empty.csv", "--plots empty.csv: empty.csv is a file, not a folder"),
    ("predict", "give what to predict"),
    ("predict --src 10.0.0.1", "give what to predict"),
    ("predict --matrix", "give --history"),
    ("predict --src 10.0.0.1 --dst 10.0.0.2 --history nosuch", "no input file matches 'nosuch'"),
    ("predict --src 10.0.0.1 --dst 10.0.0.2 --history /dev/null", "/dev/null is empty"),
    ("predict --src 10.0.0.1 --dst 10.0.0.2 --history other.csv", "no column 'src_addr'"),
    ("predict --src 10.0.0.1 --dst 10.0.0.2 --columns foo=bar", "there is no 'foo' to be named"),
    ("predict --src 10.0.0.1 --dst 10.0.0.2 --time never", "never is not a time"),
    ("predict --src 10.0.0.1 --dst 10.0.0.2 --quantiles 2", "write levels between 0 and 1"),
    ("predict --src 10.0.0.1 --dst 10.0.0.2 --quantiles foo", "write levels between 0 and 1"),
    ("predict --src 10.0.0.1 --dst 10.0.0.2 --checkpoint nothing", "nothing holds no trained model"),
    ("predict --src 10.0.0.1 --dst 10.0.0.2 --output folder.csv", "folder.csv: there is a folder of that name"),
    ("predict --src 10.0.0.1 --dst 10.0.0.2 --output empty.csv/x.csv", "empty.csv is a file, not a folder"),
    ("predict --src 10.0.0.1 --dst 10.0.0.2 --output x.txt", "must end with .csv or .parquet"),
    ("predict --src 10.0.0 --dst bar", "'10.0.0' is neither an address nor a name"),
    ("predict --questions nosuch.csv", "nosuch.csv"),
    ("predict --questions empty.csv", "cannot read empty.csv"),
    ("predict --questions timed.csv --time 2024-05-01", "the questions have a column of times: leave --time out"),
    ("predict --questions other.csv", "no column 'src_addr'"),
    ("anomalies nosuch", "no input file matches 'nosuch'"),
    ("anomalies empty.csv", "empty.csv is empty"),
    ("anomalies one.csv --output folder.csv", "folder.csv: there is a folder of that name"),
    ("anomalies one.csv --output out.txt", "must end with .csv or .parquet"),
    ("anomalies one.csv --checkpoint nosuch", "nosuch holds no trained model"),
    ("destinations --src 10.0.0.1 --checkpoint nosuch", "nosuch holds no trained model"),
    ("complete --src 10.0.0.1 --prefix 10. --checkpoint empty.csv", "empty.csv holds no trained model"),
    ("export nosuch -o new", "nosuch holds no trained model"),
    ("export nosuch -o empty.csv --overwrite", "--output empty.csv: empty.csv is a file, not a folder"),
    ("export nosuch -o rows --overwrite", "rows holds something else than a model"),
    ("export nosuch -o new --card nosuch.md", "cannot read the model card nosuch.md: No such file"),
    ("export nosuch -o new --card latin1.md", "cannot read the model card latin1.md: not UTF-8 text"),
    ("plan", "give --measurements NUMBER"),
    ("plan --input nosuch", "no input file matches 'nosuch'"),
    ("plan --input empty.csv", "empty.csv is empty"),
    ("plan -n nan", "--measurements must be a number"),
    ("report nosuch", "nosuch"),
    ("report nothing", "nothing"),
    ("report rows", "rows is not the folder of a run"),
    ("report nosuch -o folder.csv", "folder.csv: there is a folder of that name"),
    ("convert nosuch -o new", "give --to maxtext or --from maxtext"),
    ("convert nosuch --to maxtext -o empty.csv", "--output empty.csv: empty.csv is a file, not a folder"),
    ("suggest", "give --history"),
    ("serve --history nosuch --port 0", "no input file matches 'nosuch'"),
    ("serve --rows empty.csv --port 0", "empty.csv is empty"),
    ("serve --checkpoint nothing --port 0", "nothing holds no trained model"),
    ("serve --token-file nothing", "cannot read the token file nothing: Is a directory"),
    ("prepare -i raw -o new --timings nothing", "--timings nothing: Is a directory"),
    ("import atlas one.csv --per-file --timings nothing -o new", "--timings nothing: Is a directory"),
    ("export nosuch -o new --card nothing", "cannot read the model card nothing: Is a directory"),
    ("bench pipeline --rows nosuch", "no such folder: nosuch"),
]


@pytest.mark.parametrize(("command", "message"), CASES, ids=[command for command, _ in CASES])
def test_wrong_input_is_answered_with_one_line_and_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, message: str
) -> None:
    monkeypatch.chdir(folder)
    before = contents(folder)
    done = CliRunner().invoke(app, shlex.split(command))
    assert isinstance(done.exception, PingLlmError), done.output
    assert message in str(done.exception)
    assert "\n" not in str(done.exception)
    assert done.stdout == ""
    assert contents(folder) == before


def test_what_the_system_refuses_to_write_is_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(PingLlmError, match=r"cannot write to .*folder\.csv: Is a directory"):
        write_table(pa.table({"a": [1]}), tmp_path / "folder.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.csv"]
    refused = "cannot write to there: No space left on device"
    with pytest.raises(PingLlmError, match=refused), explained("cannot write to there", OSError):
        raise OSError(28, "No space left on device")


def test_a_full_disk_under_a_file_of_timings_is_named(folder: Path, tmp_path: Path) -> None:
    command = ["prepare", "-i", str(folder / "raw"), "-o", str(tmp_path), "--timings", "/dev/full", "--workers", "1"]
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, PingLlmError)
    assert str(error) == "--timings /dev/full: No space left on device"


def test_a_folder_that_may_not_be_written_to_is_named_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(PingLlmError, match=f"--plots a/b: {tmp_path} cannot be written to"):
        check_folder(tmp_path / "a" / "b", "--plots a/b")


def test_the_files_that_tell_other_folders_from_measurements_have_one_name_everywhere() -> None:
    assert ROWS_FILE == MANIFEST
