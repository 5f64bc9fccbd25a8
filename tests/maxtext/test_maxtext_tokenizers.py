"""The tokens that tests/test_backend_tokenizers.py expects are those of MaxText and `transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest

module = pytest.importorskip("maxtext.input_pipeline.tokenizer", reason="MaxText is not installed here")

RECORDED: dict[str, Any] = json.loads(Path(__file__).parents[1].joinpath("tokenizers.json").read_text())


@pytest.mark.parametrize("family", RECORDED["tokenizers"])
def test_the_recorded_tokens_are_those_of_maxtext(tmp_path: Path, family: str) -> None:
    for name, content in RECORDED["tokenizers"][family]["files"].items():
        (tmp_path / name).write_text(json.dumps(content))
    for keys, expected in RECORDED["tokenizers"][family]["ids"].items():
        tokenizer = module.build_tokenizer(str(tmp_path), "huggingface", "bos" in keys, "eos" in keys, None)
        assert [list(tokenizer.encode(text)) for text in RECORDED["texts"]] == expected, keys
