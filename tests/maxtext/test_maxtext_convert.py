"""Models converted to MaxText and back give the same logits."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from maxtext_runs import CONFIG, ON_A_CPU, REPOSITORY, TINY, arguments, run_here
from typer.testing import CliRunner

from ping_llm.cli.main import app
from ping_llm.config import Config, load_config
from ping_llm.core.errors import PingLlmError
from ping_llm.data.registry import make_train_loader
from ping_llm.data.synthetic import random_batch
from ping_llm.integrations.maxtext.convert import (
    convert_from_maxtext,
    convert_to_maxtext,
    from_maxtext,
    maxtext_keys,
    our_config,
    read_keys,
    to_maxtext,
    write_weights,
)
from ping_llm.models.lm import ModelSettings, Transformer
from ping_llm.models.modules import by_name
from ping_llm.runs.task import task_of
from ping_llm.runs.trained import Trained, load_trained
from ping_llm.runs.weights import model_settings, state_of
from ping_llm.training import train

pytest.importorskip("maxtext", reason="MaxText is not installed here; `make test-maxtext` makes an environment with it")

BATCH = random_batch(3, 128, seed=3)


def model_of(trained: Trained) -> Transformer:
    graph = nnx.split(nnx.eval_shape(lambda: Transformer(model_settings(trained.config), nnx.Rngs(0))))[0]
    return nnx.merge(graph, state_of(trained))


def our_logits(folder: Path) -> Any:
    model = model_of(load_trained(folder))
    batch = {name: jnp.asarray(array) for name, array in BATCH.items()}
    return np.asarray(model(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"], 4))


def maxtext_logits(config: Path, load_parameters_path: Path, **changes: Any) -> Any:
    from maxtext.configs import pyconfig
    from maxtext.utils import maxtext_utils, model_creation_utils

    from ping_llm.integrations.maxtext.launch import patched

    keys = ON_A_CPU | {"run_name": "x", "base_output_directory": "x", "enable_checkpointing": False} | changes
    keys |= {"load_parameters_path": load_parameters_path, "per_device_batch_size": 3, "dataset_type": "synthetic"}
    with patched():
        settings = pyconfig.initialize(["", str(config), *arguments(keys)])
    mesh = maxtext_utils.get_mesh_from_config(settings)
    model = model_creation_utils.from_pretrained(settings, mesh=mesh)
    model = model[0] if isinstance(model, tuple) else model
    with mesh:
        logits = model(
            decoder_input_tokens=BATCH["inputs"],
            decoder_positions=BATCH["inputs_position"],
            decoder_segment_ids=BATCH["inputs_segmentation"],
            enable_dropout=False,
        )
    return np.asarray(logits)


@pytest.fixture(scope="module")
def trained_by_us(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Config(
        run_name="ours",
        base_output_directory=str(tmp_path_factory.mktemp("ours")),
        network_train_files=str(rows),
        per_device_batch_size=4,
        max_target_length=128,
        base_num_decoder_layers=3,
        base_emb_dim=32,
        base_num_query_heads=3,
        head_dim=16,
        base_mlp_dim=40,
        rope_max_timescale=500.0,
        dtype="float32",
        grain_worker_count=0,
        steps=8,
        enable_tensorboard=False,
    )
    return Path(train(config)["run"])


def on_real_tokens(logits: Any) -> Any:
    return logits[BATCH["inputs_segmentation"] > 0]


class TestToMaxText:
    def test_logits_are_equal(self, trained_by_us: Path, tmp_path: Path) -> None:
        done = convert_to_maxtext(trained_by_us, tmp_path / "theirs")
        theirs = maxtext_logits(tmp_path / "theirs" / "config.yml", done["load_parameters_path"])
        ours = our_logits(trained_by_us)
        assert theirs.shape == ours.shape
        assert np.std(ours) > 0.1
        np.testing.assert_allclose(on_real_tokens(theirs), on_real_tokens(ours), rtol=1e-4, atol=1e-4)

    def test_training_goes_on_from_the_weights_with_our_loss(
        self, trained_by_us: Path, rows: Path, tmp_path: Path
    ) -> None:
        done = convert_to_maxtext(trained_by_us, tmp_path / "theirs")
        keys = ON_A_CPU | {"run_name": "x", "base_output_directory": str(tmp_path / "runs"), "steps": 1}
        keys |= {"load_parameters_path": done["load_parameters_path"], "network_train_files": rows}
        keys |= {"per_device_batch_size": 4, "grain_worker_count": 0, "enable_checkpointing": False}
        outcome = run_here(keys, tmp_path / "notes", config=tmp_path / "theirs" / "config.yml")
        trained = load_trained(trained_by_us)
        with make_train_loader(trained.config) as loader:
            batch = {name: jnp.asarray(array) for name, array in next(loader).items()}
        sums = task_of(trained.config).sums(model_of(trained), batch, None, 1)
        ours = float(sums["cross_entropy"] / sums["targets"])
        assert ours < np.log(267) - 0.3
        assert outcome.losses[0] == pytest.approx(ours, rel=1e-5)

    def test_and_back_again_the_weights_are_the_same(self, trained_by_us: Path, tmp_path: Path) -> None:
        convert_to_maxtext(trained_by_us, tmp_path / "theirs")
        convert_from_maxtext(tmp_path / "theirs" / "checkpoint", tmp_path / "ours")
        before, after = (load_trained(folder).weights for folder in (trained_by_us, tmp_path / "ours"))
        for name, array in before.items():
            cut = slice(267) if name == "embedding" else (slice(None), slice(267)) if name == "head.kernel" else ...
            np.testing.assert_allclose(after[name][cut], array[cut], rtol=1e-6, err_msg=name)

    def test_what_maxtext_cannot_express_is_refused(self) -> None:
        with pytest.raises(PingLlmError, match="soft_cap"):
            maxtext_keys(Config(final_logits_soft_cap=30.0))
        with pytest.raises(PingLlmError, match="whole numbers"):
            maxtext_keys(Config(rope_max_timescale=500.5))

    def test_a_completer_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(PingLlmError, match="only language models"):
            convert_to_maxtext(Path("completer"), tmp_path / "out")


class TestFromMaxText:
    @pytest.mark.parametrize("scan_layers", [True, False], ids=["stacked", "side by side"])
    def test_logits_of_a_model_trained_by_maxtext_are_equal(
        self, rows: Path, tmp_path: Path, scan_layers: bool
    ) -> None:
        keys = TINY | {"base_num_decoder_layers": 2, "scan_layers": scan_layers, "learning_rate": 0.05}
        keys |= {"run_name": "theirs", "base_output_directory": str(tmp_path / "runs"), "steps": 9}
        keys |= {"network_train_files": str(rows), "per_device_batch_size": 4, "grain_worker_count": 0}
        keys |= {"eval_interval": -1, "checkpoint_period": 100}
        assert run_here(keys, tmp_path / "notes").code == 0
        checkpoint = tmp_path / "runs" / "theirs" / "checkpoints" / "8"
        done = convert_from_maxtext(checkpoint, tmp_path / "ours")
        assert done["steps"] == 9
        model = {name: keys[name] for name in TINY if name not in ON_A_CPU}
        model |= {"base_num_decoder_layers": 2, "scan_layers": scan_layers}
        theirs = maxtext_logits(CONFIG, checkpoint / "items", network_train_files=str(rows), **model)
        ours = our_logits(tmp_path / "ours")
        np.testing.assert_allclose(on_real_tokens(theirs), on_real_tokens(ours), rtol=1e-4, atol=1e-4)
        assert np.std(ours) > 0.1

    def test_scales_of_norms_become_part_of_the_matrices_that_follow(self) -> None:
        settings = ModelSettings(layers=2, width=16, heads=2, head_dim=8, mlp_width=12, dtype="float32")
        random = np.random.default_rng(0)
        model = Transformer(settings, nnx.Rngs(0))
        ours = {name: np.asarray(array) for name, array in by_name(nnx.split(model)[1]).items()}
        theirs = to_maxtext(ours, settings)
        scaled = {
            name: random.uniform(0.5, 2.0, array.shape).astype(np.float32) if name.endswith("scale") else array
            for name, array in theirs.items()
        }
        assert sum(name.endswith("scale") for name in scaled) == 3
        back = from_maxtext(scaled, settings)
        scale = scaled["decoder/decoder_norm/scale"]
        np.testing.assert_allclose(back["head.kernel"][:, :267], ours["head.kernel"][:, :267] * scale[:, None])
        scale = scaled["decoder/layers/pre_self_attention_layer_norm/scale"][:, 1]
        np.testing.assert_allclose(back["blocks.1.qkv.kernel"], ours["blocks.1.qkv.kernel"] * scale[:, None], rtol=1e-6)

    def test_a_model_of_another_kind_is_refused_with_the_reason(self, tmp_path: Path) -> None:
        file = tmp_path / "config.yml"
        file.write_text("base_config: base.yml\n")
        with pytest.raises(PingLlmError, match="normalization_layer_epsilon=1e-05: only"):
            our_config(read_keys(file), "x")
        with pytest.raises(PingLlmError, match="decoder_block=gemma"):
            our_config(read_keys(file, ["decoder_block=gemma"]), "x")
        epsilon = "normalization_layer_epsilon=1e-6"
        with pytest.raises(PingLlmError, match="grouped heads"):
            our_config(read_keys(file, [epsilon, "base_num_kv_heads=4"]), "x")
        assert our_config(read_keys(file, [epsilon]), "x").base_emb_dim == 2048
        with pytest.raises(PingLlmError, match="write key=value"):
            read_keys(file, ["nonsense=1"])

    def test_what_is_no_checkpoint_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(PingLlmError, match=r"no architecture.yml"):
            convert_from_maxtext(tmp_path, tmp_path / "out")
        with pytest.raises(PingLlmError, match="not a checkpoint of MaxText"):
            convert_from_maxtext(tmp_path, tmp_path / "out", config=CONFIG)
        write_weights(tmp_path / "0", {"decoder/other": np.zeros(3, dtype=np.float32)})
        with pytest.raises(PingLlmError, match="has no token_embedder"):
            convert_from_maxtext(tmp_path / "0", tmp_path / "out", config=CONFIG)


class TestCommand:
    def run(self, *words: str | Path) -> Any:
        return CliRunner().invoke(app, ["convert", *map(str, words)])

    def test_there_and_back(self, trained_by_us: Path, tmp_path: Path) -> None:
        there = self.run(trained_by_us, "--to", "maxtext", "--output", tmp_path / "theirs", "--json")
        assert json.loads(there.stdout)["load_parameters_path"] == str(tmp_path / "theirs" / "checkpoint" / "items")
        back = self.run(tmp_path / "theirs" / "checkpoint", "--from", "maxtext", "--output", tmp_path / "ours")
        assert back.exit_code == 0
        assert "M parameters" in back.stdout
        assert load_trained(tmp_path / "ours").config.base_num_decoder_layers == 3

    def test_what_makes_no_sense_or_would_destroy_something_is_refused(
        self, trained_by_us: Path, tmp_path: Path
    ) -> None:
        def error(*words: str | Path) -> str:
            return str(self.run(trained_by_us, *words, "--output", tmp_path / "out").exception)

        assert "--to maxtext or --from maxtext" in error()
        assert "--to maxtext or --from maxtext" in error("--to", "torch")
        assert "--to maxtext or --from maxtext" in error("--to", "maxtext", "--from", "maxtext")
        assert "belong to --from" in error("--to", "maxtext", "--config", CONFIG)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").touch()
        assert "exists already" in error("--to", "maxtext")
        assert "something else" in error("--to", "maxtext", "--overwrite")
        assert (tmp_path / "out" / "thesis.tex").exists()


def test_the_configuration_of_maxtext_describes_the_model_of_ours() -> None:
    """configs/maxtext/latency_network.yml and configs/latency_network.yml are one architecture where MaxText can."""
    ours = load_config(REPOSITORY / "configs" / "latency_network.yml", ["use_qk_norm=false", "byte_features=0"])
    found = yaml.safe_load(CONFIG.read_text())
    wanted = maxtext_keys(ours)
    read = read_keys(CONFIG)
    assert {name: read[name] for name in wanted} == wanted
    assert found["per_device_batch_size"] == ours.per_device_batch_size
