"""Contexts that cross sources hold what others measured to the same destinations: each pair once, nothing invented."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from ping_llm.batches.batch import Stages
from ping_llm.config import Config
from ping_llm.contexts.source import RowSequences
from ping_llm.contexts.spec import ContextSettings, RowsSpec
from ping_llm.core.errors import PingLlmError
from ping_llm.data import network
from ping_llm.data.registry import Part
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.manifest import Manifest
from ping_llm.rows.prepare import PrepareSettings, prepare
from ping_llm.sources.simulator import SimulatorSettings, simulate

LENGTH = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measurements, and their rows by source and by destination; a tenth of the sources are for evaluation."""
    folder = tmp_path_factory.mktemp("crossing")
    simulate(SimulatorSettings(measurements=20_000, measurements_per_source=100), folder / "raw")
    for by in ("source", "destination"):
        inputs = (str(folder / "raw" / "*.parquet"),)
        prepare(PrepareSettings(inputs=inputs, output=folder / by, by=by, train_ratio=0.9, workers=1))
    return folder


def opened(folder: Path, split: str = "train", **settings: Any) -> RowSequences:
    contexts = ContextSettings(length=LENGTH, **settings)
    spec = RowsSpec.find(str(folder / "source"), split, by_destination=str(folder / "destination"), contexts=contexts)
    return RowSequences.of(spec, 1, Stages())


def contexts(opened: RowSequences, count: int = 60) -> list[dict[str, Any]]:
    return [segment for sequence in range(count) for segment in opened.explain(sequence)["segments"]]


def test_rows_by_destination_hold_what_the_sources_for_training_measured(folder: Path) -> None:
    by_source, by_destination = Manifest.load(folder / "source"), Manifest.load(folder / "destination")
    assert by_destination.written == by_source.splits["train"].measurements
    assert by_destination.dropped["for_evaluation"] == by_source.splits["eval"].measurements

    def pairs(name: str) -> Counter[tuple[bytes, bytes]]:
        rows, found = RowSet(folder / name), Counter[tuple[bytes, bytes]]()
        for number, own in enumerate(rows.column("source")):
            row = rows[number]
            width = row.destinations.shape[1]
            for other in row.destinations:
                ends = own[:width].tobytes(), other.tobytes()
                found[ends if name == "source" else ends[::-1]] += 1
        return found

    assert pairs("source") == pairs("destination")


def test_contexts_hold_measurements_of_others_to_the_destinations_of_the_source(folder: Path) -> None:
    table = pq.read_table(sorted((folder / "raw").glob("*.parquet"))).to_pylist()
    pairs_measured = {(m["src_addr"], m["dst_addr"]) for m in table}
    times = {(m["src_addr"], m["dst_addr"], int(m["event_time"].timestamp())) for m in table}
    crossed = 0
    for context in contexts(opened(folder, crossing=1.0)):
        own = [m for m, i in zip(context["measurements"], context["measurement_indices"], strict=True) if i is not None]
        others = [m for m, i in zip(context["measurements"], context["measurement_indices"], strict=True) if i is None]
        assert {m["source"] for m in own} <= {context["source"]}
        assert context["source"] not in {m["source"] for m in others}
        pairs = [(m["source"], m["destination"]) for m in others]
        assert len(set(pairs)) == len(pairs)
        for m in own + others:
            assert (m["source"], m["destination"]) in pairs_measured
            if m["time_s"] is not None:
                assert (m["source"], m["destination"], m["time_s"]) in times
        crossed += len(others)
    assert crossed > 300


def test_the_share_says_how_many_contexts_cross(folder: Path) -> None:
    def share(crossing: float) -> float:
        found = contexts(opened(folder, crossing=crossing), 120)
        large = [context for context in found if len(context["measurement_indices"]) > 15]
        return float(np.mean([None in context["measurement_indices"] for context in large]))

    assert share(0.0) == 0.0
    assert 0.3 < share(0.5) < 0.7
    assert share(1.0) > 0.95


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_sequence_does_not_depend_on_what_it_is_built_with(folder: Path, split: str) -> None:
    together = opened(folder, split, crossing=0.7).packed(range(12))
    for sequence in (11, 3, 0):
        alone = opened(folder, split, crossing=0.7).packed([sequence])
        ends = np.cumsum(together.sizes)
        mine = np.flatnonzero(together.sequence == sequence)
        begin, end = ends[mine[0]] - together.sizes[mine[0]], ends[mine[-1]]
        assert np.array_equal(alone.tokens, together.tokens[begin:end])
        assert alone.sizes.sum() <= LENGTH


def test_sources_for_evaluation_are_in_no_context_of_training(folder: Path) -> None:
    rows = RowSet(folder / "source", "eval")
    held_out = {rows[number].source_address for number in range(len(rows))}
    assert held_out
    for context in contexts(opened(folder, crossing=1.0)):
        assert not held_out & {m["source"] for m in context["measurements"]}


def test_rows_of_one_kind_are_not_taken_for_the_other(folder: Path) -> None:
    with pytest.raises(PingLlmError, match="by destination"):
        RowsSpec.find(str(folder / "destination"), "train")
    with pytest.raises(PingLlmError, match="not prepared by destination"):
        RowsSpec.find(str(folder / "source"), "train", by_destination=str(folder / "source"))


def test_the_keys_decide_what_the_data_are(folder: Path) -> None:
    rows = str(folder / "source")
    config = Config(network_train_files=rows, network_eval_files=rows, eval_interval=-1, max_target_length=LENGTH)
    crossing = config.replace(network_by_destination=str(folder / "destination"))
    identities = [network.spec_from_config(c, "train", Part()).identity() for c in (config, crossing)]
    assert identities[0] != identities[1]
