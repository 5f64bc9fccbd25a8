"""`python -m ping_llm.config` prints the tables of all keys in docs/configuration.md, made from their declarations."""

import sys

from ping_llm.config.keys import SECTIONS, TYPE_NAMES, Rule
from ping_llm.config.maxtext import MAXTEXT_KEYS


def key_tables() -> str:
    """For each section a heading, an introduction and the table of its keys, in Markdown."""
    blocks = []
    for section in SECTIONS:
        lines = [f"### {section.__name__}\n\n{section.__doc__}\n\n| key | type | default | meaning |", "|---" * 4 + "|"]
        for name, field in section.model_fields.items():
            rules = (rule.text for rule in field.metadata if isinstance(rule, Rule))
            kind = ", ".join([TYPE_NAMES[field.annotation].removeprefix("an ").removeprefix("a "), *rules])
            default = str(field.default).lower() if field.annotation is bool else str(field.default)
            lines.append(f"| `{name}` | {kind} | {f'`{default}`' if default else 'empty'} | {field.description} |")
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def maxtext_table() -> str:
    """The table of the keys that only MaxText has, in Markdown. Keys with the same answer share a line."""
    answers: dict[str, list[str]] = {}
    for name, (same, instead) in MAXTEXT_KEYS.items():
        value = "" if same is None else f"={str(same).lower()}"
        answers.setdefault(instead, []).append(f"`{name}{value}`")
    rows = [f"| {', '.join(names)} | {instead} |" for instead, names in answers.items()]
    return "\n".join(["| key | what there is instead of other values |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    sys.stdout.write(key_tables())
