"""Tokenizers: three kinds behind one function, many documents at a time, and clear words about what is wrong."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_fixtures import BOS, EOS, byte_tokenizer, text_config
from ping_llm.core.errors import PingLlmError
from ping_llm.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_of

WORDS = "the cat sat on the mat and the dog ate the cat's dinner, 1234 times: naïve façades – 測試 🙂"


def hugging_face_folder(folder: Path, words: str = WORDS, special: str = "<begin>") -> Path:
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=[special, "<end>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([words], trainer)
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<begin>"}, "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module", params=["tiktoken", "huggingface", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, folder: Path) -> Tokenizer:
    kind = str(request.param)
    if kind == "sentencepiece":
        pytest.importorskip("sentencepiece", reason="the package sentencepiece is not installed")
        path = request.getfixturevalue("shared_data") / "c4-minimal" / "tokenizer.default.model"
    elif kind == "tiktoken":
        pytest.importorskip("tiktoken", reason="the package tiktoken is not installed")
        path = byte_tokenizer(folder)
    else:
        path = hugging_face_folder(folder / "hf")
    return load_tokenizer(kind, str(path))


def test_documents_begin_and_end_with_their_tokens_and_empty_ones_have_none(tokenizer: Tokenizer) -> None:
    tokens, lengths = tokenizer.encode([WORDS, "", "x"])
    assert lengths[1] == 0
    assert len(tokens) == lengths.sum()
    for document in (tokens[: lengths[0]], tokens[lengths[0] :]):
        assert (document[0], document[-1]) == (tokenizer.bos, tokenizer.eos)
        assert len(document) > 2
    assert tokens.max() < tokenizer.vocabulary


def test_many_documents_are_tokenised_as_each_alone(tokenizer: Tokenizer) -> None:
    documents = [WORDS, WORDS[::-1], "a", "", "b\nc", WORDS * 3]
    together = tokenizer.encode(documents)
    alone = [tokenizer.encode([document]) for document in documents]
    assert np.array_equal(together[0], np.concatenate([tokens for tokens, _ in alone]))
    assert np.array_equal(together[1], np.concatenate([lengths for _, lengths in alone]))


RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("tokenizers.json").read_text())
"""Small tokenizers with the files of real ones, and the tokens that MaxText 0.2.5 makes with them (with transformers
5.22); tests/maxtext compares these with MaxText itself."""


@pytest.mark.parametrize("family", RECORDED["tokenizers"])
def test_tokens_are_those_of_maxtext(tmp_path: Path, family: str) -> None:
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    for name, content in RECORDED["tokenizers"][family]["files"].items():
        (tmp_path / name).write_text(json.dumps(content))
    for keys, expected in RECORDED["tokenizers"][family]["ids"].items():
        added = {"add_bos": "bos" in keys, "add_eos": "eos" in keys}
        config = text_config(tmp_path, tokenizer_type="huggingface", tokenizer_path=str(tmp_path), **added)
        tokens, sizes = tokenizer_of(config).encode(RECORDED["texts"])
        assert [part.tolist() for part in np.split(tokens, np.cumsum(sizes)[:-1])] == expected, keys


@pytest.mark.parametrize("named", [{"bos_token": None, "eos_token": "<end>"}, {"eos_token": {"content": "<end>"}}])
def test_a_first_token_that_the_folder_does_not_name_is_not_added(tmp_path: Path, named: dict[str, Any]) -> None:
    folder = hugging_face_folder(tmp_path / "qwen", words="None of None", special="None")
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    tokenizer = load_tokenizer("huggingface", str(folder))
    assert (tokenizer.bos, tokenizer.eos) == (None, 1)


def test_a_file_that_asks_for_truncation_and_padding_tokenises_documents_whole(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    file = hugging_face_folder(tmp_path / "cut") / "tokenizer.json"
    whole = load_tokenizer("huggingface", str(file.parent)).encode([WORDS, "x"])
    model = tokenizers.Tokenizer.from_file(str(file))
    model.enable_truncation(4)
    model.enable_padding(length=8)
    model.save(str(file))
    assert json.loads(file.read_text())["truncation"]["max_length"] == 4
    load_tokenizer.cache_clear()
    for expected, found in zip(
        whole, load_tokenizer("huggingface", str(file.parent)).encode([WORDS, "x"]), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_a_name_on_the_hub_is_read_as_the_same_folder_is(tmp_path: Path) -> None:
    repository = tmp_path / "models--Qwen--Qwen3-0.6B"  # as Hugging Face keeps what it has downloaded
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    (repository / "snapshots").mkdir()
    folder = hugging_face_folder(repository / "snapshots" / "c0ffee")
    code = "from ping_llm.data.tokenizer import load_tokenizer as load\nt = load('huggingface', 'Qwen/Qwen3-0.6B')\n"
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code + "print(t.digest, t.bos, t.eos)"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    there = load_tokenizer("huggingface", str(folder))
    assert done.stdout.split() == [there.digest, str(there.bos), str(there.eos)] == [there.digest, "0", "1"]


@settings(max_examples=50, deadline=None)
@given(
    documents=st.lists(st.text(max_size=20), max_size=6),
    add_bos=st.booleans(),
    add_eos=st.booleans(),
)
def test_bytes_come_back_whatever_is_added(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], add_bos: bool, add_eos: bool
) -> None:
    pytest.importorskip("tiktoken", reason="the package tiktoken is not installed")
    config = text_config(tmp_path_factory.getbasetemp(), add_bos=add_bos, add_eos=add_eos)
    tokens, lengths = tokenizer_of(config).encode(documents)
    expected = [
        [*([BOS] if add_bos else []), *text.encode(), *([EOS] if add_eos else [])] if text else [] for text in documents
    ]
    assert tokens.tolist() == list(itertools.chain.from_iterable(expected))
    assert lengths.tolist() == [len(part) for part in expected]


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken", reason="the package tiktoken is not installed")
    config = text_config(tmp_path)
    assert tokenizer_of(config).vocabulary == 512
    assert tokenizer_of(config.replace(vocab_size=600)).vocabulary == 512
    with pytest.raises(
        PingLlmError, match=r"^vocab_size=500 is too small: .* has 512 tokens; set vocab_size=512, or 0$"
    ):
        tokenizer_of(config.replace(vocab_size=500))


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface", "tiktoken"])
@pytest.mark.parametrize("content", [b"", b"no such thing\n", bytes(range(256))])
def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path: Path, kind: str, content: bytes) -> None:
    pytest.importorskip({"huggingface": "tokenizers"}.get(kind, kind), reason="its package is not installed")
    file = tmp_path / "wrong.file"
    file.write_bytes(content)
    with pytest.raises(PingLlmError, match="is not a ") as caught:
        load_tokenizer(kind, str(file))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface", "tiktoken"])
def test_a_missing_file_is_named(tmp_path: Path, kind: str) -> None:
    pytest.importorskip({"huggingface": "tokenizers"}.get(kind, kind), reason="its package is not installed")
    with pytest.raises(PingLlmError, match=r"nothing\.here"):
        load_tokenizer(kind, str(tmp_path / "nothing.here"))


@pytest.mark.parametrize(
    ("kind", "package"), [("sentencepiece", "sentencepiece"), ("huggingface", "tokenizers"), ("tiktoken", "tiktoken")]
)
def test_a_missing_package_is_answered_with_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PingLlmError, match=rf'needs the package {package}: pip install "ping-llm\[text\]"$'):
        load_tokenizer(kind, str(tmp_path / "any"))


def test_no_tokenizer_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(PingLlmError, match="dataset_type=grain needs a tokenizer: set tokenizer_path"):
        tokenizer_of(text_config(tmp_path, tokenizer_path=""))
