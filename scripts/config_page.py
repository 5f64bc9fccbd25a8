"""Renew the tables of keys in docs (`make config-page`). A test fails while they are out of date."""

from pathlib import Path

from ping_llm.config.__main__ import key_tables, maxtext_table

DOCS = Path(__file__).resolve().parents[1] / "docs"


def renew(page: Path, name: str, table: str) -> None:
    begin, end = f"<!-- {name}: written by `make config-page` -->\n", f"<!-- end of {name} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    page.write_text(f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


if __name__ == "__main__":
    renew(DOCS / "configuration.md", "keys", key_tables())
    renew(DOCS / "coming-from-maxtext.md", "maxtext", maxtext_table())
