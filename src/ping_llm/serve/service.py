"""What the routes of the API share: the model's thread, what is known, and the limits."""

import asyncio
from typing import Any, Final

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from ping_llm.serve import schemas
from ping_llm.serve.answers import Answers
from ping_llm.serve.known import Known
from ping_llm.serve.model_thread import BusyError, Job, ModelThread
from ping_llm.serve.questions import Knowledge
from ping_llm.serve.settings import Limits
from ping_llm.serve.uploads import TooManyError, measured_list

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
