"""The application: routes of the API, the page and its files, and errors as one line of JSON."""

import asyncio
import hashlib
import logging
import mimetypes
import os
import socket
import sys
from pathlib import Path
from typing import Any, Final

import h11
import jax
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ping_llm import __version__
from ping_llm.core.console import err
from ping_llm.core.errors import PingLlmError
from ping_llm.serve import api, schemas
from ping_llm.serve import api as data_api
from ping_llm.serve.answers import Answers, steady_predictor, warm_up
from ping_llm.serve.api import Service
from ping_llm.serve.model_thread import BusyError, ModelThread
from ping_llm.serve.protect import Protected, problem
from ping_llm.serve.questions import json_reply
from ping_llm.serve.settings import ServeSettings
from ping_llm.serve.store import TooManyError, read_known

_FILES: Final = Path(__file__).parent / "static"
_PALETTE: Final = Path(__file__).parents[1] / "report" / "static" / "style.css"
_PAGES: Final = {"/": "index.html", "/docs": "docs.html"}


def make_app(service: Service, settings: ServeSettings) -> ASGIApp:
    app = FastAPI(
        title="ping-llm",
        version=__version__,
        description="Predicted network latencies, as distributions. All RTTs are in ms.",
        docs_url=None,  # those of FastAPI load their scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    app.include_router(api.router)
    app.include_router(data_api.router)
    _add_health(app)
    _add_files(app)
    _add_errors(app)
    if settings.token is not None:
        _ask_for_token(app)
    return Protected(app, settings)


def _add_health(app: FastAPI) -> None:
    @app.get("/healthz", response_model=schemas.Health)
    async def healthz(request: Request) -> Response:
        """Whether the server is there; "warming": some answers take seconds still."""
        return json_reply({"status": "ok" if request.app.state.service.warm else "warming"})


def _add_files(app: FastAPI) -> None:
    """All there are, read once: a path that names nothing of them cannot name anything else."""
    files = {f"/static/{path.name}": path for path in sorted(_FILES.iterdir()) if path.is_file()}
    files |= {path: _FILES / name for path, name in _PAGES.items()} | {"/static/palette.css": _PALETTE}
    for path, file in files.items():
        _add_file(app, path, file.read_bytes(), mimetypes.guess_type(file.name)[0] or "application/octet-stream")


def _add_file(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'

    @app.get(path, include_in_schema=False)
    async def file(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        return Response(content, media_type=kind, headers={"ETag": tag})


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(PingLlmError)
    async def of_user(request: Request, error: PingLlmError) -> Response:
        status = {TooManyError: 413, BusyError: 503}.get(type(error), 422)
        reply: Response = problem(status, error)
        if status == 503:
            reply.headers["Retry-After"] = "2"
        return reply

    @app.exception_handler(RequestValidationError)
    async def of_schema(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return problem(422, f"{where}: {first['msg']}" if where else first["msg"])

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        reply: Response = problem(error.status_code, error.detail)
        reply.headers.update(error.headers or {})
        return reply


def _ask_for_token(app: FastAPI) -> None:
    """Say in the OpenAPI document that the API wants one."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        document = described()
        document.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path, methods in document["paths"].items():
            for operation in methods.values() if path.startswith("/api/") else ():
                operation["security"] = [{"token": []}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]


# A server from beginning to end: load, listen, answer, stop.

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
