"""`make test-faults`: the trials, and a table of how they ended."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

Tell = Callable[[str, str, Counter[str]], None]
_GOOD: Final = "same", "one line", "as read"


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Tell:
    """Report how trials ended. Good are the same result, an error of one line, and (of what has no checksum) another
    value that is read as what it says; all else is a failure."""
    return lambda what, fault, outcomes: record_property("faults", (what, fault, dict(outcomes)))


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from jobs import Bench

    with Bench(tmp_path_factory.mktemp("faults")).closing() as made:
        yield made


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "faults" and report.when == "call"
    ]
    total: Counter[str] = Counter()
    terminalreporter.write_line("| what | fault | trials | same result | one line | as read | failures |")
    terminalreporter.write_line("|---|---|---:|---:|---:|---:|---:|")
    for what, fault, outcomes in sorted(rows):
        trials = sum(outcomes.values())
        good = {name: outcomes.get(name, 0) for name in _GOOD}
        counts = {"trials": trials, **good, "failures": trials - sum(good.values())}
        total.update(counts)
        terminalreporter.write_line(f"| {what} | {fault} | " + " | ".join(f"{n:,}" for n in counts.values()) + " |")
    terminalreporter.write_line("| all | | " + " | ".join(f"{n:,}" for n in total.values()) + " |")
