"""The loader: the same batches however they are delivered, exact after any restart, and nothing left behind."""

import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Self, cast

import grain
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from conftest import random_measurements
from ping_llm.batches import report
from ping_llm.batches.batch import PackedTokens, Stages, digest
from ping_llm.batches.loader import Loader
from ping_llm.batches.source import BatchSource
from ping_llm.batches.spec import Batch, DataSpec, DataState, LoaderSettings
from ping_llm.config import Config
from ping_llm.contexts.source import RowSequences, global_batches
from ping_llm.contexts.spec import ContextSettings, RowsSpec, data_spec
from ping_llm.core.errors import PingLlmError
from ping_llm.data.registry import make_eval_loader, make_train_loader
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.prepare import PrepareSettings, prepare
from ping_llm.tokens.decode import decode


def prepared(folder: Path, measurements: int = 30_000, seed: int = 0, sources: int = 300) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(random_measurements(measurements, seed=seed, sources=sources), folder / "raw.parquet")
    prepare(PrepareSettings(inputs=(str(folder / "raw.parquet"),), output=folder / "rows", workers=1))
    return folder / "rows"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def other_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("other"), seed=1)


def spec_of(*folders: Path, batch: int = 8, seed: int = 0, weights: tuple[Fraction, ...] = (Fraction(1),)) -> DataSpec:
    rows = [RowsSpec.find(str(folder), "train", contexts=ContextSettings(length=512)) for folder in folders]
    return data_spec(rows, weights=weights, seed=seed, global_batch_size=batch)


def with_rows(spec: DataSpec, **change: object) -> DataSpec:
    """The spec of the same rows that are drawn from in another way."""
    rows = [replace(cast(RowsSpec, source), **change) for source in spec.sources]  # type: ignore[arg-type]
    return data_spec(rows, seed=spec.seed, global_batch_size=spec.global_batch_size)


def digests(spec: DataSpec, first: int, last: int, *, hosts: int = 1, workers: int = 0) -> list[str]:
    return [digest(batch) for batch in global_batches(spec, first, last, hosts=hosts, workers=workers)]


def take(loader: Loader, count: int) -> list[str]:
    return [digest(next(loader)) for _ in range(count)]


class TestSameBatches:
    @pytest.mark.parametrize(
        ("hosts", "workers"), [(2, 0), (4, 0), (8, 0), (1, 1), (1, 3), pytest.param(2, 2, marks=pytest.mark.slow)]
    )
    def test_for_any_number_of_hosts_and_workers(self, rows: Path, hosts: int, workers: int) -> None:
        spec = spec_of(rows)
        assert digests(spec, 0, 8, hosts=hosts, workers=workers) == digests(spec, 0, 8)

    def test_made_alone_and_backward(self, rows: Path) -> None:
        spec = spec_of(rows)
        backward = [digest(BatchSource(spec)[step]) for step in reversed(range(8))]
        assert backward == digests(spec, 0, 8)[::-1]

    def test_from_a_source_that_was_sent_to_another_process_after_it_was_used(self, rows: Path) -> None:
        source = BatchSource(spec_of(rows))
        batch = source[3]
        assert digest(pickle.loads(pickle.dumps(source))[3]) == digest(batch)

    @pytest.mark.slow
    def test_in_another_process(self, rows: Path) -> None:
        arguments = ["inspect", "batches", str(rows), "--steps", "3:6", "--digest", "--json"]
        arguments += ["--batch-size", "8", "--length", "512", "--workers", "1"]
        environment = os.environ | {"PYTHONHASHSEED": "7"}
        done = subprocess.run(
            [sys.executable, "-m", "ping_llm", *arguments], capture_output=True, text=True, check=True, env=environment
        )
        assert [json.loads(line)["digest"] for line in done.stdout.splitlines()] == digests(spec_of(rows), 3, 6)

    def test_other_seeds_and_steps_give_other_batches(self, rows: Path) -> None:
        all_of_them = digests(spec_of(rows), 0, 5) + digests(spec_of(rows, seed=1), 0, 5)
        assert len(set(all_of_them)) == 10

    def test_hosts_that_cannot_share_evenly_are_refused(self, rows: Path) -> None:
        with pytest.raises(PingLlmError, match="cannot be shared evenly by 3 hosts"):
            Loader(spec_of(rows), LoaderSettings(hosts=3))


class TestFindingRows:
    def test_a_folder_and_a_pattern_of_all_its_shards_are_the_same(self, rows: Path) -> None:
        assert RowsSpec.find(f"{rows}/train*.arrayrecord", "eval") == RowsSpec.find(str(rows), "train")

    @pytest.mark.parametrize(
        ("pattern", "split", "message"),
        [
            ("{rows}", "test", "has no split 'test', only train, eval"),
            ("{rows}/train-9*.arrayrecord", "train", "names 0 of the 1 train shards"),
            ("{rows}/nothing", "train", "names 0 of the 1 train shards"),
            ("{rows}/..", "train", "has no manifest.json"),
        ],
    )
    def test_what_is_not_a_whole_split_is_refused(self, rows: Path, pattern: str, split: str, message: str) -> None:
        with pytest.raises(PingLlmError, match=message):
            RowsSpec.find(pattern.format(rows=rows), split)


class TestResume:
    @pytest.mark.slow
    @pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 1), (1, 3)])
    def test_is_exact_with_any_change_of_workers(self, rows: Path, before: int, after: int) -> None:
        spec = spec_of(rows)
        with Loader(spec, LoaderSettings(worker_count=before)) as loader:
            first = take(loader, 4)
            state = DataState.from_json(loader.state().to_json())
        with Loader(spec, LoaderSettings(worker_count=after)) as loader:
            loader.restore(state)
            assert first + take(loader, 4) == digests(spec, 0, 8)

    def test_is_exact_with_another_number_of_hosts(self, rows: Path) -> None:
        spec = spec_of(rows)
        with Loader(spec, LoaderSettings(worker_count=0, host=1, hosts=2)) as loader:
            take(loader, 3)
            state = loader.state()
        with Loader(spec, LoaderSettings(worker_count=0)) as loader:
            loader.restore(state)
            assert take(loader, 3) == digests(spec, 3, 6)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (lambda spec: replace(spec, seed=5), "seed: 0 then, 5 now"),
            (lambda spec: replace(spec, global_batch_size=16), "global_batch_size: 8 then, 16 now"),
            (lambda spec: with_rows(spec, contexts=ContextSettings()), "length: 512 then, 1024 now"),
            (
                lambda spec: with_rows(spec, contexts=ContextSettings(length=512, max_contexts=4)),
                "contexts.max_contexts: 16 then, 4 now",
            ),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_with_other_settings_fails_and_says_what_differs(
        self, rows: Path, change: Callable[[DataSpec], DataSpec], named: str
    ) -> None:
        state = DataState.start(spec_of(rows))
        loader = Loader(change(spec_of(rows)), LoaderSettings(worker_count=0))
        with pytest.raises(PingLlmError) as caught:
            loader.restore(state)
        assert named in str(caught.value)
        assert "allow_data_change" in str(caught.value)
        loader.restore(state, allow_change=True)
        next(loader)

    def test_with_other_rows_or_token_version_fails(self, rows: Path, other_rows: Path) -> None:
        state = DataState.start(spec_of(rows))
        with pytest.raises(PingLlmError, match="1 of the 1 sources that this run was trained on are not in the blend"):
            Loader(spec_of(other_rows), LoaderSettings(worker_count=0)).restore(state)
        older = replace(state, identity={**state.identity, "token_version": 0})
        with pytest.raises(PingLlmError, match="token_version: 0 then, 1 now"):
            Loader(spec_of(rows), LoaderSettings(worker_count=0)).restore(older)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 99}', '{"version": 1, "next_step": "x"}'])
    def test_what_is_no_state_is_refused_in_one_line(self, text: str) -> None:
        with pytest.raises(PingLlmError, match="state"):
            DataState.from_json(text)

    def test_rows_may_have_moved_to_another_folder(self, rows: Path, tmp_path: Path) -> None:
        state = DataState.start(spec_of(rows))
        shutil.copytree(rows, tmp_path / "moved")
        moved = spec_of(tmp_path / "moved")
        with Loader(moved, LoaderSettings(worker_count=0)) as loader:
            loader.restore(state)
            assert take(loader, 2) == digests(spec_of(rows), 0, 2)


class TestBlend:
    def test_sequences_come_from_each_row_set_by_its_weight(self, rows: Path, other_rows: Path) -> None:
        spec = spec_of(rows, other_rows, batch=16, weights=(Fraction(1, 4), Fraction(3, 4)))
        alone = [BatchSource(spec_of(folder, batch=64))[0]["inputs"] for folder in (rows, other_rows)]
        blended = np.concatenate([BatchSource(spec)[step]["inputs"] for step in range(4)])
        counts = [sum(any(np.array_equal(row, mine) for mine in source) for row in blended) for source in alone]
        assert counts == [16, 48]

    @pytest.mark.slow
    def test_is_the_same_for_hosts_and_workers(self, rows: Path, other_rows: Path) -> None:
        spec = spec_of(rows, other_rows, weights=(Fraction(1, 3), Fraction(2, 3)))
        assert digests(spec, 0, 6, hosts=2, workers=1) == digests(spec, 0, 6)

    def test_weights_may_change_on_resume_and_each_row_set_goes_on_where_it_was(
        self, rows: Path, other_rows: Path
    ) -> None:
        half = spec_of(rows, other_rows, weights=(Fraction(1, 2), Fraction(1, 2)))
        with Loader(half, LoaderSettings(worker_count=0)) as loader:
            seen = [next(loader)["inputs"] for _ in range(3)]
            state = loader.state()
        most = replace(half, weights=(Fraction(1, 8), Fraction(7, 8)))
        with Loader(most, LoaderSettings(worker_count=0)) as loader:
            loader.restore(state)
            seen += [next(loader)["inputs"] for _ in range(8)]
            again = DataState.from_json(loader.state().to_json())
        sequences = [row.tobytes() for row in np.concatenate(seen)]
        for folder, expected in ((rows, 12 + 8), (other_rows, 12 + 56)):
            own = [row.tobytes() for row in BatchSource(spec_of(folder, batch=expected))[0]["inputs"]]
            assert sorted(s for s in sequences if s in set(own)) == sorted(own), "none repeated, none lost"
        assert len(again.mixture.phases) == 2


class TestFiniteEvaluation:
    def config(self, rows: Path, **changes: object) -> Config:
        return Config(
            network_eval_files=str(rows), per_device_batch_size=8, max_target_length=512, grain_worker_count=0
        ).replace(**changes)

    def test_is_the_same_every_time_and_ends(self, rows: Path) -> None:
        runs = [[digest(batch) for batch in make_eval_loader(self.config(rows))] for _ in range(2)]
        assert runs[0] == runs[1]
        assert len(runs[0]) > 1

    def test_holds_every_context_of_the_evaluation_rows_once(self, rows: Path) -> None:
        loader = make_eval_loader(self.config(rows))
        assert isinstance(loader, Loader)
        segments = sum(int(batch["inputs_segmentation"].max(axis=1).sum()) for batch in loader)
        plan = cast(RowSequences, BatchSource(loader.spec).sources[0]).plan
        assert segments == plan.samples_per_epoch

    def test_the_last_batch_is_filled_up_with_empty_sequences(self, rows: Path) -> None:
        *_, last = make_eval_loader(self.config(rows, per_device_batch_size=64))
        assert last["inputs"].shape == (64, 512)
        assert (last["inputs_segmentation"][-1] == 0).all()

    def test_eval_steps_limits_it_and_hosts_share_it(self, rows: Path) -> None:
        assert len(list(make_eval_loader(self.config(rows, eval_steps=2)))) == 2
        whole = list(make_eval_loader(self.config(rows)))
        halves = [list(make_eval_loader(self.config(rows), host=h, hosts=2)) for h in range(2)]
        for batch, a, b in zip(whole, *halves, strict=True):
            np.testing.assert_array_equal(batch["inputs"], np.concatenate([a["inputs"], b["inputs"]]))


class TestBoundOnSegments:
    """What packed attention has to be told before it sees a batch."""

    @staticmethod
    def most(batch: Batch) -> int:
        return int(batch["inputs_segmentation"].max())

    @pytest.mark.parametrize("batch", [8, 700])
    def test_no_batch_has_more_and_it_is_tight(self, rows: Path, batch: int) -> None:
        spec = spec_of(rows, batch=batch)
        source = BatchSource(spec)
        assert batch < 100 or batch > cast(RowSequences, source.sources[0]).plan.sequences_per_block, (
            "one batch, several blocks"
        )
        bounds = [source.max_segments(step) for step in range(6)]
        seen = [self.most(BatchSource(spec)[step]) for step in range(6)]
        assert all(found <= bound for found, bound in zip(seen, bounds, strict=True))
        assert max(seen) >= max(bounds) - 1

    def test_it_holds_for_blends_and_for_finite_data(self, rows: Path, other_rows: Path) -> None:
        blend = spec_of(rows, other_rows, weights=(Fraction(1, 3), Fraction(2, 3)))
        for spec in (blend, replace(blend, finite=True)):
            source = BatchSource(spec)
            for step in (0, 3, source.batches_per_epoch - 1):
                assert self.most(BatchSource(spec)[step]) <= source.max_segments(step)

    def test_a_loader_knows_it_for_any_step_whatever_its_host(self, rows: Path) -> None:
        spec = spec_of(rows)
        with (
            Loader(spec, LoaderSettings(worker_count=0)) as whole,
            Loader(spec, LoaderSettings(worker_count=0, host=1, hosts=2)) as half,
        ):
            assert [whole.max_segments(step) for step in (0, 50)] == [half.max_segments(step) for step in (0, 50)]


class TestUnpreparedFiles:
    @pytest.mark.slow
    def test_give_the_batches_that_prepared_rows_give(self, rows: Path, tmp_path: Path) -> None:
        raw = rows.parent / "raw.parquet"
        prepare(PrepareSettings(inputs=(str(raw),), output=tmp_path / "all", train_ratio=1.0, workers=1))
        config = Config(
            network_data_format="network_parquet",
            network_train_files=str(raw),
            per_device_batch_size=8,
            max_target_length=512,
            grain_worker_count=1,
        )
        with make_train_loader(config) as loader:
            assert isinstance(loader, Loader)
            folder = Path(cast(RowsSpec, loader.spec.sources[0]).folder)
            assert take(loader, 3) == digests(spec_of(tmp_path / "all"), 0, 3)
            assert folder.exists()
        del loader
        assert not folder.exists(), "the memory is given back"

    def test_that_do_not_fit_are_refused_with_the_way_out(self, rows: Path) -> None:
        config = Config(
            network_data_format="network_parquet",
            network_train_files=str(rows.parent / "raw.parquet"),
            grain_ram_budget_mb=1,
        )
        with pytest.raises(PingLlmError, match="ping-llm prepare --input"):
            make_train_loader(config)


class TestFaults:
    @pytest.fixture
    def damaged(self, rows: Path, tmp_path: Path) -> Path:
        shutil.copytree(rows, tmp_path / "damaged")
        shard = next((tmp_path / "damaged").glob("train-*.arrayrecord"))
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 0xFF
        shard.write_bytes(data)
        return tmp_path / "damaged"

    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_corrupt_row_is_an_error_that_names_shard_and_row(self, damaged: Path, workers: int) -> None:
        with (
            Loader(spec_of(damaged, batch=64), LoaderSettings(worker_count=workers)) as loader,
            pytest.raises(PingLlmError, match=r"train-00000-of-00001.arrayrecord, row \d+: "),
        ):
            take(loader, 100)

    def test_a_corrupt_row_can_be_left_out_and_is_counted(
        self, damaged: Path, rows: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        spec = with_rows(spec_of(damaged, batch=64), skip_corrupt_rows=True)
        steps = BatchSource(spec).batches_per_epoch
        with Loader(spec, LoaderSettings(worker_count=0)) as loader:
            for _ in range(steps):
                batch = next(loader)
                for row, segmentation in zip(batch["inputs"], batch["inputs_segmentation"], strict=True):
                    assert not decode(row[segmentation == 1]).problem
            assert loader.report.to_json()["corrupt_rows"] == 1
        assert caplog.text.count("1 rows could not be read and were left out") == 1
        assert digests(spec, 0, 2, hosts=2) == digests(spec, 0, 2)

    def test_a_worker_that_is_killed_ends_the_run_with_an_error_not_a_hang(self, rows: Path) -> None:
        with Loader(spec_of(rows), LoaderSettings(worker_count=2, buffer_size=1)) as loader:
            next(loader)
            workers(os.getpid())[0].kill()
            with pytest.raises(PingLlmError, match="data worker process died"):
                take(loader, 200)
        assert not workers(os.getpid())

    @pytest.mark.slow
    @pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    def test_a_stopped_program_leaves_no_worker_and_no_shared_memory(self, rows: Path, sent: signal.Signals) -> None:
        arguments = ["inspect", "batches", str(rows), "--steps", "0:1000000", "--workers", "2", "--batch-size", "8"]
        process = subprocess.Popen(
            [sys.executable, "-m", "ping_llm", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline()
        started = psutil.Process(process.pid).children(recursive=True)
        shared = {path.name for path in Path("/dev/shm").iterdir()}
        assert len(workers(process.pid)) == 2
        process.send_signal(sent)
        _, errors = process.communicate(timeout=30)
        _, alive = psutil.wait_procs(started, timeout=15)
        assert not alive
        assert not [name for name in shared if str(process.pid) in name], "nothing to leave behind"
        assert process.returncode == (-sent if sent is signal.SIGKILL else 128 + sent)
        assert "Traceback" not in errors


def workers(parent: int) -> list[psutil.Process]:
    children = psutil.Process(parent).children(recursive=True)
    return [c for c in children if c.is_running() and "spawn_main" in " ".join(c.cmdline())]


class ManyTinySegments:
    """Batches of eight that take more bytes than a slot has: segments of one token."""

    fingerprint = "tiny"
    sequences_per_epoch = 1 << 40
    left_out = ()

    def open(self, spec: DataSpec, stages: Stages) -> Self:
        return self

    def packed(self, sequences: range) -> PackedTokens:
        step, count = sequences.start // 8, 400 * len(sequences)
        if step == 5:
            raise ZeroDivisionError("a mistake of ours")
        return PackedTokens(
            tokens=np.full(count, step + 1, dtype=np.uint32),
            sizes=np.ones(count, dtype=np.int32),
            sequence=np.repeat(np.arange(len(sequences), dtype=np.int32), 400),
        )

    def max_segments(self, sequences: range) -> int:
        return 400

    def explain(self, sequence: int) -> dict[str, Any]:
        raise NotImplementedError


class TestWorkers:
    def test_a_batch_that_is_larger_than_its_slot_arrives_too(self) -> None:
        spec = DataSpec(sources=(ManyTinySegments(),), global_batch_size=8, length=512)
        with Loader(spec, LoaderSettings(worker_count=2, buffer_size=1)) as loader:
            assert [np.unique(next(loader)["inputs"][:, :400]).tolist() for _ in range(5)] == [
                [i + 1] for i in range(5)
            ]
            with pytest.raises(RuntimeError, match="ZeroDivisionError: a mistake of ours"):
                next(loader)

    def test_none_is_left_when_the_loader_is_closed(self, rows: Path) -> None:
        spec = with_rows(spec_of(rows, batch=256), contexts=ContextSettings(length=1024))  # half a megabyte per batch
        with Loader(spec, LoaderSettings(worker_count=2, buffer_size=2)) as loader:
            next(loader)
            assert len(workers(os.getpid())) == 2
        assert not workers(os.getpid())

    def test_grain_can_read_the_same_batches(self, rows: Path) -> None:
        dataset = grain.MapDataset.source(BatchSource(spec_of(rows)))
        assert [digest(batch) for batch in dataset[2:5]] == digests(spec_of(rows), 2, 5)

    def test_threads_map_a_shard_once(self, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A second map would take the place of the first, which would be unmapped while it is read."""
        mapped, map_shard = [], RowSet.shard_bytes

        def slow(rows: RowSet, shard: int) -> Any:
            mapped.append(shard)
            time.sleep(0.02)
            return map_shard(rows, shard)

        monkeypatch.setattr(RowSet, "shard_bytes", slow)
        source = BatchSource(spec_of(rows))
        with ThreadPoolExecutor(8) as pool:
            batches = list(pool.map(source.__getitem__, [2, 3, 4] * 8))
        assert [digest(batch) for batch in batches[:3]] == digests(spec_of(rows), 2, 5)
        assert len(mapped) == 2 * len(set(mapped)), "by the threads, and for the digests"


class TestVisibility:
    def test_debug_mode_logs_stages_waiting_and_the_bottleneck(
        self, rows: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO), Loader(spec_of(rows), LoaderSettings(worker_count=1, debug=True)) as loader:
            take(loader, 5)
        for expected in ("stage", "encode", "waiting for data", "bottleneck: ", "grain_worker_count"):
            assert expected in caplog.text

    def test_the_graph_and_its_numbers_are_written(self, rows: Path, tmp_path: Path) -> None:
        settings = LoaderSettings(worker_count=0, visualization_dir=str(tmp_path / "graph"))
        with Loader(spec_of(rows), settings) as loader:
            take(loader, 5)
        numbers = json.loads((tmp_path / "graph" / "pipeline.json").read_text())
        assert numbers["batches"] == 5
        assert numbers["bottleneck"] in numbers["stages"]
        assert 0 < sum(stage["share"] for stage in numbers["stages"].values()) <= 1.01
        picture = (tmp_path / "graph" / "pipeline_graph.svg").read_text()
        assert picture.startswith("<svg")
        assert all(name in picture for name in numbers["stages"])

    def test_the_graph_has_processes_buffers_and_element_types(self, rows: Path, tmp_path: Path) -> None:
        settings = LoaderSettings(worker_count=1, buffer_size=3, visualization_dir=str(tmp_path))
        with Loader(spec_of(rows), settings) as loader:
            take(loader, 3)
        picture = (tmp_path / "pipeline_graph.svg").read_text()
        for expected in ("1 worker process(es), each with up to 3 batches ready", "uint16 tokens", "6 × int32 ["):
            assert expected in picture

    def test_it_is_shown_every_minute_and_once_at_the_end(
        self, rows: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loader = Loader(spec_of(rows), LoaderSettings(worker_count=0, debug=True))
        with caplog.at_level(logging.INFO):
            take(loader, 3)
            assert caplog.text.count("pipeline: ") == 0
            monkeypatch.setattr(report, "SHOW_EVERY_S", 0.0)
            take(loader, 1)
            assert caplog.text.count("pipeline: 4 batches") == 1
            monkeypatch.undo()
            take(loader, 1)
            loader.close()
            loader.close()
        assert caplog.text.count("pipeline: ") == 2

    def test_workers_and_buffers_are_chosen_within_the_budget(self, rows: Path) -> None:
        chosen = LoaderSettings(ram_budget_mb=4096).resolved(batch_bytes=2**20)
        assert chosen.worker_count >= 1
        assert chosen.buffer_size >= 1
        tight = LoaderSettings(ram_budget_mb=300).resolved(batch_bytes=100 * 2**20)
        assert (tight.worker_count, tight.buffer_size) == (1, 1)
        assert LoaderSettings(worker_count=3, buffer_size=5).resolved(1).worker_count == 3


class TestExplain:
    def test_a_sequence_is_explained_to_the_last_token(self, rows: Path) -> None:
        spec = spec_of(rows)
        batch = BatchSource(spec)[7]
        explained = BatchSource(spec).explain(7, 5)
        tokens = [token for segment in explained["segments"] for token in segment["token_ids"]]
        assert tokens == batch["inputs"][5][: len(tokens)].tolist()
        assert explained["padding"] == int((batch["inputs_segmentation"][5] == 0).sum())
        for segment in explained["segments"]:
            begin, end = segment["window"]
            assert all(begin <= i < end for i in segment["measurement_indices"])
            assert len(segment["measurements"]) == len(segment["measurement_indices"])
            assert {m["source"] for m in segment["measurements"]} == {segment["source"]}

    def test_the_command_shows_it_in_text_and_json(self, rows: Path) -> None:
        command = [sys.executable, "-m", "ping_llm", "inspect", "batch", str(rows), "--step", "2", "--length", "512"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "segment 1: " in text
        assert "of padding" in text
        shown = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
        assert shown["segments"][0]["shard"].endswith(".arrayrecord")
