"""`ping-llm destinations`, `complete` and `surprise`: what else a model can be asked."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from ping_llm.commands.options import AnyCheckpoint, Columns, History, Json, LanguageCheckpoint, print_json, renamed
from ping_llm.commands.outputs import check_table, write_table
from ping_llm.console import out, progress

if TYPE_CHECKING:
    from ping_llm.predict.addresses import Likely
    from ping_llm.rows.format import ProbeRow

Source = Annotated[str, typer.Option("--src", help="Source address.")]
Rtt = Annotated[float | None, typer.Option(help="RTT in ms; `nan`: it fails.", show_default="any")]
Count = Annotated[int, typer.Option(min=1, help="How many to show.")]
Beam = Annotated[int, typer.Option(min=1, help="Beginnings of addresses that are followed.")]


def destinations(
    checkpoint: LanguageCheckpoint,
    src: Source,
    rtt: Rtt = None,
    history: History = None,
    columns: Columns = None,
    count: Count = 10,
    beam: Beam = 256,
    json_output: Json = False,
) -> None:
    """Likely destinations for a source and an RTT: the question asked the other way round.

    Only a language model of your own can answer this; it knows the addresses that it was trained on and those of the
    history.

    Example:

      ping-llm destinations --checkpoint runs/ping-llm/my-run --src 192.0.2.1 --rtt 20 --history my_pings.csv
    """
    from ping_llm.predict.addresses import destinations as ask

    _likely(
        checkpoint, src, history, columns, json_output,
        lambda model, own: ask(model, src, rtt, history=own, count=count, beam=beam),
    )  # fmt: skip


def complete(
    checkpoint: LanguageCheckpoint,
    src: Source,
    prefix: Annotated[str, typer.Option(help="Beginning of the destination, such as 193.0. or 2001:67c:.")],
    rtt: Rtt = None,
    history: History = None,
    columns: Columns = None,
    count: Count = 10,
    beam: Beam = 256,
    json_output: Json = False,
) -> None:
    """Complete a partial destination address, from what a language model knows of the source.

    Example:

      ping-llm complete --checkpoint runs/ping-llm/my-run --src 192.0.2.1 --prefix 193.0.
    """
    from ping_llm.predict.addresses import complete as ask

    _likely(
        checkpoint, src, history, columns, json_output,
        lambda model, own: ask(model, src, prefix, rtt_ms=rtt, history=own, count=count, beam=beam),
    )  # fmt: skip


def surprise(
    files: Annotated[list[str], typer.Argument(help="Measurement files, folders or globs.")],
    checkpoint: AnyCheckpoint = None,
    columns: Columns = None,
    top: Annotated[int, typer.Option(min=1, help="The most surprising ones to show.")] = 20,
    last: Annotated[
        int | None, typer.Option(min=1, help="Score only so many of the latest.", show_default="all")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write all to a .csv or .parquet file.")] = None,
    json_output: Json = False,
) -> None:
    """Find the measurements of a file that nobody would have expected.

    Every measurement gets the surprise of its result in bits, given what was measured before it: 10 bits more are a
    thousand times less likely. The completer needs a third of a second for each on two cores (`--last` limits it); a
    language model reads thousands in seconds.

    Examples:

      ping-llm surprise my_pings.csv --last 500

      ping-llm surprise 'data/*.parquet' --checkpoint runs/ping-llm/my-run --output surprise.csv
    """
    import pyarrow as pa

    from ping_llm.predict.predictor import Predictor
    from ping_llm.sources.observations import read_observations

    check_table(output)
    with progress("reading") as advance:
        measured = read_observations(files, columns=renamed(columns), on_progress=advance)
    predictor = Predictor.from_pretrained(checkpoint)
    known = measured.observations
    scored = np.arange(len(known))[-last:] if last else np.arange(len(known))
    with progress("scoring", total=len(scored)) as advance:
        bits = predictor.surprise(measured, scored, advance)
    table = pa.table(
        {
            "event_time": _times(known.time_s[scored]),
            "src_addr": [measured.nodes[node] for node in known.source[scored].tolist()],
            "dst_addr": [measured.nodes[node] for node in known.destination[scored].tolist()],
            "rtt": pa.array(known.rtt_ms[scored], from_pandas=True),
            "bits": bits,
        }
    )
    if output:
        write_table(table, output)
    shown = table.take(np.argsort(-np.nan_to_num(bits), kind="stable")[:top])
    if json_output:
        rows = [{**row, "event_time": row["event_time"] and row["event_time"].isoformat()} for row in shown.to_pylist()]
        print_json({"measurements": len(scored), "mean_bits": float(np.nanmean(bits)), "most_surprising": rows})
        return
    _show_surprises(shown)
    out.print(f"{len(scored):,} measurements, {np.nanmean(bits):.1f} bits each on average", highlight=False)


def _times(time_s: Any) -> Any:
    import pyarrow as pa

    unknown = np.isnan(time_s)
    microseconds = (np.where(unknown, 0.0, time_s) * 1e6).round().astype(np.int64)
    return pa.array(microseconds, mask=unknown).cast(pa.timestamp("us", tz="UTC"))


def _likely(
    checkpoint: Path,
    src: str,
    history: list[str] | None,
    columns: list[str] | None,
    json_output: bool,
    ask: Callable[[Any, "ProbeRow | None"], "Likely"],
) -> None:
    from ping_llm.predict.predictor import Predictor

    model = Predictor.from_pretrained(checkpoint).language_model
    found = ask(model, _own_history(src, history, columns))
    pairs = list(zip(found.addresses, found.probability.tolist(), strict=True))
    if json_output:
        likely = [{"address": address, "probability": chance} for address, chance in pairs]
        print_json({"destinations": likely, "covered": found.covered})
        return
    for address, chance in pairs:
        out.print(f"{chance:9.4%}  {address}")
    out.print(f"{found.covered:.1%} of the probability lies in what was looked at")


def _own_history(src: str, history: list[str] | None, columns: list[str] | None) -> "ProbeRow | None":
    """What the source itself measured."""
    from ping_llm.predict.histories import Histories
    from ping_llm.sources.observations import read_observations

    names = renamed(columns)
    if not history:
        return None
    with progress("reading") as advance:
        measured = read_observations(history, columns=names, on_progress=advance)
    if src not in measured.nodes:
        return None
    return Histories(measured.observations, measured.nodes).row(measured.nodes.index(src))[0]


def _show_surprises(table: Any) -> None:
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, side in (
        ("bits", "right"),
        ("time", "left"),
        ("source", "left"),
        ("destination", "left"),
        ("RTT", "right"),
    ):
        shown.add_column(name, justify=side)  # type: ignore[arg-type]
    for row in table.to_pylist():
        time = row["event_time"].isoformat(sep=" ", timespec="seconds") if row["event_time"] else ""
        rtt = "failed" if row["rtt"] is None else f"{row['rtt']:.2f} ms"
        shown.add_row(f"{row['bits']:.1f}", time, row["src_addr"], row["dst_addr"], rtt)
    out.print(shown)
