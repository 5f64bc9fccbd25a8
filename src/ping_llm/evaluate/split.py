"""Which measurements may be learned from and which are asked about: fixed, documented, without leaks.

    train      what weights and baselines may be fitted to
    history    what a context may hold, as far as it lies strictly before the question
    question   a measurement to be predicted, together with its answer

`RULE` has in words which measurement goes where. It follows from the addresses, by a hash that is the same for every
data set, and from the cut time. So the split depends on nothing else: not on the order of the measurements, not on how
they were cut into files. `trained_on` checks a model's training data against a split.

As a folder, others can train on the same part and be asked the same questions:

    train/measurements.parquet      measurements, as every other command reads them
    history.parquet                 likewise
    questions-PROTOCOL.parquet      likewise, the answers included
    nodes.parquet                   the address of each node, in the order of their numbers
    split.json                      the rule, the settings, the cut time, how many measurements went where, checksums
"""

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ping_llm.core.errors import PingLlmError
from ping_llm.core.files import atomic_folder, file_sha256, relative_name, sealed, unsealed
from ping_llm.core.measurements import MAX_RTT_MS, NAMED, SCHEMA, UNPARSABLE, parse_nodes, source_hash
from ping_llm.core.randomness import GOLDEN, mix64, uniform
from ping_llm.core.rtt import Bools, Floats, Ints, Observations, Questions
from ping_llm.rows.measurement_set import MeasurementSet
from ping_llm.sources import SPLIT_FILE

PROTOCOLS: Final = ("unseen_pair", "seen_pair", "unseen_probe", "disconnected")

RULE: Final = (
    "The cut time is the time below which the share 1 - later of all measurements lies.",
    "A source whose hash falls into unseen_probes is an unseen probe. What it measured is in the history, never in "
    "train; what others measured to it is not used. Questions (unseen_probe) are its measurements from the cut time on "
    "to destinations that occur in train, if it measured anything before.",
    "Of the other nodes, a pair whose hash, the same for both directions, falls into held_out_pairs is held out: it is "
    "in neither train nor history. Questions (unseen_pair) are its measurements from the cut time on, if both ends "
    "occur in train.",
    "A hash divides the nodes into two halves. Questions (disconnected) are those of unseen_pair whose ends are in "
    "different halves, if train has measurements of both within their own half; whoever answers them is given no "
    "measurement between the halves.",
    "All else is train before the cut time, and history before and after. Questions (seen_pair) are the measurements "
    "from the cut time on whose pair, in the same direction, occurs in train.",
    "Where no measurement has a time there is no cut and no seen_pair: all measurements of held-out pairs are "
    "questions, and an unseen probe's pairs are divided by their hash, 80 % history and 20 % questions.",
)

KEPT_PAIRS: Final = 0.8
"""Share of an unseen probe's pairs that is history where there are no times."""

# Keep the kinds of draw apart. They are part of the rule: other numbers would be another split.
_PROBE_SALT: Final = np.uint64(0x9B0B_E5A1_7000_0001)
_PAIR_SALT: Final = np.uint64(0x9A12_5A17_0000_0002)
_KEPT_SALT: Final = np.uint64(0x6E97_5A17_0000_0003)
_HALF_SALT: Final = np.uint64(0x4A1F_5A17_0000_0004)

FORMAT_VERSION: Final = 2
TRAIN_FILE: Final = "train/measurements.parquet"
_ROWS_PER_GROUP: Final = 1 << 17

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    held_out_pairs: float = 0.1
    unseen_probes: float = 0.05
    later: float = 0.1
    seed: int = 0
    """Another seed holds out other pairs and probes."""

    def __post_init__(self) -> None:
        for name in ("held_out_pairs", "unseen_probes", "later"):
            if not 0 <= getattr(self, name) < 1:
                raise PingLlmError(f"{name} must be a share from 0 to below 1, not {getattr(self, name)}")
        if not self.later:
            raise PingLlmError("later must be above 0: questions are asked about what was measured last")
        if not 0 <= self.seed < 2**64:
            raise PingLlmError(f"the seed must be a whole number from 0 to 2^64 - 1, not {self.seed}")


@dataclass(frozen=True, kw_only=True)
class Split:
    nodes: tuple[str, ...]
    cut_time_s: float
    """NaN for measurements without times."""
    train: Observations
    history: Observations
    questions: dict[str, Observations]
    """By protocol; one without any question is left out. Failures are included."""
    unused: int
    """Measurements that are neither in the history nor asked about."""

    @property
    def timeless(self) -> bool:
        return bool(np.isnan(self.cut_time_s))

    def visible(self, part: Observations, protocol: str) -> Observations:
        """What of a part may be known for questions of this protocol."""
        return part.take(~_across(part, self._half)) if protocol == "disconnected" else part

    @cached_property
    def _half(self) -> Bools:
        return _halves(_node_hashes(self.nodes))


def split(measured: MeasurementSet, settings: SplitSettings | None = None) -> Split:
    settings = settings or SplitSettings()
    known = _in_time_order(measured)
    cut = _cut_time(known.time_s, settings.later)
    timeless = bool(np.isnan(cut))
    nodes = measured.addresses_of()
    hashes = _node_hashes(nodes)

    # Of each pair that was measured, with its direction:
    pairs, pair = _distinct(known.pair)
    source, destination = pairs >> 32, pairs & 0xFFFFFFFF
    low, high = np.minimum(hashes[source], hashes[destination]), np.maximum(hashes[source], hashes[destination])
    pair_hash = mix64(low ^ mix64(high + GOLDEN))  # the same for both directions
    unseen = _marked(source, len(hashes)) & (_draws(hashes, _PROBE_SALT, settings.seed) < settings.unseen_probes)
    from_probe, with_probe = unseen[source], unseen[source] | unseen[destination]
    held_out = ~with_probe & (_draws(pair_hash, _PAIR_SALT, settings.seed) < settings.held_out_pairs)
    open_pair = ~with_probe & ~held_out
    across = _across(known, _halves(hashes))

    # Of each measurement:
    if timeless:
        set_aside = _draws(pair_hash, _KEPT_SALT, settings.seed) >= KEPT_PAIRS
        earlier = (open_pair | (from_probe & ~set_aside))[pair]
    else:
        earlier = known.time_s < cut
    in_train = open_pair[pair] & earlier
    trained_pair = _marked(pair[in_train], len(pairs))
    trained = _marked(source[trained_pair], len(hashes)) | _marked(destination[trained_pair], len(hashes))
    in_half = in_train & ~across
    in_own_half = _marked(np.append(known.source[in_half], known.destination[in_half]), len(hashes))
    heard = _marked(known.source[from_probe[pair] & earlier], len(hashes))
    in_history = (open_pair | from_probe)[pair] & (earlier | (not timeless))
    asked = {
        "unseen_pair": (held_out & trained[source] & trained[destination])[pair] & ~earlier,
        "seen_pair": trained_pair[pair] & ~earlier,
        "unseen_probe": (from_probe & heard[source] & trained[destination])[pair] & ~earlier,
    }
    asked["disconnected"] = asked["unseen_pair"] & across & in_own_half[known.source] & in_own_half[known.destination]
    questions = {name: known.take(mask) for name, mask in asked.items() if mask.any()}
    if not in_train.any() or not questions:
        lacking = "question to ask" if in_train.any() else "measurement to learn from"
        raise PingLlmError(
            f"too little to split: of {len(known):,} measurements of {len(pairs):,} pairs there is no {lacking}; "
            "give more measurements, or other shares"
        )
    return Split(
        nodes=nodes,
        cut_time_s=cut,
        train=known.take(in_train),
        history=known.take(in_history),
        # Equal times are ordered by what was measured, so that a sample of the questions is always the same one.
        questions={
            name: part.take(np.lexsort((part.rtt_ms, part.destination, part.source, part.time_s)))
            for name, part in questions.items()
        },
        unused=int(np.count_nonzero(~np.logical_or.reduce([in_history, *asked.values()]))),
    )


def _in_time_order(measured: MeasurementSet) -> Observations:
    known, nodes = measured.observations, len(measured.nodes)
    if not len(known):
        raise PingLlmError("there are no measurements to split")
    ends = np.array([known.source.min(), known.destination.min(), known.source.max(), known.destination.max()])
    if ends.min() < 0 or ends.max() >= nodes:
        raise PingLlmError(f"measurements between nodes {ends.min()} to {ends.max()}, but {nodes} nodes have addresses")
    without_time = int(np.count_nonzero(np.isnan(known.time_s)))
    if 0 < without_time < len(known):
        raise PingLlmError(f"{without_time:,} of {len(known):,} measurements have no time; all must have one, or none")
    if without_time or (known.time_s[1:] >= known.time_s[:-1]).all():
        return known
    return known.take(np.argsort(known.time_s, kind="stable"))


def _cut_time(time_s: Floats, later: float) -> float:
    """The time (of sorted times) below which 1 - `later` of the measurements lie; at least those of the first time."""
    if np.isnan(time_s[0]):
        return float("nan")
    at = max(int((1 - later) * len(time_s)), int(np.searchsorted(time_s, time_s[0], side="right")))
    if at == len(time_s):
        raise PingLlmError(
            "all measurements were made at the same time, so none can be asked about after the others; "
            "if the times mean nothing, leave them out"
        )
    return float(time_s[at])


def _node_hashes(nodes: tuple[str, ...]) -> Hashes:
    families, packed, _ = parse_nodes(nodes)
    if (families == UNPARSABLE).any():
        raise PingLlmError(f"node {nodes[int(np.argmin(families))]!r} is neither an address nor a name")
    hashes = source_hash(np.where(families == NAMED, np.uint8(6), families), packed)
    if len(np.unique(hashes)) < len(hashes):
        raise PingLlmError("two nodes have the same address, so one could be learned from and the other asked about")
    return hashes


def _draws(hashes: Hashes, salt: np.uint64, seed: int) -> Floats:
    """For each hash a number that looks uniform in [0, 1)."""
    return uniform(mix64(hashes ^ salt ^ _key(seed)))


def _key(seed: int) -> Hashes:
    return mix64(np.array([seed], dtype=np.uint64) + GOLDEN)


def _halves(hashes: Hashes) -> Bools:
    return mix64(hashes ^ _HALF_SALT) >> np.uint64(63) > 0


def _across(part: Observations, half: Bools) -> Bools:
    return np.asarray(half[part.source] != half[part.destination])


def _distinct(values: Ints) -> tuple[Ints, Ints]:
    """The distinct values, and for each value which of them it is."""
    encoded = pa.array(values).dictionary_encode()
    return encoded.dictionary.to_numpy(), encoded.indices.to_numpy()


def _marked(members: Ints, size: int) -> Bools:
    marks = np.zeros(size, dtype=bool)
    marks[members] = True
    return marks


def sampled(questions: Observations, count: int, seed: int = 0) -> Observations:
    """A random part of the questions, in their order: the same every time, and a larger part holds a smaller one."""
    if count >= len(questions):
        return questions
    rank = mix64(np.arange(len(questions), dtype=np.uint64) ^ _key(seed))
    return questions.take(np.sort(np.argsort(rank)[:count]))


def trained_on(train_rows: MeasurementSet, split: Split) -> dict[str, int]:
    """How many questions of each protocol a model must not be asked if it was trained on these measurements.

    Those of an unseen pair (disconnected ones are, too) that is in them, in either direction; of an unseen probe that
    is, as source or destination; of a seen pair that is, in either direction, with a measurement at or after the cut
    time.
    """
    number = pc.index_in(pa.array(train_rows.nodes, pa.string()), value_set=pa.array(split.nodes, pa.string()))
    ids = number.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    rows = train_rows.observations
    seen = Questions(source=ids[rows.source], destination=ids[rows.destination], time_s=rows.time_s)
    late = seen.take(~(seen.time_s < split.cut_time_s))  # one without a time may be late
    compromised = {
        "unseen_pair": lambda questions: np.isin(questions.unordered_pair, seen.unordered_pair),
        "seen_pair": lambda questions: np.isin(questions.unordered_pair, late.unordered_pair),
        "unseen_probe": lambda questions: np.isin(questions.source, [seen.source, seen.destination]),
    }
    compromised["disconnected"] = compromised["unseen_pair"]
    return {name: int(compromised[name](questions).sum()) for name, questions in split.questions.items()}


# A split as a folder.


def write_split(
    measured: MeasurementSet, folder: Path, settings: SplitSettings | None = None, *, overwrite: bool = False
) -> Split:
    """Split the measurements and write the folder, whole or not at all."""
    settings = settings or SplitSettings()
    if folder.exists() and not overwrite:
        raise PingLlmError(f"{folder} already exists: choose another folder, or overwrite it")
    if folder.exists() and not (folder / SPLIT_FILE).exists():
        raise PingLlmError(f"{folder} holds something else than a split and is not overwritten; choose another folder")
    result = split(measured, settings)
    cut = None if result.timeless else result.cut_time_s
    description: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "rule": RULE,
        "settings": asdict(settings),
        "cut_time_s": cut,
        "cut_time": None if cut is None else datetime.fromtimestamp(cut, UTC).isoformat(),
        "train": len(result.train),
        "history": len(result.history),
        "questions": {name: len(part) for name, part in result.questions.items()},
        "unused": result.unused,
    }
    families, _, _ = parse_nodes(result.nodes)
    ip_version = pa.array(np.where(families == NAMED, 0, families).astype(np.int8))
    addresses = pa.array(result.nodes, pa.string())
    parts = {TRAIN_FILE: result.train, "history.parquet": result.history}
    parts |= {f"questions-{name}.parquet": questions for name, questions in result.questions.items()}
    try:
        with atomic_folder(folder) as unfinished:
            pq.write_table(pa.table({"address": addresses}), unfinished / "nodes.parquet", compression="zstd")
            for name, part in parts.items():
                (unfinished / name).parent.mkdir(exist_ok=True)
                _write(unfinished / name, part, addresses, ip_version)
            description["files"] = {name: file_sha256(unfinished / name) for name in ("nodes.parquet", *parts)}
            (unfinished / SPLIT_FILE).write_text(json.dumps(sealed(description), indent=2) + "\n")
    except OSError as error:
        raise PingLlmError(f"cannot write {folder}: {error.strerror or error}") from error
    return result


def _write(path: Path, part: Observations, addresses: Any, ip_version: Any) -> None:
    time = _time_column(part)
    rtt = pa.array(part.rtt_ms if part.rtt_ms.dtype == np.float32 else part.rtt_ms.astype(np.float64), from_pandas=True)
    columns = [time, addresses.take(part.source), addresses.take(part.destination), ip_version.take(part.source), rtt]
    schema = SCHEMA.set(0, pa.field("event_time", time.type, nullable=time.null_count > 0))
    table = pa.table(columns, schema=schema.set(4, pa.field("rtt", rtt.type)))
    encoding: dict[str, Any] = {"compression": "zstd", "use_dictionary": ["src_addr", "dst_addr"]}
    pq.write_table(table, path, row_group_size=_ROWS_PER_GROUP, **encoding)


def _time_column(part: Observations) -> Any:
    """Microseconds, as the schema has them; seconds, which readers take too, if times are finer or out of range."""
    with np.errstate(invalid="ignore"):
        time_us = np.rint(part.time_s * 1e6)
        lossless = np.isnan(part.time_s) | ((time_us / 1e6 == part.time_s) & (np.abs(time_us) < 2**62))
    if not lossless.all():
        return pa.array(part.time_s)
    return pa.array(time_us, from_pandas=True).cast(pa.int64()).cast(SCHEMA.field("event_time").type)


def read_split(folder: Path) -> Split:
    """The split that `write_split` wrote, exactly."""
    try:
        description = json.loads((folder / SPLIT_FILE).read_text())
        if description["format"] != FORMAT_VERSION:
            raise PingLlmError(
                f"{folder} has format {description['format']}; this version of ping-llm reads {FORMAT_VERSION}"
            )
        unsealed(description)
        for name, checksum in description["files"].items():
            if file_sha256(folder / relative_name(name, folder / SPLIT_FILE)) != checksum:
                raise ValueError(f"{name} is not what was written")
        nodes = pq.read_table(folder / "nodes.parquet")["address"].combine_chunks()
        _node_hashes(tuple(nodes.to_pylist()))  # all are addresses, each once
        asked = [name for name in PROTOCOLS if name in description["questions"]]
        cut = description["cut_time_s"]
        if cut is not None and not np.isfinite(cut):
            raise ValueError(f"the cut time is {cut}")
        return Split(
            nodes=tuple(nodes.to_pylist()),
            cut_time_s=float("nan") if cut is None else cut,
            train=_read(folder / TRAIN_FILE, nodes),
            history=_read(folder / "history.parquet", nodes),
            questions={name: _read(folder / f"questions-{name}.parquet", nodes) for name in asked},
            unused=description["unused"],
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError, pa.ArrowException) as error:
        raise PingLlmError(f"{folder} is not a split, or is damaged: {' '.join(str(error).split())[:200]}") from error


def _read(path: Path, nodes: Any) -> Observations:
    table = pq.read_table(path)
    time = table["event_time"]
    in_us = pa.types.is_timestamp(time.type)
    source, destination = (pc.index_in(table[name], value_set=nodes) for name in ("src_addr", "dst_addr"))
    found = Observations(
        source=source.to_numpy().astype(np.int64),
        destination=destination.to_numpy().astype(np.int64),
        time_s=time.cast(pa.int64()).to_numpy() / 1e6 if in_us else time.to_numpy(),
        rtt_ms=table["rtt"].to_numpy(),
    )
    if source.null_count or destination.null_count or not pa.types.is_floating(table["rtt"].type):
        raise ValueError(f"{path.name} has addresses that nodes.parquet has not, or RTTs that are no numbers")
    if np.isinf(found.time_s).any() or ((found.rtt_ms < 0) | (found.rtt_ms > MAX_RTT_MS)).any():
        raise ValueError(f"{path.name} has times or RTTs that cannot be")
    return found
