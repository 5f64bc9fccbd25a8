"""Real measurements, all predictors, one table: `python bench/real_data.py FOLDER [--model completer] …`.

FOLDER holds the files of `real_data_sets.py`, which says what they are, what is known of them, and which sets had a
part in the design. Every predictor gets the same known part and the same queries, at most so many of each set and seed,
and answers with distributions: those of classical methods are the errors that they make on a held-out part of what is
known. Models answer with the default settings of the product, unless `--setting` says otherwise.

Intervals (95 %) and leads come from resampling the queries, a pair with all its queries at a time; scores are over the
queries of all seeds. With `--cache`, answers of classical methods are kept (by set, seed, number of queries, name and
settings), so that another run asks the models only; empty the folder when the code of a method has changed.

`--write-known FOLDER` writes the known parts as CSV files, to fine-tune on (two probes behind one address are one node
there): a tuned model is then to be asked about the set and seed of its file only (`--sets`, `--first-seed`).
"""

import argparse
import fnmatch
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from ping_llm import Predictor
from ping_llm.baselines import standard_baselines
from ping_llm.baselines.forecasts import (
    BUCKETS,
    Asked,
    cumulative_by_bucket,
    forecast,
    forecaster,
)
from ping_llm.baselines.interface import Baseline
from ping_llm.core.console import err, out
from ping_llm.core.files import atomic_file
from ping_llm.core.rtt import Bools, Floats, Observations, RttDistribution
from ping_llm.evaluate.scores import (
    SCORE_COLUMNS,
    Comparison,
    Losses,
    ScoredAnswers,
    comparison_table,
    legend,
    scores_of,
)
from real_data_opponents import blend_weights, slower_opponents
from real_data_sets import DATA_SETS, DataSet, PairTask

NAMES = {name: (data_set, share) for data_set in DATA_SETS for name, share in data_set.names.items()}
HELD_OUT = 0.15
ROLES = (
    "Design and training settings were chosen on simulated data, PlanetLab and MENOG; no weight was fitted to either. "
    "WonderNetwork, Filecoin and AWS are for testing only: nothing was chosen by looking at them."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", action="append", help="a run, an exported folder, or completer (several: repeat)")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=NUMBER", help="of models: context=1024")
    parser.add_argument("--sets", default="*", help=f"names or patterns, of {', '.join(NAMES)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--queries", type=int, default=2000, help="of each set and seed, at most")
    parser.add_argument("--compare", type=int, help="on the first of these queries only: models are slow on a CPU")
    parser.add_argument("--baselines", default="*", help="names or patterns; '' for none")
    parser.add_argument("--no-models", action="store_true")
    parser.add_argument("--cache", type=Path, help="folder for the answers of classical methods")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    parser.add_argument("--write-known", type=Path, help="write what is known as CSV files, and do nothing else")
    options = parser.parse_args()
    patterns = [part.strip() for part in options.sets.split(",")]
    if wrong := [pattern for pattern in patterns if not _chosen(NAMES, [pattern])]:
        parser.error(f"--sets {','.join(wrong)}: there are {', '.join(NAMES)}, and patterns such as 'planetlab*'")
    chosen = _chosen(NAMES, patterns)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    if options.write_known:
        for name in chosen:
            _write_known(name, seeds, options.folder, options.write_known)
        return

    settings = {name: int(value) for name, _, value in (setting.partition("=") for setting in options.setting)}
    names = [] if options.no_models else options.model or ["completer"]
    models = {name: Predictor.from_pretrained(name, **settings) for name in names}
    found = {}
    for data_set in DATA_SETS:
        if not (shares := {name: share for name, share in data_set.names.items() if name in chosen}):
            continue
        data = data_set.read(options.folder)
        for name, share in shares.items():
            tasks = {seed: data.task(share, seed, options.queries) for seed in seeds}
            compared = {seed: data.task(share, seed, options.compare or options.queries) for seed in seeds}
            answers = _classical(name, tasks, options) | _models(name, compared, models)
            group = np.concatenate([task.queries.unordered_pair for task in compared.values()])
            found[name] = Comparison.of(answers, group)
            out.print(comparison_table(_title(data_set, share, len(group)), found[name], names), "")
    out.print(legend())
    out.print("\n" + overview(found, names), markup=False, soft_wrap=True)
    if options.json:
        how = {"seeds": list(seeds), "queries": options.queries, "settings": settings, "models": names}
        figures = {
            name: {
                "role": NAMES[name][0].role,
                "scores": {who: of.numbers(who) for who in of.scores},
                "intervals": {who: of.ends(who) for who in of.scores},
                "leads": of.leaders,
            }
            for name, of in found.items()
        }
        with atomic_file(options.json) as path:
            path.write_text(json.dumps(how | {"sets": figures}, indent=1) + "\n")


def _chosen(names: Sequence[str] | dict[str, Any], patterns: Sequence[str]) -> list[str]:
    """A name stands for itself and for all that continue it: planetlab for planetlab-5."""
    return [n for n in names if any(fnmatch.fnmatch(n, p) or n.startswith(f"{p}-") for p in patterns)]


def _title(data_set: DataSet, share: float, queries: int) -> str:
    return f"{data_set.title_of(share)} ({queries:,} queries; for {data_set.role})"


def opponents(task: PairTask, seed: int) -> list[Baseline]:
    """Where pairs have a past, those that look back; else those that do not, simplest first."""
    looks_back = bool(np.isfinite(task.queries.time_s).any())
    has_prefixes = not all(node.endswith("::1") for node in task.nodes)
    every = standard_baselines(task.nodes if has_prefixes else None, symmetric=task.symmetric, seed=seed)
    chosen = [one for one in every if one.causal == looks_back and "pair" not in one.name]
    return chosen if looks_back else [*chosen, *slower_opponents(task, seed)]


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What a classical method predicts for the queries, and for a part of what is known that it was not shown."""

    queried: Floats
    held_out: Floats


@dataclass(frozen=True, eq=False)
class Fitting:
    """One set and seed. Everything is fitted twice: to a part of what is known, to see which errors it makes on the
    rest, and to all of it."""

    task: PairTask
    seed: int

    @cached_property
    def known(self) -> Observations:
        return self.task.at_once

    @cached_property
    def held_out(self) -> Observations:
        found = self.known.take(self._is_held_out).answered
        return replace(found, time_s=np.full(len(found), np.nan))  # later than all that is known

    @cached_property
    def learned(self) -> Observations:
        return self.known.take(~self._is_held_out)

    @cached_property
    def _is_held_out(self) -> Bools:
        """Of what is known, all of a random 15 % of the pairs: as unknown as those that are queried."""
        _, pair = np.unique(self.known.unordered_pair, return_inverse=True)
        return (np.random.default_rng(self.seed).random(int(pair.max()) + 1) < HELD_OUT)[pair]

    @cached_property
    def opponents(self) -> list[Baseline]:
        return opponents(self.task, self.seed)

    def losses_looking_back(self, baseline: Baseline) -> Losses:
        predicted = forecaster(baseline, self.task.known, self.seed)
        return losses_of(predicted(self.task.queries.questions), self.task)

    def answered(self, baseline: Baseline) -> dict[str, Floats]:
        """As `Answered` has it."""
        parts = (self.known, self.task.queries), (self.learned, self.held_out)
        queried, held_out = (baseline.fit(known)(asked.questions) for known, asked in parts)
        return {"queried": queried, "held_out": held_out}

    def losses(self, answered: Answered) -> Losses:
        queries = self.task.queries.questions
        errors = self.held_out.log_rtt - np.log(answered.held_out)
        buckets = Asked(self.learned, self.held_out.questions).bucket
        residuals = cumulative_by_bucket(errors, buckets, BUCKETS)
        distribution = forecast(lambda _: answered.queried, Asked(self.known, queries), residuals)
        return losses_of(distribution, self.task)

    def blend(self, answers: Sequence[Answered]) -> Answered:
        """Weighted geometric mean, the weights learned from the held-out part; where both ends are known, as they are
        in nearly all queries. For the errors of the blend, weights come from the other half of it."""
        members, measured = np.log(np.stack([one.held_out for one in answers], axis=1)), self.held_out.log_rtt
        usable = Asked(self.learned, self.held_out.questions).bucket > 0
        half = np.random.default_rng(self.seed).random(len(measured)) < 0.5
        blended = np.empty(len(measured))
        for part in (half, ~half):
            blended[part] = members[part] @ blend_weights(members[~part & usable], measured[~part & usable])
        queried = np.log(np.stack([one.queried for one in answers], axis=1))
        weights = blend_weights(members[usable], measured[usable])
        return Answered(queried=np.exp(queried @ weights), held_out=np.exp(blended))


def _classical(set_name: str, tasks: dict[int, PairTask], options: argparse.Namespace) -> dict[str, Losses]:
    fittings = {seed: Fitting(task, seed) for seed, task in tasks.items()}
    patterns = [pattern.strip() for pattern in options.baselines.split(",")]
    names = [one.name for one in next(iter(fittings.values())).opponents]
    names = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    found, of_seeds = dict[str, Losses](), {name: list[Losses]() for name in names}
    answers = {seed: dict[str, Answered]() for seed in tasks}
    for name in names:
        begin = time.monotonic()
        for seed, fitting in fittings.items():
            baseline = next(one for one in fitting.opponents if one.name == name)
            answer = fitting.losses_looking_back if baseline.causal else fitting.answered
            key = f"{set_name}-{seed}-{options.queries}-{baseline!r}"
            answered = _cached(options.cache, key, partial(answer, baseline))
            if not baseline.causal:
                answers[seed][name] = Answered(**answered)
                answered = fitting.losses(answers[seed][name])
            of_seeds[name].append(answered)
        found[name] = _pooled(set_name, name, of_seeds[name], begin, options.compare)
    members = [name for name in names if name != "global median"]
    if len(members) > 1 and all(answers.values()):
        begin = time.monotonic()
        blends = [
            fitting.losses(fitting.blend([answers[seed][m] for m in members])) for seed, fitting in fittings.items()
        ]
        found["blend"] = _pooled(set_name, "blend", blends, begin, options.compare)
    return found


def _cached(folder: Path | None, key: str, answer: Callable[[], dict[str, Floats]]) -> dict[str, Floats]:
    if folder is None:
        return answer()
    path = folder / f"{key.partition('(')[0]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
    if not path.exists():
        found = answer()
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as unfinished, unfinished.open("wb") as file:
            np.savez(file, allow_pickle=False, **found)
    return dict(np.load(path))


def _models(set_name: str, tasks: dict[int, PairTask], models: dict[str, Predictor]) -> dict[str, Losses]:
    found = {}
    for name, model in models.items():
        begin = time.monotonic()
        answers = (model.predict(task.known, task.queries.questions, task.nodes) for task in tasks.values())
        of_seeds = [losses_of(answer, task) for answer, task in zip(answers, tasks.values(), strict=True)]
        found[name] = _pooled(set_name, name, of_seeds, begin, None)
    return found


def losses_of(predicted: RttDistribution, task: PairTask) -> Losses:
    """Failures are those of single results, all of which count alike; without any there is nothing to score."""
    found = ScoredAnswers.of(predicted, task.queries).losses
    unanswered = np.isnan(task.queries.rtt_ms)
    if task.results:
        p, failed, tried = predicted.p_failed, task.results.failed, task.results.tried
        found["brier"] = (p * p - 2 * p * failed + failed) * tried / tried.mean()
        found["bits"] = np.where(unanswered, np.nan, found["bits"])  # there it is no result, but the lack of a median
    elif not unanswered.any():
        del found["brier"]
    return found


def _pooled(set_name: str, name: str, of_seeds: list[Losses], begin: float, first: int | None) -> Losses:
    pooled = {key: np.concatenate([one[key][:first] for one in of_seeds]) for key in of_seeds[0]}
    scores = scores_of(pooled)
    shown = "  ".join(f"{SCORE_COLUMNS[key].title} {scores[key]:.4g}" for key in ("median_re", "p90_re", "mae"))
    err.print(f"{set_name:14}{name:28}{shown}  ({time.monotonic() - begin:.1f} s)", markup=False, soft_wrap=True)
    return pooled


def overview(found: dict[str, Comparison], models: Sequence[str]) -> str:
    """As Markdown: of each set, every model and the best of the others in each score; bold where outside the noise."""
    shown = ("median_re", "p90_re", "mae", "coverage90", "nll_bits", "brier")
    titles = " | ".join(SCORE_COLUMNS[key].title for key in shown)
    lines = [f"| known | | {titles} |", "|---" * (len(shown) + 2) + "|"]
    for name, comparison in found.items():
        data_set, share = NAMES[name]
        rivals = {who: scores for who, scores in comparison.scores.items() if who not in models}
        rows = [(model, dict.fromkeys(shown, model)) for model in models if model in comparison.scores]
        rows.append(("best other", {key: _best(rivals, key) for key in shown}))
        for title, who in rows:
            cells = [_cell(comparison, who[key], key, named=title == "best other") for key in shown]
            lines.append(f"| {data_set.title_of(share)} | {title} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", ROLES])


def _best(scores: dict[str, dict[str, float]], key: str) -> str:
    distance = SCORE_COLUMNS[key].distance
    known = {who: distance(of[key]) for who, of in scores.items() if np.isfinite(of.get(key, np.nan))}
    return min(known, key=known.__getitem__, default="")


def _cell(comparison: Comparison, who: str, key: str, *, named: bool) -> str:
    value = comparison.scores.get(who, {}).get(key, np.nan)
    if np.isnan(value):
        return ""
    column = SCORE_COLUMNS[key]
    low, high = (column.format.format(end) for end in comparison.intervals[who][key])
    text = column.format.format(value)
    text = f"**{text}**" if comparison.leaders.get(key) == who else text
    return f"{text} ({low}-{high})" + (f" {who}" if named else "")


def _write_known(name: str, seeds: range, data_folder: Path, folder: Path) -> None:
    data_set, share = NAMES[name]
    data = data_set.read(data_folder)
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds if share else ():
        task = data.task(share, seed, 1)
        known = replace(task.known, rtt_ms=np.nan_to_num(task.known.rtt_ms, nan=-1.0))  # failed, as readers take it
        columns = zip(known.source, known.destination, known.rtt_ms, strict=True)
        lines = (f"{task.nodes[source]},{task.nodes[destination]},{rtt}\n" for source, destination, rtt in columns)
        path = folder / f"{name}-{seed}.csv"
        path.write_text("src_addr,dst_addr,rtt\n" + "".join(lines))
        out.print(f"{path}: {len(known):,} measurements", markup=False)


if __name__ == "__main__":
    main()
