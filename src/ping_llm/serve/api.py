"""The routes of the JSON API: each reads a request, has the model's thread compute the answer, and sends it back."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from queue import Full, Queue
from typing import Annotated, Any, Final

import numpy as np
import pyarrow as pa
from fastapi import APIRouter, Depends, Request, Response
from fastapi import Query as Parameter
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from ping_llm import __version__
from ping_llm.core.cells import time_microseconds
from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import MAX_TIME_US, node_text
from ping_llm.core.rtt import Ints, RttDistribution
from ping_llm.predict.matrix import RAMP
from ping_llm.predict.prompts import LikelyAddresses
from ping_llm.rows.measurement_set import MeasurementSet
from ping_llm.serve import schemas
from ping_llm.serve.access import Limits, json_reply
from ping_llm.serve.answers import ModelAnswers, Query, queries_of
from ping_llm.serve.jobs import BusyError, Job, ModelThread, WarmingError
from ping_llm.serve.metrics import ServerMetrics
from ping_llm.serve.store import KnownMeasurements, MeasurementStore, Role, check_count, measurements_of, read_upload

_MAX_SERIES: Final = 2_000  # measurements of a pair in one reply
_MAX_CANDIDATES: Final = 64  # destinations that a completer considers if the request names no candidates
_MAX_AHEAD_S: Final = 3600.0  # how far added measurements may be ahead of the server's clock
_SCORING_SHARE: Final = 0.7  # of the time limit of a request. What is scored by then is the answer
_DENSITY_RANGE: Final = (0.01, 0.99)  # quantiles between which densities are given
_MIN_DENSITY_RATIO: Final = 1.2  # of the outermost edges, so that a narrow density remains visible
_STATUS: Final = {
    400: "malformed request",
    401: "missing or wrong token",
    403: "the server was not started with the option for this",
    408: "the request arrived too slowly",
    413: "more than the limits allow",
    415: "wrong Content-Type",
    422: "invalid request",
    503: "busy, or no answer in time",
}
_FILE_BODY: Final = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_TAKES_FILE: Final = {"requestBody": {"required": True, "content": _FILE_BODY}}

router = APIRouter(
    prefix="/api/v1",
    responses={code: {"model": schemas.Problem, "description": what} for code, what in _STATUS.items()},
)


@dataclass(kw_only=True)
class Service:
    """What the routes share."""

    model: ModelAnswers
    store: MeasurementStore
    thread: ModelThread
    limits: Limits
    warm: bool = False  # whether every shape is compiled
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    arrivals: Queue[MeasurementSet] | None = None  # None: clients cannot add measurements
    places: Sequence[schemas.Place] = ()

    async def compute(self, job: Job) -> Any:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.thread.submit(job)), self.limits.seconds)
        except TimeoutError:
            if self.warm:
                raise BusyError(f"no answer within {self.limits.seconds:g} seconds: request less at once") from None
            raise WarmingError(f"the model is still warming up: try again in {WarmingError.retry_after} s") from None

    def node(self, text: str) -> str:
        """A node of a request as the measurements have it: its name or its address in canonical spelling."""
        return self.store.name_of(node_text(text))

    def nodes(self, texts: Sequence[str], what: str) -> list[str]:
        """Each once, if they are not too many."""
        check_count(len(texts), self.limits.questions, what)
        return list(dict.fromkeys(map(self.node, texts)))

    def query(self, question: schemas.Question) -> Query:
        source, destination = self.node(question.src_addr), self.node(question.dst_addr)
        return Query(source=source, destination=destination, time_s=_seconds(question.event_time))

    async def predicted(
        self, queries: Sequence[Query], body: schemas.WithHistory, levels: Sequence[float], bins: int = 0
    ) -> list[dict[str, Any]]:
        """Pairs with their predictions, as `schemas.PairPrediction`."""
        answers, supports = await self.compute(self.model.predict(queries, await self.known(body)))
        return await run_in_threadpool(_pair_predictions, queries, answers, supports, levels, bins)

    async def known(self, body: schemas.WithHistory) -> KnownMeasurements:
        history = await self.listed(body.history) if body.history else None
        return KnownMeasurements(store=self.store if body.use_rows else None, history=history)

    async def listed(self, measurements: Sequence[schemas.Measurement]) -> MeasurementSet:
        check_count(len(measurements), self.limits.history)
        return await run_in_threadpool(lambda: measurements_of([one.model_dump() for one in measurements]))

    async def uploaded(self, request: Request) -> MeasurementSet:
        return await run_in_threadpool(read_upload, await request.body(), self.limits.history)


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


_Service = Annotated[Service, Depends(_service)]


@router.post("/predict", response_model=schemas.PredictReply, response_model_exclude_none=True)
async def predict(service: _Service, body: schemas.PredictRequest) -> Response:
    """Predict the results of measurements, many in one request."""
    check_count(len(body.questions), service.limits.questions, "questions")
    queries = [service.query(question) for question in body.questions]
    return json_reply({"predictions": await service.predicted(queries, body, body.quantiles, body.bins)})


@router.post("/context", response_model=schemas.ContextReply)
async def context(service: _Service, body: schemas.ContextRequest) -> Response:
    """One prediction from growing parts of its context, the most informative measurements first."""
    job = service.model.growth(service.query(body.question), await service.known(body), body.sizes)
    measured, rows, sizes, answers = await service.compute(job)
    found = await run_in_threadpool(_predictions, answers, body.quantiles, body.bins, one_range=True)
    steps = [{"size": size} | reply for size, reply in zip(sizes, found, strict=True)]
    return json_reply({"context": _columns(measured, rows), "steps": steps})


@router.post("/rank", response_model=schemas.RankReply)
async def rank(service: _Service, body: schemas.RankRequest) -> Response:
    """Destinations by the median of their predicted RTT, shortest first."""
    destinations = service.nodes(body.dst_addrs, "destinations")
    queries = queries_of(service.node(body.src_addr), destinations, _seconds(body.event_time))
    ranking = await service.predicted(queries, body, body.quantiles)
    return json_reply({"ranking": sorted(ranking, key=lambda reply: reply["median"])})


@router.post("/matrix", response_model=schemas.MatrixReply)
async def matrix(service: _Service, body: schemas.MatrixRequest) -> Response:
    """Medians of what was measured between the busiest sources and destinations."""
    known, ends = await service.known(body), (_seconds(body.begin), _seconds(body.end))
    store = known.store if known.history is None and known.store is not None else None

    def computed() -> tuple[Any, ...]:
        return (store or MeasurementStore(known.latest(None, np.nan, 0))).matrix(body.count, *ends)

    names = ("sources", "destinations", "median", "measurements")
    return json_reply(dict(zip(names, await run_in_threadpool(computed), strict=True)) | {"colours": RAMP})


@router.post("/suggest", response_model=schemas.SuggestReply, response_model_exclude_none=True)
async def suggest(service: _Service, body: schemas.SuggestRequest) -> Response:
    """Which pairs to measure next: those whose measurement would reduce uncertainty most."""
    seconds = _SCORING_SHARE * service.limits.seconds
    job = service.model.suggest(await service.known(body), body.budget, seconds)
    queries, answers, supports, is_complete = await service.compute(job)
    found = _pair_predictions(queries, answers, supports, schemas.QUANTILES) if queries else []
    return json_reply({"suggestions": found, "complete": is_complete})


@router.get("/places", response_model=schemas.PlacesReply)
async def places(service: _Service) -> Response:
    """Nodes whose location is known."""
    return json_reply({"places": [place.model_dump() for place in service.places]})


@router.post("/destinations", response_model=schemas.DestinationsReply)
async def destinations(service: _Service, body: schemas.DestinationsRequest) -> Response:
    """Destinations that are likely to answer in about this time: the inverse of a prediction."""
    candidates = service.nodes(body.candidates, "candidates")
    source, known, time_s = service.node(body.src_addr), await service.known(body), _seconds(body.event_time)
    if not candidates and service.model.is_completer:
        candidates = await run_in_threadpool(_candidates, source, known)
    job = service.model.destinations(source, body.rtt, candidates, known, time_s, body.count)
    likely, answers = await service.compute(job)
    return json_reply(_likely(likely, answers) | {"candidates": len(candidates) or None})


@router.post("/complete", response_model=schemas.DestinationsReply)
async def complete(service: _Service, body: schemas.CompleteRequest) -> Response:
    """The likeliest destinations that begin with this prefix (language model only)."""
    source, time_s = service.node(body.src_addr), _seconds(body.event_time)
    job = service.model.complete(source, body.prefix, body.rtt, await service.known(body), time_s, body.count)
    return json_reply(_likely(await service.compute(job), None))


@router.get("/model", response_model=schemas.ModelReply)
async def model(service: _Service) -> Response:
    """The model, the known measurements, and the limits of a request."""
    answers, store, rows = service.model, service.store, None
    if len(store):
        times = store.measured.observations.time_s
        rows = {
            "measurements": len(store),
            "sources": np.count_nonzero(store.counts["source"]),
            "destinations": np.count_nonzero(store.counts["destination"]),
            "begin": times[0],
            "end": times[-1],
            "examples": [{"src_addr": source, "dst_addr": destination} for source, destination in store.busiest],
        }
    about = {
        "name": answers.name,
        "kind": "completer" if answers.is_completer else "language model",
        "version": __version__,
        "steps": answers.predictor.trained.steps,
        "context": answers.max_context,
        "warm": service.warm,
        "limits": asdict(service.limits),
        "rows": rows,
        "places": len(service.places),
    }
    return json_reply(about)


@router.get("/addresses", response_model=schemas.AddressesReply)
async def find_addresses(
    service: _Service,
    role: Role = "source",
    search: Annotated[str, Parameter(max_length=60, description="Part of an address.")] = "",
    source: Annotated[
        schemas.AddressText | None, Parameter(description="The destinations that it has measured come first.")
    ] = None,
    count: Annotated[int, Parameter(ge=1, le=100)] = 20,
) -> Response:
    """Search the addresses of the server's measurements."""
    measuring = service.node(source) if source else None
    found = await run_in_threadpool(service.store.search, search, role, source=measuring, count=count)
    return json_reply({"addresses": [{"address": one, "measurements": times} for one, times in found.items()]})


@router.get("/history", response_model=schemas.MeasuredColumns)
async def history(
    service: _Service,
    src_addr: schemas.AddressText,
    dst_addr: schemas.AddressText | None = None,
    count: Annotated[int, Parameter(ge=1, le=_MAX_SERIES)] = 500,
    begin: Annotated[str, Parameter(max_length=60, description="Only measurements from this time on.")] = "",
    end: Annotated[str, Parameter(max_length=60, description="Only measurements up to this time.")] = "",
) -> Response:
    """The latest of the server's measurements of a source or of a pair, in time order."""
    store, destination = service.store, service.node(dst_addr) if dst_addr else None
    rows = store.between(store.rows_of(service.node(src_addr), destination), _seconds(begin), _seconds(end))
    return json_reply(_columns(store.measured, rows[-count:], len(rows)))


@router.post("/measurements", response_model=schemas.AddedReply)
async def measurements(service: _Service, body: schemas.AddedRequest) -> Response:
    """Add measurements to the server's: all or, if one is invalid, none. One without a time counts as made now."""
    if service.arrivals is None:
        raise HTTPException(HTTPStatus.FORBIDDEN, "this server accepts no measurements: start it with --accept")
    measured = await service.listed(body.measurements)
    if measured.dropped:
        reasons = ", ".join(f"{reason} {count}" for reason, count in measured.dropped.items())
        raise PingLlmError(f"some of the measurements cannot be used ({reasons}): none was added")
    if (measured.observations.time_s > time.time() + _MAX_AHEAD_S).any():
        raise PingLlmError("some of the measurements are in the future: none was added")
    try:
        service.arrivals.put_nowait(measured)
    except Full:
        raise BusyError("too many measurements are waiting to be added: try again in a few seconds") from None
    return json_reply({"added": len(measured.observations)})


@router.post("/read", response_model=schemas.MeasurementsReply, openapi_extra=_TAKES_FILE)
async def read(service: _Service, request: Request) -> Response:
    """Read a file of measurements: CSV, Parquet, JSON lines or RIPE Atlas JSON. Nothing is kept."""
    measured = await service.uploaded(request)
    rows = np.arange(len(measured.observations))
    reading = measured.reading.lines if measured.reading else ()
    return json_reply(_columns(measured, rows) | {"dropped": dict(measured.dropped), "reading": reading})


@router.post("/anomalies", response_model=schemas.AnomaliesReply)
async def anomalies(service: _Service, body: schemas.AnomaliesRequest) -> Response:
    """Anomaly scores: the NLL of each result in bits, given what was measured before it."""
    return await _scored(service, await service.listed(body.measurements), body.last)


@router.post("/anomalies/file", response_model=schemas.AnomaliesReply, openapi_extra=_TAKES_FILE)
async def anomalies_of_file(service: _Service, request: Request, last: schemas.Last = None) -> Response:
    """Anomaly scores of a file: CSV, Parquet, JSON lines or RIPE Atlas JSON. Nothing is kept."""
    return await _scored(service, await service.uploaded(request), last)


@router.post("/anomalies/rows", response_model=schemas.AnomaliesReply)
async def anomalies_of_rows(service: _Service, body: schemas.RowsAnomaliesRequest) -> Response:
    """Anomaly scores of the server's own measurements: of all, a source, a pair, a range of time."""
    store = service.store
    source, destination = (node and service.node(node) for node in (body.src_addr, body.dst_addr))
    if destination and not source:
        raise PingLlmError("dst_addr needs src_addr")
    rows = store.rows_of(source, destination) if source else np.arange(len(store))
    rows = store.between(rows, _seconds(body.begin), _seconds(body.end))
    if not len(rows):
        raise PingLlmError("the server has no such measurements")
    return await _scored(service, store.measured, body.last, rows)


async def _scored(service: Service, measured: MeasurementSet, last: int | None, rows: Ints | None = None) -> Response:
    """The scores of the latest of these rows, of all if there are none."""
    count, seconds = service.limits.scored, _SCORING_SHARE * service.limits.seconds
    rows = np.arange(len(measured.observations)) if rows is None else rows
    job = service.model.anomaly_scores(measured, rows[-min(last or count, count) :], seconds)
    scored, scores, is_complete = await service.compute(job)
    found = {name: np.where(np.isfinite(own), own, np.nan).astype(np.float32) for name, own in scores.items()}
    columns = _columns(measured, scored, len(rows))
    return json_reply(columns | found | {"complete": is_complete, "dropped": dict(measured.dropped)})


def _seconds(time: Any) -> float:
    """Unix seconds of a number or of ISO 8601 text; NaN if there is no time."""
    if time is None or time == "":
        return np.nan
    micros, missing, bad = time_microseconds(pa.array([time]))
    if missing[0] or bad[0] or not 0 <= micros[0] <= MAX_TIME_US:
        raise PingLlmError(f"{str(time)[:60]!r} is not a time between 1970 and 2100")
    return float(micros[0]) / 1e6


def _candidates(source: str, known: KnownMeasurements) -> list[str]:
    """The most measured destinations, of the server's measurements, then of the request's."""
    stores = [known.store] if known.store is not None else []
    stores += [MeasurementStore(known.history)] if known.history is not None else []
    found = [one for store in stores for one in store.search("", "destination", source=source, count=_MAX_CANDIDATES)]
    found = [address for address in dict.fromkeys(found) if address != source][:_MAX_CANDIDATES]
    if not found:
        raise PingLlmError(f"no destination of {source} is known: name candidates, or give a history")
    return found


# Distributions and measurements as JSON.


def _predictions(
    answers: RttDistribution, levels: Sequence[float], bins: int, *, one_range: bool = False
) -> list[dict[str, Any]]:
    """One object for each query; `one_range` gives all the same bins."""
    quantiles = answers.quantile(list(levels)) if levels else np.zeros((len(answers), 0))
    names = [f"{level:g}" for level in levels]
    columns = answers.p_failed.tolist(), answers.median.tolist(), quantiles.tolist()
    found: list[dict[str, Any]] = [
        {"p_failed": p_failed, "median": median, "quantiles": dict(zip(names, own, strict=True))}
        for p_failed, median, own in zip(*columns, strict=True)
    ]
    if bins:
        low, high = answers.quantile(list(_DENSITY_RANGE)).T
        if one_range:
            low, high = np.full_like(low, low.min()), np.full_like(high, high.max())
        middle, reach = np.sqrt(low * high), np.sqrt(np.maximum(high / low, _MIN_DENSITY_RATIO))
        edges = np.geomspace(middle / reach, middle * reach, bins + 1, axis=1)
        shares = np.maximum(np.diff(answers.cdf(edges), axis=1), 0.0).astype(np.float32, order="C")
        for reply, own_edges, own in zip(found, edges.astype(np.float32, order="C"), shares, strict=True):
            reply["density"] = {"edges": own_edges, "probability": own}
    return found


def _pair_predictions(
    queries: Sequence[Query],
    answers: RttDistribution,
    supports: Sequence[dict[str, Any] | None],
    levels: Sequence[float],
    bins: int = 0,
) -> list[dict[str, Any]]:
    pairs = ({"src_addr": one.source, "dst_addr": one.destination, "event_time": one.time_s} for one in queries)
    rest = ({"support": support} if support else {} for support in supports)
    found = _predictions(answers, levels, bins)
    return [pair | reply | support for pair, reply, support in zip(pairs, found, rest, strict=True)]


def _likely(likely: LikelyAddresses, answers: RttDistribution | None) -> dict[str, Any]:
    columns = {"dst_addr": likely.addresses, "probability": likely.probability.tolist()}
    if answers is not None:
        columns |= {"median": answers.median.tolist(), "p_failed": answers.p_failed.tolist()}
    listed = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    among = "candidates" if np.isnan(likely.covered) else "all addresses"
    return {"among": among, "covered": likely.covered, "destinations": listed}


def _columns(measured: MeasurementSet, rows: Ints, total: int | None = None) -> dict[str, Any]:
    """The measurements of these rows, in this order."""
    chosen = measured.observations.take(rows)
    return {
        "src_addr": [measured.nodes[node] for node in chosen.source.tolist()],
        "dst_addr": [measured.nodes[node] for node in chosen.destination.tolist()],
        "event_time": chosen.time_s,
        "rtt": chosen.rtt_ms.astype(np.float32),
        "total": len(rows) if total is None else total,
    }
