"""`dataset_type=tfds`: documents of TFRecord datasets through tensorflow-datasets."""

from ping_llm.backends.tensorflow_data import TfdsStream, builder, check_split, identity
from ping_llm.backends.text.stream import EvalLoader, StreamLoader
from ping_llm.backends.text.streamed import streamed_evaluation, streamed_training
from ping_llm.backends.text.tokenizer import tokenizer_of
from ping_llm.config import Config
from ping_llm.pipeline.spec import DataState


def train_loader(config: Config, *, devices: int, host: int, hosts: int, state: DataState | None) -> StreamLoader:
    made = builder(config.dataset_path, config.dataset_name, config.dataset_type)
    check_split(made, config.train_split, "train_split")
    stream = TfdsStream(
        made,
        config.train_split,
        config.train_data_columns,
        seed=config.data_shuffle_seed,
        epochs=config.num_epoch,
        host=host,
        hosts=hosts,
    )
    data = identity(made, config.train_split)
    return streamed_training(config, stream, data=data, devices=devices, host=host, hosts=hosts, state=state)


def eval_loader(config: Config, *, devices: int, host: int, hosts: int) -> EvalLoader:
    made = builder(config.dataset_path, config.eval_dataset_name, config.dataset_type)
    check_split(made, config.eval_split, "eval_split")
    stream = TfdsStream(made, config.eval_split, config.eval_data_columns, epochs=1, shuffle=False)
    return streamed_evaluation(config, stream, devices=devices, host=host, hosts=hosts)


def check(config: Config) -> None:
    """Are the datasets there, and is there a tokenizer?"""
    check_split(builder(config.dataset_path, config.dataset_name, "tfds"), config.train_split, "train_split")
    tokenizer_of(config)
    if config.eval_interval > 0:
        check_split(builder(config.dataset_path, config.eval_dataset_name, "tfds"), config.eval_split, "eval_split")
