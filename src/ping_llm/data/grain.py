"""`dataset_type=grain`: text in ArrayRecord, Parquet or TFRecord files, or documents that were tokenised before.

Parquet and TFRecord files are read in order (`stream.py`). Batches of ArrayRecord files (`text.py`) and of tokenised
documents (`batches/documents.py`) are a function of their step.
"""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from ping_llm.batches.documents import DocumentsSpec, TokenDocuments, documents_spec, fingerprint
from ping_llm.batches.spec import DataSpec, DataState, EvalLoader, TrainLoader
from ping_llm.config import Blend, Config, parse_blend
from ping_llm.config.keys import RANDOM_ACCESS_TYPES
from ping_llm.core.errors import PingLlmError, explained
from ping_llm.data.documents import Files, check_documents, file_stream, matching, reader_of
from ping_llm.data.registry import ONE_HOST, TEXT_STAGES, Part, changes_of, eval_loader_of, loader_of
from ping_llm.data.stream import StreamEvalLoader, StreamLoader, text_identity
from ping_llm.data.text import TextSpec, measured
from ping_llm.data.tokenizer import tokenizer_of

TEXT_VERSION: Final = 2  # raised whenever the same files would give other batches


def train_loader(config: Config, part: Part, state: DataState | None) -> TrainLoader:
    if config.grain_file_type in RANDOM_ACCESS_TYPES:
        return loader_of(text_spec(config, part), config, part, state)
    [(files, _)] = _train_sources(config)
    reader = reader_of(config.grain_file_type, config.train_data_columns)
    documents = file_stream(files, reader, part, seed=config.shuffle_seed, epochs=config.num_epoch)
    return StreamLoader(config, part, documents, data={"files": fingerprint(files)}, state=state)


def eval_loader(config: Config, part: Part) -> EvalLoader:
    files, kind, column = _eval_files(config), config.grain_file_type, config.eval_data_columns
    if kind in RANDOM_ACCESS_TYPES:
        return eval_loader_of(_spec(config, part, [files], column, epochs=1, finite=True), config, part)
    return StreamEvalLoader(config, part, file_stream(files, reader_of(kind, column)))


def check(config: Config) -> None:
    """An error if a file, the column of text, or the tokenizer is missing, or a file is of another kind."""
    if config.grain_file_type != "tokens":
        tokenizer_of(config)
    found = [(files, config.train_data_columns) for files, _ in _train_sources(config)]
    if config.eval_interval > 0:
        found.append((_eval_files(config), config.eval_data_columns))
    for files, column in found:
        if config.grain_file_type == "tokens":
            TokenDocuments(files, column)
        else:
            check_documents(files, config.grain_file_type, column)


def train_files(config: Config) -> list[Files]:
    return [files for files, _ in _train_sources(config)]


def _train_sources(config: Config) -> list[tuple[Files, Fraction]]:
    """The files of each source of documents, with its share."""
    kind, blend = config.grain_file_type, _blend(config)
    if len(blend) > 1 and kind not in RANDOM_ACCESS_TYPES:
        raise PingLlmError(f"grain_file_type={kind} cannot blend: only {' and '.join(RANDOM_ACCESS_TYPES)} can")
    return [(matching(pattern, "grain_train_files", kind), weight) for pattern, weight in blend]


def _eval_files(config: Config) -> Files:
    if not config.grain_eval_files:
        raise PingLlmError("grain_eval_files is not set: name the evaluation files, or set eval_interval to -1")
    patterns = [pattern for pattern, _ in parse_blend(config.grain_eval_files)]
    return tuple(f for pattern in patterns for f in matching(pattern, "grain_eval_files", config.grain_file_type))


def _blend(config: Config) -> Blend:
    """The patterns to train on with their shares: from the key, or from the JSON file that it names."""
    if path := config.grain_train_mixture_config_path:
        if config.grain_train_files:
            raise PingLlmError("set grain_train_files or grain_train_mixture_config_path, not both")
        return _mixture_file(Path(path))
    if not config.grain_train_files:
        raise PingLlmError("grain_train_files is not set: give a pattern of the training files")
    return parse_blend(config.grain_train_files)


class _MixtureSource(BaseModel):
    path: str
    weight: Annotated[float, Field(ge=0, lt=1e15)]


def _mixture_file(file: Path) -> Blend:
    where = f"grain_train_mixture_config_path={file}"
    with explained(f"{where} cannot be read", OSError):
        text = file.read_bytes()
    try:
        sources = TypeAdapter(dict[str, _MixtureSource]).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        what = " ".join([*map(repr, first["loc"]), first["msg"]])
        raise PingLlmError(f'{where}: {what}; write {{"name": {{"path": pattern, "weight": number}}, …}}') from None
    with explained(where, PingLlmError):
        return parse_blend(";".join(f"{source.path},{source.weight}" for source in sources.values()))


# ArrayRecord and tokenised documents: what decides every batch.


def text_spec(config: Config, part: Part = ONE_HOST) -> DataSpec:
    """`batch = f(spec, step)`."""
    found = _train_sources(config)
    files, weights = [files for files, _ in found], tuple(weight for _, weight in found)
    settings = {"weights": weights, **changes_of(config)}
    return _spec(config, part, files, config.train_data_columns, epochs=config.num_epoch, **settings)


def spec_from_config(config: Config, split: str, part: Part) -> DataSpec:
    if config.grain_file_type not in RANDOM_ACCESS_TYPES or split != "train":
        kinds = " and ".join(RANDOM_ACCESS_TYPES)
        raise PingLlmError(f"of dataset_type=grain, training batches of {kinds} files can be made by their step alone")
    return text_spec(config, part)


def _spec(config: Config, part: Part, files: Sequence[Files], column: str, *, epochs: int, **settings: Any) -> DataSpec:
    kind = config.grain_file_type
    if config.max_segments_per_seq > 0:
        raise PingLlmError(f"grain_file_type={kind} packs as many documents as fit: leave max_segments_per_seq at -1")
    if kind == "tokens" and not config.vocab_size:
        raise PingLlmError("grain_file_type=tokens: set vocab_size, the tokens of the tokenizer that made the files")
    shared: dict[str, Any] = {"column": column, "epochs": epochs, "shuffled": config.enable_data_shuffling}
    sources: list[DocumentsSpec] = []
    where = measured(config, [f for each in files for f in each], column, part) if kind == "arrayrecord" else {}
    for each in files:
        own = shared | {"excluded": _excluded(config.skip_documents, {file.name for file in each})}
        if kind == "tokens":
            sources.append(DocumentsSpec.of(each, vocabulary=config.vocab_size, **own))
        else:
            lengths = tuple(where[file] for file in each)
            sources.append(TextSpec(each, fingerprint(each), config=config, measured=lengths, **own))
    if kind == "arrayrecord":
        settings |= {"stages": TEXT_STAGES, "settings": text_identity(config, part) | {"text_version": TEXT_VERSION}}
    shape = {"global_batch_size": part.batch_size(config), "length": config.max_target_length}
    return documents_spec(sources, seed=config.data_shuffle_seed, **shape, **settings)


def _excluded(path: str, files: set[str]) -> tuple[tuple[str, int], ...]:
    """The documents of these files that are left out."""
    with explained(f"skip_documents={path} cannot be read", OSError, UnicodeDecodeError):
        lines = Path(path).read_text(encoding="utf-8").splitlines() if path else []
    found = []
    for number, line in enumerate(lines, 1):
        file, _, document = line.strip().rpartition(" ")
        if not file or not document.isdecimal():
            raise PingLlmError(f"{path}, line {number}: write FILE NUMBER")
        if Path(file).name in files:
            found.append((Path(file).name, int(document)))
    return tuple(found)
