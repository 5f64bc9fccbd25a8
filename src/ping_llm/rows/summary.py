"""What `ping-llm inspect rows` says about a prepared dataset: the numbers as JSON, and how they are shown."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ping_llm.core.measurements import format_address, source_hash
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.format import ProbeRow
from ping_llm.rows.manifest import Manifest
from ping_llm.sources.nodes import shown_in_rows
from ping_llm.storage import Location, locate


def summarise(folder: Path | str | Location) -> dict[str, Any]:
    """Everything that the manifest and the indexes know, as JSON-able values."""
    manifest = Manifest.load(folder)
    splits = {}
    for name in manifest.splits:
        with RowSet(folder, name) as rows:
            splits[name] = _summarise_split(rows)
    return {
        "path": str(locate(folder)),
        "fingerprint": manifest.fingerprint,
        "options": manifest.options,
        "input_files": len(manifest.inputs),
        "read": manifest.read,
        "written": manifest.written,
        "dropped": manifest.dropped,
        "splits": splits,
    }


def _summarise_split(rows: RowSet) -> dict[str, Any]:
    counts = rows.column("count").astype(np.int64)
    measurements = int(counts.sum())
    summary: dict[str, Any] = {
        "fingerprint": rows.info.fingerprint,
        "shards": len(rows.info.shards),
        "bytes": sum(shard.bytes for shard in rows.info.shards),
        "rows": len(rows),
        "measurements": measurements,
    }
    if not len(rows):
        return summary
    ipv6 = int(counts[rows.column("family") == 6].sum())
    return summary | {
        "sources": len(np.unique(source_hash(rows.column("family"), rows.column("source")))),
        "ipv4_share": 1 - ipv6 / measurements,
        "ipv6_share": ipv6 / measurements,
        "failed_share": rows.info.failed / measurements,
        "first_time": _moment(int(rows.column("first_time_us").min())),
        "last_time": _moment(int(rows.column("last_time_us").max())),
        "row_size": {
            "mean": measurements / len(rows),
            **{f"p{q}": int(np.percentile(counts, q, method="nearest")) for q in (50, 90, 99)},
            "max": int(counts.max()),
        },
        "histogram": _histogram(counts),
    }


def _histogram(counts: Any) -> list[dict[str, int]]:
    """Rows and measurements by row size, in powers of four."""
    levels = np.floor(np.log2(counts) / 2).astype(int)
    binned = np.bincount(levels), np.bincount(levels, weights=counts).astype(int)
    return [
        {"from": 4**level, "to": 4 ** (level + 1) - 1, "rows": rows, "measurements": measurements}
        for level, (rows, measurements) in enumerate(np.transpose(binned).tolist())
    ]


def row_as_json(rows: RowSet, number: int, limit: int) -> dict[str, Any]:
    """One row decoded: its first `limit` measurements."""
    row, (_, shown) = rows[number], shown_in_rows(rows.folder)
    shard = int(rows.column("shard")[number])
    return {
        "row": number,
        "split": rows.split,
        "shard": rows.info.shards[shard].file,
        "position": int(rows.column("position")[number]),
        "source": shown(row.source_address),
        "count": len(row),
        "measurements": [measurement_as_json(row, i, shown) for i in range(min(limit, len(row)))],
    }


def measurement_as_json(row: ProbeRow, i: int, shown: Callable[[str], str] = str) -> dict[str, Any]:
    rtt = float(row.rtt_ms[i])
    return {
        "event_time": _moment(int(row.time_us[i])),
        "dst_addr": shown(format_address(row.family, row.destinations[i].tobytes())),
        "rtt": None if np.isnan(rtt) else round(rtt, 4),
    }


def _moment(time_us: int) -> str:
    return (datetime.fromtimestamp(0, UTC) + timedelta(microseconds=time_us)).isoformat().replace("+00:00", "Z")


def render(summary: dict[str, Any], *, row: dict[str, Any] | None = None, histograms: bool = False) -> RenderableType:
    """The summary for the terminal."""
    dropped = ", ".join(f"{n:,} {reason}" for reason, n in summary["dropped"].items()) or "none"
    parts: list[RenderableType] = [
        Text(f"Probe rows in {summary['path']}", style="bold"),
        Text(f"  fingerprint  {summary['fingerprint']}"),
        Text(f"  input        {summary['read']:,} measurements in {summary['input_files']} file(s)"),
        Text(f"  written      {summary['written']:,}    dropped: {dropped}\n"),
        _split_table(summary["splits"]),
    ]
    if histograms:
        parts += [_histogram_table(name, split) for name, split in summary["splits"].items() if split["rows"]]
    if row:
        parts.append(_row_table(row))
    return Group(*parts)


def _split_table(splits: dict[str, Any]) -> Table:
    lines = {
        "rows": "{rows:,}",
        "sources": "{sources:,}",
        "measurements": "{measurements:,}",
        "IPv4 / IPv6": "{ipv4_share:.1%} / {ipv6_share:.1%}",
        "unanswered": "{failed_share:.2%}",
        "from": "{first_time}",
        "to": "{last_time}",
        "row size p50 / p99 / max": "{row_size[p50]:,} / {row_size[p99]:,} / {row_size[max]:,}",
        "shards": "{shards} ({megabytes:,.1f} MB)",
    }
    table = _plain_table("", *(f"#{name}" for name in splits))
    for label, text in lines.items():
        cells = (text.format(**s, megabytes=s["bytes"] / 1e6) if s["rows"] else "" for s in splits.values())
        table.add_row(label, *cells)
    return table


def _histogram_table(name: str, split: dict[str, Any]) -> RenderableType:
    table = _plain_table("#measurements in a row", "#rows", "")
    largest = max(bin["rows"] for bin in split["histogram"])
    for bin in split["histogram"]:
        bar = "█" * round(30 * bin["rows"] / largest) or ("▏" if bin["rows"] else "")
        table.add_row(f"{bin['from']:,} – {bin['to']:,}", f"{bin['rows']:,}", bar)
    return Group(Text(f"\n{name}: row sizes", style="bold"), table)


def _row_table(row: dict[str, Any]) -> RenderableType:
    table = _plain_table("time", "destination", "#RTT")
    for m in row["measurements"]:
        rtt = Text("unanswered", style="red") if m["rtt"] is None else Text(f"{m['rtt']:.3f} ms")
        table.add_row(m["event_time"], m["dst_addr"], rtt)
    left = row["count"] - len(row["measurements"])
    where = f"{row['shard']}, record {row['position']}"
    heading = Text(f"\n{row['split']} row {row['row']} ({where}): source {row['source']}", style="bold")
    return Group(heading, table, Text(f"… {left:,} more") if left else "")


def _plain_table(*columns: str) -> Table:
    """Columns of text, and of numbers where the name begins with #."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="")
    for name in columns:
        table.add_column(name.removeprefix("#"), justify="right" if name.startswith("#") else "left")
    return table
