"""What a server may be asked, by whom, and for how long."""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ping_llm.core.errors import PingLlmError

_SHORTEST_TOKEN: Final = 16


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one request. What lies beyond is answered by an error of one line, never by working at it."""

    body_bytes: int = 8_000_000
    """Of a request, counted while it arrives."""
    history: int = 20_000
    """Measurements in one request."""
    questions: int = 256
    """In one request."""
    scored: int = 5_000
    """Measurements whose surprise is computed in one request: the latest."""
    seconds: float = 30.0
    """From when a request has arrived to its answer."""
    arrival_seconds: float = 15.0
    """For the head of a request to arrive, and again for its body."""
    waiting: int = 64
    """Requests that are being computed or wait for it."""
    connections: int = 256


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    checkpoint: Path | None = None
    """None: the completer of the package."""
    rows: tuple[str, ...] = ()
    """Prepared rows or measurement files: what is known."""
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = field(default=None, repr=False)
    open_to_all: bool = False
    """Whether other machines may ask without a token."""
    context: int = 256
    """Measurements that the completer may look at for an answer."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.token is not None and (not self.token.isascii() or not self.token.isprintable() or " " in self.token):
            raise PingLlmError("the token may hold only printable ASCII characters without spaces")
        if self.token is not None and len(self.token) < _SHORTEST_TOKEN:
            raise PingLlmError(f"the token must have at least {_SHORTEST_TOKEN} characters")
        if not is_loopback(self.host) and self.token is None and not self.open_to_all:
            raise PingLlmError(
                f"--host {self.host} can be reached from other machines: "
                "give --token-file, or --open-to-all if everybody may ask"
            )

    @property
    def names(self) -> frozenset[str] | None:
        """Host names under which the server may be asked; None: under any.

        A page of somebody else's whose name was pointed at 127.0.0.1 could otherwise ask on behalf of its visitor.
        """
        if self.token is not None or self.open_to_all:
            return None
        return frozenset({"localhost", "127.0.0.1", "[::1]", f"[{self.host}]" if ":" in self.host else self.host})


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
