"""Measurements straight from a server, written where a file could be:

    prometheus+http://host:9090/?query=…&start=…&end=…&step=…    a range query; all but the host may be left out
    atlas:1001?start=…&stop=…&probe_ids=…                        a RIPE Atlas measurement, by its number

Times are ISO 8601, epoch seconds, or before now, as `-6h`. What the server answers is written to files as it is, and
read like files that somebody has saved. Those of Atlas are kept in the cache folder, one for each page of time: what
was interrupted, or is asked again, fetches only what is missing. PING_LLM_ATLAS_URL names another server, and
PING_LLM_ATLAS_KEY an API key for measurements that are not public.
"""

import base64
import hashlib
import http.client
import json
import os
import re
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from ping_llm import __version__
from ping_llm.core.console import progress
from ping_llm.core.errors import PingLlmError, one_line, shown
from ping_llm.core.files import atomic_file
from ping_llm.sources.tools import moment
from ping_llm.storage.cache import cache_folder
from ping_llm.storage.stores import number_from_environment

_TIMEOUT_S: Final = 60.0
_TRIES: Final = 5
_MAX_ANSWER: Final = 8 << 30  # bytes of one page, which go to the disk
_SAID: Final = 2000  # bytes of an error's body


@cache
def download(source: str) -> tuple[Path, ...]:
    """The files that a source gives. Asked again, this process gets the same files."""
    if source.lower().startswith("atlas:"):
        return tuple(_atlas(source))
    _folders.append(tempfile.TemporaryDirectory(prefix="ping-llm-prometheus-"))  # until the process ends
    return tuple(prometheus(source, Path(_folders[-1].name)))


_folders: list[tempfile.TemporaryDirectory[str]] = []


def refresh() -> None:
    """Ask the servers anew from now on."""
    download.cache_clear()
    while _folders:
        _folders.pop().cleanup()


# Prometheus.

_DEFAULT_QUERY: Final = (
    '{__name__=~"probe_success|probe_duration_seconds|probe_icmp_duration_seconds|ping_rtt_seconds'
    '|smokeping_requests_total|smokeping_response_duration_seconds_(sum|count)"}'
)
_EMPTY: Final = 500  # bytes: an answer without series is shorter
_MAX_STEPS: Final = 10_000  # Prometheus answers at most 11,000 points of a series


def prometheus(source: str, folder: Path) -> Iterator[Path]:
    """Range queries, as many as it takes; each answer is a file in the folder."""
    url = urlsplit(source[len("prometheus+") :])
    given = _options(url.query, source, {"query", "start", "end", "step"})
    now = time.time()
    step = _seconds(given.get("step", "60s"), source, "step")
    end = _moment(given.get("end"), now, now, source)
    start = _moment(given.get("start"), now, end - 86_400, source)
    if step < 1 or not start < end:
        raise PingLlmError(f"{_public(url)}: start must be before end, and the step at least 1 s")
    address = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path.rstrip('/')}/api/v1/query_range"
    pages = list(_pages(start, end, step * _MAX_STEPS))
    with progress("asking Prometheus", total=len(pages)) as advance:
        for number, (first, last) in enumerate(pages):
            # Both ends of a range are in the answer.
            last = last if number == len(pages) - 1 else last - step
            query = {"query": given.get("query", _DEFAULT_QUERY), "start": first, "end": last, "step": step}
            path = folder / f"prometheus-{url.hostname}-{number:05d}.json"
            _fetch(f"{address}?{urlencode(query)}", path, _credentials(url), _public(url))
            advance()
            if path.stat().st_size > _EMPTY or b'"result":[]' not in path.read_bytes():
                yield path


def _credentials(url: SplitResult) -> dict[str, str]:
    if not url.username:
        return {}
    pair = url.netloc.rpartition("@")[0].encode()
    return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}


def _public(url: SplitResult) -> str:
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"


# RIPE Atlas.

_ATLAS: Final = "https://atlas.ripe.net/api/v2"
_PAGE_S: Final = 6 * 3600
_SETTLED_S: Final = 3600  # results of a time may arrive so much later


def _atlas(source: str) -> Iterator[Path]:
    """The results of a measurement, a file for each page of time."""
    text, _, query = source.partition(":")[2].partition("?")
    if not re.fullmatch(r"\d{1,12}", text):
        raise PingLlmError(f"{source}: write atlas:NUMBER, such as atlas:1001?start=2024-05-01T00:00Z&stop=-0h")
    given = _options(query, source, {"start", "stop", "probe_ids", "page"})
    base = os.environ.get("PING_LLM_ATLAS_URL", _ATLAS).rstrip("/")
    key = os.environ.get("PING_LLM_ATLAS_KEY")
    headers = {"Authorization": f"Key {key}"} if key else {}
    now, name = time.time(), f"atlas:{text}"
    about = _measurement(f"{base}/measurements/{text}/", headers, name)
    if about.get("type", "ping") != "ping":
        raise PingLlmError(f"{name} is a measurement of {shown(about['type'])}: only pings can be imported")
    ended = about.get("stop_time") or now
    stop = int(_moment(given.get("stop"), now, min(now, ended if isinstance(ended, int | float) else now), source))
    start = int(_moment(given.get("start"), now, stop - 86_400, source))  # a day, unless told otherwise
    page = int(_seconds(given.get("page", f"{_PAGE_S}s"), source, "page"))
    if not 0 <= start < stop or page < 60:
        raise PingLlmError(f"{source}: start must be before stop, and a page at least 60 s")

    probes = {"probe_ids": given["probe_ids"]} if "probe_ids" in given else {}
    kept = hashlib.sha256(f"{base} {probes}".encode()).hexdigest()[:12]
    folder = cache_folder() / "atlas" / f"{text}-{kept}"
    pages = list(_pages(start, stop, page, aligned=True))
    with progress(f"downloading {name}", total=len(pages)) as advance:
        for first, last in pages:
            is_open = last + _SETTLED_S > now
            path = folder / f"atlas-{text}-{int(first)}-{'open' if is_open else int(last)}.json"
            if is_open or not path.exists():
                # Both ends of a range are in the answer, and times are whole seconds.
                window = {"start": int(first), "stop": int(last) - 1, "format": "json", **probes}
                _fetch(f"{base}/measurements/{text}/results/?{urlencode(window)}", path, headers, name, end=b"]")
            advance()
            if path.stat().st_size > len("[ ]\n"):
                yield path


def _measurement(url: str, headers: Mapping[str, str], name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ping-llm-") as folder:
        path = Path(folder) / "measurement.json"
        _fetch(url, path, headers, name, limit=1 << 20)
        try:
            about = json.loads(path.read_bytes())
        except ValueError:
            about = None
    if not isinstance(about, dict):
        raise PingLlmError(f"{name}: the server's answer is not that of RIPE Atlas")
    return about


# What both need.


def _options(query: str, source: str, known: set[str]) -> dict[str, str]:
    try:
        given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        raise PingLlmError(f"{source}: what follows the question mark must be NAME=VALUE, with & between") from None
    if unknown := given.keys() - known:
        raise PingLlmError(f"{source}: {sorted(unknown)[0]!r} is none of {', '.join(sorted(known))}")
    return given


_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")


def _seconds(said: str, source: str, what: str) -> float:
    match = _SPAN.fullmatch(said)
    if match is None:
        raise PingLlmError(f"{source}: {what}={said!r} is no span of time such as 30s, 5m or 6h")
    return float(match[1]) * _UNITS[match[2] or "s"]


def _moment(said: str | None, now: float, default: float, source: str) -> float:
    if said is None:
        return default
    if said.startswith("-"):
        return now - _seconds(said[1:], source, "a time")
    found = moment(said.replace(" ", "+"))  # which is what a plus becomes in a query
    if found is None:
        raise PingLlmError(f"{source}: {said!r} is no time such as 2024-05-01T12:00Z, 1714564800 or -6h")
    return found


def _pages(start: float, stop: float, page: float, *, aligned: bool = False) -> Iterator[tuple[float, float]]:
    """Ranges that follow each other. Aligned ones are the same whatever the start: they can be used again."""
    while start < stop:
        end = min(stop, (start // page + 1) * page if aligned else start + page)
        yield start, end
        start = end


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows a server to another path only: credentials stay with whom they were given to."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            raise urllib.error.HTTPError(req.full_url, code, f"it points to {newurl}: name that server", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetch(
    url: str, path: Path, headers: Mapping[str, str], name: str, *, end: bytes = b"}", limit: int = _MAX_ANSWER
) -> None:
    """An answer of JSON becomes a file, whole or not at all. What may pass is tried again."""
    request = urllib.request.Request(
        url, headers={"User-Agent": f"ping-llm/{__version__}", "Accept": "application/json", **headers}
    )
    path.parent.mkdir(parents=True, exist_ok=True)

    def once() -> None:
        with (
            urllib.request.build_opener(_SameHost).open(request, timeout=_TIMEOUT_S) as answer,
            atomic_file(path) as unfinished,
            unfinished.open("wb") as file,
        ):
            tail, expected = b"", answer.length
            while block := answer.read(1 << 20):
                file.write(block)
                tail = (tail + block)[-64:]
                if file.tell() > limit:
                    raise PingLlmError(f"{name}: an answer of more than {limit >> 20:,} MB: ask for less at a time")
            if not tail.rstrip().endswith(end) or expected not in (None, file.tell()):
                raise ConnectionError(f"the answer was cut off after {file.tell():,} bytes, or is not JSON")

    _retried(once, name)


def _retried(action: Callable[[], None], name: str) -> None:
    wait = number_from_environment("PING_LLM_STORAGE_WAIT_S", 1.0)
    for attempt in range(1, _TRIES + 1):
        try:
            return action()
        except urllib.error.HTTPError as error:
            problem = f"HTTP status {error.code} {_said(error)}"
            passing = error.code in (408, 425, 429) or error.code >= 500
            asked = moment(error.headers.get("Retry-After") or "") if error.headers else None
            wait = max(wait, min(asked, 60.0)) if asked else wait
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            problem = one_line(reason if isinstance(reason, Exception) else error)
            passing = isinstance(reason, TimeoutError | ConnectionError | http.client.HTTPException)
        if not passing or attempt == _TRIES:
            times = f" (tried {attempt} times)" if attempt > 1 else ""
            raise PingLlmError(f"{name}: {problem}{times}") from None
        time.sleep(wait * 2 ** (attempt - 1))


def _said(error: urllib.error.HTTPError) -> str:
    """Why, in the server's words."""
    try:
        body = json.loads(error.read(_SAID))
        said = body.get("error") if isinstance(body, dict) else None
        detail = said.get("detail") if isinstance(said, dict) else said
    except (OSError, ValueError, http.client.HTTPException):
        detail = None
    return shown(detail) if detail else " ".join(str(error.reason).split())[:200]
