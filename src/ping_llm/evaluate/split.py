"""Which measurements may be learned from and which are asked about: fixed, documented, without leaks.

    cut time       questions are asked about what was measured at or after it; nothing as late is learned from
    unseen probe   a source of which nothing is learned: it is known only by what it measured before the question
    held-out pair  two nodes whose measurements of each other, in either direction, nobody gets to see
    train          what weights and baselines may be fitted to
    history        what a context may hold, as far as it lies strictly before the question
    question       a measurement to be predicted, together with its answer

Where a measurement goes follows from its addresses, by a hash that is the same for every data set, and from the cut
time. So the split depends on nothing else: not on the order of the measurements, not on how they were cut into files.
`RULE` has it in words. `trained_on` checks a model's training data against a split.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import UNPARSABLE, parse_addresses, source_hash
from ping_llm.core.randomness import GOLDEN, mix64, uniform
from ping_llm.core.rtt import Bools, Floats, Ints, Observations, Questions
from ping_llm.rows.measurement_set import MeasurementSet

PROTOCOLS: Final = ("unseen_pair", "seen_pair", "unseen_probe")

RULE: Final = (
    "The cut time is the time below which the share 1 - later of all measurements lies.",
    "A source whose hash falls into unseen_probes is an unseen probe. What it measured is in the history, never in "
    "train; what others measured to it is not used. Questions (unseen_probe) are its measurements from the cut time on "
    "to destinations that occur in train, if it measured anything before.",
    "Of the other nodes, a pair whose hash, the same for both directions, falls into held_out_pairs is held out: it is "
    "in neither train nor history. Questions (unseen_pair) are its measurements from the cut time on, if both ends "
    "occur in train.",
    "All else is train before the cut time, and history before and after. Questions (seen_pair) are the measurements "
    "from the cut time on whose pair, in the same direction, occurs in train.",
    "Where no measurement has a time there is no cut and no seen_pair: all measurements of held-out pairs are "
    "questions, and an unseen probe's pairs are divided by their hash, 80 % history and 20 % questions.",
)

KEPT_PAIRS: Final = 0.8
"""Share of an unseen probe's pairs that is history where there are no times."""

# Keep the three kinds of draw apart. They are part of the rule: other numbers would be another split.
_PROBE_SALT: Final = np.uint64(0x9B0B_E5A1_7000_0001)
_PAIR_SALT: Final = np.uint64(0x9A12_5A17_0000_0002)
_KEPT_SALT: Final = np.uint64(0x6E97_5A17_0000_0003)

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


def split(measured: MeasurementSet, settings: SplitSettings | None = None) -> Split:
    settings = settings or SplitSettings()
    known = _in_time_order(measured)
    cut = _cut_time(known.time_s, settings.later)
    timeless = bool(np.isnan(cut))
    hashes = _node_hashes(measured.nodes)

    # Of each pair that was measured, with its direction:
    pairs, pair = _distinct(known.pair)
    source, destination = pairs >> 32, pairs & 0xFFFFFFFF
    pair_hash = _pair_hashes(hashes[source], hashes[destination])
    unseen = _marked(source, len(hashes)) & (_draws(hashes, _PROBE_SALT, settings.seed) < settings.unseen_probes)
    from_probe, with_probe = unseen[source], unseen[source] | unseen[destination]
    held_out = ~with_probe & (_draws(pair_hash, _PAIR_SALT, settings.seed) < settings.held_out_pairs)
    open_pair = ~with_probe & ~held_out

    # Of each measurement:
    if timeless:
        set_aside = _draws(pair_hash, _KEPT_SALT, settings.seed) >= KEPT_PAIRS
        earlier = (open_pair | (from_probe & ~set_aside))[pair]
    else:
        earlier = known.time_s < cut
    in_train = open_pair[pair] & earlier
    trained_pair = _marked(pair[in_train], len(pairs))
    trained = _marked(source[trained_pair], len(hashes)) | _marked(destination[trained_pair], len(hashes))
    heard = _marked(known.source[from_probe[pair] & earlier], len(hashes))
    in_history = (open_pair | from_probe)[pair] & (earlier | (not timeless))
    asked = {
        "unseen_pair": (held_out & trained[source] & trained[destination])[pair] & ~earlier,
        "seen_pair": trained_pair[pair] & ~earlier,
        "unseen_probe": (from_probe & heard[source] & trained[destination])[pair] & ~earlier,
    }
    if not in_train.any() or not any(mask.any() for mask in asked.values()):
        lacking = "question to ask" if in_train.any() else "measurement to learn from"
        raise PingLlmError(
            f"too little to split: of {len(known):,} measurements of {len(pairs):,} pairs there is no {lacking}; "
            "give more measurements, or other shares"
        )
    return Split(
        nodes=measured.nodes,
        cut_time_s=cut,
        train=known.take(in_train),
        history=known.take(in_history),
        questions={name: _in_fixed_order(known.take(asked[name])) for name in PROTOCOLS if asked[name].any()},
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


def _in_fixed_order(questions: Observations) -> Observations:
    """Ordered by time, and among equal times by what they are: so that a sample of them is always the same one."""
    columns = (questions.rtt_ms, questions.destination, questions.source, questions.time_s)
    return questions.take(np.lexsort(columns))


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
    families, packed = parse_addresses(nodes)
    if (families == UNPARSABLE).any():
        raise PingLlmError(f"node {nodes[int(np.argmin(families))]!r} is not an address")
    hashes = source_hash(families, packed)
    if len(np.unique(hashes)) < len(hashes):
        raise PingLlmError("two nodes have the same address, so one could be learned from and the other asked about")
    return hashes


def _pair_hashes(one: Hashes, other: Hashes) -> Hashes:
    """A hash of two nodes, whichever comes first."""
    return mix64(np.minimum(one, other) ^ mix64(np.maximum(one, other) + GOLDEN))


def _draws(hashes: Hashes, salt: np.uint64, seed: int) -> Floats:
    """For each hash a number that looks uniform in [0, 1)."""
    return uniform(mix64(hashes ^ salt ^ _key(seed)))


def _key(seed: int) -> Hashes:
    return mix64(np.array([seed], dtype=np.uint64) + GOLDEN)


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

    Those of an unseen pair that is in them, in either direction; of an unseen probe that is, as source or destination;
    of a seen pair that is, in either direction, with a measurement at or after the cut time.
    """
    number = pc.index_in(pa.array(train_rows.nodes, pa.string()), value_set=pa.array(split.nodes, pa.string()))
    ids = number.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    rows = train_rows.observations
    seen = Questions(source=ids[rows.source], destination=ids[rows.destination], time_s=rows.time_s)
    late = seen.take(~(seen.time_s < split.cut_time_s))  # one without a time may be late
    ends = np.concatenate([seen.source, seen.destination])
    compromised = {
        "unseen_pair": lambda questions: _among(questions.unordered_pair, seen.unordered_pair),
        "seen_pair": lambda questions: _among(questions.unordered_pair, late.unordered_pair),
        "unseen_probe": lambda questions: _among(questions.source, ends),
    }
    return {name: int(compromised[name](questions).sum()) for name, questions in split.questions.items()}


def _among(values: Ints, known: Ints) -> Bools:
    if len(known) > len(values):  # a small table is quicker to search than a large one is to build
        known = known[_among(known, values)]
    return pc.is_in(pa.array(values), value_set=pa.array(known)).to_numpy(zero_copy_only=False)
