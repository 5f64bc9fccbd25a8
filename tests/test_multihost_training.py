"""Training by several processes: how they find each other, and that they train, fail, stop and resume as one."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from backend_fixtures import reading, text_config, texts, write_files
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.training.processes import LOST, explain, find_coordinates, join
from training_fixtures import folder_of, free_port, losses, simulated_rows, steps_done, tiny_config

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
HEARTBEAT_S = 10

MODEL: dict[str, Any] = {
    "base_num_decoder_layers": 1,
    "base_emb_dim": 32,
    "base_num_query_heads": 2,
    "head_dim": 16,
    "base_mlp_dim": 48,
    "dtype": "float32",
    "enable_tensorboard": False,
}

PROGRAM = """
import hashlib, json, os, pathlib, sys
from ping_llm.batches.loader import Loader
from ping_llm.cli.main import main
from ping_llm.core.errors import PingLlmError

sys.argv[3] = os.environ.get("TEST_CONFIG", sys.argv[3])
next_of = Loader.__next__
fails_at = int(os.environ.get("TEST_FAILS_AT", "-1"))

def recorded(loader):
    step = loader.state().next_step
    if step == fails_at:
        raise PingLlmError("the disk of this machine is broken")
    batch = next_of(loader)
    line = {"step": step, "sequences": [hashlib.sha256(one.tobytes()).hexdigest() for one in batch["inputs"]]}
    path = pathlib.Path(os.environ["TEST_RECORDS"]) / f"{loader.settings.hosts}-{loader.settings.host}.jsonl"
    with path.open("a") as file:
        print(json.dumps(line), file=file)
    return batch

Loader.__next__ = recorded
main()
"""
"""`ping-llm`, which writes down what each process loads."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_rows(tmp_path_factory.mktemp("multihost"), 20_000)


def config_in(folder: Path, rows: Path) -> Config:
    return tiny_config(
        rows,
        folder / "runs",
        max_target_length=128,
        checkpoint_period=5,
        learning_rate_schedule="wsd",  # a rate that does not depend on how long the run is to be
        warmup_steps_fraction=0.0,
        decay_steps_fraction=0.0,
    )


@pytest.fixture
def config(rows: Path, tmp_path: Path) -> Config:
    return config_in(tmp_path, rows)


@pytest.fixture(scope="module")
def alone(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of one process, to compare with."""
    config = config_in(tmp_path_factory.mktemp("alone"), rows).replace(run_name="alone", steps=60)
    with started(config, 1) as group:
        group.succeed()
    return config


def records_of(config: Config) -> Path:
    return Path(config.base_output_directory).parent / f"records-{config.run_name}"


def loaded(config: Config, hosts: int) -> dict[int, list[list[str]]]:
    """By step, the digests of the sequences that each of so many hosts loaded."""
    by_host = []
    for host in range(hosts):
        lines = (records_of(config) / f"{hosts}-{host}.jsonl").read_text().splitlines()
        by_host.append({r["step"]: r["sequences"] for r in map(json.loads, lines)})
    steps = set.intersection(*(set(host) for host in by_host))
    return {step: [host[step] for host in by_host] for step in steps}


class Group:
    """Processes of a run. All are ended, whatever happens."""

    def __init__(self, config: Config, count: int, *more: str, each: dict[int, dict[str, str]] | None = None) -> None:
        port = free_port()
        records_of(config).mkdir(parents=True, exist_ok=True)
        file = records_of(config) / f"{count}.yml"
        file.write_text(config.replace(distributed=count > 1).to_yaml())
        self.processes: list[subprocess.Popen[str]] = []
        for number in range(count):
            environment = {
                "JAX_PLATFORMS": "cpu",
                "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
                "PING_LLM_HEARTBEAT_S": str(HEARTBEAT_S),
                "PING_LLM_JOIN_S": "200",
                "TEST_RECORDS": str(records_of(config)),
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(number),
            } | (each or {}).get(number, {})
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, "train", "--config", str(file), "--batch-size=4", "--json", *more],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=os.environ | environment,
                )
            )
        self.families = [psutil.Process(process.pid) for process in self.processes]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            for process in self.processes:
                assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def results(self, timeout: float = 240) -> list[tuple[int, str, str]]:
        """Exit code, standard output and error of each."""
        deadline = time.monotonic() + timeout
        found = []
        for process in self.processes:
            out, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            found.append((process.returncode, out, errors))
        return found

    def succeed(self) -> list[dict[str, Any]]:
        """The summaries."""
        results = self.results()
        for code, _, errors in results:
            assert code == 0, errors
        return [json.loads(out.splitlines()[-1]) for _, out, _ in results]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@contextmanager
def started(*arguments: Any, **options: Any) -> Iterator[Group]:
    group = Group(*arguments, **options)
    try:
        yield group
    finally:
        group.end()


def newest_checkpoint(config: Config) -> int:
    """Steps of the newest one that is complete, while the next may be under way."""
    names = (path.name for path in (folder_of(config) / "checkpoints").glob("[0-9]*"))
    return max((int(name) for name in names if name.isdigit()), default=-1)


@pytest.mark.slow
class TestFourProcesses:
    def test_have_the_losses_of_one_load_their_parts_and_save_the_same_step_when_one_is_asked_to_stop(
        self, config: Config, alone: Config
    ) -> None:
        four = config.replace(run_name="four", steps=100_000, checkpoint_period=100_000)
        with started(four, 4) as group:
            group.wait_until(lambda: steps_done(four) > 12)
            group.processes[1].send_signal(signal.SIGTERM)
            summaries = group.succeed()
        (steps,) = {summary["steps"] for summary in summaries}
        assert not summaries[0]["complete"]
        assert (folder_of(four) / "checkpoints" / str(steps)).is_dir()
        np.testing.assert_allclose(losses(four)[:12], losses(alone)[:12], rtol=1e-5)
        whole, parts = loaded(alone, 1), loaded(four, 4)
        for step in range(12):
            assert [len(part) for part in parts[step]] == [1, 1, 1, 1]
            assert list(chain(*parts[step])) == whole[step][0]

    @pytest.mark.parametrize("victim", [0, 2])
    def test_stop_when_one_is_killed_say_which_and_two_go_on_with_the_same_batches(
        self, config: Config, alone: Config, victim: int
    ) -> None:
        run = config.replace(run_name="killed", steps=100_000)
        with started(run, 4) as group:
            group.wait_until(lambda: newest_checkpoint(run) >= 10)
            family = [relative for root in group.families for relative in [root, *root.children(recursive=True)]]
            group.processes[victim].kill()
            results = group.results()
        for number, (code, _, errors) in enumerate(results):
            if number == victim:
                continue
            last_line = errors.strip().splitlines()[-1]
            assert code == LOST, errors
            assert f"lost process {victim} on {socket.gethostname()}" in last_line
            assert "the run resumes from its last checkpoint" in last_line
            assert "Check failure stack trace" not in errors
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive

        saved = newest_checkpoint(run)
        with started(run.replace(steps=saved + 6), 2) as group:
            summaries = group.succeed()
        assert [summary["resumed_from"] for summary in summaries] == [saved, saved]
        np.testing.assert_allclose(losses(run), losses(alone)[: saved + 6], rtol=1e-4)
        whole, parts = loaded(alone, 1), loaded(run, 2)
        for step in range(saved, saved + 6):
            assert [len(part) for part in parts[step]] == [2, 2]
            assert list(chain(*parts[step])) == whole[step][0]

    def test_stop_at_once_when_one_fails_and_say_why(self, config: Config) -> None:
        run = config.replace(run_name="failed", steps=100_000)
        with started(run, 4, each={2: {"TEST_FAILS_AT": "9"}}) as group:
            results = group.results()
        for number, (code, _, errors) in enumerate(results):
            assert code == 1, errors
            assert "the disk of this machine is broken" in errors
            assert "Traceback" not in errors
            if number != 2:
                assert f"process 2 on {socket.gethostname()} failed" in errors.strip().splitlines()[-1]

    def test_end_together_where_finite_data_gives_each_a_different_amount(self, tmp_path: Path) -> None:
        pytest.importorskip("tiktoken", reason="the package tiktoken is not installed")
        pattern = write_files(tmp_path / "texts", "parquet", [texts(60), texts(9, seed=1), texts(3, seed=2), texts(1)])
        config = text_config(
            tmp_path,
            **MODEL | reading("parquet", pattern),
            base_output_directory=str(tmp_path / "runs"),
            run_name="finite",
            num_epoch=1,
            steps=80,
            eval_interval=40,
            grain_eval_files=pattern,
        )
        with started(config, 4) as group:
            summaries = group.succeed()
        assert {summary["steps"] for summary in summaries} == {80}
        assert len({summary["eval_loss"] for summary in summaries}) == 1
        assert losses(config)[0] > 1
        assert losses(config)[-1] == 0.0  # nothing but padding


@pytest.mark.slow
class TestJoining:
    def test_a_process_that_waits_in_vain_says_what_to_look_at(self, config: Config) -> None:
        with started(config, 2, each={0: {"PING_LLM_JOIN_S": "4"}, 1: {"JAX_PROCESS_ID": "x"}}) as group:
            (code, _, errors), (other_code, _, other_errors) = group.results()
        assert code == LOST
        assert "not all came in time" in errors.strip().splitlines()[-1]
        assert other_code == 1
        assert "JAX_PROCESS_ID=x: write a whole number" in other_errors.strip().splitlines()[-1]

    def test_processes_with_different_settings_say_so(self, config: Config, tmp_path: Path) -> None:
        other = config.replace(run_name="other", steps=7, distributed=True)
        file = tmp_path / "other.yml"
        file.write_text(other.to_yaml())
        with started(config.replace(steps=6), 2, each={1: {"TEST_CONFIG": str(file)}}) as group:
            results = group.results()
        for code, _, errors in results:
            assert code == 1, errors
            assert "process 1 on" in errors.strip().splitlines()[-1]
            assert "has another configuration than process 0" in errors.strip().splitlines()[-1]


GIVEN = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SRUN = {
    "SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
}  # fmt: skip
HOSTS = ["node1", "node2", "node3"]


class TestCoordinates:
    def test_three_variables_say_it_all(self) -> None:
        found = find_coordinates(GIVEN)
        assert (found["coordinator_address"], found["num_processes"], found["process_id"]) == ("10.0.0.1:1234", 4, 3)

    def test_the_variables_count_more_than_the_launcher(self) -> None:
        assert find_coordinates(GIVEN | SRUN)["num_processes"] == 4

    @pytest.mark.parametrize("environment", [{}, SRUN, SRUN | {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234"}])
    def test_otherwise_jax_looks_for_the_launcher(self, environment: dict[str, str]) -> None:
        assert find_coordinates(environment) == {}

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"JAX_PROCESS_ID": ""}, "JAX_PROCESS_ID must be, too"),
            ({"JAX_COORDINATOR_ADDRESS": ""}, "JAX_COORDINATOR_ADDRESS must be, too"),
            ({"JAX_NUM_PROCESSES": "four"}, "JAX_NUM_PROCESSES=four: write a whole number"),
            ({"JAX_PROCESS_ID": "4"}, "numbered 0 to 3"),
            ({"JAX_PROCESS_ID": "-1"}, "numbered 0 to 3"),
            ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, "host:port"),
            ({"JAX_COORDINATOR_ADDRESS": "node1:http"}, "host:port"),
            ({"JAX_COORDINATOR_ADDRESS": "node1:70000"}, "host:port"),
        ],
    )
    def test_what_is_missing_or_cannot_be_is_named(self, change: dict[str, str], message: str) -> None:
        with pytest.raises(PingLlmError, match=message):
            find_coordinates(GIVEN | change)

    def test_a_batch_script_without_srun_is_told_so(self) -> None:
        with pytest.raises(PingLlmError, match="write srun before the command"):
            find_coordinates({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"})

    def test_a_run_of_several_processes_needs_a_name(self) -> None:
        with pytest.raises(PingLlmError, match="add --name"):
            join(Config(distributed=True))


class TestExplanation:
    @pytest.mark.parametrize(
        ("status", "expected"),
        [
            ("UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n2\nThe tasks have crashed. "
             "Check the task logs", "lost process 2 on node3 of 3"),
            ("UNAVAILABLE: … (stopped sending heartbeats):\n/job:jax_worker/replica:0/task:1\n"
             "/job:jax_worker/replica:0/task:2\nThe tasks have crashed.",
             "lost process 1 on node2, process 2 on node3"),
            ("UNAVAILABLE: Failed to send RPC to coordination service.", "lost process 0 on node1"),
            ("INTERNAL: something new", "lost another process (INTERNAL: something new)"),
            ("DEADLINE_EXCEEDED: … RPC: /xla.coordination.CoordinationService/RegisterTask", "not all came in time"),
            ("ALREADY_EXISTS: … RPC: /xla.coordination.CoordinationService/RegisterTask", "has the same number"),
            ("INVALID_ARGUMENT: Unexpected task … RegisterTask", "was told of fewer processes"),
        ],
    )  # fmt: skip
    def test_last_words_of_jax_become_one_line(self, status: str, expected: str) -> None:
        words = f"F1115 client.h:80] Terminating process because … absl::Status: {status}\n*** Check failure stack"
        explanation = explain(-signal.SIGABRT, words, HOSTS)
        assert explanation is not None
        assert expected in explanation
        assert "\n" not in explanation

    def test_a_process_that_was_killed_is_said_to_be(self) -> None:
        assert "ended by SIGKILL (the machine may have run out of memory)" in (explain(-9, "", []) or "")

    @pytest.mark.parametrize("code", [0, 1, 75, 130, -signal.SIGABRT])
    def test_there_is_nothing_to_explain_where_a_process_has_spoken_for_itself(self, code: int) -> None:
        assert explain(code, "", []) is None


class TestLauncherFiles:
    """What is in deploy/, with programs in place of SLURM and Kubernetes."""

    @pytest.fixture
    def tools(self, tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
        """Runs a script whose `ping-llm` writes a summary and ends in a code; what is called is noted in `calls`."""

        def run(*command: str, code: int, complete: bool) -> "subprocess.CompletedProcess[str]":
            summary = tmp_path / "runs" / "ping-llm" / "my-run" / "summary.json"
            summary.parent.mkdir(parents=True, exist_ok=True)
            summary.write_text(json.dumps({"complete": complete}, indent=1))
            programs = tmp_path / "bin"
            programs.mkdir(exist_ok=True)
            for name, then in {"ping-llm": f"exit {code}", "srun": 'shift; exec "$@"', "scontrol": ""}.items():
                (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\n{then}\n')
                (programs / name).chmod(0o755)
            path = f"{programs}{os.pathsep}{os.environ['PATH']}"
            return subprocess.run(
                command,
                cwd=tmp_path,
                env=os.environ | {"PATH": path, "SLURM_JOB_ID": "17", "RUN": "my-run"},
                capture_output=True,
                text=True,
                timeout=30,
            )

        return run

    @pytest.mark.parametrize(
        ("code", "complete", "ends_with", "requeued"),
        [(0, True, 0, False), (0, False, 0, True), (LOST, False, 0, True), (137, False, 0, True), (1, False, 1, False)],
    )
    def test_a_slurm_job_queues_again_until_the_run_is_complete(
        self, tmp_path: Path, tools: Any, code: int, complete: bool, ends_with: int, requeued: bool
    ) -> None:
        ended = tools(
            "bash", str(DEPLOY / "slurm.sbatch"), "--name", "my-run", "--steps", "9", code=code, complete=complete
        )
        assert ended.returncode == ends_with, ended.stderr
        calls = (tmp_path / "calls").read_text().splitlines()
        assert "ping-llm train --name my-run --steps 9 distributed=true" in calls
        assert ("scontrol requeue 17" in calls) == requeued

    def kubernetes(self) -> dict[str, Any]:
        return {part["kind"]: part for part in yaml.safe_load_all((DEPLOY / "kubernetes.yml").read_text())}

    def test_the_kubernetes_job_fits_its_service_and_its_volume(self) -> None:
        parts = self.kubernetes()
        job, service = parts["Job"]["spec"], parts["Service"]
        pod = job["template"]["spec"]
        (container,) = pod["containers"]
        given = {entry["name"]: entry.get("value") for entry in container["env"]}
        port = service["spec"]["ports"][0]["port"]
        name = parts["Job"]["metadata"]["name"]
        assert job["completionMode"] == "Indexed"
        assert job["completions"] == job["parallelism"] == int(given["JAX_NUM_PROCESSES"])
        assert given["JAX_COORDINATOR_ADDRESS"] == f"{name}-0.{pod['subdomain']}:{port}"
        assert pod["subdomain"] == service["metadata"]["name"]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == {"job-name": name}
        assert pod["restartPolicy"] == "Never"  # Kubernetes wants that with a podFailurePolicy
        assert {rule["onExitCodes"]["containerName"] for rule in job["podFailurePolicy"]["rules"][1:]} == {"train"}
        claims = {
            v["name"]: v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v
        }
        assert claims["storage"] == parts["PersistentVolumeClaim"]["metadata"]["name"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}

    @pytest.mark.parametrize(
        ("code", "complete", "ends_with"), [(0, True, 0), (0, False, LOST), (LOST, False, LOST), (1, False, 1)]
    )
    def test_a_kubernetes_pod_ends_well_only_when_the_run_is_complete(
        self, tmp_path: Path, tools: Any, code: int, complete: bool, ends_with: int
    ) -> None:
        (script,) = self.kubernetes()["Job"]["spec"]["template"]["spec"]["containers"][0]["args"]
        script = script.replace("/storage/", f"{tmp_path}/")
        assert tools("bash", "-c", script, code=code, complete=complete).returncode == ends_with

    @pytest.mark.slow
    def test_two_processes_on_hosts_without_a_scheduler(self, config: Config, tmp_path: Path) -> None:
        (tmp_path / "run.yml").write_text(config.replace(run_name="hosts", steps=5).to_yaml())
        port = free_port()
        environment = {
            "PING_LLM": f"{sys.executable} -m ping_llm", "PING_LLM_PORT": str(port), "PING_LLM_JOIN_S": "60",
            "JAX_PLATFORMS": "cpu", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
        }  # fmt: skip
        options = ["--config", str(tmp_path / "run.yml"), "--batch-size", "4"]
        ended = subprocess.run(
            [str(DEPLOY / "hosts.sh"), "localhost", "localhost", "--", *options],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert ended.returncode == 0, ended.stderr
        assert "2 process(es)" in ended.stderr
        assert len(losses(config.replace(run_name="hosts"))) == 5
