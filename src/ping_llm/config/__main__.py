"""`python -m ping_llm.config` prints the tables of all keys, as docs/configuration.md has them.

They are made from the declarations of the keys, so that they cannot say anything else.
"""

import sys

from ping_llm.config.keys import SECTIONS, TYPE_NAMES, Rule


def key_tables() -> str:
    """Markdown: for each section a heading, an introduction and the table of its keys."""
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


if __name__ == "__main__":
    sys.stdout.write(key_tables())
