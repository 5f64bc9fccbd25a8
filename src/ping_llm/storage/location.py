"""Glob patterns over paths that are only known as text."""

import builtins
import fnmatch
import os
import re
import tempfile
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

import pyarrow as pa

from ping_llm.core.errors import PingLlmError
from ping_llm.storage.filesystems import SCHEMES, Entry, LocalStore, RandomFile, RemoteStore

_MAGIC: Final = re.compile(r"[*?\[]")


def has_magic(text: str) -> bool:
    return bool(_MAGIC.search(text))


def split_pattern(path: str) -> tuple[str, str]:
    """The folders before the first one with a wildcard, and the rest."""
    parts = path.split("/")
    first = next((i for i, part in enumerate(parts) if has_magic(part)), len(parts))
    return "/".join(parts[:first]), "/".join(parts[first:])


def pattern_of(text: str) -> re.Pattern[str]:
    """A regular expression for relative paths. `**` stands for any number of folders; `*` does not cross a slash."""
    *folders, name = text.split("/")
    parts = ["(?:[^/]+/)*" if folder == "**" else _within_name(folder) + "/" for folder in folders]
    return re.compile("".join(parts) + ("(?:[^/]+/)*[^/]+" if name == "**" else _within_name(name)))


def _within_name(part: str) -> str:
    translated = fnmatch.translate(part)
    inner = translated[len("(?s:") : translated.rindex(")")]
    return inner.replace("(?>.*?", "(?>[^/]*?").replace(".*", "[^/]*")


# A place where a file or a folder is: a local path, `s3://bucket/key` or `gs://bucket/key`.
#
# A location is a name and nothing more: it can be compared, pickled and sent to other processes and machines;
# connections are opened where it is used. Remote calls are tried again on transient failures (`retry.py`).

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ONE_SLASH: Final = re.compile(r"(s3|gs):/[^/]")


def locate(text: "str | Path | Location") -> "Location":
    """The location that a user wrote."""
    if isinstance(text, Location):
        return text
    written = str(text)
    if collapsed := _ONE_SLASH.match(written):
        if isinstance(text, str):
            raise PingLlmError(f"{text}: write {collapsed[1]}:// with two slashes")
        written = written.replace(":/", "://", 1)  # `Path` has taken one away
    match = _SCHEME.match(written)
    if match is None:
        return Location(path=written)
    scheme, rest = match[1].lower(), written[match.end() :]
    if scheme == "file":
        if not rest.startswith("/"):
            raise PingLlmError(f"{text}: a file:// address has three slashes, such as file:///data/rows")
        return Location(path=rest)
    if scheme not in SCHEMES:
        raise PingLlmError(f"{text}: {scheme}:// is not supported; use a local path, s3://, gs:// or file:///")
    path = "/".join(part for part in rest.split("/") if part)
    if not path:
        raise PingLlmError(f"{text} names no bucket; write {scheme}://bucket/path")
    return Location(scheme=scheme, path=path)


@dataclass(frozen=True, kw_only=True, order=True)
class Location:
    scheme: str = ""
    """"s3" or "gs"; empty for a local path."""
    path: str
    """Local path, or `bucket/key`."""
    known_size: int | None = field(default=None, compare=False)
    """Bytes, where a listing has told."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}" if self.scheme else self.path

    @property
    def is_remote(self) -> bool:
        return bool(self.scheme)

    @property
    def is_local(self) -> bool:
        return not self.scheme

    @property
    def local(self) -> Path:
        if self.is_remote:
            raise PingLlmError(f"{self} is not on this machine: a local path is needed here")
        return Path(self.path)

    def __truediv__(self, name: str) -> "Location":
        return self._at(str(PurePosixPath(self.path) / (name.lstrip("/") if self.is_remote else name)))

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.path).suffix

    @property
    def parent(self) -> "Location":
        """Of a bucket, the bucket itself."""
        return self if self.is_remote and "/" not in self.path else self._at(str(PurePosixPath(self.path).parent))

    def relative_to(self, folder: "Location") -> str:
        return str(PurePosixPath(self.path).relative_to(folder.path))

    def _at(self, path: str) -> "Location":
        return replace(self, path=path, known_size=None)

    # -- asking

    def exists(self) -> bool:
        return self._store.info(self.path).kind != "missing"

    def is_dir(self) -> bool:
        return self._store.info(self.path).kind == "folder"

    def is_file(self) -> bool:
        return self._store.info(self.path).kind == "file"

    def size(self) -> int:
        """Bytes of a file."""
        return self._store.file(self.path).size if self.known_size is None else self.known_size

    def stat(self) -> Entry:
        """Size and time of a file, as its store says: whether it is still the same."""
        return self._store.file(self.path)

    def list(self, recursive: bool = False) -> "builtins.list[Location]":
        """The files of a folder, sorted, with their sizes. A folder that is not there has none."""
        found = self._store.files(self.path, recursive)
        return sorted(Location(scheme=self.scheme, path=path, known_size=size) for path, size in found)

    def glob(self, pattern: str) -> "builtins.list[Location]":
        """Files below this folder that match: `*`, `?` and `[…]` within a name, `**` through any folders."""
        wanted = pattern_of(pattern)
        return [file for file in self.list(recursive="/" in pattern) if wanted.fullmatch(file.relative_to(self))]

    # -- reading

    def read_bytes(self) -> bytes:
        return self._store.read(self.path)

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def open_input(self) -> pa.NativeFile:
        """A seekable file for Arrow readers."""
        return self._store.open_input(self.path)

    def open_stream(self) -> BinaryIO:
        """A file to be read from its beginning to its end, in large blocks underneath."""
        return self._store.open_stream(self.path)

    def open_random(self) -> RandomFile:
        """A file with `read_at(nbytes, offset)`, which several threads may call side by side."""
        return self._store.open_random(self.path)

    def download(self, target: Path, *, sha256: str | None = None, size: int | None = None) -> None:
        """Copy to a local file, which appears whole or not at all. Size, and checksum where given, are verified."""
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
        os.close(descriptor)
        unfinished = Path(name)
        try:
            self.fill(unfinished, sha256=sha256, size=size)
            unfinished.chmod(0o644)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)

    def fill(self, target: Path, *, sha256: str | None = None, size: int | None = None) -> None:
        """Write this file's bytes over those of a local one, and verify them."""
        self._store.fill(self.path, target, sha256=sha256, size=size)

    # -- writing

    def write_bytes(self, data: bytes) -> None:
        """Whole or not at all."""
        self._store.write(self.path, data)

    def write_text(self, text: str) -> None:
        self.write_bytes(text.encode())

    def check_writable(self) -> None:
        """See at once that files can be written to a remote folder, not after hours of work."""
        if self.is_remote:
            probe = self / f".writable-{uuid.uuid4().hex[:12]}"
            probe.write_bytes(b"")
            probe.delete()

    def upload(self, source: Path) -> None:
        """Copy a local file here, whole or not at all, and see that the store has all of it."""
        self._store.upload(self.path, source)

    def copy_to(self, target: "Location") -> None:
        """A copy under another name. Within one store the bytes do not pass through this machine."""
        if self.scheme == target.scheme:
            self._store.copy(self.path, target.path)
        elif self.is_local:
            target.upload(self.local)
        else:
            self.download(target.local)

    def delete(self) -> None:
        """Remove a file, if it is there."""
        self._store.delete(self.path)

    def delete_tree(self) -> None:
        """Remove a folder and all that is in it, if it is there. A bucket itself is left alone."""
        self._store.delete_tree(self.path)

    @property
    def _store(self) -> LocalStore | RemoteStore:
        return RemoteStore(self.scheme) if self.scheme else LocalStore()
