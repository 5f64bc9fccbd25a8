"""What was understood of an input and what became of its rows, in two lines; and whether that is good enough."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from ping_llm.core.errors import MeasurementError, PingLlmError

MAX_BAD_SHARE: Final = 0.1
"""Of the rows. Where more cannot be used, the table was most likely misunderstood."""
_NO_FAULT: Final = frozenset({"duplicate", "not_ping"})
"""Reasons to leave a row out that say nothing against the others."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was understood of an input, and what became of its rows."""

    understood: tuple[str, ...] = ()
    """What each file or table was taken for, without repetitions."""
    rows: int = 0
    used: int = 0
    timeouts: int = 0
    nodes: int = 0
    names: int = 0
    """Of the nodes, those without an address."""
    begin_s: float | None = None
    end_s: float | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Rows that are not used, by reason (`measurements.DROP_REASONS`)."""
    examples: Mapping[str, str] = field(default_factory=dict)
    """Of each reason, the first such row."""

    @property
    def lines(self) -> tuple[str, str]:
        shown = "; ".join(self.understood[:2]) + (f"; and {len(self.understood) - 2} more" * (len(self.understood) > 2))
        named = f" ({self.names:,} by name)" if self.names else ""
        times = "no times"
        if self.begin_s is not None and self.end_s is not None:
            both = (f"{datetime.fromtimestamp(s, UTC):%Y-%m-%d %H:%M:%S}" for s in (self.begin_s, self.end_s))
            times = " to ".join(both) + " UTC"
        result = f"{self.used:,} of {self.rows:,} rows used"
        if self.nodes:  # else they were not counted
            result += f", {self.timeouts:,} of them timeouts; {self.nodes:,} nodes{named}; {times}"
        left_out = f"; left out: {self.in_words(2)}" if self.dropped else ""
        return f"read: {shown or 'measurements'}", result + left_out

    def in_words(self, examples: int) -> str:
        """What was left out, most first; with examples of so many reasons."""
        found = Counter(self.dropped).most_common()
        return ", ".join(
            f"{count:,} {reason}" + (f" ({self.examples[reason]})" if reason in self.examples and i < examples else "")
            for i, (reason, count) in enumerate(found)
        )

    def check(self, *, allow_bad_rows: bool) -> None:
        """An error if so few rows can be used that answers from them would mislead."""
        bad = sum(count for reason, count in self.dropped.items() if reason not in _NO_FAULT)
        if not self.used:
            raise MeasurementError(
                f"no usable measurement in the input; left out: {self.in_words(3) or 'none, it is empty'}"
            )
        if bad > MAX_BAD_SHARE * self.rows and not allow_bad_rows:
            raise PingLlmError(
                f"{bad:,} of {self.rows:,} rows cannot be used: {self.in_words(2)}; correct them, say how to read them "
                "(--columns, --rtt-unit, --delimiter), or go on without them: --allow-bad-rows"
            )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "lines": list(self.lines)}
