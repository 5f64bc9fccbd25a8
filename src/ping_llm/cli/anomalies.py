"""`ping-llm anomalies`: unexpected measurements, as tables for people and as a check for scripts."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

from typer import Exit, Option

from ping_llm.cli import options
from ping_llm.core.console import err, progress

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.table import Table

FOUND: Final = 3
"""Exit code of `--fail-above`. 1 is any error, 2 a wrong option."""
_BAR: Final = 24


class Score(StrEnum):
    BITS = "bits"
    TAIL = "tail"


def anomalies(
    files: options.MeasurementFiles,
    checkpoint: options.AnyCheckpoint = None,
    how: options.HowToRead = None,
    top: Annotated[int, Option(min=1, help="How many to show, highest scores first.")] = 20,
    last: Annotated[int | None, Option(min=1, help="Score only this many of the latest.", show_default="all")] = None,
    timeline: Annotated[bool, Option("--timeline", help="Show scores and timeouts over time.")] = False,
    fail_above: Annotated[
        float | None, Option(metavar="BITS", help="Exit with code 3 if a score is higher.", show_default="never")
    ] = None,
    score: Annotated[Score, Option(help="Score to sort by and to compare with --fail-above.")] = Score.BITS,
    output: options.OutputTable = None,
    json_output: options.Json = False,
) -> None:
    """Find unexpected measurements in files.

    Every measurement gets an anomaly score: the negative log-likelihood (NLL) of its result in bits, given what was
    measured before it. A result with 10 bits more is a thousand times less likely. Beside it stand the prediction
    (median, 90 % interval, probability of a timeout) and the tail probability: how likely a result is that lies at
    least as far from the median.

    With `--score tail`, the score is the tail probability in bits: about 1 for a typical result, 10 for one in a
    thousand. It makes timeouts and RTTs comparable; the NLL of an ordinary RTT may be 3 bits or 13, depending on how
    narrow its prediction is.

    The completer needs a third of a second per measurement on two cores (`--last` limits it). A language model scores
    thousands in seconds, but its predictions take much longer: it makes them only for the measurements that are shown,
    and for all with `--score tail`.

    The exit code is 3 if a score is above `--fail-above`, 0 if none is, 1 after an error.

    Examples:

        ping-llm anomalies my_pings.csv --last 500
        ping-llm anomalies my_pings.csv --last 500 --timeline
        ping-llm anomalies my_pings.csv --last 10 --score tail --fail-above 13 --json
        ping-llm anomalies 'data/*.parquet' --checkpoint runs/ping-llm/my-run --output anomalies.csv
    """
    import numpy as np
    import pyarrow as pa

    from ping_llm.predict.anomalies import anomalies as scored_by
    from ping_llm.predict.anomalies import highest
    from ping_llm.predict.anomalies import timeline as timeline_of
    from ping_llm.predict.predictor import Predictor

    options.check_file(output, ".csv", ".parquet")
    measured = options.read_measurements(files, how)
    predictor = Predictor.from_pretrained(checkpoint)
    which = np.arange(len(measured.observations))[-(last or 0) :]
    with progress("scoring", total=len(which)) as advance:
        scored = scored_by(predictor, measured, which, len(which) if score is Score.TAIL else top, advance)
    if output:
        options.write_table(scored, output)
    chances = scored["p_failed"].to_numpy()
    scores = scored["bits"].to_numpy() if score is Score.BITS else -np.log2(scored["tail"].to_numpy())
    shown = scored.append_column("score", pa.array(scores)).take(highest(scores, top))
    result: dict[str, Any] = {"measurements": len(scored), "score": score, "mean_score": float(np.nanmean(scores))}
    result |= {"timeouts": scored["rtt"].null_count, **options.as_read(measured)}
    result |= {} if np.isnan(chances).any() else {"expected_timeouts": float(chances.sum())}
    tables = [_as_shown(shown)]
    if timeline:
        slots = timeline_of(scored, scores)
        result["timeline"] = _with_iso_times(slots)
        tables.insert(0, _timeline_as_shown(slots))
    result["anomalies"] = _with_iso_times(shown)
    above = 0 if fail_above is None else int((scores > fail_above).sum())
    if fail_above is not None:
        result |= {"above": above}
    text = (
        f"{len(scored):,} measurements, score {result['mean_score']:.1f} on average; timeouts: {result['timeouts']:,}"
    )
    text += f", expected: {result['expected_timeouts']:.1f}" if "expected_timeouts" in result else ""
    options.show(result, json_output, *tables, text)
    if above:
        err.print(f"{above:,} of {len(scored):,} measurements have a score above {fail_above:g}", markup=False)
        raise Exit(FOUND)


def _with_iso_times(table: "pa.Table") -> list[dict[str, Any]]:
    rows = table.to_pylist()
    for row in rows:
        row |= {name: value.isoformat() for name, value in row.items() if hasattr(value, "isoformat")}
    return rows


def _seconds(when: Any) -> str:
    return when.isoformat(sep=" ", timespec="seconds").removesuffix("+00:00") if when else ""


def _as_shown(table: "pa.Table") -> "Table":
    rows = []
    for row in table.to_pylist():
        rtt = "timeout" if row["rtt"] is None else f"{row['rtt']:.2f}"
        cells = [_seconds(row["event_time"]), row["src_addr"], row["dst_addr"], rtt, *[""] * 4, f"{row['score']:.1f}"]
        if row["expected"] is not None:
            tail = f"{row['tail']:.2g}" if row["tail"] >= 1e-6 else "< 1e-6"
            interval = f"{row['low']:.2f} to {row['high']:.2f}"
            cells[4:8] = [f"{row['expected']:.2f}", interval, f"{row['p_failed']:.1%}", tail]
        rows.append(cells)
    names = ["RTT", "expected", "90 % interval", "P(timeout)", "tail", "score"]
    return options.as_table(
        ["time (UTC)", "source", "destination"], names, rows, "RTTs in ms; the highest scores first"
    )


def _timeline_as_shown(slots: "pa.Table") -> "Table":
    rows, most = slots.to_pylist(), max(slots["highest_score"].to_pylist(), default=1.0) or 1.0
    cells = []
    for row in rows:
        expected = "" if row["expected_timeouts"] is None else f"{row['expected_timeouts']:.1f}"
        mean, high = (round(_BAR * max(row[name], 0.0) / most) for name in ("mean_score", "highest_score"))
        bar = "█" * mean + "░" * (high - mean)
        counts = [f"{row['measurements']:,}", f"{row['timeouts']:,}", expected]
        cells.append([_seconds(row["from"]), bar, *counts, f"{row['mean_score']:.1f}", f"{row['highest_score']:.1f}"])
    names = ["measurements", "timeouts", "expected", "mean score", "highest"]
    return options.as_table(["from (UTC)", "score: mean █, highest ░"], names, cells)
