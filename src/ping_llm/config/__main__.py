"""`python -m ping_llm.config` prints the tables of all keys; with a page as argument it renews those in the page."""

import sys
from pathlib import Path

from ping_llm.config.load import key_tables, update
from ping_llm.core.errors import PingLlmError


def main(arguments: list[str]) -> int:
    try:
        for page in arguments:
            update(Path(page))
    except (OSError, PingLlmError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if not arguments:
        sys.stdout.write(key_tables())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
