"""Who may query the server, and how much: settings, limits, and the guard that every request passes before its route.

The guard checks host name, token, type and size of the body, and the time it takes to arrive. It also adds what every
reply carries (headers that keep a browser from running or fetching anything foreign), and writes the log: one line per
request, without its query string and headers.
"""

import asyncio
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ping_llm.core.errors import PingLlmError
from ping_llm.sources.columns import AS_FOUND, InputOptions

log = logging.getLogger("ping_llm.serve")

_MIN_TOKEN_LENGTH: Final = 16
_API: Final = "/api/"
METRICS: Final = "/metrics"
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.IGNORECASE)
"""A Host header: a name or an address, and maybe a port."""

Answered = Callable[[str, str, int, float], None]

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one request. What lies beyond is answered by an error of one line, never by working at it."""

    body_bytes: int = 8_000_000  # of a request, counted while it arrives
    history: int = 20_000  # measurements in one request
    questions: int = 256  # in one request
    scored: int = 5_000  # measurements whose anomaly score is computed in one request: the latest
    seconds: float = 30.0  # from when a request has arrived to its answer
    arrival_seconds: float = 15.0  # for the head of a request to arrive, and again for its body
    waiting: int = 64  # requests that are being computed or wait for it
    connections: int = 256
    pipelined_seconds: float = 0.005  # between requests that did not wait for the last answer, of all connections


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    checkpoint: Path | None = None  # None: the completer that comes with the package
    rows: tuple[str, ...] = ()  # prepared rows or measurement files: the known measurements
    input_options: InputOptions = AS_FOUND
    """How the rows are to be read; a nodes file also has locations."""
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = field(default=None, repr=False)
    open_to_all: bool = False  # whether other machines may send queries without a token
    context: int = 1024  # measurements that the completer chooses for a single pair
    accept: bool = False  # whether clients may add measurements
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.token is not None and (not self.token.isascii() or not self.token.isprintable() or " " in self.token):
            raise PingLlmError("the token may hold only printable ASCII characters without spaces")
        if self.token is not None and len(self.token) < _MIN_TOKEN_LENGTH:
            raise PingLlmError(f"the token must have at least {_MIN_TOKEN_LENGTH} characters")
        if not _is_loopback(self.host) and self.token is None and not self.open_to_all:
            raise PingLlmError(
                f"--host {self.host} can be reached from other machines: "
                "give --token-file, or --open-to-all if everybody may send queries"
            )

        if not _is_loopback(self.host) and self.token is None and self.accept:
            raise PingLlmError(
                "--accept lets clients change what others are answered: on other machines they need a token"
            )

    @property
    def names(self) -> frozenset[str] | None:
        """Host names that a request may be addressed to; None: any.

        Without this check, a foreign page whose host name was pointed at 127.0.0.1 (DNS rebinding) could send queries
        on behalf of its visitor.
        """
        if self.token is not None or self.open_to_all:
            return None
        return frozenset({"localhost", "127.0.0.1", "[::1]", f"[{self.host}]" if ":" in self.host else self.host})


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def json_reply(content: Any, status: int = 200) -> Response:
    """NaN becomes null."""
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json")


def error_reply(status: int, message: Any, headers: Mapping[str, str] | None = None) -> Response:
    """An error of one line."""
    reply = json_reply({"error": " ".join(str(message).split())[:500]}, status)
    reply.headers.update(headers or {})
    return reply


class Guard:
    """Wraps the application (an ASGI middleware).

    Starlette's TrustedHostMiddleware is not used: it cuts `[::1]:8000` at its first colon, and its replies are no JSON.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, answered: Answered) -> None:
        """`answered` is told of every request: its method, route, status, and seconds."""
        self._app, self._limits, self._names, self._answered = app, settings.limits, settings.names, answered
        self._token = None if settings.token is None else settings.token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.monotonic(), 0

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store" if scope["path"].startswith(_API) else "no-cache")
            await send(message)

        async def receive_again() -> Message:
            """The body that was read already, then whatever comes after it."""
            return admitted.pop() if admitted else await receive()

        try:
            admitted = [{"type": "http.request", "body": await self._admit(scope, receive), "more_body": False}]
            await self._app(scope, receive_again, send_guarded)
        except HTTPException as refused:
            await error_reply(refused.status_code, refused.detail, refused.headers)(scope, receive, send_guarded)
        except Exception:
            log.exception("a request failed")
            if not status:
                await error_reply(500, "the server made a mistake; its log says more")(scope, receive, send_guarded)
        finally:
            path = scope.get("raw_path", b"").decode("ascii", errors="replace")[:200]
            seconds = time.monotonic() - begin
            log.info("%s %s %d %.0f ms", scope["method"], path, status, 1000 * seconds)
            self._answered(scope["method"], getattr(scope.get("route"), "path", "other"), status, seconds)

    async def _admit(self, scope: Scope, receive: Receive) -> bytes:
        """The body of a request that may be answered.

        A body that is refused is read to its end, too: closing a connection on which more arrives resets it, and the
        client would never see why. One that waits to be invited (`Expect: 100-continue`) is not.
        """
        headers, limit = Headers(scope=scope), self._limits.body_bytes
        too_large = HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request may have {limit:,} bytes at most"
        refusal, announced = self._refusal(scope, headers), headers.get("content-length", "0")
        if refusal is None and announced.isdigit() and int(announced[:20]) > limit:
            refusal = too_large
        if refusal is not None and headers.get("expect", "").lower() == "100-continue":
            raise HTTPException(*refusal, {"Connection": "close"})
        body = bytearray()
        message: Message = {"more_body": True}
        try:
            async with asyncio.timeout(self._limits.arrival_seconds):
                while message.get("more_body", False):
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise HTTPException(HTTPStatus.BAD_REQUEST, "the request ended before it was complete")
                    body += message.get("body", b"") if refusal is None else b""
                    if refusal is None and len(body) > limit:  # what a client announces need not be true
                        refusal = too_large
        except TimeoutError:
            too_slow = HTTPStatus.REQUEST_TIMEOUT, "the request came too slowly"
            raise HTTPException(*(refusal or too_slow), {"Connection": "close"}) from None
        if refusal is not None:
            raise HTTPException(*refusal)
        return bytes(body)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        """Why a request is not answered, whatever its body holds."""
        host = _HOST.fullmatch(headers.get("host", ""))
        if self._names is not None and (host is None or host[1].lower() not in self._names):
            return HTTPStatus.MISDIRECTED_REQUEST, "this server is not known by the name in your request"
        if not scope["path"].startswith(_API) and scope["path"] != METRICS:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode("latin-1", errors="replace"), self._token or b"")
        if self._token is not None and not (scheme.lower() == "bearer" and is_right):
            return HTTPStatus.UNAUTHORIZED, "this server needs a token: send it as a bearer token"
        # Types that a page of another origin cannot send without being allowed to.
        is_file = scope["path"].endswith(("/file", "/read"))
        expected = "application/octet-stream" if is_file else "application/json"
        sent = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and sent != expected:
            return HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the body must be sent with Content-Type: {expected}"
        return None
