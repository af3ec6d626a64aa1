"""Tasks run by datatrove give what the plain command gives; the jobs of a cluster are what they should be."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from data_prep.cli import app
from data_prep.executors import Cluster, slurm_jobs
from data_prep.rows import open_data
from data_prep.validate import Checker, Checking

runner = CliRunner()

# A cluster of one machine: runs a script's array tasks one after the other, as soon as it is sent.
SBATCH = r"""#!/bin/bash
count=$(ls "$CLUSTER" | grep -c args)
echo "$@" > "$CLUSTER/args-$count"
script="${@: -1}"
cp "$script" "$CLUSTER/script-$count"
grep -q merge_stats "$script" || for task in $(seq 0 $(sed -n 's/^#SBATCH --array=0-//p' "$script")); do
    export SLURM_ARRAY_TASK_ID=$task RUN_OFFSET=0 SLURM_NODELIST=node1
    bash "$script" > "$CLUSTER/out-$count-$task" 2>&1 || exit 1
done
echo "Submitted batch job $((100 + count))"
"""
SCONTROL = "#!/bin/bash\necho node1\n"
SRUN = """#!/bin/bash
while [ "$1" != launch_pickled_pipeline ]; do shift; done
exec "$@"
"""


def run(*arguments: object) -> Result:
    return runner.invoke(app, [*map(str, arguments)], env={"COLUMNS": "300"})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """150 rows without media in 3 parts, every 40th faulty."""
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for n in range(150):
            answer = {"role": "assistant", "content": "" if n % 40 == 7 else "a"}
            turns = [{"role": "user", "content": f"{n}?"}, answer]
            file.write(json.dumps({"id": str(n), "messages": turns}) + "\n")
    return path


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo: Path) -> Path:
    """Where `sbatch` keeps what it was called with."""
    folder = tmp_path / "cluster"
    (folder / "bin").mkdir(parents=True)
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CLUSTER", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(repo))
    return folder


def test_two_local_tasks_give_what_the_plain_command_gives(data: Path, tmp_path: Path) -> None:
    outputs = []
    for name, options in (("plain", ()), ("local", ("--executor", "local", "--tasks", 2))):
        folder = tmp_path / name
        found = run("validate", data, "--fix", folder / "c.jsonl", "--report", folder / "f.jsonl", *options)
        assert found.exit_code == 1
        table = found.stdout.replace(str(folder), "")
        outputs.append([table, *((folder / f"{file}.jsonl").read_bytes() for file in "cf")])
    assert outputs[0] == outputs[1]
    assert len(outputs[0][2].splitlines()) == 4
    logs = tmp_path / "local" / ".c.jsonl.jobs"
    assert sorted(file.name for file in logs.rglob("completions/*")) == ["00000", "00001"]
    assert not list(tmp_path.rglob("*.parts"))


def test_jobs_of_a_cluster(data: Path, tmp_path: Path, cluster: Path) -> None:
    plain, out = tmp_path / "plain.jsonl", tmp_path / "out" / "clean.jsonl"
    run("validate", data, "--fix", plain)
    options = ("--executor", "slurm", "--tasks", 2, "--partition", "cpu")
    sent = run("validate", data, "--fix", out, *options, "--time", "2:00:00", "--sbatch", "account=me")
    assert sent.exit_code == 0, sent.output
    scripts = [(cluster / f"script-{n}").read_text() for n in range(4)]
    array, _, last, _ = scripts   # the engine adds a job that sums up its own figures
    for line in ("array=0-1", "partition=cpu", "time=2:00:00", "account=me", "mem-per-cpu=4G"):
        assert f"#SBATCH --{line}\n" in array
    assert "#SBATCH --array=0-0\n" in last
    assert f"export PATH={Path(sys.executable).parent}:$PATH" in array
    assert re.search(r"^srun .* launch_pickled_pipeline .*/0-checking/executor\.pik$", array, re.MULTILINE)
    assert "--dependency=afterok:100" in (cluster / "args-2").read_text()
    assert "submitted: job 102 writes" in sent.stdout
    # And the jobs, run one after another, have done the work.
    assert out.read_bytes() == plain.read_bytes()


def test_processes_of_a_task_are_asked_of_the_cluster(data: Path, tmp_path: Path) -> None:
    work = Checking(Checker(open_data(data)), tmp_path, None, None)
    job = slurm_jobs(work, tmp_path / "logs", Cluster("slurm", 7, "cpu", mem_gb=9), workers=3)
    array = job.depends
    assert (array.tasks, job.tasks) == (7, 1)
    found = [each.get_sbatch_args(each.tasks) for each in (array, job)]
    assert [args["cpus-per-task"] for args in found] == [3, 1]
    assert [args["array"] for args in found] == ["0-6", "0-0"]
    assert {args["mem-per-cpu"] for args in found} == {"9G"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tasks", 2), "--tasks 2 needs --executor local or slurm"),
        (("--executor", "slurm"), "needs --partition NAME"),
        (("--partition", "cpu"), "are for --executor slurm"),
        (("--executor", "local"), "needs --report or --fix"),
        (("--executor", "slurm", "--partition", "cpu", "--sbatch", "x"), "write NAME=VALUE"),
        (("--executor", "slurm", "--partition", "cpu", "--report", "f.jsonl"), "there is no `sbatch` here"),
    ],
)
def test_misuse_is_one_line(
    data: Path, options: tuple, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    result = run("validate", data, *options)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert message in result.stderr
