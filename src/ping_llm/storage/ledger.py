"""What has been uploaded to a remote folder, by checksum, so that an upload that was killed does not begin again.

The ledger lies beside the files, so another machine may go on, too. Stores know sizes but no checksums we could ask
for; without the ledger a file that is already there would have to be read to be trusted.
"""

import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, Self

from ping_llm.storage.location import Location
from ping_llm.storage.retry import MissingError, StorageError

LEDGER: Final = ".upload.json"
_WRITE_EVERY_S: Final = 5.0


class Ledger:
    """Of the uploads to a remote folder, while they last. May be used by several threads.

    >>> with Ledger(folder) as ledger:
    ...     if not ledger.has("a", size=3, sha256=checksum):
    ...         (folder / "a").upload(path)
    ...         ledger.add("a", checksum)
    """

    def __init__(self, folder: Location, known: Mapping[str, str] | None = None) -> None:
        """`known`: checksums of files that are there already, as a manifest says."""
        self._place = folder / LEDGER
        self._lock = threading.Lock()
        self._checksums = dict(known or {})
        with suppress(MissingError, ValueError):
            self._checksums |= json.loads(self._place.read_text())
        self._sizes = {file.name: file.size() for file in folder.list()}
        self._written = time.monotonic()

    def has(self, name: str, *, size: int, sha256: str) -> bool:
        """Whether this very file is there."""
        return self._sizes.get(name) == size and self._checksums.get(name) == sha256

    def add(self, name: str, sha256: str) -> None:
        """Note an upload. The notes themselves are stored every few seconds."""
        with self._lock:
            self._checksums[name] = sha256
            if time.monotonic() - self._written > _WRITE_EVERY_S:
                self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        self._place.write_text(json.dumps(self._checksums))

    def __enter__(self) -> Self:
        self._write()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        """When all went well, a manifest says the same, and nothing is to be gone on with."""
        if kind is None:
            self._place.delete()
        else:
            with suppress(StorageError):  # what went wrong first is what is to be said
                self._write()
