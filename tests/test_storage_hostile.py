"""What a stranger put into a bucket cannot touch files of this machine, and trouble leaves nothing half-done there."""

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ping_llm.core.errors import PingLlmError
from ping_llm.storage import Location
from ping_llm.storage.cache import Cache
from ping_llm.storage.mirror import LEDGER, STATE, Ledger, Mirror, fetch
from ping_llm.storage.stores import retried
from storage_fixtures import S3Server, bucket, s3, s3_server, status

__all__ = ["bucket", "s3", "s3_server"]

DIGEST = "0f" * 32
HOSTILE_NAMES = ["/home/user/.bashrc", "../../victim", "a/../../victim", "..", "", ".", "a\0b", "a\\..\\b", "x" * 300]
HOSTILE_DIGESTS: list[Any] = ["abc/../../../victim", "", "0" * 63, None, 7, ["0" * 64], "0" * 63 + "/"]


def hostile_states() -> list[Any]:
    """States of a mirror that nobody of ours wrote: one wrong value each, then random ones."""
    entry = {"bytes": 3, "sha256": DIGEST}
    states: list[Any] = [None, 3, "text", [], {}, {"step": 1}, {"files": {}}, {"step": "x", "files": {}}]
    states += [{"step": 1, "files": {name: entry}} for name in HOSTILE_NAMES]
    states += [{"step": 1, "files": {"a": {"bytes": 3, "sha256": digest}}} for digest in HOSTILE_DIGESTS]
    broken: list[Any] = [None, 3, ["a"], {"a": None}, {"a": {}}, {"a": {"bytes": "x"}}]
    states += [{"step": 1, "files": files} for files in broken]
    random.seed(7)
    values = [*HOSTILE_NAMES, *HOSTILE_DIGESTS, -1, 2**80, {}, "a/b"]
    for _ in range(100):
        files: Any = {str(random.choice(values)): {"bytes": random.choice(values), "sha256": random.choice(values)}}
        states.append({"step": random.choice(values), "files": files})
    return states


def test_a_hostile_mirror_is_one_line_and_touches_nothing(bucket: Location, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "mine").write_text("mine")
    run = home / "runs" / "mine"
    for state in hostile_states():
        (bucket / STATE).write_text(json.dumps(state))
        for take in (lambda: fetch(bucket), lambda: Mirror(run, bucket).pull()):
            with pytest.raises(PingLlmError) as caught:
                take()
            assert "\n" not in str(caught.value)
    assert [path.name for path in home.rglob("*")] == ["mine"]
    assert (home / "mine").read_text() == "mine"
    assert not list(tmp_path.rglob("victim"))


def test_a_state_that_is_not_json_is_one_line(bucket: Location) -> None:
    for text in ("{", "[" * 100_000, "\0"):
        (bucket / STATE).write_text(text)
        with pytest.raises(PingLlmError, match="is damaged"):
            fetch(bucket)


@pytest.mark.parametrize("digest", HOSTILE_DIGESTS)
def test_no_digest_leads_out_of_the_cache(digest: Any, bucket: Location, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    cache = Cache(folder=tmp_path / "cache", limit_bytes=1_000_000)
    uses: list[Callable[[], object]] = [
        lambda: cache.whole(bucket / "a", size=1, sha256=digest),
        lambda: cache.find(size=1, sha256=digest),
        lambda: cache.forget(digest),
        lambda: cache.blocks_path(digest),
    ]
    for use in uses:
        with pytest.raises((PingLlmError, TypeError)):
            use()
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("text", ["[1]", '"ab"', "3", "{", "null"])
def test_a_damaged_ledger_means_that_nothing_was_uploaded(text: str, bucket: Location) -> None:
    (bucket / LEDGER).write_text(text)
    (bucket / "a").write_bytes(b"abc")
    assert not Ledger(bucket, {}).has("a", size=3, sha256=DIGEST)


def test_an_interrupted_upload_leaves_the_whole_object_or_the_one_before(bucket: Location, tmp_path: Path) -> None:
    """Leaving the block of an output stream completes the object, even after an exception."""
    source = tmp_path / "source"
    source.write_bytes(random.Random(1).randbytes(24_000_000))
    target = bucket / "object"
    interrupts = 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for delay in (0.002, 0.005, 0.01, 0.02, 0.04, 0.08):
            target.write_bytes(b"before")
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                target.upload(source)
            except KeyboardInterrupt:
                interrupts += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert target.size() in (6, 24_000_000)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupts


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_files_of_any_size_are_uploaded(size: int, bucket: Location, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"x" * size)
    (bucket / "object").upload(tmp_path / "source")
    assert (bucket / "object").read_bytes() == b"x" * size


def test_a_store_may_be_away_for_as_long_as_was_set(
    s3: S3Server, bucket: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time decides, not how many tries it takes."""
    monkeypatch.delenv("PING_LLM_STORAGE_TRIES")
    failures = iter([ConnectionError("away")] * 20)

    def action() -> str:
        if (error := next(failures, None)) is not None:
            raise error
        return "back"

    monkeypatch.setenv("PING_LLM_STORAGE_WAIT_S", "1e-9")
    assert retried(bucket, action) == "back"
    (bucket / "a").write_bytes(b"abc")
    s3.fail(status(503), times=20)
    assert (bucket / "a").read_bytes() == b"abc"
