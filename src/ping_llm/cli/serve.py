"""`ping-llm serve`: a web page and a JSON API over a trained model."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from typer import Option

from ping_llm.cli.options import AnyCheckpoint
from ping_llm.core.console import err
from ping_llm.core.errors import PingLlmError, explained, need

_VARIABLE = "PING_LLM_TOKEN"


def serve(
    checkpoint: AnyCheckpoint = None,
    rows: Annotated[list[str] | None, Option(help="Known measurements: rows or files; may be repeated.")] = None,
    host: Annotated[str, Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen at; 0: any that is free.")] = 8000,
    token: Annotated[
        str | None, Option(help=f"Token that clients must send. Others may see it here: --token-file or {_VARIABLE}.")
    ] = None,
    token_file: Annotated[Path | None, Option(help="File whose first line is the token.")] = None,
    open_to_all: Annotated[bool, Option("--open-to-all", help="Let other machines ask without a token.")] = False,
    context: Annotated[int, Option(min=8, max=4096, help="Measurements in a context of the completer.")] = 256,
    max_body_mb: Annotated[float, Option(min=0.01, help="Largest request.")] = 8.0,
    max_history: Annotated[int, Option(min=1, help="Most measurements in a request.")] = 20_000,
    max_questions: Annotated[int, Option(min=1, help="Most questions in a request.")] = 256,
    max_scored: Annotated[int, Option(min=1, help="Most measurements whose anomaly score is computed.")] = 5_000,
    max_seconds: Annotated[float, Option(min=0.1, help="Longest time for an answer.")] = 30.0,
) -> None:
    """Serve a web page and a JSON API: predictions to look at and to query.

    Without `--checkpoint`, the completer that comes with ping-llm answers. `--rows` names known measurements, whose
    addresses the page offers; without it, you give addresses and measurements yourself.

    Only this machine has access, unless `--host` says otherwise. Nothing that is sent is kept, and no file is read but
    those that are named here.

    Examples:

        ping-llm serve --rows my_pings.csv
        ping-llm serve --checkpoint runs/ping-llm/my-run --rows data/probe_rows --port 8080
    """
    need("fastapi", "serve", "ping-llm serve")
    need("uvicorn", "serve", "ping-llm serve")
    from ping_llm.serve.access import Limits, ServeSettings
    from ping_llm.serve.server import serve as answer

    sizes = {"history": max_history, "questions": max_questions, "scored": max_scored}
    settings = ServeSettings(
        checkpoint=checkpoint,
        rows=tuple(rows or ()),
        host=host,
        port=port,
        token=_token(token, token_file),
        open_to_all=open_to_all,
        context=context,
        limits=Limits(body_bytes=int(max_body_mb * 1_000_000), seconds=max_seconds, **sizes),
    )
    with suppress(KeyboardInterrupt):
        answer(settings)
    err.print("stopped")


def _token(given: str | None, file: Path | None) -> str | None:
    if given is not None and file is not None:
        raise PingLlmError("give --token or --token-file, not both")
    if file is None:
        return given if given is not None else os.environ.get(_VARIABLE) or None
    with explained(f"cannot read the token file {file}", OSError, UnicodeDecodeError):
        lines = file.read_text(encoding="utf-8").splitlines()
    if not lines or not lines[0].strip():
        raise PingLlmError(f"the first line of the token file {file} must be the token")
    return lines[0].strip()
