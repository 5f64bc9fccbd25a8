"""Files of documents: which ones a pattern means, whether they are of the right kind, and what identifies them."""

import hashlib
import json
from fractions import Fraction
from pathlib import Path
from typing import Final

from ping_llm.config import Config
from ping_llm.config.blend import Blend, parse_blend
from ping_llm.errors import PingLlmError

_PIECE: Final = 1 << 16

_RIEGELI: Final = bytes.fromhex("83af70d10d884a3f0000000000000000")
"""The header that every ArrayRecord file begins with."""

_KINDS: Final = {"arrayrecord": "ArrayRecord", "parquet": "Parquet", "tfrecord": "TFRecord"}


def matching(pattern: str, key: str) -> tuple[Path, ...]:
    """The files that a pattern names, in the order of their names."""
    if "://" in pattern:
        raise PingLlmError(f"{key}: {pattern} is not a local path; documents are read from this machine's disks only")
    path = Path(pattern).expanduser()
    found = tuple(sorted(p for p in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if p.is_file()))
    if not found:
        raise PingLlmError(f"{key}: no file matches {pattern}")
    return found


def check_kind(files: tuple[Path, ...], wanted: str, key: str) -> None:
    """Every file begins as those of its kind do."""
    for file in files:
        found = _kind(file)
        if found != wanted:
            what = f"is a {_KINDS[found]} file" if found else "is not"
            advice = f"; set grain_file_type={found}" if found and key.startswith("grain") else ""
            raise PingLlmError(f"{key}: {_KINDS[wanted]} files are wanted, but {file} {what}{advice}")


def _kind(file: Path) -> str | None:
    size = file.stat().st_size
    with file.open("rb") as data:
        head = data.read(16)
        data.seek(max(0, size - 4))
        tail = data.read()
    if head[:4] == b"PAR1" and tail == b"PAR1":
        return "parquet"
    if head.startswith(_RIEGELI):
        return "arrayrecord"
    length = int.from_bytes(head[:8], "little")
    return "tfrecord" if size == 0 or (len(head) > 12 and length + 16 <= size) else None


def fingerprint(files: tuple[Path, ...]) -> str:
    """Of names, sizes, and the first and last bytes of files, where their tables of contents are: not all is read."""
    hashed = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        hashed.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as data:
            hashed.update(data.read(_PIECE))
            data.seek(max(0, size - _PIECE))
            hashed.update(data.read(_PIECE))
    return hashed.hexdigest()[:16]


def blend_of(config: Config) -> Blend:
    """The patterns that `grain` trains on with their shares: from the key, or from the JSON file that it names."""
    if path := config.grain_train_mixture_config_path:
        if config.grain_train_files:
            raise PingLlmError("set grain_train_files or grain_train_mixture_config_path, not both")
        return _mixture(Path(path))
    if not config.grain_train_files:
        raise PingLlmError("grain_train_files is not set: give a pattern of the training files")
    return parse_blend(config.grain_train_files)


def _mixture(file: Path) -> Blend:
    wrong = f"grain_train_mixture_config_path={file}"
    try:
        value = json.loads(file.read_text())
    except OSError as error:
        raise PingLlmError(f"{wrong} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise PingLlmError(f"{wrong} is not JSON: {error}") from None
    if not isinstance(value, dict) or not value:
        raise PingLlmError(f'{wrong}: write {{"name": {{"path": pattern, "weight": number}}, …}}')
    parts: dict[str, Fraction] = {}
    for name, part in value.items():
        if not isinstance(part, dict) or not isinstance(part.get("path"), str) or "weight" not in part:
            raise PingLlmError(f'{wrong}: {name!r} needs a "path" and a "weight"')
        weight = part["weight"]
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 1e15:
            raise PingLlmError(f"{wrong}: the weight of {name!r} must be a number from 0 up, not {weight!r}")
        if part["path"] in parts:
            raise PingLlmError(f"{wrong}: {part['path']} is there twice; give it once, with the sum of the weights")
        parts[part["path"]] = Fraction(str(weight))
    total = sum(parts.values())
    if not total:
        raise PingLlmError(f"{wrong}: the weights are all 0; at least one must be positive")
    return tuple((pattern, weight / total) for pattern, weight in parts.items())
