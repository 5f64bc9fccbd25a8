"""`ping-llm predict`, `anomalies`, `destinations` and `complete`: questions to a trained model."""

from collections import Counter
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ping_llm.cli import options
from ping_llm.core.console import progress
from ping_llm.core.errors import PingLlmError, explained

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from rich.table import Table

    from ping_llm.rows.measurement_set import MeasurementSet

_LINES_SHOWN = 25
_MAX_QUESTIONS = 1_000_000


def predict(
    history: options.History = None,
    src: Annotated[list[str] | None, Option(help="Source address; may be repeated.")] = None,
    dst: Annotated[list[str] | None, Option(help="Destination address; may be repeated.")] = None,
    questions: Annotated[
        Path | None, Option(help="File of questions instead: src_addr, dst_addr, and event_time if it matters.")
    ] = None,
    matrix: Annotated[bool, Option("--matrix", help="Every source of the history to every destination.")] = False,
    time: Annotated[str | None, Option(help="When, as 2024-05-01T12:00Z.", show_default="after the history")] = None,
    checkpoint: options.AnyCheckpoint = None,
    quantiles: Annotated[str, Option(help="Levels to print, separated by commas.")] = "0.05,0.5,0.95",
    context: Annotated[int, Option(min=8, help="Measurements that are chosen for a single pair, at most.")] = 1024,
    votes: Annotated[int, Option(min=1, help="Answers to average: a little better, but as much slower.")] = 1,
    columns: options.Columns = None,
    output: options.OutputTable = None,
    json_output: options.Json = False,
) -> None:
    """Predict RTTs that were not measured, from measurements that were.

    Works without any training: the completer that comes with ping-llm was trained on simulated Internets only and reads
    your measurements as context. Of addresses it only sees which share a prefix, so private ones and stand-ins will do.
    Every answer is a distribution: its quantiles, and the probability of a timeout.

    The completer looks at a history of up to 2,047 measurements whole. Of a longer one, it looks at what is most
    informative about the pair, or about all pairs between the nodes near either end: measurements of these pairs, then
    of either end with others, nearest first, then pairs that stand in for them. A language model (`--checkpoint` of
    your own run) looks at the latest measurements of the source.

    Answers that are guesses carry a question mark, and the reason is below the table: an end was never measured, no
    chain of measurements links the two, or the pair has only timed out.

    Examples:

        ping-llm predict --history my_pings.csv --src 192.0.2.1 --dst 198.51.100.7
        ping-llm predict --history my_pings.csv --matrix --output predicted.csv
        ping-llm predict --history 'data/*.parquet' --questions questions.csv --time 2024-05-01T12:00Z --json
    """
    from ping_llm.predict.predictor import Predictor, checked_levels

    levels = checked_levels(quantiles.split(","))
    options.check_file(output, ".csv", ".parquet")
    known = options.read_measurements(history, columns)
    table = _questions(src or [], dst or [], questions, known if matrix else None, time)
    predictor = Predictor.from_pretrained(checkpoint, context=context, votes=votes)
    with progress("predicting", total=len(table)) if len(table) > 1 else nullcontext() as advance:
        answered = predictor.answered(table, known, levels, advance)
    if output:
        options.write_table(answered, output, "predictions")
    shown = _in_words(answered, levels) if not output or len(table) <= _LINES_SHOWN else ()
    options.show({"predictions": answered.to_pylist()} if json_output else None, json_output, *shown)


def _questions(
    src: list[str], dst: list[str], questions: Path | None, matrix_of: "MeasurementSet | None", time: str | None
) -> "pa.Table":
    import numpy as np
    import pyarrow as pa

    from ping_llm.core.measurements import of_two_families, parse_nodes
    from ping_llm.sources.columns import COLUMN_NAMES

    if [bool(src or dst), questions is not None, matrix_of is not None].count(True) != 1 or bool(src) != bool(dst):
        raise PingLlmError("say what to predict: --src with --dst, or --questions FILE, or --matrix")
    if questions is not None:
        table = _read_table(questions)
    else:
        pairs = list(product(src, dst))
        if matrix_of is not None:
            known, nodes = matrix_of.observations, matrix_of.nodes
            if not len(known):
                raise PingLlmError("--matrix is of the sources and destinations of the history: give --history")
            source, destination = np.unique(known.source)[:, None], np.unique(known.destination)[None]
            families, _, _ = parse_nodes(matrix_of.addresses_of())
            may = ~of_two_families(families[source], families[destination]) & (source != destination)
            ends = np.broadcast_arrays(source, destination)
            pairs = [(nodes[a], nodes[b]) for a, b in zip(*(end[may].tolist() for end in ends), strict=True)]
        if len(pairs) > _MAX_QUESTIONS:
            raise PingLlmError(f"{len(pairs):,} pairs are more than {_MAX_QUESTIONS:,}: name some by --src and --dst")
        table = pa.table({"src_addr": [p[0] for p in pairs], "dst_addr": [p[1] for p in pairs]})
    if time is not None:
        if not set(COLUMN_NAMES["event_time"]).isdisjoint(table.column_names):
            raise PingLlmError("the questions have times of their own: leave --time out")
        table = table.append_column("event_time", pa.array([time] * table.num_rows))
    return table


def _read_table(path: Path) -> "pa.Table":
    """A file of questions as it is: all its columns come back with the answers."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import csv

    from ping_llm.sources.columns import COLUMN_NAMES

    with explained(f"cannot read {path}", OSError, pa.ArrowException):
        if path.suffix == ".parquet":
            return pq.read_table(path)
        addresses = dict.fromkeys(COLUMN_NAMES["src_addr"] + COLUMN_NAMES["dst_addr"], pa.string())
        return csv.read_csv(path, convert_options=csv.ConvertOptions(column_types=addresses))


def _in_words(table: "pa.Table", levels: list[float]) -> "Iterator[str | Table]":
    from ping_llm.sources.columns import COLUMN_NAMES

    source, destination = (
        next(name for name in COLUMN_NAMES[end] if name in table.column_names) for end in ("src_addr", "dst_addr")
    )
    quantiles = [f"{level:.4g} quantile" if level != 0.5 else "median" for level in levels]
    rows = []
    for row in table.slice(0, _LINES_SHOWN).to_pylist():
        values = (f"{row[f'{level:g}']:.2f}" for level in levels)
        is_guess = "?" if row["extrapolating"] else ""
        rows.append([row[source], row[destination], is_guess, *values, f"{row['p_failed']:.1%}"])
    caption = "RTTs in ms, if there is an answer"
    yield options.as_table(["source", "destination", ""], [*quantiles, "P(timeout)"], rows, caption)
    if guessed := Counter(table["reason"].drop_null().to_pylist()):
        yield "? extrapolated: " + "; ".join(f"{reason} ({count:,})" for reason, count in guessed.most_common())
    if table.num_rows > _LINES_SHOWN:
        yield f"… and {table.num_rows - _LINES_SHOWN:,} more: --output FILE writes all, --json prints all"


def suggest(
    history: options.History = None,
    budget: Annotated[int, Option(min=1, help="How many measurements you can make.")] = 50,
    among: Annotated[
        Path | None,
        Option(help="File of pairs that can be measured: src_addr, dst_addr.", show_default="unmeasured ones"),
    ] = None,
    checkpoint: options.AnyCheckpoint = None,
    columns: options.Columns = None,
    output: options.OutputTable = None,
    json_output: options.Json = False,
) -> None:
    """Suggest which pairs to measure next: those whose measurement would say most about all that is unknown.

    These are pairs with wide intervals, spread over the nodes, and links between parts of the network that no
    measurement connects. They come with their predictions, the most valuable first.

    Examples:

        ping-llm suggest --history my_pings.csv --budget 50
        ping-llm suggest --history my_pings.csv --among possible_pairs.csv --output next.csv
    """
    from ping_llm.predict.predictor import Predictor
    from ping_llm.predict.suggest import LEVELS

    options.check_file(output, ".csv", ".parquet")
    known = options.read_measurements(history, columns)
    possible = _read_table(among) if among else None
    with progress("weighing candidates") as advance:
        found = Predictor.from_pretrained(checkpoint).suggest(known, budget=budget, among=possible, advance=advance)
    if output:
        options.write_table(found, output, "pairs")
    shown = _in_words(found, list(LEVELS)) if not output else ()
    options.show({"suggestions": found.to_pylist()} if json_output else None, json_output, *shown)


def anomalies(
    files: options.MeasurementFiles,
    checkpoint: options.AnyCheckpoint = None,
    columns: options.Columns = None,
    top: Annotated[int, Option(min=1, help="How many to show, the highest scores first.")] = 20,
    last: Annotated[int | None, Option(min=1, help="Score only so many of the latest.", show_default="all")] = None,
    output: options.OutputTable = None,
    json_output: options.Json = False,
) -> None:
    """Find the measurements of a file that nobody would have expected.

    Every measurement gets an anomaly score: the negative log-likelihood (NLL) of its result in bits, given what was
    measured before it. 10 bits more are a thousand times less likely. The completer needs a third of a second for each
    on two cores (`--last` limits it); a language model reads thousands in seconds.

    Examples:

        ping-llm anomalies my_pings.csv --last 500
        ping-llm anomalies 'data/*.parquet' --checkpoint runs/ping-llm/my-run --output anomalies.csv
    """
    import numpy as np
    import pyarrow as pa

    from ping_llm.predict.predictor import Predictor

    options.check_file(output, ".csv", ".parquet")
    measured = options.read_measurements(files, columns)
    predictor = Predictor.from_pretrained(checkpoint)
    scored = np.arange(len(measured.observations))[-(last or 0) :]
    with progress("scoring", total=len(scored)) as advance:
        bits = predictor.anomaly_scores(measured, scored, advance)
    known = measured.observations.take(scored)
    time = pa.array((known.time_s * 1e6).round(), from_pandas=True).cast(pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    ends = ([measured.nodes[node] for node in end.tolist()] for end in (known.source, known.destination))
    rtt_ms = pa.array(known.rtt_ms, from_pandas=True)
    table = pa.table([time, *ends, rtt_ms, bits], ["event_time", "src_addr", "dst_addr", "rtt", "bits"])
    if output:
        options.write_table(table, output)
    highest = table.take(np.argsort(-np.nan_to_num(bits), kind="stable")[:top]).to_pylist()
    shown = []
    for row in highest:
        when, rtt = row["event_time"], "timeout" if row["rtt"] is None else f"{row['rtt']:.2f} ms"
        row["event_time"] = when and when.isoformat()
        seconds = when.isoformat(sep=" ", timespec="seconds") if when else ""
        shown.append([seconds, row["src_addr"], row["dst_addr"], rtt, f"{row['bits']:.1f}"])
    mean = float(np.nanmean(bits))
    result = {"measurements": len(scored), "mean_bits": mean, "anomalies": highest}
    text = f"{len(scored):,} measurements, {mean:.1f} bits each on average"
    lines = options.as_table(["time", "source", "destination"], ["RTT", "bits"], shown)
    options.show(result, json_output, lines, text)


# What only a language model can answer.

Source = Annotated[str, Option("--src", help="Source address.")]
Rtt = Annotated[float | None, Option(help="RTT in ms; `nan`: a timeout.", show_default="any")]
Count = Annotated[int, Option(min=1, help="How many to show.")]
Beam = Annotated[int, Option(min=1, help="Width of the beam search over addresses.")]


def destinations(
    checkpoint: options.LanguageCheckpoint,
    src: Source,
    rtt: Rtt = None,
    history: options.History = None,
    columns: options.Columns = None,
    count: Count = 10,
    beam: Beam = 256,
    json_output: options.Json = False,
) -> None:
    """Likely destinations for a source and an RTT: the inverse of `predict`.

    Only a language model of your own can answer this; it knows the addresses that it was trained on and those of the
    history.

    Example:

        ping-llm destinations --checkpoint runs/ping-llm/my-run --src 192.0.2.1 --rtt 20 --history my_pings.csv
    """
    complete(checkpoint, src, "", rtt, history, columns, count, beam, json_output)


def complete(
    checkpoint: options.LanguageCheckpoint,
    src: Source,
    prefix: Annotated[str, Option(help="Beginning of the destination, such as 193.0. or 2001:67c:.")],
    rtt: Rtt = None,
    history: options.History = None,
    columns: options.Columns = None,
    count: Count = 10,
    beam: Beam = 256,
    json_output: options.Json = False,
) -> None:
    """Complete a partial destination address, from what a language model knows of the source.

    Example:

        ping-llm complete --checkpoint runs/ping-llm/my-run --src 192.0.2.1 --prefix 193.0.
    """
    from ping_llm.predict import scoring
    from ping_llm.predict.predictor import Predictor
    from ping_llm.predict.prompts import Histories

    model = Predictor.from_pretrained(checkpoint).language_model
    measured = options.read_measurements(history, columns)
    own = None  # what the source itself measured
    if src in measured.nodes:
        own, _ = Histories(measured.observations, measured.nodes).row(measured.nodes.index(src))
    found = scoring.destinations(model, src, rtt, history=own, count=count, beam=beam, prefix=prefix)
    pairs = list(zip(found.addresses, found.probability.tolist(), strict=True))
    likely = [{"address": address, "probability": chance} for address, chance in pairs]
    lines = [f"{chance:9.4%}  {address}" for address, chance in pairs]
    lines.append(f"{found.covered:.1%} of the probability lies in what was looked at")
    options.show({"destinations": likely, "covered": found.covered}, json_output, *lines)
