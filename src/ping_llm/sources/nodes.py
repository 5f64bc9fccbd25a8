"""The nodes file: what is known of nodes that measurements name. Columns name, address, latitude, longitude, as."""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa

from ping_llm.core.errors import PingLlmError
from ping_llm.core.geography import UNKNOWN
from ping_llm.core.measurements import NAMED, UNPARSABLE, format_address, parse_nodes
from ping_llm.sources import NODES_FILE
from ping_llm.sources.columns import split_unit, words
from ping_llm.sources.tables import read_cells
from ping_llm.storage import Location

_COLUMNS: Final = {
    "name": words("name node node_name host hostname host_name site probe probe_id prb_id id label"),
    "address": words("address addr ip ip_address ip_addr ipv4 ipv6 address_v4 address_v6"),
    "latitude": words("latitude lat"),
    "longitude": words("longitude lon lng long"),
    "asn": words("as asn as_number asn_v4 asn_v6"),
}


@dataclass(frozen=True, kw_only=True)
class Node:
    """One line of a nodes file."""

    name: str
    address: str | None = None
    latitude: float | None = None
    longitude: float | None = None
    asn: str | None = None


Nodes = Mapping[str, Node]
"""By name."""

NO_NODES: Final[Nodes] = {}


def read_nodes(path: str) -> dict[str, Node]:
    names, rows = read_cells(path)
    usual = {split_unit(name)[0]: i for i, name in reversed(list(enumerate(names)))}
    at = {column: next((usual[s] for s in spelt if s in usual), None) for column, spelt in _COLUMNS.items()}
    if at["name"] is None:
        raise PingLlmError(f"{path}: no column name (it has: {', '.join(names)}): write name, address, latitude, …")
    nodes: dict[str, Node] = {}
    for number, row in enumerate(rows, 2):
        cells = {column: row[i].strip() or None for column, i in at.items() if i is not None and i < len(row)}
        where = f"{path}, line {number}"
        name = cells.get("name")
        if name is None:
            raise PingLlmError(f"{where}: a node without a name")
        if name in nodes:
            raise PingLlmError(f"{where}: {name!r} is there twice")
        nodes[name] = Node(
            name=name,
            address=_address(cells.get("address"), where),
            latitude=_degrees(cells.get("latitude"), 90, where),
            longitude=_degrees(cells.get("longitude"), 180, where),
            asn=cells.get("asn"),
        )
    return nodes


def _address(text: str | None, where: str) -> str | None:
    if text is None:
        return None
    if parse_nodes([text])[0][0] in (UNPARSABLE, NAMED):
        raise PingLlmError(f"{where}: {text!r} is not an address")
    return _canonical(text)


def _degrees(text: str | None, most: float, where: str) -> float | None:
    if text is None:
        return None
    try:
        value = float(text.replace(",", "."))
    except ValueError:
        value = float("nan")
    if not -most <= value <= most:
        raise PingLlmError(f"{where}: {text!r} is not between -{most} and {most} degrees")
    return value


class PositionReader:
    """Positions that stand beside measurements, as they are read."""

    def __init__(self) -> None:
        self._found: dict[str, Counter[tuple[str, float, float]]] = {"src": Counter(), "dst": Counter()}
        self._of_one_end: set[str] = set()
        """Ends whose columns do not say of which end they are: read as if of either."""

    def add(self, batch: pa.RecordBatch) -> None:
        for end, of_end in self._found.items():
            prefix = f"{end}_" if f"{end}_latitude" in batch.schema.names else ""
            names = [f"{end}_addr", f"{prefix}latitude", f"{prefix}longitude"]
            if names[1] not in batch.schema.names:
                continue
            if not prefix:
                self._of_one_end.add(end)
            columns = [batch.column(name) for name in names]
            table = pa.table([columns[0].cast(pa.string()), *columns[1:]], names=names)
            for row in table.group_by(names).aggregate([([], "count_all")]).to_pylist():
                node, latitude, longitude, count = (
                    row[names[0]],
                    *(_number(row[name]) for name in names[1:]),
                    row["count_all"],
                )
                if node and abs(latitude) <= 90 and abs(longitude) <= 180 and (latitude, longitude) != (0, 0):
                    of_end[node.strip(), latitude, longitude] += count

    def nodes(self) -> dict[str, Node]:
        """Each node with its most frequent position. Columns that may be of either end are of that at which a node is
        always at the same position."""
        ends = {end for end, of_end in self._found.items() if len({node for node, *_ in of_end}) == len(of_end)}
        ends = (self._found.keys() - self._of_one_end) | set(sorted(self._of_one_end & ends, reverse=True)[:1])
        found: dict[str, Node] = {}
        for end in sorted(ends, reverse=True):
            for (text, latitude, longitude), _ in self._found[end].most_common():
                name = _canonical(text)
                found.setdefault(name, Node(name=name, latitude=latitude, longitude=longitude))
        return found


def _number(cell: Any) -> float:
    try:
        return float(cell.replace(",", ".") if isinstance(cell, str) else cell)
    except (TypeError, ValueError):
        return float("nan")


def _canonical(text: str) -> str:
    """An address in its usual spelling; a name as it is."""
    families, packed, _ = parse_nodes([text])
    if families[0] in (UNPARSABLE, NAMED):
        return text
    return format_address(int(families[0]), packed[0].tobytes())


def shown_names(nodes: Nodes) -> dict[str, str]:
    """The name of each address; of several, the first."""
    names: dict[str, str] = {}
    for node in nodes.values():
        if node.address is not None:
            names.setdefault(node.address, node.name)
    return names


def shown_in_rows(folder: Location) -> tuple[Nodes, Callable[[str], str]]:
    """What is known of the names in prepared rows, and what to show for an address there."""
    if not (folder / NODES_FILE).exists():
        return NO_NODES, lambda address: address
    nodes = read_nodes(str(folder / NODES_FILE))
    names = shown_names(nodes)

    def shown(address: str) -> str:  # an IPv4 address that was measured with a name is among the IPv6 addresses
        address = address.removeprefix("::ffff:") if "." in address else address
        return names.get(address, address)

    return nodes, shown


def write_nodes(nodes: Iterable[Node]) -> str:
    """A nodes file."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(_COLUMNS)
    table.writerows([getattr(node, column) for column in _COLUMNS] for node in nodes)
    return text.getvalue()


def addresses_of(texts: Iterable[str], nodes: Nodes) -> Sequence[str]:
    """The address of each node that has one, else its name."""
    return [(nodes[text].address or text) if text in nodes else text for text in texts]


def joined_with(described: Nodes, beside: Mapping[str, Node]) -> Nodes:
    """What a nodes file says, and where it says nothing of a position, what stands beside the measurements."""
    names, nodes = shown_names(described), dict(described)
    for place in beside.values():
        name = names.get(place.name, place.name)
        known = nodes.get(name, Node(name=name))
        if known.latitude is None or known.longitude is None:
            nodes[name] = replace(known, latitude=place.latitude, longitude=place.longitude)
    return nodes


def degrees_of(texts: Iterable[str], nodes: Nodes) -> list[tuple[float, float]]:
    """Latitude and longitude of each node that has both."""
    found = ((nodes[text].latitude, nodes[text].longitude) if text in nodes else (None, None) for text in texts)
    return [
        UNKNOWN if latitude is None or longitude is None else (latitude, longitude) for latitude, longitude in found
    ]
