"""Our keys in MaxText's own configuration, what is refused there, and the seams that are checked at start."""

import base64
import hashlib
import importlib
import importlib.metadata
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from maxtext_runs import CONFIG, REPOSITORY, initialized, start

from ping_llm.config import KEYS
from ping_llm.config.maxtext import MAXTEXT_KEYS
from ping_llm.core.errors import PingLlmError
from ping_llm.integrations.maxtext import launch as seams
from ping_llm.integrations.maxtext.launch import NETWORK_KEYS, main, network_config

pytest.importorskip("maxtext", reason="MaxText is not installed here; `make test-maxtext` makes an environment with it")


class TestKeys:
    def test_network_is_grain_to_maxtext_and_network_to_us(self, network: dict[str, Any]) -> None:
        config = initialized(network)
        assert config.dataset_type == "grain"
        assert config.ping_llm_backend == "network"
        assert config.network_train_files == network["network_train_files"]

    def test_our_keys_are_typed_documented_and_have_our_defaults(self) -> None:
        for name in NETWORK_KEYS:
            field, key = network_config().model_fields[name], KEYS[name]
            assert field.description == key.description
            assert field.default == key.default
            assert field.annotation is key.annotation

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"attention": "cudnn_flash_jax"}, "ignores where segments end"),
            ({"packing": False}, "always packed"),
            ({"enable_data_shuffling": False}, "seeded permutation"),
            ({"vocab_size": 200}, "vocab_size must be at least 267"),
            ({"expansion_factor_real_data": 0.5}, "resumes on any number of hosts"),
            ({"colocated_python_data_input": True}, "colocated_python_data_input"),
            ({"network_train_files": ""}, "needs network_train_files"),
            ({"network_eval_files": "", "eval_interval": 10}, "network_eval_files is empty"),
            ({"network_data_format": "csv"}, "network_data_format must be one of probe_chunks, network_parquet"),
            ({"network_max_contexts": 0}, "network_max_contexts must be at least 1"),
            ({"network_max_contexts": "many"}, "valid integer"),
            ({"network_train_files": "a,0.3;b,x"}, "network_train_files"),
            ({"grain_debug_mode": "perhaps"}, "valid boolean"),
        ],
        ids=str,
    )
    def test_what_cannot_be_is_refused_with_the_reason(
        self, network: dict[str, Any], change: dict[str, Any], reason: str
    ) -> None:
        with pytest.raises(PingLlmError, match=reason):
            initialized(network | change)

    def test_other_dataset_types_may_use_the_attention_that_network_data_may_not(self, network: dict[str, Any]) -> None:
        config = initialized(network | {"dataset_type": "synthetic", "attention": "cudnn_flash_jax"})
        assert not config.ping_llm_backend
        assert config.dataset_type == "synthetic"

    def test_every_key_of_maxtext_about_data_is_ours_too_or_says_what_to_use_instead(self) -> None:
        types = importlib.import_module("maxtext.configs.types")
        groups = ["DatasetGeneral", "Tokenizer"]
        groups += [f"{kind}Dataset" for kind in ("Tfds", "Hf", "Grain", "MMap", "OlmoGrain")]
        about_data = {name for group in groups for name in getattr(types, group).model_fields}
        assert about_data <= {*KEYS, *MAXTEXT_KEYS}
        page = (REPOSITORY / "docs" / "coming-from-maxtext.md").read_text()
        assert not [name for name in about_data if f"`{name}" not in page]
        assert set(MAXTEXT_KEYS) <= set(types.MaxTextConfig.model_fields)

    def test_grain_draws_no_graph_of_other_dataset_types_and_says_so(self, network: dict[str, Any]) -> None:
        with pytest.raises(PingLlmError, match="Grain writes none"):
            initialized(network | {"dataset_type": "synthetic", "grain_visualization_dir": "x"})

    def test_a_misspelt_key_gets_a_suggestion(
        self, network: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        assert main(["", str(CONFIG), "network_train_file=x"]) == 1
        assert "did you mean network_train_files" in capsys.readouterr().err
        file = tmp_path / "config.yml"
        file.write_text("base_config: base.yml\nnetwork_max_context: 3\n")
        assert main(["", str(file)]) == 1
        assert "did you mean network_max_contexts" in capsys.readouterr().err

    def test_a_configuration_that_is_not_there_is_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["", "nowhere.yml", "run_name=x"]) == 1
        assert capsys.readouterr().err.count("\n") == 1

    def test_processes_that_are_not_all_described_are_one_line(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1234")
        monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
        monkeypatch.delenv("JAX_PROCESS_ID", raising=False)
        assert main(["", str(CONFIG), "run_name=x"]) == 1
        printed = capsys.readouterr().err
        assert "JAX_PROCESS_ID must be, too" in printed
        assert printed.count("\n") == 1

    def test_a_refused_configuration_ends_the_program(self, network: dict[str, Any], tmp_path: Path) -> None:
        outcome = start(network | {"attention": "cudnn_flash_jax"}, tmp_path / "notes").finish()
        assert outcome.code != 0
        assert outcome.said("error: the configuration is refused: attention=cudnn_flash_jax ignores where segments end")
        assert not outcome.batches


class TestSeams:
    def test_the_installed_maxtext_is_a_known_one(self) -> None:
        assert seams.check_seams() in seams.KNOWN_VERSIONS

    @pytest.mark.parametrize(
        ("module", "name", "instead", "difference"),
        [
            (seams.PIPELINE, "make_grain_train_iterator", None, "make_grain_train_iterator is missing"),
            (seams.PIPELINE, "make_grain_eval_iterator", lambda config: 0, r"takes \(config\), not \(config, global"),
            (seams.CONFIG, "initialize", lambda argv: 0, "initialize takes"),
            (seams.LOADING, "_cleanup_orphaned_multiprocessing_processes", None, "is missing"),
            (seams.CHECKPOINTS, "save_checkpoint", lambda *_: 0, "save_checkpoint does not use grain"),
            (seams.STATE, "ElasticIterator", int, "ElasticIterator is not Grain's"),
        ],
    )
    def test_a_maxtext_that_differs_is_refused_in_one_line(
        self, monkeypatch: pytest.MonkeyPatch, module: str, name: str, instead: Any, difference: str
    ) -> None:
        monkeypatch.setattr(importlib.import_module(module), name, instead)
        with pytest.raises(PingLlmError, match=f"{difference}.*Known to work: maxtext==0.2.5") as error:
            seams.check_seams()
        assert "\n" not in str(error.value)

    def test_a_key_that_went_away_is_noticed(self) -> None:
        with pytest.raises(PingLlmError, match="there is no key no_such_key"):
            seams.check_seams((*seams.KEYS_READ, "no_such_key"))

    def test_debug_mode_of_other_data_is_grains_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[str, bool]] = []
        config = SimpleNamespace(update=lambda *change: asked.append(change))
        monkeypatch.setattr(importlib.import_module("grain"), "config", config)
        make = seams.for_our_data(lambda *_: "ours", lambda *_: "theirs")
        assert make(SimpleNamespace(ping_llm_backend="network", grain_debug_mode=True), None, [0]) == "ours"
        assert not asked
        assert make(SimpleNamespace(ping_llm_backend="", grain_debug_mode=True), None, [0]) == "theirs"
        assert asked == [("py_debug_mode", True)]

    def test_the_names_are_put_back(self) -> None:
        modules = {name: importlib.import_module(name) for name, _ in seams.PARAMETERS}
        before = {(module, name): getattr(modules[module], name) for module, name in seams.PARAMETERS}
        with seams.patched():
            during = {(module, name): getattr(modules[module], name) for module, name in seams.PARAMETERS}
        assert sum(before[key] is not during[key] for key in before) == 4
        assert all(getattr(modules[module], name) is value for (module, name), value in before.items())


def test_no_file_of_maxtext_was_changed() -> None:
    """Every file is what the wheel's RECORD says."""
    files = importlib.metadata.files("maxtext")
    assert files
    recorded = [file for file in files if file.hash]
    assert len(recorded) > 300
    for file in recorded:
        assert file.hash is not None
        found = hashlib.new(file.hash.mode, Path(str(file.locate())).read_bytes()).digest()
        assert base64.urlsafe_b64encode(found).rstrip(b"=").decode() == file.hash.value, file
    listed = {str(file) for file in files}
    package = Path(importlib.import_module("maxtext").__path__[0])
    here = {str(path.relative_to(package.parent)) for path in package.rglob("*.py")}
    assert here <= listed


def test_worker_processes_do_not_load_maxtext() -> None:
    """They import the program that started them, and what makes batches."""
    program = (
        "import ping_llm.integrations.maxtext.__main__, ping_llm.batches.loader, sys; print('maxtext' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


_OTHER_PEOPLES_WORKER = """
    import os, signal, subprocess, sys, time
    from contextlib import nullcontext
    from maxtext.input_pipeline import multihost_dataloading
    from ping_llm.integrations.maxtext.launch import patched

    if __name__ == "__main__":
        # An orphan that looks like a worker process: its parent ends before it.
        worker = "import time; time.sleep(60)  # multiprocessing.spawn"
        command = f"[sys.executable, '-c', {worker!r}], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
        start = f"import subprocess, sys; print(subprocess.Popen({command}).pid)"
        pid = int(subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE, check=True).stdout)
        while "PPid:\\t1\\n" not in open(f"/proc/{pid}/status").read():
            time.sleep(0.05)
        with patched() if sys.argv[1] == "ours" else nullcontext():
            multihost_dataloading.MultiHostDataLoadIterator([], None).close()
            time.sleep(0.3)
        state = open(f"/proc/{pid}/stat").read().split()[2] if os.path.exists(f"/proc/{pid}") else "Z"
        print("alive" if state != "Z" else "ended")
"""


@pytest.mark.parametrize(("whose", "fate"), [("theirs", "ended"), ("ours", "alive")])
def test_closing_an_iterator_ends_other_peoples_workers_only_without_us(tmp_path: Path, whose: str, fate: str) -> None:
    """In a process namespace of its own, because stock MaxText would end them on the whole machine."""
    alone = ["unshare", "--pid", "--fork", "--mount-proc"]
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("`unshare --pid` is not allowed here")
    program = tmp_path / "worker.py"
    program.write_text(textwrap.dedent(_OTHER_PEOPLES_WORKER))
    done = subprocess.run(
        [*alone, "sh", "-c", f"{sys.executable} {program} {whose}; exit $?"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"DECOUPLE_GCLOUD": "TRUE"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == fate
