"""A JSON array of any size becomes one element per line, in bounded memory and without parsing it.

The API returns all results of a measurement as one array. Only two facts about it are needed to cut it up: which
brackets and commas stand outside strings, and how deep they are nested. Both are running sums over the bytes, so
numpy finds them block by block at 300 MB/s, and the rest of the importer knows only lines.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from ping_llm.errors import PingLlmError

_QUOTE, _COMMA, _OPEN, _CLOSE, _NEWLINE, _SPACE = b'",[]\n '

_MARKS: Final = bytes(byte in b'",[]{}' for byte in range(256))
_WITHOUT_NEWLINES: Final = bytes.maketrans(b"\n", b" ")

_NESTING: Final = np.zeros(256, dtype=np.int8)
_NESTING[list(b"[{")] = 1
_NESTING[list(b"]}")] = -1

_BACKSLASHES: Final = re.compile(rb"\\\\*")  # not rb"\\+", which is 20 times slower: it has no literal to search for


def array_as_lines(blocks: Iterable[bytes], name: str) -> Iterator[bytes]:
    """The same bytes with each comma between elements turned into a newline, and each newline into a space.

    Several arrays one after the other (concatenated downloads) are fine. Brackets that do not match raise: after them
    nobody can tell where an element ends.
    """
    depth, in_string, elements = 0, 0, 0
    held = b""  # a backslash at the end of a block belongs to the character that follows
    for block in blocks:
        text = held + block
        held = b"\\" if (len(text) - len(text.rstrip(b"\\"))) % 2 else b""
        text = text.removesuffix(held)
        data = np.frombuffer(bytearray(text).translate(_WITHOUT_NEWLINES), dtype=np.uint8)
        marks = np.flatnonzero(np.frombuffer(text.translate(_MARKS), dtype=bool))
        kinds = data[marks]
        quotes = kinds == _QUOTE
        escaped = [run.end() for run in _BACKSLASHES.finditer(text) if len(run[0]) % 2]
        if escaped:
            quotes &= ~np.isin(marks, escaped)
        strings = in_string + np.cumsum(quotes, dtype=np.int32)
        outside = strings & 1 == 0
        steps = _NESTING[kinds] * outside
        after = depth + np.cumsum(steps, dtype=np.int32)
        before = after - steps

        opening = (before == 0) & (steps != 0)
        closing = (after == 0) & (steps < 0)
        separating = outside & (before == 1) & (kinds == _COMMA)
        if np.any(kinds[opening] != _OPEN) or np.any(kinds[closing] != _CLOSE):
            raise PingLlmError(f"{name}: brackets do not match after element {elements:,}; download the file again")
        data[marks[opening]] = _SPACE
        data[marks[separating | closing]] = _NEWLINE

        elements += int(np.count_nonzero(separating | closing))
        if len(marks):
            depth, in_string = int(after[-1]), int(strings[-1]) & 1
        yield data.tobytes()
    if depth or in_string or held:
        raise PingLlmError(
            f"{name}: the array is cut off or damaged after element {elements:,}; download the file again"
        )
