"""PyTorch's own loader over our batches: the same ones on any number of processes and workers, after any resume."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from backend_fixtures import text_config, texts, write_files
from ping_llm.batches.batch import digest
from ping_llm.batches.documents import DocumentsSpec, documents_spec, write_token_file
from ping_llm.batches.source import BatchSource
from ping_llm.batches.spec import Batch, DataSpec
from ping_llm.core.errors import PingLlmError
from ping_llm.data.registry import spec_from_config

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-torch")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    """A mixture whose weights change at step 6."""
    folder, rng = tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    for name in "ab":
        sizes = np.minimum(rng.lognormal(4, 1, 2_000).astype(int) + 1, 900)
        write_token_file(folder / f"{name}.bin", (rng.integers(0, 50_000, size) for size in sizes), 50_000)
    third = Fraction(1, 3)
    return documents_spec(
        [DocumentsSpec.of([folder / f"{name}.bin"]) for name in "ab"],
        weights=(1 - third, third),
        schedule=((6, (third, 1 - third)),),
        length=256,
        global_batch_size=8,
    )


def loaded(
    spec: DataSpec, first: int, last: int, *, workers: int, host: int = 0, hosts: int = 1, start: str | None = None
) -> Iterator[Batch]:
    source = BatchSource(spec, host=host, hosts=hosts)
    steps = range(first, last)
    loader = torch.utils.data.DataLoader(
        source, batch_size=None, sampler=steps, num_workers=workers, multiprocessing_context=start
    )
    for batch in loader:
        assert all(isinstance(tensor, torch.Tensor) for tensor in batch.values())
        yield {name: tensor.numpy() for name, tensor in batch.items()}


def test_batches_are_those_of_their_steps_before_and_after_a_resume_with_other_workers(spec: DataSpec) -> None:
    expected = [digest(BatchSource(spec)[step]) for step in range(12)]
    seen = [digest(batch) for batch in loaded(spec, 0, 5, workers=2)]
    seen += [digest(batch) for batch in loaded(spec, 5, 9, workers=0)]
    seen += [digest(batch) for batch in loaded(spec, 9, 12, workers=1)]
    assert seen == expected


def test_text_is_tokenised_in_workers_that_are_not_forked_and_others_say_so(tmp_path: Path) -> None:
    pattern = write_files(tmp_path / "text", "arrayrecord", [texts(500)])
    spec = spec_from_config(text_config(tmp_path, grain_train_files=pattern))
    expected = [digest(BatchSource(spec)[step]) for step in range(6)]
    assert [digest(batch) for batch in loaded(spec, 0, 6, workers=2, start="spawn")] == expected
    with pytest.raises(PingLlmError, match=r"opened before this process was forked.*multiprocessing_context=.spawn"):
        list(loaded(spec, 0, 6, workers=2, start="fork"))


def _of_rank(rank: int, spec: DataSpec, first: int, last: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for step, batch in enumerate(loaded(spec, first, last, workers=1, host=rank, hosts=2), first):
        mine = torch.from_numpy(np.stack(list(batch.values())))
        parts = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(parts, mine)  # as a step of data-parallel training would, all together
        if rank == 0:
            whole = dict(zip(batch, torch.cat(parts, 1).numpy(), strict=True))
            with (folder / "digests").open("a") as file:
                file.write(f"{step} {digest(whole)}\n")
    torch.distributed.destroy_process_group()


def test_two_processes_have_the_global_batches_of_one(spec: DataSpec, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_of_rank, args=(spec, 3, 9, tmp_path), nprocs=2)
    expected = [f"{step} {digest(BatchSource(spec)[step])}" for step in range(3, 9)]
    assert (tmp_path / "digests").read_text().splitlines() == expected
