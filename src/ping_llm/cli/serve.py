"""`ping-llm serve`: a web page and a JSON API over a trained model."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from typer import Option

from ping_llm.cli.options import AnyCheckpoint, HowToRead
from ping_llm.core.console import err
from ping_llm.core.errors import PingLlmError, explained, need

_VARIABLE = "PING_LLM_TOKEN"


def serve(
    checkpoint: AnyCheckpoint = None,
    rows: Annotated[list[str] | None, Option(help="Known measurements: rows or files; may be repeated.")] = None,
    how: HowToRead = None,
    host: Annotated[str, Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen at; 0: any that is free.")] = 8000,
    token: Annotated[
        str | None, Option(help=f"Token that clients must send. Others may see it here: --token-file or {_VARIABLE}.")
    ] = None,
    token_file: Annotated[Path | None, Option(help="File whose first line is the token.")] = None,
    open_to_all: Annotated[bool, Option("--open-to-all", help="Let other machines ask without a token.")] = False,
    context: Annotated[int, Option(min=8, max=4095, help="As in `ping-llm predict`.")] = 1024,
    follow: Annotated[
        list[str] | None,
        Option(help="CSV or JSON lines that grow, or prometheus+http://HOST:PORT. May be repeated."),
    ] = None,
    accept: Annotated[
        bool, Option("--accept", help="Let clients add measurements: POST /api/v1/measurements.")
    ] = False,
    watch: Annotated[
        Path | None, Option(help="CSV of the pairs that /metrics is about.", show_default="those measured most")
    ] = None,
    max_pairs: Annotated[int, Option(min=1, max=10_000, help="Most pairs that /metrics is about.")] = 200,
    refresh: Annotated[float, Option(min=1.0, help="Seconds between two looks for new measurements.")] = 15.0,
    max_body_mb: Annotated[float, Option(min=0.01, help="Largest request.")] = 8.0,
    max_history: Annotated[int, Option(min=1, help="Most measurements in a request.")] = 20_000,
    max_questions: Annotated[int, Option(min=1, help="Most questions in a request.")] = 256,
    max_scored: Annotated[int, Option(min=1, help="Most measurements whose anomaly score is computed.")] = 5_000,
    max_seconds: Annotated[float, Option(min=0.1, help="Longest time for an answer.")] = 30.0,
) -> None:
    """Serve a web page and a JSON API: predictions to look at and to query.

    Without `--checkpoint`, the completer that comes with ping-llm answers. `--rows` names known measurements, whose
    addresses the page offers; without it, you give addresses and measurements yourself.

    Only this machine has access, unless `--host` says otherwise. Nothing that is sent is kept (but measurements, with
    `--accept`), and no file is read but those that are named here.

    With `--follow`, `--accept` or `--watch`, `/metrics` tells Prometheus what is expected of each pair, and how unusual
    its latest measurement was.

    Examples:

        ping-llm serve --rows my_pings.csv
        ping-llm serve --follow pings.csv --watch pairs.csv
        ping-llm serve --checkpoint runs/ping-llm/my-run --rows data/probe_rows --port 8080
    """
    need("fastapi", "serve", "ping-llm serve")
    need("uvicorn", "serve", "ping-llm serve")
    need("prometheus_client", "serve", "ping-llm serve")
    from ping_llm.serve.access import Limits, ServeSettings
    from ping_llm.serve.server import serve as answer
    from ping_llm.serve.watch import WatchSettings, feeds_of, read_pairs

    sizes = {"history": max_history, "questions": max_questions, "scored": max_scored}
    settings = ServeSettings(
        checkpoint=checkpoint,
        rows=tuple(rows or ()),
        input_options=how,
        host=host,
        port=port,
        token=_token(token, token_file),
        open_to_all=open_to_all,
        context=context,
        accept=accept,
        limits=Limits(body_bytes=int(max_body_mb * 1_000_000), seconds=max_seconds, **sizes),
    )
    watched = None
    if follow or accept or watch:
        watched = WatchSettings(
            feeds=feeds_of(follow or ()),
            pairs=read_pairs(watch) if watch else None,
            max_pairs=max_pairs,
            refresh_seconds=refresh,
        )
    with suppress(KeyboardInterrupt):
        answer(settings, watched)
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
