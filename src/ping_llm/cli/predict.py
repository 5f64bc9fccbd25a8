"""`ping-llm predict`, `suggest`, `destinations` and `complete`: what a trained model answers."""

import time as clock
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ping_llm.cli import options
from ping_llm.core.console import err, out, progress
from ping_llm.core.errors import PingLlmError, explained

if TYPE_CHECKING:
    import pyarrow as pa

    from ping_llm.rows.measurement_set import MeasurementSet

_MAX_QUESTIONS = 1_000_000


def predict(
    history: options.History = None,
    src: Annotated[list[str] | None, Option(help="Source: an address or a name; may be repeated.")] = None,
    dst: Annotated[list[str] | None, Option(help="Destination; may be repeated.")] = None,
    questions: Annotated[
        Path | None, Option(help="File of pairs to predict instead: src_addr, dst_addr, and optionally event_time.")
    ] = None,
    matrix: Annotated[
        bool, Option("--matrix", help="Predict every source of the history to every destination, as a matrix.")
    ] = False,
    time: Annotated[str | None, Option(help="When, as 2024-05-01T12:00Z.", show_default="after the history")] = None,
    checkpoint: options.AnyCheckpoint = None,
    quantiles: Annotated[str, Option(help="Quantile levels, separated by commas.")] = "0.05,0.5,0.95",
    context: Annotated[int, Option(min=8, help="Measurements selected for a single pair, at most.")] = 1024,
    votes: Annotated[
        int | None,
        Option(min=1, help="Answers to average, each as slow as one.", show_default="4 for less than 2,048 pairs"),
    ] = None,
    watch: Annotated[
        float | None,
        Option(min=0.1, metavar="SECONDS", help="Read the history again at this interval, and print what changed."),
    ] = None,
    how: options.HowToRead = None,
    output: Annotated[
        Path | None, Option("--output", "-o", help="Save all to a .csv or .parquet file; --matrix also to .html.")
    ] = None,
    json_output: options.Json = False,
) -> None:
    """Predict RTTs that were not measured, from measurements that were.

    Works without training: the completer that comes with ping-llm was trained on simulated Internets only and reads
    your measurements as context. It sees only which addresses share a prefix, so private addresses and names work too.
    Every prediction is a distribution: quantiles of the RTT, and the probability of a timeout.

    The completer reads a history of up to 2,047 measurements in full (8,191 if it is dense). From a longer one, it
    selects what is most informative about the pair, or about all pairs between the nodes near either end: measurements
    of these pairs, then of either end with other nodes, nearest first, then of similar pairs. A language model
    (`--checkpoint` of your own run) reads the latest measurements of the source.

    Latitude and longitude of nodes, in the file of `--nodes` or in columns such as src_lat and src_lon, improve
    predictions, above all for nodes that were never measured; then nothing is faster than light in fibre.

    A question mark marks an extrapolation, and the reason is below the table: an end was never measured, no chain of
    measurements links the two, or the pair has only timed out.

    In a matrix, 12 is measured (the median of the pair's latest 25 answers), 12~ predicted, 12? extrapolated. It is a
    heat map on a terminal, and tab-separated values in a pipe. A .csv or .parquet file has a line for each pair with
    everything that is known about it; an .html file is a page with a heat map. Ctrl-C ends `--watch`.

    Examples:

        ping-llm predict --history my_pings.csv --src 192.0.2.1 --dst 198.51.100.7
        ping-llm predict --history my_pings.csv --matrix --output predicted.html
        ping-llm predict --history my_pings.csv --nodes nodes.csv --src a_new_site --dst lon1
        ping-llm predict --history 'prometheus+http://prom:9090/?start=-6h' --matrix --watch 10
        ping-llm predict --history 'data/*.parquet' --questions questions.csv --time 2024-05-01T12:00Z --json
    """
    from ping_llm.predict.predictor import Predictor, checked_levels

    levels = checked_levels(quantiles.split(","))
    options.check_file(output, ".csv", ".parquet", *[".html"] * matrix)
    if watch is not None and not history:
        raise PingLlmError("--watch needs --history")
    read, stamp = partial(options.read_measurements, history, how), partial(stamps, history or [])
    last = stamp() if watch else None
    known = read()
    table = _questions(src or [], dst or [], questions, known if matrix else None, time)
    predictor = Predictor.from_pretrained(checkpoint, context=context, votes=votes)

    def answers(table: "pa.Table", known: "MeasurementSet") -> "pa.Table":
        with progress("predicting", total=len(table)) if len(table) > 1 else nullcontext() as advance:
            answered = predictor.answered(table, known, levels, advance)
        if output:
            _write(answered, levels, known.nodes, output)
        return answered

    answered = answers(table, known)
    _show(answered, known, levels, json_output, as_matrix=matrix, is_written=output is not None)
    if watch is None:
        return
    printed: dict[tuple[Any, ...], dict[str, Any]] = {}
    _changed(printed, answered, levels)
    with suppress(KeyboardInterrupt):
        for known in followed(read, stamp, last, watch):
            answered = answers(_questions(src or [], dst or [], questions, known if matrix else None, time), known)
            if changed := _changed(printed, answered, levels):
                if not json_output:
                    out.print(f"\n{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {len(changed):,} changed", markup=False)
                _show(answered.take(changed), known, levels, json_output)


def _show(
    answered: "pa.Table",
    known: "MeasurementSet",
    levels: list[float],
    json_output: bool,
    *,
    as_matrix: bool = False,
    is_written: bool = False,
) -> None:
    from ping_llm.cli import answers
    from ping_llm.predict.matrix import Matrix

    if json_output:
        return options.show({"predictions": answered.to_pylist(), **options.as_read(known)}, True)
    if as_matrix and not is_written:
        matrix = Matrix.of(answered, levels, known.nodes)
        return options.show(None, False, answers.heat_map(matrix) if out.is_terminal else answers.plain_matrix(matrix))
    if not is_written or len(answered) <= answers.ROWS_SHOWN:
        options.show(None, False, *answers.answers_table(answered, levels))


def _write(answered: "pa.Table", levels: list[float], nodes: "Sequence[str]", output: Path) -> None:
    if output.suffix != ".html":
        return options.write_table(answered, output, "predictions")
    from ping_llm.predict.matrix import Matrix
    from ping_llm.report.rendering import write_matrix

    with explained(f"cannot write to {output}", OSError):
        write_matrix(Matrix.of(answered, levels, nodes), levels, output)
    err.print(f"wrote {len(answered):,} predictions to {output}", markup=False)


def followed(
    read: "Callable[[], MeasurementSet]", stamp: Callable[[], object], last: object, every_s: float
) -> "Iterator[MeasurementSet]":
    """The history, read again whenever its stamp changes. A repeated error is printed once, and reading is retried."""
    reported = ""
    while True:
        clock.sleep(every_s)
        try:
            if (now := stamp()) == last:
                continue
            err.quiet = True  # how the files were read was printed at the start
            try:
                measured = read()
            finally:
                err.quiet = False
        except PingLlmError as error:
            if str(error) != reported:
                reported = str(error)
                err.print(f"{reported}; reading again every {every_s:g} s", markup=False)
            continue
        last, reported = now, ""
        yield measured


def stamps(history: Sequence[str]) -> object:
    """A value that changes with the files of a history."""
    from ping_llm.sources import remote
    from ping_llm.sources.files import expand

    remote.refresh()
    return [(str(file), stat.size, stat.mtime_ns) for file in expand(history) for stat in (file.stat(),)]


def _changed(printed: dict[tuple[Any, ...], dict[str, Any]], answered: "pa.Table", levels: list[float]) -> list[int]:
    """Rows that are new, or differ from what was printed: in an RTT by 1 %, in P(timeout) by 0.01, or in the reason."""
    question = answered.column_names[: answered.column_names.index("p_failed")]
    rtts = ["predictions", *(f"{level:g}" for level in levels)]
    changed = []
    for number, row in enumerate(answered.to_pylist()):
        key = tuple(row[name] for name in question)
        old = printed.get(key)
        if (
            old is None
            or old["reason"] != row["reason"]
            or abs(old["p_failed"] - row["p_failed"]) > 0.01
            or any(abs(old[name] - row[name]) > 0.01 * old[name] for name in rtts)
        ):
            printed[key] = row
            changed.append(number)
    return changed


def _questions(
    src: list[str], dst: list[str], questions: Path | None, matrix_of: "MeasurementSet | None", time: str | None
) -> "pa.Table":
    import numpy as np
    import pyarrow as pa

    from ping_llm.core.measurements import of_two_families, parse_nodes
    from ping_llm.sources.columns import question_columns
    from ping_llm.sources.tables import read_table

    if [bool(src or dst), questions is not None, matrix_of is not None].count(True) != 1 or bool(src) != bool(dst):
        raise PingLlmError("give what to predict: --src with --dst, or --questions FILE, or --matrix")
    if questions is not None:
        table = read_table(questions)
    else:
        pairs = list(product(src, dst))
        if matrix_of is not None:
            known, nodes = matrix_of.observations, matrix_of.nodes
            if not len(known):
                raise PingLlmError("--matrix predicts between the nodes of a history: give --history")
            source, destination = np.unique(known.source)[:, None], np.unique(known.destination)[None]
            families, _, _ = parse_nodes(matrix_of.addresses_of())
            may = ~of_two_families(families[source], families[destination]) & (source != destination)
            ends = np.broadcast_arrays(source, destination)
            pairs = [(nodes[a], nodes[b]) for a, b in zip(*(end[may].tolist() for end in ends), strict=True)]
        if len(pairs) > _MAX_QUESTIONS:
            raise PingLlmError(f"{len(pairs):,} pairs are more than {_MAX_QUESTIONS:,}: select some by --src and --dst")
        table = pa.table({"src_addr": [p[0] for p in pairs], "dst_addr": [p[1] for p in pairs]})
    if time is not None:
        if "event_time" in question_columns(table.column_names):
            raise PingLlmError("the questions have a column of times: leave --time out")
        table = table.append_column("event_time", pa.array([time] * table.num_rows))
    return table


def suggest(
    history: options.History = None,
    budget: Annotated[int, Option(min=1, help="Number of measurements that you can make.")] = 50,
    among: Annotated[
        Path | None,
        Option(help="File of candidates: src_addr, dst_addr.", show_default="all unmeasured pairs"),
    ] = None,
    checkpoint: options.AnyCheckpoint = None,
    how: options.HowToRead = None,
    output: options.OutputTable = None,
    json_output: options.Json = False,
) -> None:
    """Suggest which pairs to measure next: those whose measurement would reduce uncertainty most.

    These are pairs with wide prediction intervals, spread over the nodes, and links between parts of the network that
    no measurement connects. They are printed with their predictions, most informative first.

    Examples:

        ping-llm suggest --history my_pings.csv --budget 50
        ping-llm suggest --history my_pings.csv --among possible_pairs.csv --output next.csv
    """
    from ping_llm.cli.answers import answers_table
    from ping_llm.predict.predictor import Predictor
    from ping_llm.predict.suggest import LEVELS
    from ping_llm.sources.tables import read_table

    if not history:
        raise PingLlmError("suggestions complete a set of measurements: give --history")
    options.check_file(output, ".csv", ".parquet")
    known = options.read_measurements(history, how)
    possible = read_table(among) if among else None
    with progress("predicting candidates") as advance:
        found = Predictor.from_pretrained(checkpoint).suggest(known, budget=budget, among=possible, advance=advance)
    if output:
        options.write_table(found, output, "pairs")
    shown = answers_table(found, LEVELS) if found.num_rows and not output else ()
    if not found.num_rows:
        err.print("every candidate has been measured: there is nothing to suggest")
    options.show({"suggestions": found.to_pylist()} if json_output else None, json_output, *shown)


# Answers that only a language model can give.

Source = Annotated[str, Option("--src", help="Source: an address or a name.")]
Rtt = Annotated[float | None, Option(help="RTT in ms; `nan`: a timeout.", show_default="any")]
Count = Annotated[int, Option(min=1, help="How many to show.")]
Beam = Annotated[int, Option(min=1, help="Width of the beam search over addresses.")]


def destinations(
    checkpoint: options.LanguageCheckpoint,
    src: Source,
    rtt: Rtt = None,
    history: options.History = None,
    how: options.HowToRead = None,
    count: Count = 10,
    beam: Beam = 256,
    json_output: options.Json = False,
) -> None:
    """Likely destinations for a source and an RTT: the inverse of `predict`.

    This needs a language model that you have trained; it knows the addresses of its training data and of the history.

    Example:

        ping-llm destinations --checkpoint runs/ping-llm/my-run --src 192.0.2.1 --rtt 20 --history my_pings.csv
    """
    complete(checkpoint, src, "", rtt, history, how, count, beam, json_output)


def complete(
    checkpoint: options.LanguageCheckpoint,
    src: Source,
    prefix: Annotated[str, Option(help="Beginning of the destination, such as 193.0. or 2001:67c:.")],
    rtt: Rtt = None,
    history: options.History = None,
    how: options.HowToRead = None,
    count: Count = 10,
    beam: Beam = 256,
    json_output: options.Json = False,
) -> None:
    """Complete a partial destination address, by what a language model knows about the source.

    Example:

        ping-llm complete --checkpoint runs/ping-llm/my-run --src 192.0.2.1 --prefix 193.0.
    """
    from ping_llm.core.measurements import spelled_addresses
    from ping_llm.predict import scoring
    from ping_llm.predict.predictor import Predictor
    from ping_llm.predict.prompts import Histories

    model = Predictor.from_pretrained(checkpoint).language_model
    measured = options.read_measurements(history, how)
    (source,) = spelled_addresses(measured.addresses_of([src]))
    own = None  # what the source itself measured
    if src in measured.nodes:
        own = Histories(measured.observations, measured.addresses_of()).own(measured.nodes.index(src))
    found = scoring.destinations(model, source, rtt, history=own, count=count, beam=beam, prefix=prefix)
    names = dict(zip(spelled_addresses(measured.addresses_of()), measured.nodes, strict=True))
    pairs = [(names.get(a, a), chance) for a, chance in zip(found.addresses, found.probability.tolist(), strict=True)]
    likely = [{"address": address, "probability": chance} for address, chance in pairs]
    lines = [f"{chance:9.4%}  {address}" for address, chance in pairs]
    lines.append(f"the search covered {found.covered:.1%} of the probability")
    options.show({"destinations": likely, "covered": found.covered}, json_output, *lines)
