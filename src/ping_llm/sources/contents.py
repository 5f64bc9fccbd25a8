"""The bytes of a measurement file: what they begin with, decompressed, and arrays as text."""

import contextlib
import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

try:
    import lzma
except ModuleNotFoundError:  # Python may be built without
    lzma = None  # type: ignore[assignment]

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow_csv

from ping_llm.core.errors import MeasurementError, PingLlmError, explained, one_line
from ping_llm.storage import Location, locate

BLOCK_BYTES: Final = 1 << 16
"""Of a file, what tells its format and how it is to be read."""

_FOREIGN: Final = (
    (rb"PK\x03\x04.{26,60}(?:\[Content_Types\]|_rels/|xl/|mimetype)", "a spreadsheet: save the table as CSV"),
    (rb"\xd0\xcf\x11\xe0", "an old spreadsheet: save the table as CSV"),
    (
        rb"PK\x03\x04|Rar!|7z\xbc\xaf|.{257}ustar",
        "an archive: unpack it, and give the measurements in it",
    ),
    (rb"(?:.{512})?\x89HDF|CDF[\x01\x02\x05]", "HDF5, NetCDF or MATLAB 7.3: save the table as CSV or .npy"),
    (rb"RDX[23]|X\n\0\0\0[\x02\x03]|RDA[23]|X\n\0", "R data: save the table with write.csv"),
    (rb"\x80[\x02-\x05][\x95c}\](]", "a Python pickle: save the table with to_csv or to_parquet"),
    (rb"SQLite format 3", "an SQLite database: export the table, as sqlite3 -header -csv does"),
    (rb"ARROW1|FEA1|Obj\x01|ORC[^ -~]", "Arrow, Avro or ORC: save the table as Parquet or CSV"),
    (rb"(?:\xd4\xc3\xb2\xa1|\xa1\xb2\xc3\xd4|\x0a\x0d\x0d\x0a)", "a packet capture: it has packets, not RTTs"),
    (rb"\x12\x05\0", "scamper's own format: give the output of sc_warts2json"),
    (rb"%PDF", "a PDF: save its table as CSV"),
    (rb"(?i:\s*<(?:!DOCTYPE\s+html|html))", "a web page: save its table as CSV"),
    (rb"\s*<\?xml(?:(?!<rrd>).)*\Z", "XML: save the measurements as CSV or JSON (mtr: --json in place of --xml)"),
    (rb"\s*\[\s*\[", "JSON of lists without names: save the table as CSV"),
    (rb"\s*traceroute6? to ", "output of traceroute, which has hops: use ping, fping or mtr --json"),
    (rb"\s*Starting Nping", "output of nping: use ping or fping"),
    (rb"(?:-{20,}\s+)?(?:Client connecting to|Connecting to host|Server listening on)", "output of iperf: use ping"),
)
"""What other files begin with, what they are, and what to do."""


def refuse_foreign(path: str, start: bytes) -> None:
    for begins, what in _FOREIGN:
        if re.match(begins, start, re.DOTALL):
            raise PingLlmError(f"{path} is {what}")


_CODECS: Final = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"\xfd7zXZ": "xz",
}
"""By the first bytes. Arrow knows all but xz."""

UNPACKING_ERRORS: Final = (OSError, EOFError, *((lzma.LZMAError,) if lzma else ()))


def open_text(path: str) -> pa.NativeFile:
    """The bytes of a file, decompressed; of what numpy has saved, those of a text table of the same numbers."""
    file = open_stored(locate(path))
    start = bytes(file.read(64))
    file.seek(0)
    if start.startswith((b"\x93NUMPY", b"MATLAB 5.0")) or (start.startswith(b"PK\x03\x04") and b".npy" in start):
        return _array_as_text(file, path)
    return decompressed(file)


def _array_as_text(file: Any, path: str) -> pa.NativeFile:
    """The one array of two dimensions in a .npy, .npz or .mat file; names of as many nodes may be beside it."""
    with explained(f"cannot read {path}", ValueError, MemoryError, TypeError), file:
        content = file.read()
        if content.startswith(b"MATLAB"):
            from scipy.io import loadmat  # type: ignore[import-untyped]

            loaded = {name: _as_text(array) for name, array in loadmat(io.BytesIO(content)).items() if name[:2] != "__"}
        else:
            loaded = np.load(io.BytesIO(content))
        arrays = [loaded] if isinstance(loaded, np.ndarray) else list(loaded.values())
    tables = [array for array in arrays if array.ndim == 2 and array.dtype.kind in "iuf"]
    if len(tables) != 1:
        raise PingLlmError(f"{path}: has {len(tables)} arrays of numbers in two dimensions, not one: save it alone")
    names = [array.tolist() for array in arrays if array.dtype.kind == "U" and array.shape == tables[0].shape[:1]]
    columns = {str(i): column for i, column in enumerate(tables[0].astype(np.float64).T)}
    if names and len(columns) == len(names[0]):
        columns = {"": names[0], **dict(zip(names[0], columns.values(), strict=True))}
    text = io.BytesIO()
    arrow_csv.write_csv(pa.table(columns), text, arrow_csv.WriteOptions(include_header=bool(names)))
    return pa.BufferReader(text.getvalue())


def _as_text(array: Any) -> Any:
    """A cell array of MATLAB's that holds a text in each cell, as a list of texts; any other array as it is."""
    if array.dtype != object or not all(getattr(cell, "dtype", array.dtype).kind == "U" for cell in array.flat):
        return array
    return np.array(["".join(cell.flat) for cell in array.flat])


def open_stored(where: Location) -> Any:
    """The bytes of a file as they are."""
    return where.open_random() if where.is_local else where.open_stream()


def decompressed(file: Any) -> pa.NativeFile:
    start = bytes(file.read(6))
    file.seek(0)
    codec = next((codec for magic, codec in _CODECS.items() if start.startswith(magic)), None)
    if codec == "xz":
        if lzma is None:
            raise PingLlmError("this Python was built without xz: decompress the file first")
        return pa.PythonFile(lzma.open(file), mode="r")
    return pa.input_stream(file, compression=codec)


@contextlib.contextmanager
def readable(path: str | Path | Location) -> Iterator[None]:
    """What goes wrong becomes an error of one line."""
    try:
        yield
    except (*UNPACKING_ERRORS, pa.ArrowException, UnicodeDecodeError, csv.Error, TypeError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise PingLlmError(f"cannot read {path}: {error.strerror}") from error
        raise MeasurementError(f"cannot read {path}: {one_line(error, 300)}") from error  # damaged
