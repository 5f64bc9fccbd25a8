"""The routes that give and take measurements: what is known, files, and how surprising they are."""

from dataclasses import asdict
from typing import Annotated, Any, Final

import numpy as np
from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from ping_llm import __version__
from ping_llm.serve import schemas
from ping_llm.serve.known import Known, Role
from ping_llm.serve.questions import address_of
from ping_llm.serve.replies import json_reply, measured_columns
from ping_llm.serve.scoring import Scored, score
from ping_llm.serve.service import PROBLEMS, Service, service_of
from ping_llm.serve.uploads import measured_list, read_upload
from ping_llm.sources.observations import Measured

_SERIES: Final = 2_000
"""Measurements of a pair that are shown, at most."""
_SCORING_SHARE: Final = 0.7
"""Of the time of a request, for scoring. What is done by then is the answer."""

_A_FILE: Final = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}

router = APIRouter(prefix="/api/v1", responses=PROBLEMS)


@router.get("/model", response_model=schemas.ModelReply)
async def model(request: Request) -> Response:
    """What is answering, what it knows, and how much may be asked at once."""
    service = service_of(request)
    trained = service.answers.predictor.trained
    limits = asdict(service.limits)
    return json_reply(
        {
            "name": "the completer that comes with ping-llm"
            if service.answers.is_shipped
            else service.answers.predictor.name,
            "kind": "completer" if service.answers.is_completer else "language model",
            "version": __version__,
            "steps": trained.steps,
            "context": service.answers.looks_at,
            "warm": service.warm,
            "limits": {name: limits[name] for name in schemas.LimitsInfo.model_fields},
            "rows": _rows_info(service.known),
        }
    )


def _rows_info(known: Known | None) -> dict[str, Any] | None:
    if known is None or not len(known):
        return None
    times = known.measured.observations.time_s
    return {
        "measurements": len(known),
        "sources": known.count("source"),
        "destinations": known.count("destination"),
        "begin": times[0],
        "end": times[-1],
        "examples": [{"src_addr": source, "dst_addr": destination} for source, destination in known.busiest],
    }


@router.get("/addresses", response_model=schemas.AddressesReply)
async def find_addresses(
    request: Request,
    role: Role = "source",
    search: Annotated[str, Query(max_length=60, description="Part of an address.")] = "",
    source: Annotated[schemas.AddressText | None, Query(description="Whose destinations come first.")] = None,
    count: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """Search the addresses of the rows."""
    known = service_of(request).known
    if known is None:
        return json_reply({"addresses": []})
    whose = None if not source else address_of(source)
    found = await run_in_threadpool(known.search, search, role, source=whose, count=count)
    return json_reply({"addresses": [asdict(one) for one in found]})


@router.get("/history", response_model=schemas.Measured)
async def history(
    request: Request,
    src_addr: schemas.AddressText,
    dst_addr: schemas.AddressText | None = None,
    count: Annotated[int, Query(ge=1, le=_SERIES)] = 500,
) -> Response:
    """What the rows hold of a pair, or of a source to anyone: the latest measurements, in time order."""
    known = service_of(request).known
    source, destination = address_of(src_addr), address_of(dst_addr) if dst_addr else None
    if known is None:
        return json_reply({name: [] for name in ("src_addr", "dst_addr", "event_time", "rtt")} | {"total": 0})
    rows = known.of_source(source, destination)
    return json_reply(measured_columns(known.measured, rows[-count:], len(rows)))


@router.post("/measurements", response_model=schemas.MeasurementsReply, openapi_extra=_A_FILE)
async def measurements(request: Request) -> Response:
    """Read a file of measurements: CSV, Parquet, JSON lines or RIPE Atlas JSON. Nothing is kept."""
    measured = await run_in_threadpool(read_upload, await request.body(), service_of(request).limits.history)
    rows = np.arange(len(measured.observations))
    return json_reply(measured_columns(measured, rows) | {"dropped": dict(measured.dropped)})


@router.post("/surprise", response_model=schemas.SurpriseReply)
async def surprise(request: Request, wanted: schemas.SurpriseRequest) -> Response:
    """How surprising each result is, given what was measured before it."""
    service = service_of(request)
    service.check(len(wanted.measurements), service.limits.history, "measurements")
    listed = [one.model_dump() for one in wanted.measurements]
    return await _scored(service, await run_in_threadpool(measured_list, listed), wanted.last)


@router.post("/surprise/file", response_model=schemas.SurpriseReply, openapi_extra=_A_FILE)
async def surprise_of_file(
    request: Request,
    last: Annotated[int | None, Query(ge=1, description="Score only so many of the latest.")] = None,
) -> Response:
    """The same of a file: CSV, Parquet, JSON lines or RIPE Atlas JSON. Nothing is kept."""
    service = service_of(request)
    measured = await run_in_threadpool(read_upload, await request.body(), service.limits.history)
    return await _scored(service, measured, last)


async def _scored(service: Service, measured: Measured, last: int | None) -> Response:
    most = min(last or service.limits.scored, service.limits.scored)
    job = score(service.answers, measured, most, _SCORING_SHARE * service.limits.seconds)
    scored: Scored = await service.answer(job)
    columns = measured_columns(measured, scored.which, len(measured.observations))
    bits = np.where(np.isfinite(scored.bits), scored.bits, np.nan).astype(np.float32)
    return json_reply(columns | {"bits": bits, "complete": scored.in_time, "dropped": dict(measured.dropped)})
