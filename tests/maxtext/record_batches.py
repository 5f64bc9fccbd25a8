"""The launcher, with a note of every training batch that MaxText was given: `record_batches.py FILE CONFIG key=value…`.

A line of the file holds a step, the offset of this process's part in the batch, and a digest of each of its sequences.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


def digests(batch: dict[str, Any]) -> list[str]:
    rows = np.stack([np.asarray(batch[name]) for name in sorted(batch)], axis=1)
    return [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in rows]


@contextmanager
def recording(path: Path) -> Iterator[None]:
    """Append the batches that MaxText is given in the block to a file."""
    from ping_llm.integrations.maxtext import iterators

    given = iterators.LocalBatches.__next__

    def noted(self: iterators.LocalBatches) -> Any:
        step, host = self.loader.state().next_step, self.loader.settings.host
        batch = given(self)
        if not self.loader.spec.finite:
            with path.open("a") as file:
                line = {"step": step, "first": host * self.loader.batch_size, "sequences": digests(batch)}
                file.write(json.dumps(line) + "\n")
        return batch

    iterators.LocalBatches.__next__ = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        iterators.LocalBatches.__next__ = given  # type: ignore[method-assign]


def main() -> int:
    sys.modules["tensorflow"] = None  # type: ignore[assignment]  # the extra `maxtext` has none, and it loads slowly
    from ping_llm.integrations.maxtext import launch

    with recording(Path(sys.argv[1])):
        return launch.main([sys.argv[0], *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
