"""Several nodes: the Slurm script and the Kubernetes manifest, with stand-ins for a cluster's commands."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

REPO = Path(__file__).resolve().parents[2]
STEPS = ("trainer_args.max_steps=2", "trainer_args.dataloader_num_workers=0", "trainer_args.save_steps=99",
         "dataset_config.eval_datasets=[]", "trainer_args.eval_steps=null")  # fmt: skip
SRUN = """#!/usr/bin/env bash
# One process for each node, all on this machine.
while [[ $1 == --* ]]; do echo "srun $1" >>"$LOG"; shift; done
tasks=()
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_NODEID=$node "$@" & tasks+=($!); done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>"$LOG"
if [[ $1 == show ]]; then printf '127.0.0.1\\n127.0.0.2\\n'; fi
"""
APPTAINER = """#!/usr/bin/env bash
echo "apptainer $*" >>"$LOG"
echo "passed on: ${HF_HOME-none} ${TRITON_CACHE_DIR-none} ${PYTHONPATH-none} ${HF_TOKEN-none}" >>"$LOG"
"""
# What the operator gives each pod, and the launcher is to make of it.
TELLS = """#!/usr/bin/env bash
echo "$NNODES ${NODE_RANK:-$SLURM_NODEID} $MASTER_ADDR:$MASTER_PORT $PRESET ${0#"$PWD"/} $*${FRESH:+ fresh}"
exit "${CODE:-0}"
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def losses(run: Path) -> list[tuple[float, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows if row["split"] == "train"]


def sbatch(root: Path, *words: str, nodes: int = 2, **env: str) -> subprocess.CompletedProcess[str]:
    """The script as a batch job of so many nodes; the log of the stand-ins is in root/log."""
    bin_folder = root / "bin"
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("apptainer", APPTAINER)):
        executable(bin_folder / name, text)
    dropped = ("PRESET", "NGPU", "FRESH", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK")
    job = {"SLURM_JOB_ID": "41234", "SLURM_SUBMIT_DIR": str(root), "SLURM_JOB_NODELIST": "a[1-2]"}
    job |= {"SLURM_JOB_NUM_NODES": str(nodes), "LOG": str(root / "log"), "CUDA_VISIBLE_DEVICES": ""}
    path = f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return subprocess.run(
        [root / "recipes/_launch/slurm.sbatch", *words],
        env={**inherited, **job, "PATH": path, "PYTHONPATH": str(root), **env},
        capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.timeout(1200)
def test_two_nodes_equal_one_node_of_two_processes(clone: Path, start: Any) -> None:
    """Two launchers that find each other as under Slurm, each with one process, and one with two."""
    options = {"PRESET": "smoke", "OMP_NUM_THREADS": "1"}
    done = sbatch(clone, "qwen2_5_vl", *STEPS, NGPU="1", MASTER_PORT=free_port(), **options)
    assert done.returncode == 0, done.stdout + done.stderr
    run = clone / "runs/qwen2_5_vl-smoke"
    manifest = json.loads((run / "manifest.json").read_text())
    assert (manifest["layout"]["nodes"], manifest["world_size"]) == (2, 2)
    process = start("qwen2_5_vl", *STEPS, NGPU="2", FRESH="1", **options)
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 0, said
    (old,) = (clone / "runs").glob("qwen2_5_vl-smoke.*")
    assert len(losses(run)) == 2
    assert losses(run) == losses(old)
    assert json.loads((run / "manifest.json").read_text())["layout"]["nodes"] == 1


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository whose one recipe only says how it was launched."""
    executable(tmp_path / "recipes/mine/launch.sh", TELLS)
    executable(tmp_path / "tools/entrypoint.sh", '#!/usr/bin/env bash\nexec "$@"\n')
    executable(
        tmp_path / "recipes/_launch/slurm.sbatch", (REPO / "recipes/_launch/slurm.sbatch").read_text()
    )
    return tmp_path


class TestSlurm:
    def test_every_node_is_told_where_it_belongs(self, root: Path) -> None:
        done = sbatch(root, "mine", "a.b=1 2", PRESET="full")
        assert done.returncode == 0, done.stderr
        port = 20000 + 41234 % 20000
        assert sorted(done.stdout.splitlines()) == [
            f"2 {node} 127.0.0.1:{port} full recipes/mine/launch.sh a.b=1 2" for node in (0, 1)
        ]
        assert "srun --kill-on-bad-exit=1" in (root / "log").read_text()

    def test_in_an_image(self, root: Path) -> None:
        done = sbatch(root, "mine", "x=1", IMAGE="engine.sif", MOUNTS="/data:/data", HF_HOME="", nodes=1,
                      TRITON_CACHE_DIR="/scratch/t", HF_TOKEN="secret")  # fmt: skip
        assert done.returncode == 0, done.stderr
        mounts = f"{root}:/app,{root}/.cache/image:/cache,/data:/data"
        expected = f"apptainer exec --nv --pwd /app --bind {mounts} engine.sif tools/entrypoint.sh "
        expected += "recipes/mine/launch.sh x=1"
        log = (root / "log").read_text().splitlines()
        assert expected in log
        assert "passed on: none none none secret" in log   # the image's own caches hold
        done = sbatch(root, "mine", IMAGE="team#engine", CONTAINER="pyxis", CACHE=str(root / "c"), nodes=1,
                      HF_HOME="/scratch/hf", TRITON_CACHE_DIR="/scratch/t")  # fmt: skip
        assert done.returncode == 0, done.stderr
        log = (root / "log").read_text()
        mounts = f"{root}:/app,{root}/c:/cache,/scratch/hf:/cache/huggingface"
        for option in ("image=team#engine", f"mounts={mounts}", "workdir=/app"):
            assert f"srun --container-{option}\n" in log
        assert "srun --cpu-bind=none\n" in log

    @pytest.mark.parametrize(
        ("words", "env", "said"),
        [
            ([], {}, "RECIPE=: no such recipe"),
            (["theirs"], {}, "RECIPE=theirs: no such recipe"),
            (["mine"], {"IMAGE": "x", "CONTAINER": "docker"}, "CONTAINER=docker: not known"),
        ],
    )
    def test_refusals(self, root: Path, words: list[str], env: dict[str, str], said: str) -> None:
        done = sbatch(root, *words, **env)
        assert done.returncode == 2
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1

    @pytest.mark.parametrize(("code", "queued"), [("143", True), ("1", False), ("0", False)])
    def test_a_job_whose_time_is_up_is_queued_again(self, root: Path, code: str, queued: bool) -> None:
        done = sbatch(root, "mine", CODE=code, REQUEUE="1")
        assert done.returncode == int(code)
        assert ("scontrol requeue 41234" in (root / "log").read_text()) == queued
        (root / "log").unlink()
        sbatch(root, "mine", CODE=code)
        assert "requeue" not in (root / "log").read_text()

    def test_only_the_first_start_is_fresh(self, root: Path) -> None:
        """Or a job that is queued again would put its own checkpoint aside."""
        first = sbatch(root, "mine", nodes=1, PRESET="full", FRESH="1")
        assert first.stdout.endswith(" fresh\n")
        again = sbatch(root, "mine", nodes=1, PRESET="full", FRESH="1", SLURM_RESTART_COUNT="1")
        assert again.returncode == 0
        assert "fresh" not in again.stdout


class TestKubernetes:
    @pytest.fixture
    def job(self) -> dict[str, Any]:
        return yaml.safe_load((REPO / "recipes/_launch/pytorchjob.yaml").read_text())

    def test_replicas_and_the_operators_names(self, job: dict[str, Any]) -> None:
        assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
        replicas = job["spec"]["pytorchReplicaSpecs"]
        assert set(replicas) == {"Master", "Worker"}
        assert replicas["Master"]["replicas"] == 1
        assert replicas["Master"]["template"] == replicas["Worker"]["template"]
        (container,) = replicas["Master"]["template"]["spec"]["containers"]
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert env["NNODES"] == str(sum(each["replicas"] for each in replicas.values()))
        assert (REPO / "recipes" / env["RECIPE"] / "launch.sh").is_file()
        assert container["name"] == "pytorch"
        assert [port["name"] for port in container["ports"]] == ["pytorchjob-port"]
        assert not {"RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"} & set(env)   # the operator's

    def test_folders(self, job: dict[str, Any]) -> None:
        """What the image must be able to write lies in volumes; shared memory is not the default's 64 MB."""
        pod = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert set(mounts.values()) == set(volumes)
        dockerfile = (REPO / "Dockerfile").read_text()
        for folder in json.loads(re.search(r"^VOLUME (\[.*\])$", dockerfile, re.MULTILINE)[1]):
            assert "persistentVolumeClaim" in volumes[mounts[folder]], folder
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"]

    def test_the_command(self, job: dict[str, Any], root: Path) -> None:
        """The image's entry point, then the launcher with the node's rank."""
        (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
        entry = re.search(r"^ENTRYPOINT (\[.*\])$", (REPO / "Dockerfile").read_text(), re.MULTILINE)[1]
        assert container["command"] == json.loads(entry)
        assert (REPO / Path(container["command"][-1]).relative_to("/app")).is_file()
        env = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
        operator = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
        done = subprocess.run(
            container["args"], cwd=root, env={**os.environ, **env, "RECIPE": "mine", **operator},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        launched = "recipes/mine/launch.sh trainer_args.max_steps=1000"
        assert done.stdout == f"2 1 job-master-0:23456 full {launched}\n"
