"""Batches: the same bits however they are built, the contract they keep, the truth they tell, the room they waste."""

import hashlib
import time
from functools import cache

import numpy as np
import pyarrow as pa
import pytest

from conftest import random_measurements
from ping_llm.batches.batch import Stages
from ping_llm.batches.spec import Batch
from ping_llm.contexts.plan import Mode
from ping_llm.contexts.source import RowSequences
from ping_llm.core.measurements import SCHEMA, format_address
from ping_llm.rows import format as layout
from ping_llm.rows.dataset import CorruptRowError, RowSet
from ping_llm.tokens import VOCABULARY_SIZE, TimeKind
from ping_llm.tokens.decode import DecodedMeasurement, decode
from pipeline_fixtures import START_S, Dataset, arrays_of, histories, in_batches, prepare_table, simulated

NAMES = {
    "inputs",
    "inputs_position",
    "inputs_segmentation",
    "targets",
    "targets_position",
    "targets_segmentation",
}


@cache
def mixed() -> Dataset:
    """Both families, failures, equal times, long and short histories, times finer than seconds."""
    tables = [random_measurements(6_000, sources=200), histories([4_000, 700, 80, 30, 2, 1], seed=3)]
    return prepare_table(pa.concat_tables([*tables, histories([3_000, 200, 20, 1], family=6, seed=4)]))


def digest(batch: Batch) -> str:
    hashed = hashlib.sha256()
    for name in sorted(batch):
        hashed.update(name.encode() + batch[name].astype("<i4").tobytes())
    return hashed.hexdigest()


def assert_equal(found: Batch, expected: Batch, rows: slice = slice(None)) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        assert np.array_equal(found[name], expected[name][rows]), name


class TestPurity:
    """A batch is a function of rows, seed, settings and the numbers of its sequences."""

    def two_epochs(self) -> tuple[int, Batch]:
        builder = mixed().builder()
        count = 2 * builder.plan.sequences_per_epoch
        return count, arrays_of(builder, range(count))

    def test_a_sequence_built_alone_is_the_same(self) -> None:
        count, everything = self.two_epochs()
        for sequence in range(0, count, 7):
            assert_equal(arrays_of(mixed().builder(), [sequence]), everything, slice(sequence, sequence + 1))

    def test_the_order_in_which_sequences_are_built_does_not_matter(self) -> None:
        count, everything = self.two_epochs()
        builder = mixed().builder()
        order = np.random.default_rng(0).permutation(count)
        for chosen in np.array_split(order, 9):
            built = arrays_of(builder, chosen.tolist())
            for name in built:
                assert np.array_equal(built[name], everything[name][chosen])

    @pytest.mark.parametrize("hosts", [2, 3, 8])
    def test_slices_of_hosts_make_up_the_whole_batch(self, hosts: int) -> None:
        count, everything = self.two_epochs()
        parts = [arrays_of(mixed().builder(), part.tolist()) for part in np.array_split(np.arange(count), hosts)]
        assert_equal({name: np.concatenate([part[name] for part in parts]) for name in NAMES}, everything)

    def test_a_sequence_may_be_asked_for_twice_in_one_batch(self) -> None:
        built = arrays_of(mixed().builder(), [5, 2, 5])
        for name in NAMES:
            assert np.array_equal(built[name][0], built[name][2])
            assert not np.array_equal(built["inputs"][0], built["inputs"][1])

    def test_far_epochs_can_be_built_at_once(self) -> None:
        builder = mixed().builder()
        far = 1_000_000 * builder.plan.sequences_per_epoch
        assert_equal(arrays_of(builder, [far]), arrays_of(mixed().builder(), [3, far]), slice(1, 2))

    def test_another_seed_gives_other_batches(self) -> None:
        assert len({digest(arrays_of(mixed().builder(seed), range(4))) for seed in range(5)}) == 5

    def test_every_epoch_gives_other_batches(self) -> None:
        builder = mixed().builder()
        per_epoch = builder.plan.sequences_per_epoch
        assert len({digest(arrays_of(builder, [epoch * per_epoch])) for epoch in range(5)}) == 5


@pytest.fixture(params=[256, 1024], scope="module")
def batch(request: pytest.FixtureRequest) -> Batch:
    return arrays_of(mixed().builder(length=request.param), range(60))


class TestContract:
    def test_arrays_have_the_names_type_and_shape_of_the_contract(self) -> None:
        for length in (100, 256, 1024):
            batch = arrays_of(simulated(20_000).builder(length=length), range(5))
            assert set(batch) == NAMES
            for array in batch.values():
                assert array.dtype == np.int32
                assert array.shape == (5, length)

    def test_segments_are_numbered_from_one_and_padding_is_zero_at_the_end(self, batch: Batch) -> None:
        for segmentation in batch["inputs_segmentation"]:
            used = np.count_nonzero(segmentation)
            assert (segmentation[:used] > 0).all()
            assert segmentation[0] == 1
            assert set(np.diff(segmentation[:used]).tolist()) <= {0, 1}
            assert (segmentation[used:] == 0).all()

    def test_positions_restart_in_every_segment(self, batch: Batch) -> None:
        for segmentation, position in zip(batch["inputs_segmentation"], batch["inputs_position"], strict=True):
            for number in range(1, int(segmentation.max()) + 1):
                inside = position[segmentation == number]
                assert inside.tolist() == list(range(len(inside)))
            assert (position[segmentation == 0] == 0).all()

    def test_targets_are_inputs_shifted_by_one_inside_each_segment(self, batch: Batch) -> None:
        for row in range(len(batch["inputs"])):
            inputs, targets = batch["inputs"][row], batch["targets"][row]
            segmentation, predicted = batch["inputs_segmentation"][row], batch["targets_segmentation"][row]
            for number in range(1, int(segmentation.max()) + 1):
                (inside,) = np.nonzero(segmentation == number)
                assert np.array_equal(targets[inside[:-1]], inputs[inside[1:]])
                assert (predicted[inside[:-1]] == number).all()
                assert predicted[inside[-1]] == 0, "a segment's last token has nothing to predict"
                assert targets[inside[-1]] == 0

    def test_positions_of_targets_are_those_of_the_inputs_they_follow(self, batch: Batch) -> None:
        counted = batch["targets_segmentation"] > 0
        assert np.array_equal(batch["targets_position"][counted], batch["inputs_position"][counted])

    def test_padding_and_boundaries_carry_no_loss(self, batch: Batch) -> None:
        segmentation = batch["inputs_segmentation"]
        following = np.pad(segmentation[:, 1:], ((0, 0), (0, 1)))
        has_loss = batch["targets_segmentation"] > 0
        assert np.array_equal(has_loss, (segmentation > 0) & (segmentation == following))

    def test_unused_positions_are_zero_in_every_array(self, batch: Batch) -> None:
        padding = batch["inputs_segmentation"] == 0
        assert padding.any()
        for array in batch.values():
            assert (array[padding] == 0).all()

    def test_tokens_are_of_the_vocabulary(self, batch: Batch) -> None:
        assert batch["inputs"].min() >= 0
        assert batch["inputs"].max() < VOCABULARY_SIZE


def segments_of(batch: Batch) -> list[tuple[DecodedMeasurement, ...]]:
    """The measurements of every segment of a batch, as its tokens say them."""
    found = []
    for inputs, segmentation in zip(batch["inputs"], batch["inputs_segmentation"], strict=True):
        for number in range(1, int(segmentation.max()) + 1):
            decoded = decode(inputs[segmentation == number])
            assert decoded.problem is None
            assert decoded.truncated == 0
            found.append(decoded.measurements)
    return found


def says_the_truth(measurement: DecodedMeasurement, rows: RowSet, row: int, position: int) -> bool:
    """Whether a decoded measurement is measurement `position` of a row."""
    truth = rows[row]
    rtt = float(truth.rtt_ms[position])
    same_rtt = (
        measurement.rtt_ms is None
        if np.isnan(rtt)
        else measurement.rtt_ms is not None and abs(measurement.rtt_ms - rtt) <= max(rtt * 2**-11, 0.0005001)
    )
    same_time = (measurement.time_kind is TimeKind.NONE and measurement.time_s is None) or (
        measurement.time_s == int(truth.time_us[position]) // 1_000_000
    )
    return (
        same_rtt
        and same_time
        and measurement.family == truth.family
        and measurement.source == truth.source_address
        and measurement.destination == format_address(truth.family, truth.destinations[position].tobytes())
    )


class TestTruth:
    @pytest.mark.parametrize("length", [100, 1024])
    def test_every_segment_decodes_to_real_measurements_of_its_row(self, length: int) -> None:
        builder = mixed().builder(length=length)
        sequences = range(0, builder.plan.sequences_per_epoch, 4)
        segments = builder.segments(sequences)
        decoded = segments_of(arrays_of(builder, sequences))
        assert len(decoded) == len(segments.samples.row)
        families, failed, kinds = set(), set(), set()
        for number, measurements in enumerate(decoded):
            positions = segments.position[segments.sample == number].tolist()
            assert len(set(positions)) == len(positions) == len(measurements), "no measurement is twice in a context"
            for measurement, position in zip(measurements, positions, strict=True):
                assert says_the_truth(measurement, builder.rows, int(segments.samples.row[number]), position)
                families.add(measurement.family)
                failed.add(measurement.failed)
                kinds.add(measurement.time_kind)
        assert families == {4, 6}
        assert failed == {True, False}
        assert kinds == set(TimeKind)

    def test_contexts_have_the_times_of_their_mode(self) -> None:
        builder = mixed().builder()
        sequences = range(builder.plan.sequences_per_epoch)
        modes = builder.segments(sequences).samples.mode.tolist()
        for mode, measurements in zip(modes, segments_of(arrays_of(builder, sequences)), strict=True):
            kinds = [m.time_kind for m in measurements]
            timed = [kind for kind in kinds if kind is not TimeKind.NONE]
            assert timed[:1] in ([], [TimeKind.ABSOLUTE])
            assert TimeKind.ABSOLUTE not in timed[1:]
            if mode == Mode.FULL:
                assert timed == kinds
                times = [m.time_s for m in measurements if m.time_s is not None]
                assert times == sorted(times)
            if mode == Mode.NONE:
                assert timed == []

    def test_windows_are_kept(self) -> None:
        segments = mixed().builder().segments(range(100))
        start, size = segments.samples.start[segments.sample], segments.samples.size[segments.sample]
        assert (segments.position >= start).all()
        assert (segments.position < start + size).all()

    def test_rows_that_fit_are_nearly_always_used_whole(self) -> None:
        builder = simulated(300_000).builder()
        whole = used_whole = measurements = used = 0
        for batch in in_batches(builder.plan.sequences_per_epoch):
            segments = builder.segments(batch)
            counts = np.bincount(segments.sample, minlength=len(segments.samples.row))
            fits, size = segments.samples.whole, segments.samples.size
            whole, used_whole = whole + fits.sum(), used_whole + (fits & (counts == size)).sum()
            measurements, used = measurements + size[fits].sum(), used + counts[fits].sum()
        assert whole > 1_000
        assert used_whole / whole > 0.9
        assert used / measurements > 0.98


def padding(dataset: Dataset, *, epoch: int = 0, **settings: int) -> float:
    """Share of an epoch's tokens that are padding."""
    builder = dataset.builder(**settings)
    sequences, length = builder.plan.sequences_per_epoch, builder.plan.settings.length
    used = sum(
        builder.segments([epoch * sequences + sequence for sequence in batch]).packed.sizes.sum()
        for batch in in_batches(sequences)
    )
    return 1 - int(used) / (sequences * length)


class TestPadding:
    @pytest.mark.parametrize("epoch", [0, 1, 5])
    def test_is_at_most_two_per_cent_on_heavy_tailed_rows(self, epoch: int) -> None:
        assert padding(simulated(300_000), epoch=epoch) <= 0.02

    def test_is_at_most_two_per_cent_on_ipv4_alone(self) -> None:
        assert padding(simulated(300_000, ipv6_share=0.0), epoch=1) <= 0.02

    def test_is_at_most_three_per_cent_on_ipv6_alone(self) -> None:
        dataset = simulated(300_000, ipv6_share=1.0, dual_stack_share=0.0)
        assert set(dataset.rows.column("family").tolist()) == {6}
        assert padding(dataset, epoch=1) <= 0.03

    @pytest.mark.parametrize(("length", "most"), [(256, 0.06), (4096, 0.01)])
    def test_of_other_lengths_is_about_half_a_measurement_a_sequence(self, length: int, most: float) -> None:
        assert padding(simulated(300_000), epoch=1, length=length) <= most

    @pytest.mark.parametrize("family", [4, 6])
    def test_is_at_most_two_per_cent_on_small_rows_alone(self, family: int) -> None:
        assert padding(prepare_table(histories([1, 2, 3, 5, 8, 13] * 500, family=family))) <= 0.02

    @pytest.mark.parametrize("size", [34, 40, 48])
    def test_is_at_most_a_sixth_on_rows_of_a_single_size(self, size: int) -> None:
        assert padding(prepare_table(histories([size] * 300))) <= 1 / 6

    def test_is_at_most_two_and_a_half_per_cent_on_little_heavy_tailed_data_on_average_over_epochs(self) -> None:
        assert np.mean([padding(simulated(20_000), epoch=epoch) for epoch in range(12)]) <= 0.025

    def test_is_at_most_five_per_cent_on_a_few_long_rows_on_average_over_epochs(self) -> None:
        dataset = prepare_table(histories([20_000] * 3))
        assert np.mean([padding(dataset, epoch=epoch) for epoch in range(8)]) <= 0.05


class TestCorruptRows:
    def damaged(self) -> tuple[Dataset, int]:
        dataset = prepare_table(random_measurements(3_000, sources=50))
        with dataset.rows as rows:
            row = len(rows) // 2
            path = dataset.folder / rows.info.shards[0].file
            content = bytearray(path.read_bytes())
            content[layout.physical(int(rows.column("offset")[row]) + 60)] ^= 1
        path.write_bytes(content)
        return dataset, row

    def test_are_an_error_in_the_batch_that_uses_them(self) -> None:
        dataset, row = self.damaged()
        builder = dataset.builder()
        with pytest.raises(CorruptRowError) as caught:
            arrays_of(builder, range(builder.plan.sequences_per_epoch))
        assert caught.value.row == row

    def test_can_be_left_out_and_are_reported(self) -> None:
        dataset, row = self.damaged()
        builder = RowSequences(dataset.rows, dataset.plan(), skip_corrupt_rows=True)
        sequences = range(builder.plan.sequences_per_epoch)
        segments = builder.segments(sequences)
        assert row not in segments.samples.row
        assert set(builder.left_out) == {row}
        assert "row" in builder.left_out[row]
        segments_of(arrays_of(builder, sequences))

    def test_change_only_the_sequences_that_they_are_in(self) -> None:
        table = random_measurements(3_000, sources=50)
        sound = prepare_table(table).builder()
        dataset, row = self.damaged()
        builder = RowSequences(dataset.rows, dataset.plan(), skip_corrupt_rows=True)
        sequences = range(sound.plan.sequences_per_epoch)
        segments = sound.segments(sequences)
        touched = np.unique(segments.packed.sequence[segments.samples.row == row])
        others = np.setdiff1d(np.arange(len(sequences)), touched)
        assert len(others) > 0
        found, expected = arrays_of(builder, sequences), arrays_of(sound, sequences)
        for name in NAMES:
            assert np.array_equal(found[name][others], expected[name][others])


class TestStages:
    def test_a_stage_that_fails_is_counted_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = iter([0.0, 2.0, 10.0, 11.0])
        monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
        stages = Stages()
        with pytest.raises(ValueError, match="broken"), stages("failing"):
            raise ValueError("broken")
        with stages("next"):
            pass
        assert stages.seconds == {"failing": 2.0, "next": 1.0}

    def test_building_a_batch_fills_them(self) -> None:
        builder = mixed().builder()
        arrays_of(builder, range(4))
        assert {"plan", "read", "encode"} <= set(builder.stages.seconds)
        assert all(seconds >= 0 for seconds in builder.stages.seconds.values())


def fixed_table() -> pa.Table:
    """A table that does not depend on any library's random numbers."""
    row = np.repeat(np.arange(60), np.arange(60) * 7 % 90 + 1)
    number = np.arange(len(row))
    ipv6 = row % 3 == 0
    return pa.table(
        {
            "event_time": pa.array((START_S + number * 97 % 50_000) * 1_000_000, pa.timestamp("us", tz="UTC")),
            "src_addr": [f"2001:db8::{r}" if v6 else f"10.0.0.{r}" for r, v6 in zip(row, ipv6, strict=True)],
            "dst_addr": [
                f"2001:db8:1::{n % 50}" if v6 else f"192.0.2.{n % 50}" for n, v6 in zip(number, ipv6, strict=True)
            ],
            "ip_version": pa.array(np.where(ipv6, 6, 4), pa.int8()),
            "rtt": pa.array((number * 31 % 4_001 / 8 + 0.5).astype(np.float32), mask=number % 23 == 0),
        },
        schema=SCHEMA,
    )


def test_a_batch_of_fixed_rows_is_the_pinned_one() -> None:
    """Should this fail, every run's batches have changed: then saved data states must not be accepted any more."""
    builder = prepare_table(fixed_table()).builder(seed=42)
    per_epoch = builder.plan.sequences_per_epoch
    assert (builder.plan.samples_per_epoch, per_epoch) == GOLDEN_SIZES
    assert digest(arrays_of(builder, [0, 1, per_epoch, 3 * per_epoch + 5])) == GOLDEN_DIGEST


GOLDEN_SIZES = (114, 49)
GOLDEN_DIGEST = "7fb5fa14c3bf73e885ec0dd72598e28337fb01197d746c4901a3b58cfee6e9d0"
