"""docs/notebook.ipynb runs from top to bottom, and its cells give what they promise."""

import ast
import json
import linecache
from pathlib import Path
from typing import Any

import pandas as pd

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"


def values_of_cells() -> list[Any]:
    """What the last expression of each code cell gives (None: it ends with a statement)."""
    values: list[Any] = []
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(NOTEBOOK.read_text())["cells"]):
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == [], "outputs are not kept: they would differ with every run"
        name, source = f"cell {number}", "".join(cell["source"])
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)  # for the traceback
        tree = ast.parse(source, name)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), names)
        values.append(last and eval(compile(ast.Expression(last.value), name, "eval"), names))  # type: ignore[attr-defined]
    return values


def test_the_notebook_runs() -> None:
    head, predictor, answers, summary, distributions, within, suggested, scored = values_of_cells()
    assert list(head) == ["src_addr", "dst_addr", "rtt"]
    assert len(repr(predictor)) < 120
    assert (answers["0.05"] < answers["0.95"]).all()
    assert summary.startswith("median error ")
    assert float(summary.split()[2].rstrip("%;")) < 30
    assert len(repr(distributions)) < 250
    assert len(within) == len(distributions) == len(answers)
    assert len(suggested) == 3
    assert isinstance(scored, pd.DataFrame)
    assert scored["tail"].idxmin() == scored.index[-1], "the last measurement is out of line"
