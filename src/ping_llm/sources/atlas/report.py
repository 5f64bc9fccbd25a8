"""What an import did: every result that was read is accounted for, as measurements or under a drop reason."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from ping_llm.core.errors import MeasurementError, PingLlmError
from ping_llm.sources.atlas.stream import ParsedChunk


@dataclass(frozen=True, kw_only=True)
class InputReport:
    """One input file."""

    file: str
    bytes: int
    results: int
    measurements: int
    failed: int
    dropped: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """The whole import. `results` is the number of results kept plus the sum of `dropped`."""

    results: int
    """Results read."""
    measurements: int
    """Measurements written: one per result kept, or one per packet of it."""
    failed: int
    """Measurements without an answer, which are among the measurements."""
    dropped: dict[str, int]
    """Results that gave no measurement, by reason."""
    examples: dict[str, str]
    """Where the first result dropped for each reason is, and what is wrong with it."""
    bytes: int
    seconds: float
    files: tuple[str, ...]
    """Parquet files written."""
    inputs: tuple[InputReport, ...]

    @property
    def kept(self) -> int:
        return self.results - sum(self.dropped.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(kw_only=True)
class Tally:
    """Counts of one input file while it is read."""

    file: str
    strict: bool
    results: int = 0
    measurements: int = 0
    failed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, parsed: ParsedChunk) -> None:
        self.results += parsed.results
        self.measurements += parsed.batch.num_rows
        self.failed += parsed.batch.column("rtt").null_count
        self.dropped.update(parsed.dropped)
        for reason, (number, detail) in parsed.examples.items():
            place = f"{self.file} element {number}" if parsed.in_array else f"{self.file}:{number}"
            if self.strict:
                raise MeasurementError(f"{place}: {reason}: {detail}")
            self.examples.setdefault(reason, f"{place}: {detail}")

    def finish(self) -> None:
        """Called at the end of the file: one without any JSON is the wrong file, not one with many bad results."""
        if self.results and self.dropped["malformed_json"] == self.results:
            raise PingLlmError(
                f"{self.file}: not RIPE Atlas JSON: expected one result per line or one array, "
                f"and none of {self.results:,} is valid JSON"
            )


def total(tallies: list[Tally], sizes: list[int], *, files: tuple[str, ...], seconds: float) -> ImportReport:
    dropped: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for tally in tallies:
        dropped.update(tally.dropped)
        examples = tally.examples | examples
    return ImportReport(
        results=sum(tally.results for tally in tallies),
        measurements=sum(tally.measurements for tally in tallies),
        failed=sum(tally.failed for tally in tallies),
        dropped=dict(dropped.most_common()),
        examples={reason: examples[reason] for reason, _ in dropped.most_common()},
        bytes=sum(sizes),
        seconds=seconds,
        files=files,
        inputs=tuple(
            InputReport(
                file=tally.file,
                bytes=size,
                results=tally.results,
                measurements=tally.measurements,
                failed=tally.failed,
                dropped=dict(tally.dropped.most_common()),
            )
            for tally, size in zip(tallies, sizes, strict=True)
        ),
    )
