"""Draw the layers of the package from its imports, and count the files that a prediction and a batch go through.

    python scripts/architecture.py                        # prints both
    python scripts/architecture.py docs/architecture.md   # renews them in the page (`make architecture`)

A file counts if one of its functions is called; what runs while modules are imported does not. A jump is a call from
one of our files into another.
"""

import argparse
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "ping_llm"
BEGIN, END = "<!-- drawn by `make architecture` -->\n", "<!-- end -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", nargs="?", type=Path)
    page = parser.parse_args().page
    text = f"{picture()}\n{table()}\n{ways()}"
    if page is None:
        sys.stdout.write(text)
        return
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}")


def layers() -> list[str]:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    return [name.removeprefix("ping_llm.") for name in reversed(contract["layers"])]


def picture() -> str:
    """Folders in their order, bottom up, with the imports that no other path implies."""
    import grimp

    graph = grimp.build_graph("ping_llm")
    used = {
        upper: {
            lower
            for lower in layers()
            if lower != upper
            and graph.direct_import_exists(importer=f"ping_llm.{upper}", imported=f"ping_llm.{lower}", as_packages=True)
        }
        for upper in layers()
    }
    lines = ["```mermaid", "flowchart BT"]
    for upper, lowers in used.items():
        implied = {below for lower in lowers for below in reachable(used, lower)}
        lines += [f"    {upper} --> {lower}" for lower in sorted(lowers - implied)]
    return "\n".join([*lines, "```", ""])


def reachable(used: dict[str, set[str]], start: str) -> set[str]:
    return used[start].union(*(reachable(used, below) for below in used[start]))


def table() -> str:
    lines = ["| layer | files | lines | what it holds |", "|---|---:|---:|---|"]
    for name in layers():
        files = sorted((SOURCES / name).rglob("*.py"))
        text = (SOURCES / name / "__init__.py").read_text()
        what = text.split('"""')[1].split("\n\n")[0].replace("\n", " ").rstrip(".") if '"""' in text else ""
        count = sum(len(file.read_text().splitlines()) for file in files)
        lines.append(f"| `{name}` | {len(files)} | {count:,} | {what} |")
    files = list(SOURCES.rglob("*.py"))
    total = sum(len(file.read_text().splitlines()) for file in files)
    return "\n".join([*lines, f"| all | {len(files)} | {total:,} | |", ""])


def ways() -> str:
    with tempfile.TemporaryDirectory() as folder:
        rows, history, source, destination = small_data(Path(folder))
        prediction = one_prediction(history, source, destination)
        batch = one_batch(rows)
    lines = ["| | files | jumps between files | which |", "|---|---:|---:|---|"]
    for name, (files, jumps) in (("one prediction (`ping-llm predict`)", prediction), ("one steady batch", batch)):
        lines.append(f"| {name} | {len(files)} | {jumps:,} | {', '.join(f'`{file}`' for file in sorted(files))} |")
    return "\n".join([*lines, ""])


def small_data(folder: Path) -> tuple[Path, Path, str, str]:
    import pyarrow.csv
    import pyarrow.parquet

    ping_llm(f"simulate --measurements 20000 --output {folder}/raw")
    ping_llm(f"prepare --input {folder}/raw --output {folder}/rows")
    table = pyarrow.parquet.read_table(next((folder / "raw").glob("*.parquet"))).slice(0, 600)
    pyarrow.csv.write_csv(table, folder / "history.csv")
    return folder / "rows", folder / "history.csv", table["src_addr"][0].as_py(), table["dst_addr"][0].as_py()


def one_prediction(history: Path, source: str, destination: str) -> tuple[set[str], int]:
    with called() as found:
        ping_llm(f"predict --history {history} --src {source} --dst {destination}")
    return found.files, found.jumps


def one_batch(rows: Path) -> tuple[set[str], int]:
    from ping_llm.config import load_config
    from ping_llm.data.registry import make_train_loader

    with make_train_loader(load_config(None, [f"network_train_files={rows}", "grain_worker_count=0"])) as loader:
        for _ in range(3):
            next(loader)
        with called() as found:
            next(loader)
    return found.files, found.jumps


def ping_llm(arguments: str) -> None:
    from ping_llm.cli.main import app

    with redirect_stdout(sys.stderr):
        app(arguments.split(), standalone_mode=False)


class Calls:
    def __init__(self) -> None:
        self.between: Counter[tuple[str, str]] = Counter()
        self.files: set[str] = set()
        self._importing = 0

    @property
    def jumps(self) -> int:
        return sum(count for (caller, callee), count in self.between.items() if caller != callee)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_name == "<module>":
            self._importing += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not self._importing and (file := ours(frame)):
            self.files.add(file)
            caller = frame.f_back
            while caller is not None and not ours(caller):
                caller = caller.f_back
            self.between[ours(caller) if caller else "", file] += 1


def ours(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(SOURCES)) if path.is_relative_to(SOURCES) else ""


@contextmanager
def called() -> Iterator[Calls]:
    found = Calls()
    profile: Callable[..., Any] = found
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


if __name__ == "__main__":
    main()
