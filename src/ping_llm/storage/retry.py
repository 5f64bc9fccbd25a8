"""What a store answers, judged: worth another try, or an answer.

    tried again   time-outs, refused and broken connections, a body that ends too early, 408, 429, 500, 502, 503, 504
    an answer     no such object or bucket, forbidden, wrong credentials, any other refusal

Waits double from a quarter of a second and are drawn at random below that, so that many workers that met the same
trouble do not come back all at once.
"""

import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import pyarrow as pa

from ping_llm.core.errors import PingLlmError

Result = TypeVar("Result")


class StorageError(PingLlmError):
    """A store that refuses, or that could not be reached in all tries."""


class MissingError(StorageError):
    """There is no such object, bucket or file."""


class TruncatedError(OSError):
    """Fewer bytes came than were announced."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    tries: int = 8
    total_s: float = 120.0
    """No try begins later than this after the first."""
    first_wait_s: float = 0.25
    longest_wait_s: float = 15.0

    @classmethod
    def from_environment(cls) -> "RetryPolicy":
        values = {}
        for name, variable in (("tries", "PING_LLM_STORAGE_TRIES"), ("total_s", "PING_LLM_STORAGE_SECONDS")):
            if text := os.environ.get(variable):
                try:
                    values[name] = int(text) if name == "tries" else float(text)
                except ValueError:
                    raise PingLlmError(f"{variable}={text!r} is not a number") from None
        return cls(**values)  # type: ignore[arg-type]

    def wait_s(self, failed: int) -> float:
        """How long to wait after so many failed tries."""
        return random.uniform(0.1, 1.0) * min(self.longest_wait_s, self.first_wait_s * 2.0 ** (failed - 1))


def retried(where: object, action: Callable[[], Result], policy: RetryPolicy | None = None) -> Result:
    """The action's result. Transient failures are tried again; what remains is one clear line about `where`."""
    policy = policy or RetryPolicy.from_environment()
    began = time.monotonic()
    tries = 0
    while True:
        tries += 1
        try:
            return action()
        except (OSError, pa.ArrowException) as error:
            if (refusal := _refusal(where, error)) is not None:
                raise refusal from error
            wait = policy.wait_s(tries)
            spent = time.monotonic() - began
            if tries >= policy.tries or spent + wait > policy.total_s:
                times = "once" if tries == 1 else f"{tries} times in {spent:.0f} s"
                raise StorageError(f"{where}: {cause(error)} (tried {times})") from error
            time.sleep(wait)


_MISSING: Final = re.compile(r"NO_SUCH_KEY|NO_SUCH_BUCKET|RESOURCE_NOT_FOUND|NOT_FOUND|HTTP status 404")
_FORBIDDEN: Final = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|INVALID_CLIENT_TOKEN|SIGNATURE_DOES_NOT_MATCH|EXPIRED_TOKEN|UNRECOGNIZED_CLIENT"
    r"|MISSING_AUTHENTICATION_TOKEN|PERMISSION_DENIED|UNAUTHENTICATED|HTTP status 40[13]|InvalidAccessKeyId"
    r"|SignatureDoesNotMatch|ExpiredToken|OAuth2 access token"
)
_TRANSIENT_STATUS: Final = re.compile(r"HTTP status (408|429|5\d\d)")
_REFUSED: Final = re.compile(r"HTTP status [34]\d\d|INVALID_|MALFORMED|VALIDATION|INVALID_ARGUMENT|FAILED_PRECONDITION")


def _refusal(where: object, error: Exception) -> StorageError | None:
    """The error that no further try would change, if it is one."""
    text = str(error)
    if _TRANSIENT_STATUS.search(text) or isinstance(error, TruncatedError | TimeoutError | ConnectionError):
        return None
    if isinstance(error, FileNotFoundError) or _MISSING.search(text):
        what = "no such bucket" if "BUCKET" in text else "no such object (or no such bucket)"
        return MissingError(f"{where}: {what}")
    if isinstance(error, PermissionError) or _FORBIDDEN.search(text):
        return StorageError(f"{where}: access denied: check the credentials and what they may do ({cause(error)})")
    if isinstance(error, OSError) and error.errno is not None:  # of this machine's own disk, for instance
        return StorageError(f"{where}: {error.strerror or error}" + (f" ({error.filename})" if error.filename else ""))
    if "HTTP status 301" in text:
        return StorageError(f"{where}: the bucket is in another region: set AWS_REGION to its own")
    if _REFUSED.search(text):
        return StorageError(f"{where}: refused: {cause(error)}")
    return None


_NOISE: Final = re.compile(r"^When .*?: (?=AWS Error)|\(Request ID: [^)]*\)|No response body\.|[.:\s]+$")


def cause(error: BaseException) -> str:
    """The store's words on one line, without the parts that say nothing."""
    text = " ".join(str(error).split())
    while (shorter := _NOISE.sub("", text).strip()) != text:
        text = shorter
    return text[:300] or type(error).__name__
