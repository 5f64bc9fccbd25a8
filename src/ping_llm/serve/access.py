"""Access to the server: its settings and limits, and the guard that every request passes before its route.

The guard checks the host name, the token, the type and size of the body, and the time that it takes to arrive. It adds
the security headers, which keep browsers from running or loading anything foreign, and logs one line per request,
without query string and headers.
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
"""A Host header: a name or an address, and optionally a port."""

OnAnswer = Callable[[str, str, int, float], None]
"""Called after every request with its method, route, status and seconds."""

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
    """Limits of a request. One beyond them is refused in one line before any work is done for it."""

    body_bytes: int = 8_000_000  # of a request, counted while it arrives
    history: int = 20_000  # measurements in one request
    questions: int = 256  # in one request
    scored: int = 5_000  # measurements whose anomaly scores are computed in one request: the latest
    seconds: float = 30.0  # from the arrival of a request to its answer
    arrival_seconds: float = 15.0  # for the head of a request to arrive, and again for its body
    waiting: int = 64  # requests that are being computed or waiting for it
    connections: int = 256
    pipelined_seconds: float = 0.005  # between pipelined requests, of all connections together


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    checkpoint: Path | None = None  # None: the completer that comes with the package
    history: tuple[str, ...] = ()  # files of measurements or folders of prepared rows
    input_options: InputOptions = AS_FOUND  # how to read them
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = field(default=None, repr=False)
    open_to_all: bool = False  # whether other machines may send requests without a token
    context: int = 1024  # measurements that the completer selects for a single pair
    accept: bool = False  # whether clients may add measurements
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.token is not None:
            if not re.fullmatch("[!-~]*", self.token):
                raise PingLlmError("the token may contain only printable ASCII characters without spaces")
            if len(self.token) < _MIN_TOKEN_LENGTH:
                raise PingLlmError(f"the token must have at least {_MIN_TOKEN_LENGTH} characters")
        elif not _is_loopback(self.host):
            if not self.open_to_all:
                raise PingLlmError(
                    f"--host {self.host} is reachable from other machines: "
                    "give --token-file, or --open-to-all if everybody may send requests"
                )
            if self.accept:
                raise PingLlmError(
                    "--accept lets clients change the answers that others get: with --open-to-all it needs a token"
                )

    @property
    def names(self) -> frozenset[str] | None:
        """Host names that a request may be addressed to; None: any.

        Without this check, a foreign page whose host name resolves to 127.0.0.1 (DNS rebinding) could send requests on
        behalf of its visitor.
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
    """Content as JSON, with null for NaN."""
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json")


def error_reply(status: int, message: Any, headers: Mapping[str, str] | None = None) -> Response:
    """An error of one line."""
    reply = json_reply({"error": " ".join(str(message).split())[:500]}, status)
    reply.headers.update(headers or {})
    return reply


class Guard:
    """An ASGI middleware around the application.

    Starlette's TrustedHostMiddleware is not used: it splits `[::1]:8000` at the first colon and replies in plain text.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, on_answer: OnAnswer) -> None:
        self._app, self._limits, self._names, self._on_answer = app, settings.limits, settings.names, on_answer
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
            """The body, which was read already, then whatever follows it."""
            return admitted.pop() if admitted else await receive()

        try:
            admitted = [{"type": "http.request", "body": await self._admit(scope, receive), "more_body": False}]
            await self._app(scope, receive_again, send_guarded)
        except HTTPException as refused:
            await error_reply(refused.status_code, refused.detail, refused.headers)(scope, receive, send_guarded)
        except Exception:
            log.exception("a request failed")
            if not status:
                await error_reply(500, "internal error: see the server's log")(scope, receive, send_guarded)
        finally:
            path = scope.get("raw_path", b"").decode("ascii", errors="replace")[:200]
            seconds = time.monotonic() - begin
            log.info("%s %s %d %.0f ms", scope["method"], path, status, 1000 * seconds)
            self._on_answer(scope["method"], getattr(scope.get("route"), "path", "other"), status, seconds)

    async def _admit(self, scope: Scope, receive: Receive) -> bytes:
        """The body of a request that is not refused.

        The body of a refused request is read to its end too: closing a connection on which more arrives resets it, and
        the client would never see the reason. A body that waits for permission (`Expect: 100-continue`) is not read.
        """
        headers, limit = Headers(scope=scope), self._limits.body_bytes
        too_large = HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request may have at most {limit:,} bytes"
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
                    if refusal is None and len(body) > limit:  # the announced length may be wrong
                        refusal = too_large
        except TimeoutError:
            too_slow = HTTPStatus.REQUEST_TIMEOUT, "the request arrived too slowly"
            raise HTTPException(*(refusal or too_slow), {"Connection": "close"}) from None
        if refusal is not None:
            raise HTTPException(*refusal)
        return bytes(body)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        """Status and reason for refusing a request, whatever its body contains."""
        host = _HOST.fullmatch(headers.get("host", ""))
        if self._names is not None and (host is None or host[1].lower() not in self._names):
            return HTTPStatus.MISDIRECTED_REQUEST, "the Host header of the request does not name this server"
        if not scope["path"].startswith(_API) and scope["path"] != METRICS:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode("latin-1", errors="replace"), self._token or b"")
        if self._token is not None and not (scheme.lower() == "bearer" and is_right):
            return HTTPStatus.UNAUTHORIZED, "this server needs a token: send it as a bearer token"
        # A page of another origin cannot send these types without a preflight request, which is never granted.
        is_file = scope["path"].endswith(("/file", "/read"))
        expected = "application/octet-stream" if is_file else "application/json"
        sent = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and sent != expected:
            return HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the body must be sent with Content-Type: {expected}"
        return None
