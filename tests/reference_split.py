"""The rule of the split a second time: one measurement after the other, in whole numbers."""

from collections import Counter
from ipaddress import ip_address

from ping_llm.evaluate.split import SplitSettings
from split_fixtures import Measurement

MASK = 2**64 - 1


def mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def node_hash(node: str) -> int:
    address = ip_address(node)
    packed = address.packed.ljust(16, b"\0")
    low = (int.from_bytes(packed[8:]) + address.version * 0x9E3779B97F4A7C15) & MASK
    return mix(int.from_bytes(packed[:8]) ^ mix(low))


def pair_hash(one: str, other: str) -> int:
    low, high = sorted((node_hash(one), node_hash(other)))
    return mix(low ^ mix((high + 0x9E3779B97F4A7C15) & MASK))


def draw(value: int, salt: int, seed: int) -> float:
    return (mix(value ^ salt ^ mix((seed + 0x9E3779B97F4A7C15) & MASK)) >> 11) / 2**53


def expected_split(measurements: list[Measurement], settings: SplitSettings) -> dict[str, Counter[Measurement]] | None:
    """What goes where; None where there is too little to split."""
    timeless = all(t is None for _, _, t, _ in measurements)
    times = sorted(t for _, _, t, _ in measurements if t is not None)
    cut = 0.0
    if not timeless:
        if times[0] == times[-1]:
            return None
        cut = times[int((1 - settings.later) * len(times))]
        if cut == times[0]:
            cut = min(t for t in times if t > times[0])

    probes = {
        s for s, *_ in measurements if draw(node_hash(s), 0x9B0BE5A170000001, settings.seed) < settings.unseen_probes
    }
    places: list[str] = []
    for source, destination, at, _ in measurements:
        hashed = pair_hash(source, destination)
        held_out = draw(hashed, 0x9A125A1700000002, settings.seed) < settings.held_out_pairs
        kept = draw(hashed, 0x6E975A1700000003, settings.seed) < 0.8
        if source in probes:
            early = kept if timeless else at is not None and at < cut
            places.append("probe early" if early else "probe late")
        elif destination in probes:
            places.append("to a probe")
        elif held_out:
            places.append("pair late" if timeless or (at is not None and at >= cut) else "pair early")
        else:
            places.append("open early" if timeless or (at is not None and at < cut) else "open late")

    def placed(*names: str) -> list[Measurement]:
        return [m for m, place in zip(measurements, places, strict=True) if place in names]

    train = placed("open early")
    nodes = {node for s, d, *_ in train for node in (s, d)}
    pairs = {(s, d) for s, d, *_ in train}
    half = {node: mix(node_hash(node) ^ 0x4A1F5A1700000004) >> 63 for s, d, *_ in measurements for node in (s, d)}
    in_own_half = {node for s, d, *_ in train if half[s] == half[d] for node in (s, d)}
    heard = {s for s, *_ in placed("probe early")}
    questions = {
        "unseen_pair": [m for m in placed("pair late") if m[0] in nodes and m[1] in nodes],
        "seen_pair": [m for m in placed("open late") if (m[0], m[1]) in pairs],
        "unseen_probe": [m for m in placed("probe late") if m[0] in heard and m[1] in nodes],
    }
    questions["disconnected"] = [
        m for m in questions["unseen_pair"] if half[m[0]] != half[m[1]] and in_own_half.issuperset(m[:2])
    ]
    if not train or not any(questions.values()):
        return None
    history = placed("open early", "open late", "probe early", *([] if timeless else ["probe late"]))
    used = Counter(history) | Counter(questions["unseen_pair"]) | Counter(questions["unseen_probe"])
    return {name: Counter(part) for name, part in questions.items() if part} | {
        "train": Counter(train),
        "history": Counter(history),
        "unused": Counter(measurements) - used,
    }
