"""Renew the tables of keys in docs/configuration.md (`make config-page`). A test fails while they are out of date."""

from pathlib import Path

from ping_llm.config.__main__ import key_tables

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
BEGIN, END = "<!-- keys: written by `make config-page` -->\n", "<!-- end of keys -->"

if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{key_tables()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
