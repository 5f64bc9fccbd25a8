"""The work folder of a preparation: where tasks leave what they finished, for other tasks and for the next run.

It is a folder that every machine of the engine reaches by the same name: on this machine's disk, on a shared one, or in
an object store. A file appears in it whole or not at all, and two attempts at the same task (one on a machine that was
given up too early) write the same bytes, so they do no harm.
"""

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from ping_llm.core.errors import PingLlmError
from ping_llm.storage import Location
from ping_llm.storage.location import RandomFile
from ping_llm.storage.retry import MissingError
from ping_llm.tasks.pool import map_in_order

REQUESTS_AT_ONCE: Final = 16
"""An object store answers one request in some 30 ms whatever its size, but many at a time."""


class Span(NamedTuple):
    """A range of bytes of a file."""

    file: str
    start: int
    end: int


def deliver(source: Path, target: Location) -> None:
    """Put a finished local file in its place. It may be moved away."""
    if target.is_remote:
        target.upload(source)
        return
    try:
        source.replace(target.local)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with _staged(target.local) as temporary:
            shutil.copyfile(source, temporary)


def copy(source: Location, target: Location) -> None:
    """The same file in another place, without moving its bytes where that can be."""
    if source.is_remote or target.is_remote:
        source.copy_to(target)
        return
    with _staged(target.local) as temporary:
        try:
            os.link(source.local, temporary)
        except OSError:  # another disk, or one without links
            shutil.copyfile(source.local, temporary)


def write_json(target: Location, value: Any) -> None:
    text = json.dumps(value, indent=1) + "\n"
    if target.is_remote:
        target.write_text(text)
        return
    with _staged(target.local) as temporary:
        temporary.write_text(text)


def read_json(source: Location) -> Any | None:
    """What a file says, or nothing if it is not there."""
    try:
        return json.loads(source.read_text())
    except MissingError:
        return None


class SpanReader:
    """Reads spans of the files in a folder. Objects of a store are opened once, and many are read at a time."""

    def __init__(self, folder: Location) -> None:
        self._folder = folder
        self._opened: dict[str, RandomFile] = {}

    def read(self, spans: Sequence[Span]) -> Iterator[bytes]:
        """The bytes of each span, in order."""
        if self._folder.is_local:
            yield from map(self._from_disk, spans)
            return
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
            yield from map_in_order(threads, self._from_store, spans, window=2 * REQUESTS_AT_ONCE)

    def _from_store(self, span: Span) -> bytes:
        file = self._opened.get(span.file)
        if file is None:
            file = self._opened.setdefault(span.file, (self._folder / span.file).open_random())
        return self._whole(span, file.read_at(span.end - span.start, span.start))

    def _from_disk(self, span: Span) -> bytes:
        with (self._folder.local / span.file).open("rb", buffering=0) as file:
            return self._whole(span, os.pread(file.fileno(), span.end - span.start, span.start))

    def _whole(self, span: Span, data: bytes) -> bytes:
        if len(data) != span.end - span.start:
            raise PingLlmError(
                f"{self._folder / span.file} is shorter than when it was written; run the same command again"
            )
        return data


@contextmanager
def _staged(path: Path) -> Iterator[Path]:
    """A temporary name, used by no other machine, that becomes `path` at the end."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
