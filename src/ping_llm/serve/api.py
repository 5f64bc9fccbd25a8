"""What the routes of the API share: the model's thread, what is known, and the limits."""

import asyncio
from dataclasses import asdict
from typing import Annotated, Any, Final

import numpy as np
from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from ping_llm import __version__
from ping_llm.core.errors import PingLlmError
from ping_llm.rows.measurement_set import MeasurementSet
from ping_llm.serve import schemas
from ping_llm.serve.answers import Answers, Found, Grown, Scored, score
from ping_llm.serve.model_thread import BusyError, Job, ModelThread
from ping_llm.serve.questions import Asked, Knowledge, address_of, json_reply, measured_columns, predictions, seconds_of
from ping_llm.serve.settings import Limits
from ping_llm.serve.store import Known, Role, TooManyError, measured_list, read_upload

PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    code: {"model": schemas.Problem, "description": what}
    for code, what in {
        400: "not a request that can be read",
        401: "no token, or a wrong one",
        408: "the request came too slowly",
        413: "more than the limits allow",
        415: "a body of another type",
        422: "a question that cannot be answered",
        503: "busy, or no answer in time",
    }.items()
}


class Service:
    """What the routes need."""

    def __init__(self, answers: Answers, known: Known | None, thread: ModelThread, limits: Limits) -> None:
        self.answers, self.known, self.thread, self.limits = answers, known, thread, limits
        self.warm = False

    async def answer(self, job: Job) -> Any:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.thread.submit(job)), self.limits.seconds)
        except TimeoutError:
            raise BusyError(f"no answer within {self.limits.seconds:g} seconds: ask for less at once") from None

    async def knowledge(self, request: schemas.WithHistory) -> Knowledge:
        history = None
        if request.history:
            self.check(len(request.history), self.limits.history, "measurements")
            history = await run_in_threadpool(lambda: measured_list([one.model_dump() for one in request.history]))
        return Knowledge(known=self.known if request.use_rows else None, history=history)

    def check(self, count: int, most: int, what: str) -> None:
        if count > most:
            raise TooManyError(f"{count:,} {what} are more than the {most:,} that this server takes at once")


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


# The routes that ask the model: each reads a request, has the model's thread answer it, and gives the answer back.

_CANDIDATES: Final = 64
"""Destinations of the rows among which a completer looks, if nobody names any."""

router = APIRouter(prefix="/api/v1", responses=PROBLEMS)


@router.post("/predict", response_model=schemas.PredictReply, response_model_exclude_none=True)
async def predict(request: Request, wanted: schemas.PredictRequest) -> Response:
    """The results of measurements that were not made: many questions in one request."""
    service = service_of(request)
    service.check(len(wanted.questions), service.limits.questions, "questions")
    asked = [_asked(question) for question in wanted.questions]
    answers = await service.answer(service.answers.predict(asked, await service.knowledge(wanted)))
    found = await run_in_threadpool(predictions, answers, wanted.quantiles, wanted.bins)
    return json_reply({"predictions": [_ends(one) | reply for one, reply in zip(asked, found, strict=True)]})


@router.post("/context", response_model=schemas.ContextReply)
async def context(request: Request, wanted: schemas.ContextRequest) -> Response:
    """How the answer to one question changes as the model sees more of what says most about it."""
    service = service_of(request)
    job = service.answers.growing(_asked(wanted.question), await service.knowledge(wanted), wanted.sizes)
    grown: Grown = await service.answer(job)
    found = await run_in_threadpool(predictions, grown.answers, wanted.quantiles, wanted.bins, one_range=True)
    steps = [{"size": size} | reply for size, reply in zip(grown.sizes, found, strict=True)]
    return json_reply({"context": measured_columns(grown.measured, grown.chosen), "steps": steps})


@router.post("/rank", response_model=schemas.RankReply)
async def rank(request: Request, wanted: schemas.RankRequest) -> Response:
    """Destinations by the RTT that is expected of them: the median of each, shortest first."""
    service = service_of(request)
    service.check(len(wanted.dst_addrs), service.limits.questions, "destinations")
    destinations = list(dict.fromkeys(address_of(text) for text in wanted.dst_addrs))
    source, when = address_of(wanted.src_addr), seconds_of(wanted.event_time)
    asked = [Asked(source=source, destination=one, time_s=when) for one in destinations]
    answers = await service.answer(service.answers.predict(asked, await service.knowledge(wanted)))
    found = predictions(answers, wanted.quantiles, 0)
    ranking = sorted(
        (_ends(one) | reply for one, reply in zip(asked, found, strict=True)), key=lambda reply: reply["median"]
    )
    return json_reply({"ranking": ranking})


@router.post("/destinations", response_model=schemas.DestinationsReply)
async def destinations(request: Request, wanted: schemas.DestinationsRequest) -> Response:
    """Who answers in about this time? The question asked the other way round."""
    service = service_of(request)
    service.check(len(wanted.candidates), service.limits.questions, "candidates")
    source, knowledge = address_of(wanted.src_addr), await service.knowledge(wanted)
    candidates = list(dict.fromkeys(address_of(text) for text in wanted.candidates))
    if not candidates and service.answers.is_completer:
        candidates = await run_in_threadpool(_candidates, source, knowledge)
    for one in candidates:
        Asked(source=source, destination=one)
    job = service.answers.destinations(
        source, wanted.rtt, candidates, knowledge, seconds_of(wanted.event_time), wanted.count
    )
    found: Found = await service.answer(job)
    return json_reply(_likely(found) | {"looked_at": len(candidates) or None})


@router.post("/complete", response_model=schemas.DestinationsReply)
async def complete(request: Request, wanted: schemas.CompleteRequest) -> Response:
    """The likeliest destinations that begin like this; only a language model knows any."""
    service = service_of(request)
    job = service.answers.complete(
        address_of(wanted.src_addr), wanted.prefix, wanted.rtt, await service.knowledge(wanted),
        seconds_of(wanted.event_time), wanted.count,
    )  # fmt: skip
    return json_reply(_likely(await service.answer(job)))


def _asked(question: schemas.Question) -> Asked:
    return Asked(
        source=address_of(question.src_addr),
        destination=address_of(question.dst_addr),
        time_s=seconds_of(question.event_time),
    )


def _ends(asked: Asked) -> dict[str, Any]:
    return {"src_addr": asked.source, "dst_addr": asked.destination, "event_time": asked.time_s}


def _candidates(source: str, knowledge: Knowledge) -> list[str]:
    """The destinations that were measured most, of the server's measurements and of those of the request."""
    parts = [knowledge.known] if knowledge.known is not None else []
    parts += [Known(knowledge.history)] if knowledge.history is not None else []
    found = [
        one.address for known in parts for one in known.search("", "destination", source=source, count=_CANDIDATES)
    ]
    found = [address for address in dict.fromkeys(found) if address != source][:_CANDIDATES]
    if not found:
        raise PingLlmError(f"there is no destination to choose from for {source}: name candidates, or give a history")
    return found


def _likely(found: Found) -> dict[str, Any]:
    listed: list[dict[str, Any]] = [
        {"dst_addr": address, "probability": chance}
        for address, chance in zip(found.addresses, found.probability.tolist(), strict=True)
    ]
    if found.answers is not None:
        for one, median, p_failed in zip(
            listed, found.answers.median.tolist(), found.answers.p_failed.tolist(), strict=True
        ):
            one |= {"median": median, "p_failed": p_failed}
    among = "candidates" if found.covered is None else "all addresses"
    return {"among": among, "covered": found.covered, "destinations": listed}


# The routes that give and take measurements: what is known, files, and how surprising they are.

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

data_router = APIRouter(prefix="/api/v1", responses=PROBLEMS)


@data_router.get("/model", response_model=schemas.ModelReply)
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


@data_router.get("/addresses", response_model=schemas.AddressesReply)
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


@data_router.get("/history", response_model=schemas.Measured)
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


@data_router.post("/measurements", response_model=schemas.MeasurementsReply, openapi_extra=_A_FILE)
async def measurements(request: Request) -> Response:
    """Read a file of measurements: CSV, Parquet, JSON lines or RIPE Atlas JSON. Nothing is kept."""
    measured = await run_in_threadpool(read_upload, await request.body(), service_of(request).limits.history)
    rows = np.arange(len(measured.observations))
    return json_reply(measured_columns(measured, rows) | {"dropped": dict(measured.dropped)})


@data_router.post("/surprise", response_model=schemas.SurpriseReply)
async def surprise(request: Request, wanted: schemas.SurpriseRequest) -> Response:
    """How surprising each result is, given what was measured before it."""
    service = service_of(request)
    service.check(len(wanted.measurements), service.limits.history, "measurements")
    listed = [one.model_dump() for one in wanted.measurements]
    return await _scored(service, await run_in_threadpool(measured_list, listed), wanted.last)


@data_router.post("/surprise/file", response_model=schemas.SurpriseReply, openapi_extra=_A_FILE)
async def surprise_of_file(
    request: Request,
    last: Annotated[int | None, Query(ge=1, description="Score only so many of the latest.")] = None,
) -> Response:
    """The same of a file: CSV, Parquet, JSON lines or RIPE Atlas JSON. Nothing is kept."""
    service = service_of(request)
    measured = await run_in_threadpool(read_upload, await request.body(), service.limits.history)
    return await _scored(service, measured, last)


async def _scored(service: Service, measured: MeasurementSet, last: int | None) -> Response:
    most = min(last or service.limits.scored, service.limits.scored)
    job = score(service.answers, measured, most, _SCORING_SHARE * service.limits.seconds)
    scored: Scored = await service.answer(job)
    columns = measured_columns(measured, scored.which, len(measured.observations))
    bits = np.where(np.isfinite(scored.bits), scored.bits, np.nan).astype(np.float32)
    return json_reply(columns | {"bits": bits, "complete": scored.in_time, "dropped": dict(measured.dropped)})
