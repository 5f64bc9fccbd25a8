"""A server from beginning to end: load, listen, answer, stop."""

import asyncio
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import h11
import jax
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ping_llm.console import err
from ping_llm.errors import PingLlmError
from ping_llm.serve.answers import Answers, steady_predictor
from ping_llm.serve.app import make_app
from ping_llm.serve.known import read_known
from ping_llm.serve.model_thread import ModelThread
from ping_llm.serve.service import Service
from ping_llm.serve.settings import ServeSettings
from ping_llm.serve.warm_up import warm_up

log = logging.getLogger("ping_llm.serve")


def serve(settings: ServeSettings) -> None:
    """Answer until Ctrl-C or SIGTERM."""
    _log_to_stderr()
    listening = _listen(settings.host, settings.port)
    with listening:
        _keep_compiled()
        answers = Answers(steady_predictor(settings.checkpoint, settings.context))
        known = read_known(settings.rows) if settings.rows else None
        with ModelThread(answers.forecast, settings.limits.waiting) as thread:
            service = Service(answers, known, thread, settings.limits)
            thread.submit(warm_up(answers), background=True).add_done_callback(lambda done: _warmed(service, done))
            config = uvicorn.Config(
                make_app(service, settings),
                http=_patient_protocol(settings.limits.arrival_seconds),
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                limit_concurrency=settings.limits.connections,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=5,
                ws="none",
            )
            _announce(settings, answers, listening.getsockname()[1])
            uvicorn.Server(config).run(sockets=[listening])


def _warmed(service: Service, done: Any) -> None:
    if done.cancelled():
        return
    if (error := done.exception()) is not None:
        log.error("warming up failed: %s", error)
    service.warm = True


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise PingLlmError(f"cannot listen at {host} port {port}: {error.strerror or error}") from error
    return listening


def _keep_compiled() -> None:
    """Keep what was compiled in the user's cache: the next start takes seconds less."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ping-llm" / "compiled"
    settings = {
        "jax_compilation_cache_dir": str(cache),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


def _announce(settings: ServeSettings, answers: Answers, port: int) -> None:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    kind = "the completer of the package" if answers.is_shipped else answers.predictor.trained.where
    err.print(f"{kind} answers at http://{host}:{port} (the API: /docs). Ctrl-C stops it.", markup=False)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"))
    for name, level in (("ping_llm.serve", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def _patient_protocol(seconds: float) -> type[asyncio.Protocol]:
    """HTTP that does not wait forever for the head of a request: each slow client would keep a connection."""

    class Patient(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._timer = self.loop.call_later(seconds, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            is_partial = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
            if self._timer is not None and not is_partial:
                self._timer.cancel()
                self._timer = None
            elif self._timer is None and is_partial:
                self._timer = self.loop.call_later(seconds, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

    return Patient
