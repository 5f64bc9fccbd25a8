"""The application: routes of the API, the page and its files, and errors as one line of JSON."""

import hashlib
import mimetypes
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from ping_llm import __version__
from ping_llm.errors import PingLlmError
from ping_llm.serve import api, data_api, schemas
from ping_llm.serve.model_thread import BusyError
from ping_llm.serve.protect import Protected, problem
from ping_llm.serve.replies import json_reply
from ping_llm.serve.service import Service
from ping_llm.serve.settings import ServeSettings
from ping_llm.serve.uploads import TooManyError

_FILES: Final = Path(__file__).parent / "static"
_PALETTE: Final = Path(__file__).parents[1] / "report" / "style.css"
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
