"""`ping-llm serve`: the application (API, web page, errors as one line of JSON) and the process that runs it."""

import asyncio
import errno
import logging
import socket
import sys
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any, Final

import h11
import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ping_llm import __version__
from ping_llm.core.console import err
from ping_llm.core.errors import PingLlmError
from ping_llm.rows.measurement_set import MeasurementSet
from ping_llm.serve import api, schemas
from ping_llm.serve.access import METRICS, Guard, Limits, ServeSettings, error_reply, json_reply, log
from ping_llm.serve.answers import ModelAnswers, steady_predictor
from ping_llm.serve.api import Service
from ping_llm.serve.feeds import from_queue
from ping_llm.serve.jobs import BusyError, ModelThread
from ping_llm.serve.metrics import CONTENT_TYPE
from ping_llm.serve.store import TooManyError, read_store
from ping_llm.serve.watch import Watcher, WatchSettings
from ping_llm.sources.nodes import read_nodes

_FILES: Final = Path(__file__).parent / "static"
_CHART_FILES: Final = Path(__file__).parents[1] / "report" / "static"  # shared with the run report


def make_app(service: Service, settings: ServeSettings) -> ASGIApp:
    app = FastAPI(
        title="ping-llm",
        version=__version__,
        description="Predicted network latencies, as distributions. All RTTs are in ms.",
        docs_url=None,  # FastAPI's own pages load scripts from another site
        redoc_url=None,
    )
    app.state.service = service
    # The guard checks the token before it reads the body; this only describes it in the OpenAPI document.
    described = [Depends(HTTPBearer(scheme_name="token", auto_error=False))] if settings.token is not None else []
    app.include_router(api.router, dependencies=described)
    app.mount("/static/shared", StaticFiles(directory=_CHART_FILES))
    app.mount("/static", StaticFiles(directory=_FILES))

    for path, page in (("/", "index.html"), ("/docs", "docs.html")):
        app.add_route(path, partial(_page, _FILES / page), include_in_schema=False)

    @app.get("/healthz", response_model=schemas.Health)
    async def healthz() -> Response:
        """Whether the server runs; while it is "warming", some answers take seconds."""
        return json_reply({"status": "ok" if service.warm else "warming"})

    @app.get(METRICS, include_in_schema=False)
    async def metrics() -> Response:
        service.metrics.warm.set(service.warm)
        service.metrics.known.set(len(service.store))
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    for kind in (PingLlmError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _explain)
    return Guard(app, settings, service.metrics.answered)


async def _page(file: Path, request: Request) -> Response:
    return FileResponse(file)


async def _explain(request: Request, error: Exception) -> Response:
    """An error reply of one line."""
    if isinstance(error, HTTPException):
        advice = ": /docs lists the routes and their methods" if error.status_code in {404, 405} else ""
        return error_reply(error.status_code, f"{error.detail}{advice}", error.headers)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return error_reply(422, f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
        field = ".".join(str(part) for part in first["loc"][1:])
        return error_reply(422, f"{field}: {first['msg']}" if field else first["msg"])
    if isinstance(error, BusyError):
        return error_reply(503, error, {"Retry-After": str(error.retry_after)})
    return error_reply(413 if isinstance(error, TooManyError) else 422, error)


def read_places(path: str) -> list[schemas.Place]:
    """The nodes of a nodes file that have a location."""
    return [
        schemas.Place(address=one.address or one.name, name=one.name, latitude=one.latitude, longitude=one.longitude)
        for one in read_nodes(path).values()
        if one.latitude is not None and one.longitude is not None
    ]


def serve(settings: ServeSettings, watch: WatchSettings | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM; with `watch`, add the measurements of its feeds and export metrics of pairs."""
    _log_to_stderr()
    with listen(settings.host, settings.port) as listening:
        model = ModelAnswers(steady_predictor(settings.checkpoint, settings.context))
        options, limits = settings.input_options, settings.limits
        store = read_store(settings.history, options)
        places = read_places(options.nodes) if options.nodes else []
        arrivals: Queue[MeasurementSet] | None = Queue(limits.waiting) if settings.accept else None
        with ModelThread(model.forecast, limits.waiting) as thread:
            service = Service(model=model, store=store, thread=thread, limits=limits, arrivals=arrivals, places=places)
            feeds = {"post": from_queue(arrivals)} if arrivals is not None else {}
            watcher = Watcher(service, replace(watch, feeds={**watch.feeds, **feeds})) if watch is not None else None

            def warmed(done: Future[Any]) -> None:
                if done.cancelled():
                    return
                service.warm = True
                if (error := done.exception()) is not None:
                    log.error("warming up failed: %s", error)
                if watcher is not None:
                    watcher.start()

            thread.submit(model.warm_up(), background=True).add_done_callback(warmed)
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            url = f"http://{host}:{listening.getsockname()[1]}"
            err.print(f"{model.name} answers at {url} (API: {url}/docs). Ctrl-C stops it.", markup=False)
            with watcher or nullcontext():
                uvicorn.Server(server_config(service, settings)).run(sockets=[listening])


def server_config(service: Service, settings: ServeSettings) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(service, settings),
        http=_bounded_protocol(settings.limits),
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        limit_concurrency=settings.limits.connections,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=5,
        ws="none",
    )


def listen(host: str, port: int) -> socket.socket:
    family, dualstack = (socket.AF_INET6, socket.has_dualstack_ipv6()) if ":" in host else (socket.AF_INET, False)
    try:
        return socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=dualstack)
    except OSError as error:
        advice = "; choose another port with --port" if error.errno == errno.EADDRINUSE else ""
        raise PingLlmError(f"cannot listen at {host} port {port}: {error.strerror or error}{advice}") from error


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"))
    for name, level in (("ping_llm.serve", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def _bounded_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """HTTP/1.1 in which no client can hold connections by being slow, or the server's time by pipelining."""
    next_turn = 0.0

    class Bounded(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._close_soon_if(True)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._close_soon_if(self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0]))

        def connection_lost(self, exc: Exception | None) -> None:
            self._close_soon_if(False)
            super().connection_lost(exc)

        def _close_soon_if(self, is_partial: bool) -> None:
            """Close the connection unless the head of the request arrives in time."""
            if self._timer is not None and not is_partial:
                self._timer.cancel()
                self._timer = None
            elif self._timer is None and is_partial:
                self._timer = self.loop.call_later(limits.arrival_seconds, self.transport.close)

        def on_response_complete(self) -> None:
            """Pipelined requests wait in one queue for all connections."""
            nonlocal next_turn
            if not self.conn.trailing_data[0]:
                return super().on_response_complete()
            next_turn = max(self.loop.time(), next_turn) + limits.pipelined_seconds
            self.loop.call_at(next_turn, super().on_response_complete)

        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
                super().send_400_response(msg)
            else:  # a reply has begun: there cannot be another one
                self.transport.close()

    return Bounded
