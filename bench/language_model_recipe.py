"""What makes the language model better: runs that differ in a few keys, and the bits of the results they predict.

    ping-llm simulate --measurements 5000000 --output data/raw
    ping-llm split 'data/raw/*.parquet' --output data/split
    ping-llm prepare --input data/split/train --output data/rows
    python bench/language_model_recipe.py data/split data/rows --world data/raw --keys steps=1500 base_emb_dim=384 … \
        --variants '' use_qk_norm=true 'use_qk_norm=true rtt_loss_weight=4'

Each variant is trained by `ping-llm train`, several at a time on one device if `--together` says so, which shares its
time and hence makes the speeds meaningless. Scores are negative log-likelihoods in bits of the results of the same
questions as in `ping-llm evaluate`, from one forward pass; ± is half of a 95 % interval (pairs resampled).

With a world, also of random pairs of known nodes that never measured each other, whose results are drawn from the
truth: the questions about unseen pairs of a small set are about few pairs (37 of the demo's), which fare well or badly
together.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ping_llm.core.rtt import Observations, Questions, RttDistribution, encode_rtt
from ping_llm.evaluate.split import Split, read_split, sampled
from ping_llm.models.lm import Transformer
from ping_llm.predict.language_model import LanguageModel
from ping_llm.predict.prompts import prompts_for
from ping_llm.runs import read_metrics
from ping_llm.runs.trained import load_trained
from ping_llm.sources.simulator import World
from ping_llm.tokens import FIRST_BYTE, Role

PROTOCOLS = "unseen_pair", "seen_pair", "unseen_probe"
UNMEASURED = "unmeasured_pair"
Bits = np.ndarray[Any, np.dtype[np.float64]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("split", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--world", type=Path, help="adds the truth, and pairs that nobody measured")
    parser.add_argument("--config", default="configs/latency_network.yml")
    parser.add_argument("--runs", type=Path, default=Path("data/recipe"))
    parser.add_argument("--keys", nargs="*", default=[], help="of all variants")
    parser.add_argument("--variants", nargs="+", default=[""], help="keys of each, in one word")
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--score", type=Path, help="only score this run; used by the script itself")
    given = parser.parse_args()
    truth = World.load(given.world) if given.world else None
    if given.score:
        split = read_split(given.split)
        sys.stdout.write(json.dumps(scores_of(given.score, split, asked(split, given.questions, truth))) + "\n")
        return

    def one(numbered: tuple[int, str]) -> dict[str, Any]:
        return train_and_score(given, *numbered)

    if truth:
        split = read_split(given.split)
        for name, rows in asked(split, given.questions, truth).items():
            known = distribution(truth, split, rows)
            sys.stdout.write(f"the truth: {name} {shown(interval(known.bits(rows.rtt_ms), rows))}\n")
    with ThreadPoolExecutor(given.together) as pool:
        found = list(pool.map(one, enumerate(given.variants)))
    for result in sorted(found, key=lambda result: result["bits"]["seen_pair"][0]):
        bits = "  ".join(f"{name} {shown(score)}" for name, score in result["bits"].items())
        sys.stdout.write(
            f"{bits}  loss {result['eval_loss']:.4f}  {result['tokens'] / 1e6:6.0f} M tokens  {result['variant']}\n"
        )
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def train_and_score(given: argparse.Namespace, number: int, variant: str) -> dict[str, Any]:
    name = f"{number:02d}-{variant}".replace(" ", "_").replace("/", "_")[:100]
    keys = [f"network_train_files={given.rows}", f"network_eval_files={given.rows}", *given.keys, *variant.split()]
    where = [f"base_output_directory={given.runs}", "project=recipe", f"run_name={name}"]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / given.together:.3f}"}
    run = given.runs / "recipe" / name
    program = [sys.executable, "-m", "ping_llm", "train", "--config", given.config, *keys, *where]
    log = given.runs / f"{name}.log"
    given.runs.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        code = subprocess.run(program, stdout=file, stderr=file, env=environment).returncode
    if code:
        sys.exit(f"{variant}: training failed:\n{log.read_text()[-2000:]}")
    scored = [sys.executable, __file__, str(given.split), str(given.rows), "--score", str(run)]
    scored += ["--questions", str(given.questions), *(["--world", str(given.world)] if given.world else [])]
    bits = json.loads(subprocess.run(scored, check=True, capture_output=True, env=environment).stdout)
    summary, records = json.loads((run / "summary.json").read_text()), read_metrics(run / "metrics.jsonl")
    return {
        "variant": variant,
        "bits": bits,
        "eval_loss": summary["eval_loss"] or float("nan"),
        "tokens": sum(record.get("real_tokens", 0) for record in records),
        "parameters": summary["parameters"],
    }


def asked(split: Split, questions: int, truth: World | None) -> dict[str, Observations]:
    found = {name: sampled(split.questions[name], questions, 0) for name in PROTOCOLS}
    return found | ({UNMEASURED: unmeasured(split, truth, questions)} if truth else {})


def unmeasured(split: Split, truth: World, count: int) -> Observations:
    """What pairs of known nodes would have measured after the cut, had they ever measured each other."""
    random, last = np.random.default_rng(0), max(part.time_s.max() for part in split.questions.values())
    ends = {end: random.choice(np.unique(getattr(split.train, end)), 8 * count) for end in ("source", "destination")}
    drawn = Questions(**ends, time_s=np.floor(random.uniform(split.cut_time_s, last, 8 * count)))
    is_v6 = np.array([":" in node for node in split.nodes])
    known = np.concatenate([split.train.unordered_pair, split.history.unordered_pair])
    possible = (drawn.source != drawn.destination) & (is_v6[drawn.source] == is_v6[drawn.destination])
    drawn = drawn.take(np.flatnonzero(possible & ~np.isin(drawn.unordered_pair, known))[:count])
    return Observations(**vars(drawn), rtt_ms=distribution(truth, split, drawn).sample(1)[:, 0])


def distribution(truth: World, split: Split, rows: Questions) -> RttDistribution:
    nodes = np.array(split.nodes, dtype=object)
    return truth.distribution(nodes[rows.source], nodes[rows.destination], rows.time_s)


def scores_of(run: Path, split: Split, questions: dict[str, Observations]) -> dict[str, tuple[float, float]]:
    model = LanguageModel.of(load_trained(run))
    graph = nnx.split(nnx.eval_shape(lambda: Transformer(model.settings, nnx.Rngs(0))))[0]

    @jax.jit
    def likelihoods(weights: Any, tokens: Any, positions: Any) -> Any:
        """Of the targets after these positions."""
        place = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        logits = nnx.merge(graph, weights)(tokens, place, (place >= 0).astype(jnp.int32), 1)
        return jax.nn.log_softmax(jnp.take_along_axis(logits, positions[..., None], axis=1))

    found = {}
    length = model.config.max_target_length
    for name, rows in questions.items():
        prompts = prompts_for(split.history, rows.questions, split.nodes, length)
        codes = encode_rtt(np.nan_to_num(rows.rtt_ms, nan=1.0)).astype(np.int64)
        bits = np.zeros(len(rows))
        for begin in range(0, len(rows), 16):
            some = range(begin, min(begin + 16, len(rows)))
            tokens, positions = np.zeros((16, length + 3), np.int32), np.zeros((16, 3), np.int32)
            for row, n in enumerate(some):
                high, low = FIRST_BYTE + (codes[n] >> 8), FIRST_BYTE + (codes[n] & 255)
                spelt = np.concatenate([prompts[n].history, prompts[n].question, [Role.RTT_START, high, low]])
                tokens[row, : len(spelt)] = spelt
                positions[row] = len(spelt) - 4 + np.arange(3)
            logs = np.asarray(likelihoods(model.weights, tokens, positions), np.float64) / np.log(2)
            for row, n in enumerate(some):
                either = np.logaddexp2(logs[row, 0, Role.FAILED], logs[row, 0, Role.RTT_START])
                if np.isnan(rows.rtt_ms[n]):
                    bits[n] = either - logs[row, 0, Role.FAILED]
                else:
                    bytes_ = logs[row, 1, FIRST_BYTE + (codes[n] >> 8)] + logs[row, 2, FIRST_BYTE + (codes[n] & 255)]
                    bits[n] = either - logs[row, 0, Role.RTT_START] - bytes_
        found[name] = interval(bits, rows)
    return found


def interval(bits: Bits, rows: Observations) -> tuple[float, float]:
    """Mean, and half of its 95 % interval, with all questions of a pair drawn together."""
    _, pair = np.unique(rows.pair, return_inverse=True)
    total, count = np.bincount(pair, bits), np.bincount(pair)
    drawn = np.random.default_rng(0).integers(len(count), size=(500, len(count)))
    means = total[drawn].sum(axis=1) / count[drawn].sum(axis=1)
    return float(bits.mean()), float(np.subtract(*np.quantile(means, [0.975, 0.025])) / 2)


def shown(score: tuple[float, float]) -> str:
    return f"{score[0]:6.3f} ±{score[1]:.2f}"


if __name__ == "__main__":
    main()
