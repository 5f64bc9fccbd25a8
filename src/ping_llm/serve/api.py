"""The routes that ask the model: each reads a request, has the model's thread answer it, and gives the answer back."""

from typing import Any, Final

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from ping_llm.errors import PingLlmError
from ping_llm.serve import schemas
from ping_llm.serve.answers import Found, Grown
from ping_llm.serve.known import Known
from ping_llm.serve.questions import Asked, Knowledge, address_of, seconds_of
from ping_llm.serve.replies import json_reply, measured_columns, predictions
from ping_llm.serve.service import PROBLEMS, service_of

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
