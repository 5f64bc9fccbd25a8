"""Positions of nodes: read from a nodes file, checked against the measurements, and used by the completer."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ping_llm import Predictor
from ping_llm.core.geography import UNKNOWN, LocatedNodes, distance_km, light_ms, misplaced, positions_of
from ping_llm.core.rtt import Observations, Questions
from ping_llm.models.completer.geography import DistanceModel, nearness
from ping_llm.models.completer.network import identities
from ping_llm.prior.selection import node_words
from ping_llm.rows.measurement_set import read_observations, table_observations
from ping_llm.sources.columns import InputOptions

CITIES = {
    "amsterdam": (52.4, 4.9),
    "frankfurt": (50.1, 8.7),
    "new york": (40.7, -74.0),
    "chicago": (41.9, -87.6),
    "sydney": (-33.9, 151.2),
    "tokyo": (35.7, 139.7),
    "sao paulo": (-23.5, -46.6),
}


def cities(*unknown: str) -> LocatedNodes:
    return LocatedNodes.of(CITIES, [UNKNOWN if name in unknown else degrees for name, degrees in CITIES.items()])


def network(nodes: int = 80, seed: int = 0) -> tuple[LocatedNodes, Observations]:
    """Nodes anywhere on land and sea, and pings that take 1.5 times as long as light, and 4 ms."""
    rng = np.random.default_rng(seed)
    latitude = np.rad2deg(np.arcsin(rng.uniform(-0.8, 0.9, nodes)))
    located = LocatedNodes.of(
        [f"node {i}" for i in range(nodes)], list(zip(latitude, rng.uniform(-180, 180, nodes), strict=True))
    )
    source, destination = np.triu_indices(nodes, 1)
    rtt = 4.0 + 1.5 * light_ms(located.positions[source], located.positions[destination])
    return located, Observations(source=source, destination=destination, time_s=np.full(len(rtt), np.nan), rtt_ms=rtt)


def shown_to(
    predictor: Predictor, nodes: LocatedNodes, pairs: Observations, asked: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Median relative errors of the queries, without and with positions, from a fifth of the other pairs."""
    known = pairs.take(~asked & (np.random.default_rng(1).random(len(pairs)) < 0.2))
    queries = pairs.take(np.flatnonzero(asked)[:200])
    errors = [
        np.abs(predictor.predict(known, queries.questions, told).median / queries.rtt_ms - 1)
        for told in (tuple(nodes), nodes)
    ]
    return errors[0], errors[1]


class TestPositions:
    def test_distances_are_those_of_an_atlas(self) -> None:
        position = dict(zip(CITIES, cities().positions, strict=True))
        assert distance_km(position["amsterdam"], position["frankfurt"]) == pytest.approx(364, abs=8)
        assert distance_km(position["new york"], position["sydney"]) == pytest.approx(15_990, abs=50)

    def test_light_needs_ten_milliseconds_for_a_thousand_kilometres_and_back(self) -> None:
        equator = LocatedNodes.of("ab", [(0.0, 0.0), (0.0, np.rad2deg(1000 / 6371))])
        assert light_ms(*equator.positions) == pytest.approx(10.0, rel=1e-4)

    def test_what_is_not_known_has_no_distance(self) -> None:
        amsterdam, *_, sao_paulo = cities("sao paulo").positions
        assert light_ms(amsterdam, sao_paulo) == -1

    def test_nodes_of_which_no_position_is_known_are_plain_nodes(self) -> None:
        assert positions_of(cities(*CITIES)) is None
        assert positions_of(tuple(CITIES)) is None

    def test_near_nodes_have_similar_features_and_far_ones_have_not(self) -> None:
        features = nearness(cities().positions, 1, 4096)
        cosine = dict(zip(CITIES, (features @ features[0] / 4096).tolist(), strict=True))
        assert cosine["amsterdam"] == pytest.approx(1.0, abs=0.1)
        assert cosine["frankfurt"] == pytest.approx(np.exp(-((364 / 1500) ** 2) / 2), abs=0.1)
        assert cosine["tokyo"] == pytest.approx(0.0, abs=0.1)

    def test_identities_without_a_position_are_what_they_were(self) -> None:
        words, nodes = node_words(list(CITIES))[None], cities("tokyo")
        plain, located = identities(words, 128), identities(words, 128, nodes.positions[None])
        same = (plain[0] == located[0, :, :128]).all(axis=1)
        assert dict(zip(CITIES, same.tolist(), strict=True)) == {name: name == "tokyo" for name in CITIES}
        assert np.linalg.norm(located[0, :, :128], axis=1) == pytest.approx(3.0)


class TestMisplacedNodes:
    def test_the_node_that_all_contradictions_share_is_found(self) -> None:
        nodes, pairs = network(30)
        moved = LocatedNodes.of(nodes, [UNKNOWN] * len(nodes))
        moved.positions = nodes.positions.copy()
        moved.positions[7] = -nodes.positions[7]
        assert misplaced(moved.positions, pairs.source, pairs.destination, pairs.rtt_ms).tolist() == [7]
        assert misplaced(nodes.positions, pairs.source, pairs.destination, pairs.rtt_ms).tolist() == []

    def test_reading_leaves_its_position_out_and_says_so(self, tmp_path: Path) -> None:
        history, described = tmp_path / "pings.csv", tmp_path / "nodes.csv"
        names = list(CITIES)
        rows = [
            f"{a},{b},{4 + 1.5 * light_ms(x, y):.3f}"
            for a, x in zip(names, cities().positions, strict=True)
            for b, y in zip(names, cities().positions, strict=True)
            if a < b
        ]
        history.write_text("\n".join(["src,dst,rtt_ms", *rows]))
        places = CITIES | {"frankfurt": (-40.0, 175.0)}
        described.write_text("\n".join(["name,lat,lon", *(f"{n},{lat},{lon}" for n, (lat, lon) in places.items())]))
        measured = read_observations([history], options=InputOptions(nodes=str(described)))
        told = measured.addresses_of()
        assert isinstance(told, LocatedNodes)
        without = [name for name, position in zip(told, told.positions, strict=True) if not position.any()]
        assert without == ["frankfurt"]
        assert measured.reading is not None
        assert "positions of 6 nodes" in measured.reading.lines[0]
        assert "the position of 1 (frankfurt)" in measured.reading.lines[0]


class TestDistanceModel:
    def test_slope_and_offsets_are_found_in_spite_of_gross_errors(self) -> None:
        nodes, pairs = network(40)
        offset = np.random.default_rng(3).exponential(10.0, 40)
        rtt = pairs.rtt_ms + offset[pairs.source] + offset[pairs.destination]
        rtt = np.where(np.arange(len(rtt)) % 20 == 0, 10 * rtt, rtt)
        model = DistanceModel.between(nodes.positions, pairs.source, pairs.destination, rtt.astype(np.float64))
        assert model.slope == pytest.approx(1.5, rel=0.02)
        assert np.median(np.abs(model.common_ms + model.offset_ms - offset - 2.0)) < 1.0
        assert model.count.tolist() == [39] * 40

    def test_without_measurements_it_knows_what_is_usual(self) -> None:
        nodes, pairs = network(5)
        nothing = pairs.take(slice(0, 0))
        model = DistanceModel.between(nodes.positions, nothing.source, nothing.destination, np.zeros(0))
        light = light_ms(nodes.positions[pairs.source], nodes.positions[pairs.destination])
        assert model.predict(pairs.source, pairs.destination, light) == pytest.approx(1.6 * light + 6.0)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor.from_pretrained(backend="numpy")


class TestAnswers:
    def test_without_positions_nothing_changes(self, predictor: Predictor) -> None:
        _, pairs = network(20)
        nodes = [f"node {i}" for i in range(20)]
        known, queries = pairs.take(slice(0, 60)), pairs.take(slice(60, 80)).questions
        nowhere = LocatedNodes.of(nodes, [UNKNOWN] * 20)
        plain, located = (predictor.predict(known, queries, told) for told in (tuple(nodes), nowhere))
        np.testing.assert_array_equal(plain.median, located.median)

    def test_nodes_that_were_never_measured_are_answered_from_their_position(self, predictor: Predictor) -> None:
        nodes, pairs = network()
        without, with_positions = shown_to(predictor, nodes, pairs, (pairs.source < 8) | (pairs.destination < 8))
        assert np.median(with_positions) < 0.5 * np.median(without)

    def test_other_pairs_gain_too(self, predictor: Predictor) -> None:
        nodes, pairs = network()
        without, with_positions = shown_to(predictor, nodes, pairs, np.random.default_rng(2).random(len(pairs)) < 0.3)
        assert np.median(with_positions) < np.median(without)

    def test_no_answer_is_faster_than_light(self, predictor: Predictor) -> None:
        nodes, pairs = network(40)
        queries = Questions(source=np.arange(1, 40), destination=np.zeros(39, int), time_s=np.full(39, np.nan))
        light = light_ms(nodes.positions[queries.source], nodes.positions[queries.destination])
        near = replace(pairs, rtt_ms=np.full(len(pairs), 1.0))  # as if all were neighbours
        answers = predictor.predict(near.take(slice(100, 300)), queries, nodes)
        assert (answers.quantile([0.01])[:, 0] > 0.98 * light).all()
        assert (answers.interval(0.9)[1] > light).all()


class TestPositionsBesideMeasurements:
    @pytest.mark.parametrize(
        ("header", "rows", "expected"),
        [
            (
                "src,src_lat,src_lon,dst,Destination Latitude,destination longitude,rtt_ms",
                ["lon,51.5,-0.1,nyc,40.7,-74.0,71", "nyc,40.7,-74.0,fra,50.1,8.7,84"],
                {"lon": (51.5, -0.1), "nyc": (40.7, -74.0), "fra": (50.1, 8.7)},
            ),
            (  # of the probes, as in exports of RIPE Atlas: they are always at the same position
                "probe,latitude,longitude,dst_addr,rtt_ms",
                ["lon,51.5,-0.1,192.0.2.1,7", "lon,51.5,-0.1,192.0.2.9,9", "fra,50.1,8.7,192.0.2.1,8"],
                {"lon": (51.5, -0.1), "fra": (50.1, 8.7)},
            ),
            (  # of the targets
                "probe,lat,lng,dst_addr,rtt_ms",
                ["a,51.5,-0.1,192.0.2.1,7", "a,50.1,8.7,2001:DB8::9,9", "b,51.5,-0.1,192.0.2.1,8"],
                {"192.0.2.1": (51.5, -0.1), "2001:db8::9": (50.1, 8.7)},
            ),
            (  # no numbers, out of range, and a latitude alone
                "src,src_lat,src_lon,dst,dst_lat,rtt_ms",
                ["a,north,5,b,50,7", "b,95,5,c,50,7", "c,0,0,a,50,7"],
                {},
            ),
        ],
        ids=["both ends", "probes", "targets", "none"],
    )
    def test_they_are_found_by_their_names(
        self, tmp_path: Path, header: str, rows: list[str], expected: dict[str, tuple[float, float]]
    ) -> None:
        (tmp_path / "pings.csv").write_text("\n".join([header, *rows]))
        found = read_observations([tmp_path / "pings.csv"], options=InputOptions(allow_bad_rows=True)).described
        assert {name: (node.latitude, node.longitude) for name, node in found.items()} == expected

    def test_a_nodes_file_has_the_last_word(self, tmp_path: Path) -> None:
        (tmp_path / "pings.csv").write_text(
            "src,src_lat,src_lon,dst,rtt_ms\n10.0.0.1,51.5,-0.1,b,70\nb,50.1,8.7,10.0.0.1,70"
        )
        (tmp_path / "nodes.csv").write_text("name,address,lat,lon\na,10.0.0.1,48.9,2.4\n")
        options = InputOptions(nodes=str(tmp_path / "nodes.csv"))
        found = read_observations([tmp_path / "pings.csv"], options=options)
        assert set(found.nodes) == {"a", "b"}
        assert {name: node.latitude for name, node in found.described.items()} == {"a": 48.9, "b": 50.1}

    def test_parquet_and_data_frames_have_them_too(self, tmp_path: Path) -> None:
        columns = {
            "src_addr": ["lon", "nyc"],
            "src_lat": [51.5, 40.7],
            "src_lon": [-0.1, -74.0],
            "dst_addr": ["nyc", "lon"],
        }
        table = pa.table({**columns, "rtt": [71.0, 72.0]})
        pq.write_table(table, tmp_path / "pings.parquet")
        for measured in (read_observations([tmp_path / "pings.parquet"]), table_observations(table)):
            assert {name: node.longitude for name, node in measured.described.items()} == {"lon": -0.1, "nyc": -74.0}


def test_a_data_frame_of_answers_has_the_distance(predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("name,lat,lon\nlon,51.5,-0.1\nnyc,40.7,-74.0\nsyd,-33.9,151.2\n")
    history = pa.table(
        {"src_addr": ["lon", "nyc", "fra"], "dst_addr": ["nyc", "fra", "lon"], "rtt": [71.0, 84.0, 14.0]}
    )
    questions = pa.table({"src_addr": ["syd", "fra"], "dst_addr": ["lon", "syd"]})
    answered = predictor.predict_df(questions, history=history, nodes=str(tmp_path / "nodes.csv"))
    assert answered["distance_km"].to_pylist() == [pytest.approx(16_990, abs=40), None]
    assert answered["0.1"][0].as_py() > 165, "light needs 170 ms from Sydney to London"
    assert answered["extrapolating"].to_pylist() == [True, True]
