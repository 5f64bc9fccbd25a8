"""`ping-llm serve`: a web page and a JSON API for a trained model."""

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
    history: Annotated[
        list[str] | None,
        Option("--history", "--rows", help="Known measurements: file, folder, glob or prepared rows; may be repeated."),
    ] = None,
    how: HowToRead = None,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    token: Annotated[
        str | None, Option(help=f"Token that clients must send. Safer: --token-file, or the variable {_VARIABLE}.")
    ] = None,
    token_file: Annotated[Path | None, Option(help="File whose first line is the token.")] = None,
    open_to_all: Annotated[bool, Option("--open-to-all", help="Serve other machines without a token.")] = False,
    context: Annotated[int, Option(min=8, max=4095, help="As in `ping-llm predict`.")] = 1024,
    follow: Annotated[
        list[str] | None,
        Option(help="A growing file of CSV or JSON lines, or prometheus+http://HOST:PORT; may be repeated."),
    ] = None,
    accept: Annotated[
        bool, Option("--accept", help="Let clients add measurements: POST /api/v1/measurements.")
    ] = False,
    watch: Annotated[
        Path | None,
        Option(help="File of pairs for /metrics: src_addr, dst_addr.", show_default="those measured most"),
    ] = None,
    max_pairs: Annotated[int, Option(min=1, max=10_000, help="Pairs in /metrics, at most.")] = 200,
    refresh: Annotated[float, Option(min=1.0, help="Seconds between two checks for new measurements.")] = 15.0,
    max_body_mb: Annotated[float, Option(min=0.01, help="Size of a request, at most.")] = 8.0,
    max_history: Annotated[int, Option(min=1, help="Measurements in a request, at most.")] = 20_000,
    max_questions: Annotated[int, Option(min=1, help="Questions in a request, at most.")] = 256,
    max_scored: Annotated[int, Option(min=1, help="Measurements scored in a request, at most.")] = 5_000,
    max_seconds: Annotated[float, Option(min=0.1, help="Seconds for an answer, at most.")] = 30.0,
) -> None:
    """Serve predictions as a web page and a JSON API.

    Without `--checkpoint`, the completer that comes with ping-llm answers. The page suggests the addresses of the
    measurements in `--history`; without it, you give addresses and measurements in the page or in each request.

    Only this machine has access, unless `--host` says otherwise. Nothing that clients send is kept (except
    measurements, with `--accept`), and no files are read except those named here.

    With `--follow`, `--accept` or `--watch`, `/metrics` exports the prediction of each pair and the anomaly score of
    its latest measurement to Prometheus.

    Examples:

        ping-llm serve --history my_pings.csv
        ping-llm serve --follow pings.csv --watch pairs.csv
        ping-llm serve --checkpoint runs/ping-llm/my-run --history data/probe_rows --port 8080
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        need(package, "serve", "ping-llm serve")
    from ping_llm.serve.access import Limits, ServeSettings
    from ping_llm.serve.feeds import feeds_of, read_pairs
    from ping_llm.serve.server import serve as answer
    from ping_llm.serve.watch import WatchSettings

    limits = Limits(
        body_bytes=int(max_body_mb * 1_000_000),
        history=max_history,
        questions=max_questions,
        scored=max_scored,
        seconds=max_seconds,
    )
    settings = ServeSettings(
        checkpoint=checkpoint,
        history=tuple(history or ()),
        input_options=how,
        host=host,
        port=port,
        token=_token(token, token_file),
        open_to_all=open_to_all,
        context=context,
        accept=accept,
        limits=limits,
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
