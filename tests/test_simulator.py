"""The simulator: statistics like a real extract, reproducible files, and a truth that its own measurements obey."""

import dataclasses
import datetime
import ipaddress
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import SCHEMA
from ping_llm.sources.simulator import SimulatorSettings, World, generate, generate_slice, simulate
from ping_llm.sources.simulator.delays import DelayDistribution
from ping_llm.sources.simulator.geography import great_circle_km
from ping_llm.sources.simulator.hosts import source_sizes
from ping_llm.sources.simulator.world import MEASUREMENTS_PER_SLICE

Floats = npt.NDArray[np.float64]

REFERENCE_QUANTILES = {0.01: 3.2, 0.1: 12.5, 0.25: 25.8, 0.5: 50.3, 0.75: 120.7, 0.9: 239.0, 0.99: 343.0, 0.999: 1204.0}
START = 1_735_689_600  # 2025-01-01T00:00:00Z


@dataclasses.dataclass(frozen=True)
class Made:
    """A world and all of its measurements."""

    world: World
    table: pa.Table

    @property
    def seconds(self) -> npt.NDArray[np.int64]:
        return np.asarray(self.table["event_time"].cast(pa.int64()).to_numpy() // 1_000_000)

    @property
    def rtt(self) -> Floats:
        """NaN where it failed."""
        return np.asarray(self.table["rtt"].to_numpy(), np.float64)

    def truth(self) -> DelayDistribution:
        return self.world.distribution(self.table["src_addr"], self.table["dst_addr"], self.table["event_time"])

    def pair_numbers(self) -> npt.NDArray[np.int64]:
        """A number for the (source, destination) pair of each measurement."""
        src, dst = (self.table[name].combine_chunks().dictionary_encode() for name in ("src_addr", "dst_addr"))
        key = src.indices.to_numpy().astype(np.int64) * len(dst.dictionary) + dst.indices.to_numpy()
        return np.asarray(np.unique(key, return_inverse=True)[1], np.int64)


def make(**values: Any) -> Made:
    world = World(SimulatorSettings(**values))
    return Made(world, pa.concat_tables(generate(world)))


@pytest.fixture(scope="module", params=[0, 7])
def extract(request: pytest.FixtureRequest) -> Made:
    return make(seed=request.param, measurements=600_000)


@pytest.fixture(scope="module")
def small() -> Made:
    return make(seed=3, measurements=60_000)


def _address(made: Made, endpoint: Any) -> str:
    return str(made.world.endpoints.address[int(endpoint)])


# --- what the measurements look like -------------------------------------------------------------------------------


def test_rtts_failures_and_families_resemble_the_reference_extract(extract: Made) -> None:
    rtt = extract.rtt[~np.isnan(extract.rtt)]
    for share, expected in REFERENCE_QUANTILES.items():
        assert np.quantile(rtt, share) == pytest.approx(expected, rel=0.25 if share == 0.999 else 0.12), share
    assert np.isnan(extract.rtt).mean() == pytest.approx(0.035, rel=0.1)
    assert (extract.table["ip_version"].to_numpy() == 6).mean() == pytest.approx(0.423, abs=0.005)


def test_gaps_of_a_stream_resemble_the_reference_extract(extract: Made) -> None:
    pair, seconds = extract.pair_numbers(), extract.seconds
    order = np.lexsort((seconds, pair))
    gaps = np.diff(seconds[order])[np.diff(pair[order]) == 0]
    assert np.quantile(gaps, [0.5, 0.9, 0.99]) == pytest.approx([60, 180, 600], abs=2)


def test_sources_are_heavy_tailed_around_the_reference_mean(extract: Made) -> None:
    counts = np.sort(extract.table["src_addr"].value_counts().field("counts").to_numpy())[::-1]
    assert counts.mean() == pytest.approx(118, rel=0.02)
    assert 15 < np.median(counts) < 0.4 * counts.mean()
    assert counts[: len(counts) // 100].sum() > 0.2 * counts.sum()


def test_the_largest_sources_of_twenty_million_measurements_have_more_than_a_hundred_thousand() -> None:
    sizes = source_sizes(SimulatorSettings(measurements=20_000_000))
    assert sizes.sum() == 20_000_000
    assert (sizes > 100_000).sum() >= 2


def test_most_measurements_of_a_pair_lie_near_its_floor_and_a_few_do_not(extract: Made) -> None:
    pair, rtt = extract.pair_numbers(), extract.rtt
    order = np.lexsort((rtt, pair))  # sorted within each pair, failed ones last
    starts = np.flatnonzero(np.diff(pair[order], prepend=-1))
    answers = np.bincount(pair[~np.isnan(rtt)], minlength=len(starts))
    enough = answers >= 20
    ordered = rtt[order]
    low, middle, high = (ordered[(starts + share * (answers - 1)).astype(int)[enough]] for share in (0.25, 0.5, 0.75))
    assert 0.005 < np.median((high - low) / middle) < 0.05
    far = rtt > 2 * np.where(enough, ordered[starts + (answers - 1).clip(0) // 2], np.nan)[pair]
    assert 0.002 < far[enough[pair]].mean() < 0.03


# --- what is promised of any world ---------------------------------------------------------------------------------


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(-(2**70), 2**70),
    measurements=st.integers(1, 3000),
    measurements_per_source=st.floats(1, 500),
    days=st.floats(0.01, 60),
    shares=st.tuples(*[st.sampled_from([0.0, 0.3, 1.0])] * 3),
    sizes=st.tuples(*[st.integers(1, 4)] * 3),
)
def test_exactly_the_wanted_measurements_are_made_in_time_order_whatever_the_settings(
    seed: int,
    measurements: int,
    measurements_per_source: float,
    days: float,
    shares: tuple[float, float, float],
    sizes: tuple[int, int, int],
) -> None:
    made = make(
        seed=seed,
        measurements=measurements,
        measurements_per_source=measurements_per_source,
        days=days,
        ipv6_share=shares[0],
        local_share=shares[1],
        regional_share=1 - shares[1],
        dual_stack_share=shares[2],
        regions=sizes[0],
        cities_per_region=sizes[1],
        systems_per_region=sizes[2],
    )
    assert len(made.table) == measurements
    assert (np.diff(made.seconds) >= 0).all()
    assert made.seconds[0] >= START
    assert made.seconds[-1] < START + days * 86_400 + 1
    made.table.validate(full=True)


def test_measurements_have_the_common_schema_and_whole_seconds_and_interleave_sources(small: Made) -> None:
    assert small.table.schema.equals(SCHEMA)
    assert (small.table["event_time"].cast(pa.int64()).to_numpy() % 1_000_000 == 0).all()
    src = small.table["src_addr"].combine_chunks().dictionary_encode().indices.to_numpy()
    assert (np.diff(src) != 0).mean() > 0.5


def test_both_addresses_are_canonical_public_and_of_the_stated_family(small: Made) -> None:
    rows = small.table.select(["src_addr", "dst_addr", "ip_version"]).group_by(
        ["src_addr", "dst_addr", "ip_version"], use_threads=False
    )
    for row in rows.aggregate([]).to_pylist():
        for text in (row["src_addr"], row["dst_addr"]):
            address = ipaddress.ip_address(text)
            assert str(address) == text
            assert address.version == row["ip_version"]
            assert address.is_global


def test_the_share_of_failures_and_of_ipv6_can_be_chosen() -> None:
    made = make(measurements=200_000, failed_share=0.2, ipv6_share=0.75)
    assert np.isnan(made.rtt).mean() == pytest.approx(0.2, rel=0.05)
    assert (made.table["ip_version"].to_numpy() == 6).mean() == pytest.approx(0.75, abs=0.005)
    assert not np.isnan(make(measurements=20_000, failed_share=0.0).rtt).any()


def test_the_same_settings_give_the_same_measurements_and_another_seed_another_internet() -> None:
    first, second, other = (make(seed=seed, measurements=20_000) for seed in (1, 1, 2))
    assert first.table.equals(second.table)
    addresses = [set(made.world.endpoints.address.to_pylist()) for made in (first, other)]
    assert len(addresses[0] & addresses[1]) < 0.01 * len(addresses[0])
    assert not np.allclose(first.world.geography.city_position, other.world.geography.city_position, atol=0.1)


def test_any_slice_can_be_made_on_its_own(small: Made) -> None:
    last = len(small.world.slice_bounds) - 2
    assert last > 3
    parts = [generate_slice(small.world, index) for index in range(last, -1, -1)]
    assert pa.concat_tables(parts[::-1]).equals(small.table)


def test_slices_stay_small_when_measurements_are_many() -> None:
    sizes = [len(table) for table in generate(World(SimulatorSettings(measurements=2_000_000)))]
    assert sum(sizes) == 2_000_000
    assert max(sizes) < 1.2 * MEASUREMENTS_PER_SLICE


# --- the structure to discover -------------------------------------------------------------------------------------


def test_region_as_and_pop_are_prefixes_of_the_address(small: Made) -> None:
    ends, places = small.world.endpoints, small.world.geography
    assert len(set(ends.address.to_pylist())) == len(ends.address)
    for family, lengths in ((4, (8, 16, 24)), (6, (16, 32, 48))):
        mine = np.flatnonzero(ends.family == family)
        pop = ends.pop[mine]
        system = places.pop_system[pop]
        value = np.array([int(ipaddress.ip_address(text)) for text in ends.address.take(pa.array(mine)).to_pylist()])
        for length, group in zip(lengths, (places.system_region[system], system, pop), strict=True):
            prefix = value >> ((32 if family == 4 else 128) - length)
            pairs = set(zip(prefix.tolist(), group.tolist(), strict=True))
            assert len(pairs) == len(set(prefix.tolist())) == len(set(group.tolist())), (family, length)


def test_a_crowded_pop_takes_a_shorter_prefix_of_its_own() -> None:
    world = World(
        SimulatorSettings(
            measurements=40_000,
            measurements_per_source=2,
            ipv6_share=0.0,
            regions=2,
            cities_per_region=2,
            systems_per_region=2,
        )
    )
    ends = world.endpoints
    ipv4 = np.flatnonzero(ends.family == 4)
    value = np.array([int(ipaddress.ip_address(text)) for text in ends.address.take(pa.array(ipv4)).to_pylist()])
    assert len(np.unique(value)) == len(ipv4) > 20_000
    ranges = sorted((value[ends.pop[ipv4] == pop].min(), value[ends.pop[ipv4] == pop].max()) for pop in set(ends.pop))
    for (low, high), following in zip(ranges, [*ranges[1:], (2**32, 0)], strict=True):
        assert high < following[0]
        assert int(low ^ high).bit_length() <= 14  # thousands of hosts within one aligned block


def test_hosts_of_one_pop_are_much_alike_seen_from_elsewhere(small: Made) -> None:
    ends, world = small.world.endpoints, small.world
    probes = np.flatnonzero(ends.family[: ends.sources] == 4)
    probes = probes[np.argsort(ends.pop[probes], kind="stable")]
    neighbours = [(a, b) for a, b in itertools.pairwise(probes.tolist()) if ends.pop[a] == ends.pop[b]]
    strangers = list(zip(probes.tolist(), np.roll(probes, len(probes) // 2).tolist(), strict=True))
    targets = np.flatnonzero((ends.family == 4) & (np.arange(len(ends.family)) >= ends.sources))[::7]

    def difference(pairs: list[tuple[int, int]]) -> float:
        one, other = (
            world.distribution(
                ends.address.take(pa.array(np.repeat([pair[side] for pair in pairs], len(targets)))),
                ends.address.take(pa.array(np.tile(targets, len(pairs)))),
                START,
            ).median
            for side in (0, 1)
        )
        return float(np.median(np.abs(one - other) / np.minimum(one, other)))

    assert len(neighbours) > 20
    assert difference(neighbours) < 0.1
    assert difference(strangers) > 3 * difference(neighbours)


def test_nothing_is_faster_than_light_in_fibre(extract: Made) -> None:
    ends, streams = extract.world.endpoints, extract.world.streams
    distance = great_circle_km(ends.position[streams.source], ends.position[streams.target])
    truth = extract.world.distribution(
        ends.address.take(pa.array(streams.source)), ends.address.take(pa.array(streams.target)), START
    )
    assert (truth.floor_ms > 2 * distance / 200).all()


def test_a_dual_stack_probe_is_in_one_place_and_its_families_take_similar_ways(small: Made) -> None:
    ends = small.world.endpoints
    host, count = np.unique(ends.host, return_counts=True)
    assert (count <= 2).all()
    # [host, 2]: the IPv4 and the IPv6 endpoint of every dual-stack host
    both = np.lexsort((ends.family, ends.host))[np.isin(np.sort(ends.host), host[count == 2])].reshape(-1, 2)
    assert (ends.family[both] == [4, 6]).all()
    probes, targets = both[both[:, 0] < ends.sources], both[both[:, 0] >= ends.sources]
    assert len(probes) > 50
    four, six = (
        small.world.distribution(ends.address.take(pa.array(probes[:, side])), _address(small, targets[0, side]), START)
        for side in (0, 1)
    )
    relative = np.abs(four.median / six.median - 1)
    assert 0.001 < np.median(relative) < 0.1


def test_routes_are_levels_that_change_now_and_then() -> None:
    made = make(measurements=60_000, congestion_ms=0.0)
    streams = made.world.streams
    times = START + np.arange(0, 7 * 86_400, 1800)
    floors = np.stack(
        [
            made.world.distribution(_address(made, source), _address(made, target), times).floor_ms
            for source, target in zip(streams.source[:400], streams.target[:400], strict=True)
        ]
    )
    usual = floors.min(axis=1, keepdims=True)
    moved = floors > usual * 1.0001
    assert moved.mean() == pytest.approx(made.world.settings.reroute_share, abs=0.04)
    changes = (np.abs(np.diff(floors, axis=1)) > 1e-9).sum(axis=1)
    assert 0.2 < changes.mean() < 8  # in a week
    assert moved.any(axis=1).mean() < 0.9


def test_congestion_peaks_in_the_evening_of_the_place() -> None:
    made = make(measurements=60_000, reroute_share=0.0, congestion_ms=5.0)
    world = made.world
    ends, places, streams = world.endpoints, world.geography, world.streams
    same_city = places.pop_city[ends.pop[streams.source]] == places.pop_city[ends.pop[streams.target]]
    for stream in np.flatnonzero(same_city)[:20]:
        hours = np.arange(0, 24, 0.05)
        source, target = (_address(made, end[stream]) for end in (streams.source, streams.target))
        truth = world.distribution(source, target, START + hours * 3600)
        x, y, _ = places.city_position[places.pop_city[ends.pop[streams.source[stream]]]]
        peak = (hours[np.argmax(truth.floor_ms)] + 12 / np.pi * math.atan2(y, x)) % 24
        assert peak == pytest.approx(20.5, abs=0.1)
        assert np.argmax(truth.p_failed) == np.argmax(truth.floor_ms)


# --- the truth -----------------------------------------------------------------------------------------------------


def distance_from_uniform(values: Floats) -> float:
    """The Kolmogorov-Smirnov statistic times √n: above 1.95 once in a thousand tries if the values are uniform."""
    ordered = np.sort(values)
    steps = np.arange(len(values) + 1) / len(values)
    return float(max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()) * math.sqrt(len(values)))


def test_the_generated_rtts_follow_the_true_distribution(extract: Made) -> None:
    answered = ~np.isnan(extract.rtt)
    truth = extract.truth()
    place = truth.cdf(extract.rtt)[answered]
    seconds, family = extract.seconds[answered], extract.table["ip_version"].to_numpy()[answered]
    far = truth.floor_ms[answered] > 150
    assert distance_from_uniform(place) < 1.95
    for subset in (family == 4, family == 6, seconds % 86_400 < 21_600, seconds - START > 5 * 86_400, far):
        assert subset.sum() > 10_000
        assert distance_from_uniform(place[subset]) < 1.95


def test_the_generated_rtts_of_the_busiest_pair_follow_its_true_distribution(extract: Made) -> None:
    pair = extract.pair_numbers()
    busiest = pair == np.bincount(pair).argmax()
    place = extract.truth().cdf(extract.rtt)[busiest & ~np.isnan(extract.rtt)]
    assert len(place) > 1000
    assert distance_from_uniform(place) < 1.95


def test_a_wrong_distribution_is_noticed(extract: Made) -> None:
    """The bound above is tight: half a percent on every floor is enough to break it."""
    truth = extract.truth()
    wrong = dataclasses.replace(truth, floor_ms=truth.floor_ms * 0.995)
    assert distance_from_uniform(wrong.cdf(extract.rtt)[~np.isnan(extract.rtt)]) > 10


def test_failures_happen_as_often_as_their_probability_says(extract: Made) -> None:
    probability, failed = extract.truth().p_failed, np.isnan(extract.rtt)
    bounds = [0.0, 0.01, 0.02, 0.05, 0.2, 0.8, 1.0]
    for low, high in itertools.pairwise(bounds):
        chosen = (probability >= low) & (probability < high)
        assert chosen.sum() > 100
        expected, spread = probability[chosen].sum(), np.sqrt((probability * (1 - probability))[chosen].sum())
        assert abs(failed[chosen].sum() - expected) < 4 * spread


def test_samples_of_one_measurement_follow_its_distribution(small: Made) -> None:
    row = small.table.slice(777, 1).to_pylist()[0]
    truth = small.world.distribution([row["src_addr"]] * 50_000, row["dst_addr"], row["event_time"])
    drawn = truth.draw(np.random.default_rng(0))
    assert np.isnan(drawn).mean() == pytest.approx(truth.p_failed[0], abs=0.003)
    answered = drawn[~np.isnan(drawn)]
    assert distance_from_uniform(truth.cdf(drawn)[~np.isnan(drawn)]) < 1.95
    assert np.mean(answered[answered < np.quantile(answered, 0.995)]) < truth.mean[0]
    assert np.median(answered) == pytest.approx(truth.median[0], rel=0.01)


@pytest.fixture(scope="module")
def some_truths(small: Made) -> DelayDistribution:
    rows = small.table.take(pa.array(np.arange(0, len(small.table), 997)))
    return small.world.distribution(rows["src_addr"], rows["dst_addr"], rows["event_time"])


def test_quantile_and_cdf_undo_each_other(some_truths: DelayDistribution) -> None:
    shares = np.array([1e-6, 0.01, 0.25, 0.5, 0.9, 0.99, 0.9999])
    quantiles = some_truths.quantile(shares)
    assert quantiles.shape == (len(some_truths), 7)
    assert (np.diff(quantiles, axis=1) > 0).all()
    assert some_truths.cdf(quantiles) == pytest.approx(np.broadcast_to(shares, quantiles.shape), abs=1e-9)
    assert some_truths.quantile(0.25) == pytest.approx(quantiles[:, 2])
    assert some_truths.cdf(some_truths.floor_ms) == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ValueError, match="between 0 and 1"):
        some_truths.quantile(1.5)


def test_the_density_is_the_derivative_of_the_cdf_and_adds_up_to_one(some_truths: DelayDistribution) -> None:
    for share in (0.02, 0.3, 0.5, 0.8, 0.97, 0.9995):
        rtt = some_truths.quantile(share)
        step = 1e-4 * (rtt - some_truths.floor_ms)
        gradient = (some_truths.cdf(rtt + step) - some_truths.cdf(rtt - step)) / (2 * step)
        assert np.exp(some_truths.log_pdf(rtt)) == pytest.approx(gradient, rel=1e-4)
    above = np.geomspace(1e-4, 1e6, 4001)[:, None]
    density = np.exp([some_truths.log_pdf(some_truths.floor_ms + more) for more in above])
    assert np.trapezoid(density * above, np.log(above), axis=0) == pytest.approx(1.0, abs=1e-5)
    mean = np.trapezoid(density * above * (some_truths.floor_ms + above), np.log(above), axis=0)
    assert some_truths.mean == pytest.approx(mean, rel=1e-4)
    assert np.isneginf(some_truths.log_pdf(some_truths.floor_ms)).all()
    assert np.isneginf(some_truths.log_pdf(some_truths.floor_ms - 1)).all()


def test_times_may_be_given_in_any_common_form(small: Made) -> None:
    row = small.table.slice(5, 1).to_pylist()[0]
    moment: datetime.datetime = row["event_time"]
    unix = int(moment.timestamp())
    forms: list[Any] = [
        unix,
        [float(unix)],
        moment,
        [moment],
        np.datetime64(unix, "s"),
        np.array([unix * 1000], "datetime64[ms]"),
        pa.array([moment], SCHEMA.field("event_time").type),
        pa.chunked_array([pa.array([unix], pa.int64())]),
    ]
    floors = [small.world.distribution(row["src_addr"], row["dst_addr"], form).floor_ms.tolist() for form in forms]
    assert floors == [floors[0]] * len(forms)


def test_an_address_may_be_spelt_differently_but_must_be_known_and_of_one_family(small: Made) -> None:
    ends = small.world.endpoints
    ipv6 = int(np.flatnonzero(ends.family[small.world.streams.source] == 6)[0])
    source, target = (_address(small, end[ipv6]) for end in (small.world.streams.source, small.world.streams.target))
    spelt = ipaddress.ip_address(source).exploded.upper()
    truth = small.world.distribution([spelt, source], target, START)
    assert truth.floor_ms[0] == truth.floor_ms[1]
    with pytest.raises(PingLlmError, match=r"'203\.0\.113\.9' is no address of this simulated world"):
        small.world.distribution([source, "203.0.113.9"], target, START)
    with pytest.raises(PingLlmError, match="'nonsense' is no address"):
        small.world.distribution(source, "nonsense", START)
    four = _address(small, np.flatnonzero(ends.family == 4)[0])
    with pytest.raises(PingLlmError, match="different families"):
        small.world.distribution(source, four, START)


# --- files ---------------------------------------------------------------------------------------------------------


def test_files_hold_the_same_measurements_however_many_there_are(tmp_path: Path) -> None:
    settings = SimulatorSettings(seed=4, measurements=30_001)
    done: list[float] = []
    one = simulate(settings, tmp_path / "one", on_progress=lambda amount=1, *, total=None: done.append(amount))
    three = simulate(settings, tmp_path / "three", files=3)
    names = [path.name for path in three.files]
    assert names == [f"measurements-0000{number}-of-00003.parquet" for number in range(3)]
    assert [pq.read_metadata(path).num_rows for path in three.files] == [10_000, 10_000, 10_001]
    tables = [pa.concat_tables(map(pq.read_table, summary.files)) for summary in (one, three)]
    assert tables[0].schema.equals(SCHEMA)
    assert tables[0].equals(tables[1])
    assert sum(done) == one.measurements == len(tables[0]) == 30_001
    assert one.failed == tables[0]["rtt"].null_count > 0
    assert one.sources == len(tables[0]["src_addr"].unique())
    assert one.size_bytes == one.files[0].stat().st_size
    assert json.loads(json.dumps(three.to_json()))["files"] == [str(path) for path in three.files]


def test_the_same_settings_write_the_same_bytes(tmp_path: Path) -> None:
    settings = SimulatorSettings(measurements=20_000)
    first, second = (simulate(settings, tmp_path / name, files=2) for name in ("first", "second"))
    for one, other in zip(first.files, second.files, strict=True):
        assert one.read_bytes() == other.read_bytes()
    found = sorted((tmp_path / "first").iterdir())
    assert found == [*first.files, tmp_path / "first" / "world.json"]


def test_a_folder_of_measurements_leads_back_to_its_world(tmp_path: Path) -> None:
    settings = SimulatorSettings(seed=11, measurements=20_000, start=1_700_000_000, reroute_share=0.5)
    summary = simulate(settings, tmp_path)
    table = pq.read_table(summary.files[0])
    world = World.load(tmp_path)
    assert world.settings == settings
    truth = world.distribution(table["src_addr"], table["dst_addr"], table["event_time"])
    rtt = table["rtt"].to_numpy()
    assert distance_from_uniform(truth.cdf(rtt)[~np.isnan(rtt)]) < 1.95


def test_a_folder_that_is_no_simulated_world_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PingLlmError, match=r"holds no world\.json"):
        World.load(tmp_path)
    (tmp_path / "world.json").write_text("{")
    with pytest.raises(PingLlmError, match="not the description"):
        World.load(tmp_path)
    (tmp_path / "world.json").write_text(
        json.dumps({"format": 99, "ping_llm_version": "9.9", "fingerprint": "", "settings": {}})
    )
    with pytest.raises(PingLlmError, match=r"format 99 \(written by ping-llm 9\.9\)"):
        World.load(tmp_path)
    description = World(SimulatorSettings(measurements=1000)).describe()
    (tmp_path / "world.json").write_text(json.dumps(description | {"fingerprint": "0" * 32}))
    with pytest.raises(PingLlmError, match="another world grows from these settings"):
        World.load(tmp_path)


def test_measurements_are_not_overwritten_unless_asked(tmp_path: Path) -> None:
    simulate(SimulatorSettings(measurements=2000), tmp_path, files=4)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(PingLlmError, match="already holds") as caught:
        simulate(SimulatorSettings(measurements=1000), tmp_path)
    assert "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    simulate(SimulatorSettings(measurements=1000), tmp_path, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["measurements-00000-of-00001.parquet", "world.json"]


def test_an_interrupted_run_leaves_what_was_there_before(tmp_path: Path) -> None:
    def interrupt(amount: float = 1, *, total: float | None = None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(SimulatorSettings(measurements=1000), tmp_path / "new", on_progress=interrupt)
    assert not (tmp_path / "new").exists()
    simulate(SimulatorSettings(measurements=1000), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(KeyboardInterrupt):
        simulate(SimulatorSettings(measurements=2000), tmp_path, files=2, on_progress=interrupt, overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("files", [0, 101])
def test_an_impossible_number_of_files_is_refused(tmp_path: Path, files: int) -> None:
    with pytest.raises(PingLlmError, match=f"cannot be written to {files} files"):
        simulate(SimulatorSettings(measurements=100), tmp_path, files=files)
    assert not any(tmp_path.iterdir())


# --- settings ------------------------------------------------------------------------------------------------------


def test_settings_survive_json() -> None:
    settings = SimulatorSettings(seed=5, start="2024-02-29T12:00:00+01:00", days=1.5, failed_share=0.1)
    assert SimulatorSettings(**json.loads(json.dumps(settings.model_dump()))) == settings


@pytest.mark.parametrize(
    ("start", "expected"),
    [("2025-01-01T00:00:00Z", START), ("2025-01-01", START), ("2025-01-01T02:00:00+02:00", START), (123, 123)],
)
def test_the_start_is_iso_8601_or_unix_seconds(start: str | int, expected: int) -> None:
    assert SimulatorSettings(start=start).start_s == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mesurements": 5}, "did you mean measurements"),
        ({"measurements": 0}, "measurements must be at least 1, not 0"),
        ({"measurements": "many"}, "measurements must be an integer"),
        ({"ipv6_share": 1.2}, "ipv6_share must be from 0 to 1, not 1.2"),
        ({"local_share": 0.7, "regional_share": 0.7}, "at most 1"),
        ({"days": 0}, "days must be above 0"),
        ({"source_size_tail": 1.0}, "source_size_tail must be above 1"),
        ({"start": "yesterday"}, "not 'yesterday'"),
    ],
)
def test_a_setting_that_cannot_be_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PingLlmError, match=message):
        SimulatorSettings(**values)
