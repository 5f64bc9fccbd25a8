"""Questions per second to a language model: cold (a new process with an empty compilation cache), and warm.

    python bench/language_model_speed.py --config configs/latency_network.yml          # weights drawn at random
    python bench/language_model_speed.py --model runs/ping-llm/my-run --questions 1000
    python bench/language_model_speed.py --config configs/demo.yml --questions 500

Each question has a full context of its own: nothing is shared. Cold is all that `Predictor` does from loaded weights to
the distributions of all questions, compilation included; warm is the best of `--repeat` times the same. Run it twice
with `--compiled FOLDER` for what a second process takes, which finds what the first compiled.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from ping_llm import Predictor
from ping_llm.config import Config, load_config
from ping_llm.core.console import out
from ping_llm.core.rtt import Observations, Questions
from ping_llm.models.lm import Transformer
from ping_llm.models.modules import by_name, keep_compiled
from ping_llm.runs.trained import Trained, load_trained
from ping_llm.runs.weights import model_settings

SECONDS = 240
"""Between two measurements of a source."""


def untrained(config: Config) -> Trained:
    make = jax.jit(lambda: nnx.state(Transformer(model_settings(config), nnx.Rngs(0))))
    return Trained(config=config, weights=by_name(make()), steps=0, where="random")


def asked(questions: int, per_source: int) -> tuple[Observations, Questions, list[str]]:
    """A source for each question, with so many measurements of 50 destinations before it."""
    random = np.random.default_rng(0)
    nodes = [f"{1 + n // 65536}.{n // 256 % 256}.{n % 256}.7" for n in range(questions + 50)]
    source = np.repeat(np.arange(questions), per_source)
    destination = questions + random.integers(0, 50, len(source))
    time_s = 1.7e9 + SECONDS * np.tile(np.arange(per_source, dtype=np.float64), questions)
    rtt = np.exp(random.normal(3.5, 1.0, questions + 50))[destination] * random.uniform(1, 1.1, len(source))
    known = Observations(source=source, destination=destination, time_s=time_s, rtt_ms=rtt.astype(np.float32))
    later = np.full(questions, 1.7e9 + SECONDS * per_source)
    to = questions + random.integers(0, 50, questions)
    return known, Questions(source=np.arange(questions), destination=to, time_s=later), nodes


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    begun = time.perf_counter()
    trained = load_trained(arguments.model) if arguments.model else untrained(load_config(arguments.config))
    length = trained.config.max_target_length
    known, questions, nodes = asked(arguments.questions, arguments.history or length // 12)
    ready = time.perf_counter()
    seconds = []
    for number in range(1 + arguments.repeat):
        if not number:
            predictor = Predictor(trained=trained)
        now = time.perf_counter()
        answers = predictor.predict(known, questions, nodes)
        checked = float(answers.median.sum())
        seconds.append(time.perf_counter() - now)
    warm = min(seconds[1:], default=float("nan"))
    return {
        "device": jax.devices()[0].device_kind,
        "parameters": model_settings(trained.config).parameters,
        "tokens": length,
        "questions": len(questions),
        "loading_s": round(ready - begun, 2),
        "cold_s": round(seconds[0], 2),
        "warm_s": round(warm, 3),
        "warm_questions_per_s": round(len(questions) / warm, 1),
        "sum_of_medians_ms": checked,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a run or an exported folder")
    parser.add_argument("--config", type=Path, help="instead: weights drawn at random for this configuration")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--history", type=int, help="measurements before each question [as many as fit]")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--compiled", type=Path, help="folder of the compilation cache [a new one]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty:
        keep_compiled(arguments.compiled or Path(empty))
        out.print_json(json.dumps(measure(arguments)))


if __name__ == "__main__":
    main()
