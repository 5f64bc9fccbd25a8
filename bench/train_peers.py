"""Training speed on one GPU: ours in 8 and 16 bits, with `lax.scan` over layers, and the same model in PyTorch.

    ping-llm simulate --measurements 20000000 --output data/raw
    ping-llm prepare --input "data/raw/*.parquet" --output data/rows
    python bench/train_peers.py data/rows --batch-size 64

Every contender runs in a process of its own, one after the other, on batches that the pipeline made from these rows.
`trainer` is the whole product (`ping-llm train`: loader, metrics and all), the others are steps on batches that lie on
the device already. Matmuls are FP8 where the GPU can (`quantization=auto`), and BF16 where the name says so.
PyTorch gets what its users would write: `torch.compile`, scaled dot product attention, causal over the whole sequence
(it looks across segments, which is wrong but cheap), bfloat16 autocast, fused AdamW.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

CONTENDERS = ("trainer", "trainer-muon", "trainer-16-bit", "ours", "ours-16-bit", "ours-16-bit-scan", "torch-16-bit")
PEAK_FLOPS = 989e12
WARM_UP, TIMED = 5, 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", help="folder that `ping-llm prepare` wrote")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--set", nargs="*", default=[], help="keys of the model, as key=value")
    parser.add_argument("--contenders", nargs="*", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--run", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        sys.stdout.write(json.dumps(_contender(options.run)(options)) + "\n")
        return
    results = {}
    for name in options.contenders:
        command = [sys.executable, __file__, *sys.argv[1:], "--run", name]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = done.stdout.strip().splitlines()
        why = (done.stderr.strip().splitlines() or ["without a word"])[-1]
        results[name] = json.loads(lines[-1]) if done.returncode == 0 else {"error": why[-300:]}
        sys.stdout.write(_line(name, results[name]) + "\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps(results) + "\n")


def _line(name: str, result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{name:16} failed: {result['error']}"
    memory = "" if result.get("memory_gib") is None else f"  {result['memory_gib']:5.1f} GiB"
    compiling = "" if result.get("compile_s") is None else f"  compiling {result['compile_s']:5.1f} s"
    mfu = "" if result["mfu"] is None else f"  MFU {result['mfu']:.1%}"
    return f"{name:16} {result['real_tokens_per_s']:>9,.0f} real tokens/s{mfu}{memory}{compiling}"


def _contender(name: str) -> Callable[[argparse.Namespace], dict[str, Any]]:
    return {
        "trainer": lambda options: _trainer(options, "opt_type=adamw", "quantization=auto"),
        "trainer-muon": lambda options: _trainer(options, "opt_type=muon", "quantization=auto"),
        "trainer-16-bit": lambda options: _trainer(options, "opt_type=adamw"),
        "ours": lambda options: _ours(options, "quantization=auto"),
        "ours-16-bit": lambda options: _ours(options),
        "ours-16-bit-scan": lambda options: _ours(options, scan=True),
        "torch-16-bit": _torch,
    }[name]


def _config(options: argparse.Namespace, *more: str) -> Any:
    from ping_llm.config import load_config

    data = [f"network_train_files={options.rows}", f"max_target_length={options.length}", "enable_tensorboard=false"]
    return load_config(None, [*data, f"per_device_batch_size={options.batch_size}", *options.set, *more])


def _trainer(options: argparse.Namespace, *keys: str) -> dict[str, Any]:
    from ping_llm.training import train

    with tempfile.TemporaryDirectory() as folder:
        more = ["enable_checkpointing=false", "steps=120", f"base_output_directory={folder}"]
        summary = train(_config(options, *more, *keys))
    return {name: summary[name] for name in ("real_tokens_per_s", "mfu", "data_wait_fraction")}


def _batches(options: argparse.Namespace) -> tuple[list[Any], int, int]:
    """Eight batches, the segments there are at most, and the mean number of real tokens."""
    from ping_llm.data.registry import make_train_loader

    with make_train_loader(_config(options, "grain_worker_count=0")) as loader:
        most = max(loader.max_segments(step) for step in range(8))
        batches = [next(loader) for _ in range(8)]
    real = int(np.mean([(batch["inputs_segmentation"] > 0).sum() for batch in batches]))
    return batches, most, real


def _result(options: argparse.Namespace, real_tokens: int, step_s: float, **more: float) -> dict[str, Any]:
    from ping_llm.runs.weights import model_settings

    flops = model_settings(_config(options)).flops_per_token(options.length)
    rate = real_tokens / step_s
    return {"real_tokens_per_s": rate, "mfu": rate * flops / PEAK_FLOPS, "step_ms": 1e3 * step_s, **more}


def _ours(options: argparse.Namespace, *keys: str, scan: bool = False) -> dict[str, Any]:
    from ping_llm.training.processes import start_processes

    config = _config(options, "opt_type=adamw", *keys)
    start_processes(config)
    import jax

    from ping_llm.runs.task import task_of
    from ping_llm.training.loop import rounded_up
    from ping_llm.training.state import create_state, make_mesh
    from ping_llm.training.step import make_optimizer, make_train_step

    batches, most, real = _batches(options)
    if scan:
        _scan_over_layers()
    optimizer = make_optimizer(config)
    state = create_state(config, optimizer, make_mesh(config))
    train_step = make_train_step(task_of(config), optimizer, config)
    step = jax.jit(lambda state, batch: train_step(state, batch, rounded_up(most)), donate_argnums=0)
    placed = [jax.device_put(batch) for batch in batches]
    began = time.perf_counter()
    compiled = step.lower(state, placed[0]).compile()
    compile_s = time.perf_counter() - began
    for i in range(WARM_UP):
        state, values = compiled(state, placed[i % 8])
    jax.block_until_ready(values)
    began = time.perf_counter()
    for i in range(TIMED):
        state, values = compiled(state, placed[i % 8])
    jax.block_until_ready(values)
    step_s = (time.perf_counter() - began) / TIMED
    memory = getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0) / 2**30
    return _result(options, real, step_s, compile_s=compile_s, memory_gib=memory, loss=float(values["loss"]))


def _scan_over_layers() -> None:
    """Replace the model's loop over its layers by a scan over their stacked weights."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from ping_llm.models.lm.transformer import Transformer, attend, rope_angles, segments_of
    from ping_llm.models.modules import choose_attention

    def call(self: Any, tokens: Any, position: Any, segmentation: Any, max_segments: int) -> Any:
        s = self.settings
        segments = segments_of(segmentation, max_segments)
        rope = rope_angles(position, s.head_dim, s.rope_period)
        implementation = choose_attention(s.attention, s.dtype)
        parts = [nnx.split(block) for block in self.blocks]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(weights for _, weights in parts))

        def layer(x: Any, weights: Any) -> tuple[Any, None]:
            block = nnx.merge(parts[0][0], weights)
            return block(x, rope, lambda q, k, v: attend(q, k, v, segments, implementation)), None

        x, _ = jax.lax.scan(layer, self.embed(tokens), stacked)
        return self.logits(x)

    Transformer.__call__ = call  # type: ignore[method-assign]


def _torch(options: argparse.Namespace) -> dict[str, Any]:
    os.environ["JAX_PLATFORMS"] = "cpu"  # batches only; the GPU is PyTorch's
    import torch
    import torch.nn.functional as F  # noqa: N812
    from torch import nn

    from ping_llm.runs.weights import model_settings

    s = model_settings(_config(options))
    heads = s.heads * s.head_dim

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(s.width, 3 * heads, bias=False)
            self.out = nn.Linear(heads, s.width, bias=False)
            self.gate, self.up = (nn.Linear(s.width, s.mlp_width, bias=False) for _ in range(2))
            self.down = nn.Linear(s.mlp_width, s.width, bias=False)

        def forward(self, x: Any, cosine: Any, sine: Any) -> Any:
            batch, length, _ = x.shape
            q, k, v = self.qkv(F.rms_norm(x, (s.width,))).view(batch, length, 3, s.heads, s.head_dim).unbind(2)

            def rotate(z: Any) -> Any:
                a, b = z.chunk(2, -1)
                return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1).transpose(1, 2)

            attended = F.scaled_dot_product_attention(rotate(q), rotate(k), v.transpose(1, 2), is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(batch, length, heads))
            h = F.rms_norm(x, (s.width,))
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(s.vocabulary, s.width)
            self.blocks = nn.ModuleList(Block() for _ in range(s.layers))
            self.head = nn.Linear(s.width, s.vocabulary, bias=False)
            half = s.head_dim // 2
            angle = torch.arange(options.length)[:, None] * s.rope_period ** (-torch.arange(half) / half)
            self.register_buffer("cosine", angle.cos()[None, :, None].bfloat16())
            self.register_buffer("sine", angle.sin()[None, :, None].bfloat16())

        def forward(self, tokens: Any, targets: Any) -> Any:
            x = self.embedding(tokens).bfloat16()
            for block in self.blocks:
                x = block(x, self.cosine, self.sine)
            logits = self.head(F.rms_norm(x, (s.width,))).float().view(-1, s.vocabulary)
            return F.cross_entropy(logits, targets.view(-1), ignore_index=-1)

    torch.set_float32_matmul_precision("high")
    batches, _, real = _batches(options)
    placed = []
    for batch in batches:
        targets = np.where(batch["targets_segmentation"] > 0, batch["targets"], -1)
        placed.append([torch.tensor(a, dtype=torch.int64, device="cuda") for a in (batch["inputs"], targets)])
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    compiled = torch.compile(model)

    def step(i: int) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(*placed[i % 8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    began = time.perf_counter()
    step(0)
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - began
    for i in range(WARM_UP):
        step(i)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for i in range(TIMED):
        loss = step(i)
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - began) / TIMED
    memory = torch.cuda.max_memory_allocated() / 2**30
    return _result(options, real, step_s, compile_s=compile_s, memory_gib=memory, loss=loss.item())


if __name__ == "__main__":
    main()
