"""Text to tokens, many documents at a time: SentencePiece, Hugging Face and tiktoken behind one function."""

import base64
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError, explained, need
from ping_llm.core.randomness import Ints

Tokens = npt.NDArray[np.uint32]

# How text is cut into words for a tiktoken file, which does not say so itself: Llama 3's rule, as in MaxText.
_LLAMA3_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPECIAL: Final = 256
_HUB_NAME: Final = r"\w[\w.-]*(/[\w.-]+)?(?<!\.json)"  # Qwen/Qwen3-0.6B, if there is no such file
_ENCODING_NAME: Final = r"\w+"  # o200k_base, if there is no such file
_SPECIAL_TOKENS: Final = "tokenizer_config.json"
_MODEL: Final = "config.json"
# Classes of `transformers` (5.22) that add the tokens of their own template, whatever add_bos and add_eos say.
_ALWAYS_ADDED: Final = (
    "bart", "bert", "bigbird", "camembert", "deberta", "debertav2", "distilbert", "electra", "funnel", "mpnet",
    "roberta", "t5", "xglm", "xlmroberta",
)  # fmt: skip
# The first and the last token of a document, by class, where tokenizer_config.json does not name them, as for GPT-2.
_OF_CLASS: Final[dict[str, tuple[str | None, str]]] = {
    "gpt2": ("<|endoftext|>", "<|endoftext|>"),
    "gptneox": ("<|endoftext|>", "<|endoftext|>"),
    "qwen2": (None, "<|endoftext|>"),
    "llama": ("<s>", "</s>"),
    "codellama": ("<s>", "</s>"),
    "gemma": ("<bos>", "<eos>"),
}


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    vocabulary: int  # all tokens are below this
    digest: str  # of the files it was made from: equal digests give equal tokens
    bos: int | None  # begins each document that is not empty
    eos: int | None  # ends it
    spell: Callable[[list[str]], Sequence[Sequence[int]]]  # the tokens of each text, without `bos` and `eos`
    always_added: bool = False  # `bos` and `eos` do not depend on add_bos and add_eos

    def encode(self, texts: Sequence[str]) -> tuple[Tokens, Ints]:
        """All tokens, one document after the other, and how many each document has. An empty text has none."""
        spelled = self.spell(list(texts))
        sizes = np.fromiter(map(len, spelled), dtype=np.int64, count=len(spelled))
        tokens = np.fromiter(itertools.chain.from_iterable(spelled), dtype=np.uint32, count=int(sizes.sum()))
        has_text = sizes > 0
        ends = np.cumsum(sizes)[has_text]
        # In this order: where one document ends and the next begins, `eos` comes before `bos`.
        marks = [(at, t) for at, t in ((ends, self.eos), (ends - sizes[has_text], self.bos)) if t is not None]
        if not marks:
            return tokens, sizes
        offsets, added = zip(*marks, strict=True)
        tokens = np.insert(tokens, np.concatenate(offsets), np.repeat(added, len(ends)))
        return tokens, sizes + len(marks) * has_text


def tokenizer_of(config: Config) -> Tokenizer:
    """The tokenizer of a configuration; its vocabulary must not be larger than the model's."""
    if not config.tokenizer_path:
        raise PingLlmError(f"dataset_type={config.dataset_type} needs a tokenizer: set tokenizer_path")
    tokenizer = load_tokenizer(config.tokenizer_type, config.tokenizer_path, config.hf_access_token)
    if 0 < config.vocab_size < tokenizer.vocabulary:
        raise PingLlmError(
            f"vocab_size={config.vocab_size} is too small: {config.tokenizer_path} has {tokenizer.vocabulary} tokens; "
            f"set vocab_size={tokenizer.vocabulary}, or 0"
        )
    if tokenizer.always_added:
        return tokenizer
    bos, eos = tokenizer.bos if config.add_bos else None, tokenizer.eos if config.add_eos else None
    return replace(tokenizer, bos=bos, eos=eos)


def tokenization(config: Config) -> dict[str, Any]:
    """Whatever decides the tokens of a document: identifies tokens that are stored."""
    return {"tokenizer": tokenizer_of(config).digest, "add_bos": config.add_bos, "add_eos": config.add_eos}


@lru_cache(maxsize=4)
def load_tokenizer(kind: str, path: str, access_token: str = "") -> Tokenizer:
    """`kind` is sentencepiece, huggingface or tiktoken; the token is for gated repositories on the Hub."""
    if kind == "huggingface":
        return _huggingface(path, access_token)
    return _sentencepiece(path) if kind == "sentencepiece" else _tiktoken(path)


def _sentencepiece(path: str) -> Tokenizer:
    module = need("sentencepiece", "text", "tokenizer_type=sentencepiece")
    data = _read(path)
    with _must_be("a SentencePiece model", "sentencepiece", path):
        model = module.SentencePieceProcessor(model_proto=data)
    bos, eos = (token if token >= 0 else None for token in (model.bos_id(), model.eos_id()))
    return Tokenizer(
        vocabulary=model.vocab_size(),
        digest=_digest(data),
        bos=bos,
        eos=eos,
        spell=lambda texts: model.encode(texts, num_threads=1),  # workers are processes; threads would be too many
    )


def _huggingface(path: str, access_token: str) -> Tokenizer:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as above
    module = need("tokenizers", "text", "tokenizer_type=huggingface")
    file = Path(path, "tokenizer.json") if Path(path).is_dir() else Path(path)
    if not file.exists() and not re.fullmatch(_HUB_NAME, path):
        raise PingLlmError(f"tokenizer_path={path}: there is no {file}")
    with _must_be("a tokenizer of Hugging Face", "huggingface", path):
        if not file.exists():
            hub = need("huggingface_hub", "text", "tokenizer_type=huggingface")
            files = ["tokenizer.json", _SPECIAL_TOKENS, _MODEL]
            file = Path(hub.snapshot_download(path, allow_patterns=files, token=access_token or None), files[0])
        model = module.Tokenizer.from_file(str(file))
    model.no_truncation()  # some files ask for that; a document is tokenised whole
    model.no_padding()
    named = _json(file.with_name(_SPECIAL_TOKENS))
    kind = _class_of(named, file.with_name(_MODEL))
    bos, eos = _template(model) if kind in _ALWAYS_ADDED else map(model.token_to_id, _special_tokens(named, kind))
    is_named = kind not in _ALWAYS_ADDED and (kind not in _OF_CLASS or {"bos_token", "eos_token"} <= named.keys())
    added = "" if is_named else f"{bos} {eos}"  # earlier versions added other tokens here
    return Tokenizer(
        vocabulary=model.get_vocab_size(with_added_tokens=True),
        digest=_digest((model.to_str() + added).encode()),
        bos=bos,
        eos=eos,
        always_added=kind in _ALWAYS_ADDED,
        spell=lambda texts: [found.ids for found in model.encode_batch(texts, add_special_tokens=False)],
    )


def _json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    with explained(f"{file} cannot be read", ValueError):
        value = json.loads(file.read_text())
    if not isinstance(value, dict):
        raise PingLlmError(f"{file} cannot be read: it holds no JSON object")
    return value


def _class_of(named: dict[str, Any], model: Path) -> str:
    """The class of `transformers` that a folder is made for: `LlamaTokenizerFast` is `llama`."""
    name = named.get("tokenizer_class") or _json(model).get("model_type")
    return str(name).lower().removesuffix("fast").removesuffix("tokenizer").replace("_", "").replace("-", "")


def _special_tokens(named: dict[str, Any], kind: str) -> tuple[str, str]:
    """The first and the last token of a document, or "" where there is none (null in `tokenizer_config.json`)."""
    defaults = _OF_CLASS.get(kind, (None, None) if named else ("<s>", "</s>"))
    found = (named.get(key, default) for key, default in zip(("bos_token", "eos_token"), defaults, strict=True))
    bos, eos = (token.get("content") if isinstance(token, dict) else token for token in found)
    return str(bos or ""), str(eos or "")


def _template(model: Any) -> tuple[int | None, int | None]:
    """The special tokens that the tokenizer itself adds before and after a text."""
    found = model.encode("a")
    is_special = found.special_tokens_mask
    return found.ids[0] if is_special[0] else None, found.ids[-1] if is_special[-1] else None


def _tiktoken(path: str) -> Tokenizer:
    module = need("tiktoken", "text", "tokenizer_type=tiktoken")
    if Path(path).exists() or not re.fullmatch(_ENCODING_NAME, path):
        data = _read(path)
        model, bos, eos = _from_ranks(module, path, data)
    else:
        with _must_be("a tiktoken file or encoding", "tiktoken", path):  # or a download that failed
            model = module.get_encoding(path)
        data, bos, eos = repr(model).encode(), None, model.eot_token
    return Tokenizer(
        vocabulary=model.n_vocab,
        digest=_digest(data),
        bos=bos,
        eos=eos,
        spell=lambda texts: model.encode_ordinary_batch(texts, num_threads=1),
    )


def _from_ranks(module: Any, path: str, data: bytes) -> tuple[Any, int, int]:
    """A file of `base64 rank` lines, with Llama 3's special tokens behind them."""
    names = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_{i}|>" for i in range(2, _LLAMA3_SPECIAL))]
    with _must_be("a tiktoken file", "tiktoken", path):
        lines = (line.split() for line in data.splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        special = {name: len(ranks) + i for i, name in enumerate(names)}
        model = module.Encoding(Path(path).name, pat_str=_LLAMA3_WORDS, mergeable_ranks=ranks, special_tokens=special)
    return model, len(ranks), len(ranks) + 1


def _read(path: str) -> bytes:
    with explained(f"tokenizer_path={path} cannot be read", OSError):
        data = Path(path).read_bytes()
    if not data:  # which SentencePiece would take for a tokenizer without tokens
        raise PingLlmError(f"tokenizer_path={path} is not a tokenizer: the file is empty")
    return data


def _must_be(what: str, kind: str, path: str) -> AbstractContextManager[None]:
    """Turns whatever the package raises into one line."""
    return explained(f"tokenizer_path={path} is not {what} (tokenizer_type={kind})", limit=160)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
