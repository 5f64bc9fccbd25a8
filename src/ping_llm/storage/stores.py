"""Object stores: connections, which failures are retried, and one-line errors for the others.

    transient   timeouts, refused and broken connections, a body that ends too early, 408, 429 and 5xx
    final       no such object or bucket, forbidden, wrong credentials, any other refusal

Transient failures are retried by tenacity: exponential backoff from a quarter of a second with full jitter, so that
workers that failed together do not retry together. Arrow reports most failures as an `OSError` whose text alone says
what happened, hence the patterns.
"""

import os
import re
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Final, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from ping_llm.core.errors import PingLlmError

Result = TypeVar("Result")

FAILURES: Final = (OSError, pa.ArrowException)  # what an action on a store may raise


class StorageError(PingLlmError):
    """A store that refuses, or that could not be reached in all attempts."""


class MissingError(StorageError):
    """There is no such object, bucket or file."""


class TruncatedError(OSError):
    """Fewer bytes came than were announced."""


def number_from_environment(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    try:
        return float(text) if text else default
    except ValueError:
        raise PingLlmError(f"{variable}={text!r} is not a number") from None


def retried(location: object, action: Callable[[], Result]) -> Result:
    """The action's result. Transient failures are retried; the final one becomes one line that names the location."""
    import tenacity  # 50 ms, and only remote files need it

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, FAILURES) and not _refusal(location, error)),
        stop=tenacity.stop_after_attempt(int(number_from_environment("PING_LLM_STORAGE_TRIES", 1e9)))
        | tenacity.stop_before_delay(number_from_environment("PING_LLM_STORAGE_SECONDS", 120.0)),
        wait=tenacity.wait_random_exponential(number_from_environment("PING_LLM_STORAGE_WAIT_S", 0.25), max=15.0),
        reraise=True,
    )
    try:
        return retrying(action)
    except FAILURES as error:
        tries, seconds = retrying.statistics["attempt_number"], retrying.statistics["delay_since_first_attempt"]
        times = "once" if tries == 1 else f"{tries} times in {seconds:.0f} s"
        raise _refusal(location, error) or StorageError(f"{location}: {_cause(error)} (tried {times})") from error


_TRANSIENT: Final = re.compile(r"HTTP status (408|429|5\d\d)")
_MISSING: Final = re.compile(r"NO_SUCH_KEY|NO_SUCH_BUCKET|RESOURCE_NOT_FOUND|NOT_FOUND|HTTP status 404")
_FORBIDDEN: Final = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|INVALID_CLIENT_TOKEN|SIGNATURE_DOES_NOT_MATCH|EXPIRED_TOKEN|UNRECOGNIZED_CLIENT"
    r"|MISSING_AUTHENTICATION_TOKEN|PERMISSION_DENIED|UNAUTHENTICATED|HTTP status 40[13]|InvalidAccessKeyId"
    r"|SignatureDoesNotMatch|ExpiredToken|OAuth2 access token"
)
_REFUSED: Final = re.compile(r"HTTP status [34]\d\d|INVALID_|MALFORMED|VALIDATION|INVALID_ARGUMENT|FAILED_PRECONDITION")


def _refusal(location: object, error: BaseException) -> StorageError | None:
    """The error to raise for a failure that no further attempt would change; None for a transient one."""
    text, reason = str(error), None
    if _TRANSIENT.search(text) or isinstance(error, TruncatedError | TimeoutError | ConnectionError):
        return None
    if isinstance(error, FileNotFoundError) or _MISSING.search(text):
        return MissingError(f"{location}: no such object")
    if isinstance(error, PermissionError) or _FORBIDDEN.search(text):
        reason = f"access denied: check the credentials and what they may do ({_cause(error)})"
    elif isinstance(error, OSError) and error.errno is not None:  # of this machine's own disk, for instance
        reason = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    elif "HTTP status 301" in text:
        reason = "the bucket is in another region: set AWS_REGION to its own"
    elif _REFUSED.search(text):
        reason = f"refused: {_cause(error)}"
    return StorageError(f"{location}: {reason}") if reason else None


_NOISE: Final = re.compile(r"^When .*?: (?=AWS Error)|\(Request ID: [^)]*\)|No response body\.|[.:\s]+$")


def _cause(error: BaseException) -> str:
    """The store's own message on one line, without the parts that say nothing."""
    text = " ".join(str(error).split())
    while (shorter := _NOISE.sub("", text).strip()) != text:
        text = shorter
    return text[:300] or type(error).__name__


@cache
def file_system(scheme: str) -> fs.FileSystem:
    """The store of a scheme, connected at first use in each process. It knows its files by `Location.path`."""
    anonymous = os.environ.get("PING_LLM_ANONYMOUS", "").lower() in {"1", "true", "yes"}
    if scheme == "gs":
        emulator = _endpoint("STORAGE_EMULATOR_HOST")
        return fs.GcsFileSystem(
            anonymous=anonymous or bool(emulator), retry_time_limit=timedelta(seconds=10), **emulator
        )
    if scheme == "s3":
        endpoint = _endpoint("AWS_ENDPOINT_URL_S3") or _endpoint("AWS_ENDPOINT_URL")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        return fs.S3FileSystem(
            anonymous=anonymous,
            # Stores that are not Amazon's seldom care, but a request must name one.
            region=region or ("us-east-1" if endpoint else None),
            tls_ca_file_path=os.environ.get("AWS_CA_BUNDLE") or None,
            connect_timeout=10.0,
            request_timeout=max(1.0, number_from_environment("PING_LLM_STALL_S", 20.0)),
            # One attempt: retries are ours (`retried`), so that their number and time are what the user set.
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
            allow_delayed_open=True,  # a small object is one request, not three
            **endpoint,
        )
    return fs.LocalFileSystem()


os.register_at_fork(after_in_child=file_system.cache_clear)


def _endpoint(variable: str) -> dict[str, str]:
    """Options for another server than the provider's own, if the variable names one."""
    text = os.environ.get(variable)
    if not text:
        return {}
    parts = urlsplit(text if "//" in text else f"https://{text}")
    if parts.scheme not in {"http", "https"} or not parts.netloc or parts.path.strip("/"):
        raise PingLlmError(f"{variable}={text!r} is not an address such as https://storage.example.org:9000")
    return {"scheme": parts.scheme, "endpoint_override": parts.netloc}
