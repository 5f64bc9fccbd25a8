"""Connections to object stores, opened at first use in each process.

Everything that belongs to a connection comes from the environment, as the provider's own tools read it:

    s3://   AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE, ~/.aws, instance roles;
            AWS_REGION or AWS_DEFAULT_REGION; AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL; AWS_CA_BUNDLE
    gs://   GOOGLE_APPLICATION_CREDENTIALS, gcloud's default credentials, the metadata server; STORAGE_EMULATOR_HOST

`PING_LLM_ANONYMOUS=1` sends no credentials (public buckets).
"""

import os
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

from pyarrow import fs

from ping_llm.errors import PingLlmError

SCHEMES: Final = ("s3", "gs")

_CONNECT_TIMEOUT_S: Final = 10.0

_opened: dict[str, fs.FileSystem] = {}


def file_system(scheme: str) -> fs.FileSystem:
    """The file system of a scheme. It knows its files by `bucket/key`."""
    if scheme not in _opened:
        _opened[scheme] = _s3() if scheme == "s3" else _gcs()
    return _opened[scheme]


def forget() -> None:
    """Open anew at next use: the environment has changed, or this is the child of a fork."""
    _opened.clear()


os.register_at_fork(after_in_child=forget)


def _s3() -> fs.FileSystem:
    # One attempt: retries are ours (`retry.py`), so that their number and time are what we say they are.
    options: dict[str, Any] = {
        "anonymous": _is_anonymous(),
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "request_timeout": _stall_timeout_s(),
        "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=1),
        "allow_delayed_open": True,  # a small object is one request, not three
    }
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        options |= _endpoint(endpoint, "AWS_ENDPOINT_URL")
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        options["region"] = region
    elif endpoint:  # stores that are not Amazon's seldom care, but a request must name one
        options["region"] = "us-east-1"
    if bundle := os.environ.get("AWS_CA_BUNDLE"):
        options["tls_ca_file_path"] = bundle
    return fs.S3FileSystem(**options)


def _gcs() -> fs.FileSystem:
    options: dict[str, Any] = {"anonymous": _is_anonymous(), "retry_time_limit": timedelta(seconds=10)}
    if endpoint := os.environ.get("STORAGE_EMULATOR_HOST"):
        options |= _endpoint(endpoint, "STORAGE_EMULATOR_HOST") | {"anonymous": True}
    return fs.GcsFileSystem(**options)


def _endpoint(text: str, name: str) -> dict[str, Any]:
    parts = urlsplit(text if "//" in text else f"https://{text}")
    if parts.scheme not in {"http", "https"} or not parts.netloc or parts.path.strip("/"):
        raise PingLlmError(f"{name}={text!r} is not an address such as https://storage.example.org:9000")
    return {"scheme": parts.scheme, "endpoint_override": parts.netloc}


def _is_anonymous() -> bool:
    return os.environ.get("PING_LLM_ANONYMOUS", "").lower() in {"1", "true", "yes"}


def _stall_timeout_s() -> float:
    """A request on which nothing moves for so long is given up and tried again."""
    text = os.environ.get("PING_LLM_STALL_S", "20")
    try:
        return max(1.0, float(text))
    except ValueError:
        raise PingLlmError(f"PING_LLM_STALL_S={text!r} is not a number of seconds") from None
