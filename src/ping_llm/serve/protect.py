"""What every request passes before it reaches a route: host name, token, type and size of its body, and time to arrive.

Also what every reply carries (headers that keep a browser from running or fetching anything foreign), and the log: one
line a request, without its query and headers.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ping_llm.serve.questions import json_reply
from ping_llm.serve.settings import ServeSettings

log = logging.getLogger("ping_llm.serve")

_API: Final = "/api/"
_JSON: Final = "application/json"
_FILE: Final = "application/octet-stream"
_UNREAD: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE})
"""After which the rest of a body may still come, which nobody will read."""

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


class RefusedError(Exception):
    """A request that is answered at once."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message


class Protected:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app, self._limits, self._names = app, settings.limits, settings.names
        self._token = None if settings.token is None else settings.token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.monotonic(), 0

        async def guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _add_headers(MutableHeaders(scope=message), scope["path"])
            await send(message)

        try:
            body = await self._admit(scope, receive)
            await self._app(scope, _replayed(body, receive), guarded)
        except RefusedError as refused:
            reply = json_reply({"error": refused.message}, refused.status)
            if refused.status in _UNREAD:
                reply.headers["Connection"] = "close"
            await reply(scope, receive, guarded)
        except Exception:
            log.exception("a request failed")
            if not status:
                await json_reply({"error": "the server made a mistake; its log says more"}, 500)(
                    scope, receive, guarded
                )
        finally:
            path = scope.get("raw_path", b"").decode("ascii", errors="replace")[:200]
            log.info("%s %s %d %.0f ms", scope["method"], path, status, 1000 * (time.monotonic() - begin))

    async def _admit(self, scope: Scope, receive: Receive) -> bytes:
        """The body of a request that may be answered."""
        headers = Headers(scope=scope)
        if self._names is not None and _host_name(headers.get("host", "")) not in self._names:
            raise RefusedError(HTTPStatus.MISDIRECTED_REQUEST, "this server is not known by the name in your request")
        if scope["path"].startswith(_API):
            self._check_token(headers.get("authorization", ""))
            if scope["method"] == "POST":
                _check_type(scope["path"], headers.get("content-type", ""))
        return await self._read(headers.get("content-length", "0"), receive)

    def _check_token(self, authorization: str) -> None:
        if self._token is None:
            return
        scheme, _, given = authorization.partition(" ")
        is_right = hmac.compare_digest(given.strip().encode("latin-1", errors="replace"), self._token)
        if scheme.lower() != "bearer" or not is_right:
            raise RefusedError(HTTPStatus.UNAUTHORIZED, "this server asks for a token: send it as a bearer token")

    async def _read(self, announced: str, receive: Receive) -> bytes:
        """Counted while it comes in: what a client announces need not be true."""
        most = self._limits.body_bytes
        too_large = RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request may have {most:,} bytes at most")
        if announced.isdigit() and int(announced[:20]) > most:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._limits.arrival_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RefusedError(HTTPStatus.BAD_REQUEST, "the request ended before it was complete")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise RefusedError(HTTPStatus.REQUEST_TIMEOUT, "the request came too slowly") from None


def _host_name(host: str) -> str:
    """Without the port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].lower()


def _check_type(path: str, content_type: str) -> None:
    """Types that a page of another origin cannot send without being allowed to."""
    wanted = _FILE if path.endswith(("/file", "/measurements")) else _JSON
    if content_type.partition(";")[0].strip().lower() != wanted:
        raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the body must be sent with Content-Type: {wanted}")


def _replayed(body: bytes, receive: Receive) -> Receive:
    messages: Iterable[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def again() -> Message:
        return next(iter(messages), None) or await receive()

    return again


def _add_headers(headers: MutableHeaders, path: str) -> None:
    for name, value in HEADERS.items():
        headers[name] = value
    headers.setdefault("Cache-Control", "no-store" if path.startswith(_API) else "no-cache")


def problem(status: int, message: Any) -> Any:
    """An error of one line."""
    return json_reply({"error": " ".join(str(message).split())[:500]}, status)
