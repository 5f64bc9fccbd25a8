"""Real measurements, all predictors: `python bench/real_data.py FOLDER [--model completer] [--seeds 3] …`.

FOLDER holds `planetlab-rtt-frame1.npz` and `ripe-atlas-ping-menog.jsonl.bz2`. A part of the pairs is known, the others
are asked about (`real_data_sets.py`). Classical methods are fitted to the known part and asked about
everything else; models get the known part as context and are asked a random part of the same questions. And single
pings of pairs that were measured before, each asked from what lies before it.

`--write-known FOLDER` writes the known parts as CSV files, to fine-tune on (two probes behind one address are one node
there): a tuned model is then to be asked about the set and seed of its file only (`--sets`, `--first-seed`).
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ping_llm import Predictor
from ping_llm.baselines import standard_baselines
from ping_llm.baselines.interface import Baseline
from ping_llm.core.rtt import Observations
from ping_llm.evaluate.scores import Scores, scores
from real_data_sets import (
    MENOG_KNOWN,
    PLANETLAB_KNOWN,
    Pings,
    answered_later,
    menog_pairs,
    menog_pings,
    parted,
    planetlab_pairs,
)


@dataclass(frozen=True, kw_only=True)
class Set:
    name: str
    pairs: Observations
    known: float
    nodes: tuple[str, ...]
    symmetric: bool

    def baselines(self, seed: int) -> list[Baseline]:
        nodes = None if self.symmetric else self.nodes
        every = standard_baselines(nodes, symmetric=self.symmetric, seed=seed)
        return [baseline for baseline in every if not baseline.causal and "pair" not in baseline.name]


def sets(folder: Path, pings: Pings) -> Iterator[Set]:
    planetlab = planetlab_pairs(folder)
    nodes = tuple(f"{0x2000 + node:x}::1" for node in range(int(planetlab.destination.max()) + 1))  # no two alike
    for known in PLANETLAB_KNOWN:
        yield Set(name=f"planetlab-{100 * known:g}", pairs=planetlab, known=known, nodes=nodes, symmetric=True)
    pairs = menog_pairs(pings.fastest)
    for known in MENOG_KNOWN:
        yield Set(name=f"menog-{100 * known:g}", pairs=pairs, known=known, nodes=pings.nodes, symmetric=False)


_NAMES = (
    *(f"planetlab-{100 * known:g}" for known in PLANETLAB_KNOWN),
    *(f"menog-{100 * known:g}" for known in MENOG_KNOWN),
    "later",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", action="append", help="a run, an exported folder, or completer (several: repeat)")
    parser.add_argument("--sets", default="", help="only these, of planetlab-5, planetlab (all three), menog, later …")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--questions", type=int, default=2000, help="to ask models, of each set and seed")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--votes", type=int, default=1)
    parser.add_argument("--together", type=int, default=1, help="questions of one source that share a context")
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument("--no-models", action="store_true")
    parser.add_argument("--write-known", type=Path, help="write what is known as CSV files, and do nothing else")
    options = parser.parse_args()
    wanted = options.sets.split(",") if options.sets else ["planetlab", "menog", "later"]
    if unknown := [one for one in wanted if not any(_is_among(name, [one]) for name in _NAMES)]:
        parser.error(f"--sets {','.join(unknown)}: there are {', '.join(_NAMES)}; planetlab, menog")
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    pings = menog_pings(options.folder)
    chosen = [one for one in sets(options.folder, pings) if _is_among(one.name, wanted)]
    if options.write_known:
        for one in chosen:
            for seed in seeds:
                _write_known(one, seed, options.write_known)
        return
    settings = {
        "context": options.context, "votes": options.votes, "questions_per_context": options.together,
        "contexts_per_call": 64,
    }  # fmt: skip
    names = [] if options.no_models else options.model or ["completer"]
    models = {name: Predictor.from_pretrained(name, **settings) for name in names}
    for one in chosen:
        _show(one.name)
        for place in range(0 if options.no_baselines else len(one.baselines(0))):
            name = one.baselines(0)[place].name
            _show(name, [_of_baseline(one, one.baselines(seed)[place], seed) for seed in seeds])
        for name, model in models.items():
            _show(name, [_of_model(one, model, seed, options.questions) for seed in seeds])
    if "later" in wanted:
        _later(pings, models, options.questions, seeds, baselines=not options.no_baselines)


def _is_among(name: str, wanted: list[str]) -> bool:
    return any(name == one or name.startswith(f"{one}-") for one in wanted)


def _of_baseline(one: Set, baseline: Baseline, seed: int) -> Scores:
    known, asked = parted(one.pairs, one.known, seed)
    return scores(baseline.fit(_at_once(known))(asked.questions), asked)


def _of_model(one: Set, model: Predictor, seed: int, questions: int) -> Scores:
    known, asked = parted(one.pairs, one.known, seed)
    asked = asked.take(slice(0, questions))
    return scores(model.predict(known, asked.questions, one.nodes), asked)


def _later(pings: Pings, models: dict[str, Predictor], questions: int, seeds: range, *, baselines: bool) -> None:
    """Everybody is asked the same questions here: one spike more or less decides the mean."""
    _show("later (menog, single pings)")
    tests = [answered_later(pings, questions, seed) for seed in seeds]
    for baseline in (b for b in standard_baselines() if baselines and b.causal):
        fitted = baseline.fit(pings.first)
        _show(baseline.name, [scores(fitted(test.questions), test) for test in tests])
    for name, model in models.items():
        _show(name, [scores(model.predict(pings.first, test.questions, pings.nodes), test) for test in tests])


def _at_once(known: Observations) -> Observations:
    return Observations(**{**vars(known), "time_s": np.zeros(len(known))})


def _show(name: str, of_seeds: list[Scores] | None = None) -> None:
    if of_seeds is None:
        sys.stdout.write(f"\n{name:32s}{'median RE':>10s}{'p90 RE':>9s}{'MAE ms':>9s}{'in 90 %':>9s}{'NLL':>8s}\n")
    else:
        mean = {key: float(np.mean([found[key] for found in of_seeds])) for key in of_seeds[0]}
        interval = f"{mean['coverage90']:9.1%}{mean['nll_bits']:8.3f}" if "nll_bits" in mean else ""
        sys.stdout.write(f"{name:32s}{mean['median_re']:10.4f}{mean['p90_re']:9.3f}{mean['mae']:9.2f}{interval}\n")
    sys.stdout.flush()


def _write_known(one: Set, seed: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    known, _ = parted(one.pairs, one.known, seed)
    path = folder / f"{one.name}-{seed}.csv"
    lines = (
        f"{one.nodes[source]},{one.nodes[destination]},{rtt}\n"
        for source, destination, rtt in zip(known.source, known.destination, known.rtt_ms, strict=True)
    )
    path.write_text("src_addr,dst_addr,rtt\n" + "".join(lines))
    sys.stdout.write(f"{path}: {len(known):,} measurements\n")


if __name__ == "__main__":
    main()
