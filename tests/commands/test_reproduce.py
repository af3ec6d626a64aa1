"""`reproduce`: a run is made again bit by bit, and whatever differs is named."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from lmms_engine.cli import app
from lmms_engine.commands.reproducing.again import command, folder_beside
from lmms_engine.commands.reproducing.curves import EXACT, Tolerance, compare
from lmms_engine.commands.reproducing.origin import differences, read_origin, why_not_exact
from lmms_engine.errors import UserError
from lmms_engine.parallel.mesh import build_mesh, leave_mesh
from tests.runs import logged, make_config, make_row, train, write_rows

pytestmark = [pytest.mark.xdist_group("reproduce"), pytest.mark.timeout(600)]
CODE = {"commit", "changes that were not committed"}   # may change while the suite runs


@pytest.fixture(scope="module")
def made(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data` and a finished run `run` of four steps."""
    root = tmp_path_factory.mktemp("reproduce")
    shutil.copytree(corpus, root / "data")
    heldout = [{"path": str(root / "data/heldout.jsonl")}]
    config = make_config(
        root / "data", root / "run", trainer__max_steps=4, trainer__eval_steps=2, data__eval_datasets=heldout
    )
    train(build_mesh(), config)
    leave_mesh()
    return root


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """The run folder, to be changed."""
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edits a JSON file."""
    body = json.loads(path.read_text())
    edit(body)
    path.write_text(json.dumps(body))


def named(run: Path, *overrides: str) -> set[str]:
    """What differs, besides the state of the repository."""
    return {difference.what for difference in differences(read_origin(run, list(overrides)))} - CODE


def call(*words: object) -> Result:
    return CliRunner().invoke(app, ["reproduce", *map(str, words)])


def test_again_it_is_equal_to_the_last_bit(made: Path, copy: Path) -> None:
    assert named(made / "run") == set()
    done = call(made / "run", "--anyway")
    assert done.exit_code == 0, done.output
    report = json.loads((made / "run-again/reproduction.json").read_text())
    assert report["bit_equal"]
    assert report["tolerance"] is None
    kinds = [(row["step"], row["split"]) for row in report["steps"]]
    assert kinds == [(1, "train"), (2, "train"), (2, "eval"), (3, "train"), (4, "train"), (4, "eval")]
    assert "reproduced: 6 rows agree to the last bit" in done.output
    # The metrics changed by the smallest amount there is: seen in one row, and harmless on another processor.
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[3])
    row["loss"] = math.nextafter(row["loss"], 9)
    (copy / "metrics.jsonl").write_text("\n".join([*lines[:3], json.dumps(row), *lines[4:]]) + "\n")
    seen = call(copy, "--against", made / "run-again")
    assert seen.exit_code == 1
    assert "NOT reproduced: 1 of 6 rows differ; asked for: to the last bit." in seen.output
    assert "First at step 3 (train): loss, by" in seen.output
    change(copy / "manifest.json", lambda manifest: manifest.update(cpu="another"))
    close = call(copy, "--against", made / "run-again")
    assert close.exit_code == 0
    assert "not to the last bit (another processor)" in close.output
    assert call(copy, "--against", made / "run-again", "--rtol-first", "0").exit_code == 1


def test_a_changed_row_is_refused_and_seen_in_the_curve(made: Path, copy: Path) -> None:
    rows = [make_row(f"train-{i}", i) for i in range(14)]
    for row in rows:
        row["messages"][1]["content"] = row["messages"][1]["content"][::-1]   # the file keeps its size
    data = copy.parent / "data"
    shutil.copytree(made / "data", data)
    write_rows(data / "train.jsonl", rows)
    here = f"dataset_config.datasets.0.path={data}/train.jsonl"
    refused = call(copy, here)
    assert refused.exit_code == 2
    assert "differs: data fingerprint: " in refused.output
    assert "not run: --anyway" in refused.output
    assert not folder_beside(copy).exists()
    seen = call(copy, here, "trainer_args.max_steps=900", "--anyway", "--steps", "2")
    assert seen.exit_code == 1, seen.output
    again = copy.with_name("run-again")
    report = json.loads((again / "reproduction.json").read_text())
    assert not report["reproduced"]
    assert {row["step"] for row in report["steps"]} == {1, 2}
    assert report["steps"][0]["then"] != report["steps"][0]["now"]
    assert 2 <= len(logged(again)) < 900   # stopped


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda m: m.update(lock_sha256="0" * 64), {"requirements.lock"}),
        (lambda m: m["packages"].update(torch="2.0.0"), {"package torch"}),
        (lambda m: m["packages"].update({"flash-attn": "2.8"}), {"package flash-attn"}),
        (lambda m: m.update(image={"digest": "sha256:1", "commit": None, "lock_sha256": None, "base": None}),
         {"image digest"}),
        (lambda m: m.update(data_fingerprint="x"), {"data fingerprint"}),
        (lambda m: m.update(processor_fingerprint="x"), {"processor"}),
        (lambda m: m.update(weights_fingerprint="x"), {"weights"}),
        (lambda m: m.update(plugins={"./p.py": "x"}), {"plugin ./p.py"}),
        (lambda m: m.update(config_sha256="x"), {"config.yaml"}),
        (lambda m: m.update(history=[{**m, "lock_sha256": "x"}]), {"lock_sha256 of an earlier start"}),
        (lambda m: m.update(devices=["NVIDIA H200"]), {"GPU"}),
        (lambda m: None, set()),
    ],
)  # fmt: skip
def test_what_differs_is_named(copy: Path, edit: Callable[[dict[str, Any]], object], what: set[str]) -> None:
    change(copy / "manifest.json", edit)
    assert named(copy) == what


def test_the_repository_counts(copy: Path) -> None:
    change(copy / "manifest.json", lambda m: m.update(git={"commit": "f" * 40, "changes_sha256": "1" * 64}))
    found = {difference.what: str(difference) for difference in differences(read_origin(copy, []))}
    assert "commit: ffffffffffff then" in found["commit"]
    assert f"git checkout {'f' * 40}" in found["commit"]
    assert "changes that were not committed" in found


def test_data_that_are_gone(copy: Path, tmp_path: Path) -> None:
    assert named(copy, f"dataset_config.datasets.0.path={tmp_path}/none.jsonl") == {"data", "settings"}


@pytest.mark.parametrize("name", ["manifest.json", "config.yaml", "metrics.jsonl"])
def test_what_is_no_run_folder(copy: Path, name: str) -> None:
    (copy / name).unlink()
    refused = call(copy)
    assert refused.exit_code == 1
    assert f"has no {name}" in refused.stderr


def test_a_run_is_not_compared_with_itself(copy: Path) -> None:
    refused = call(copy, "--against", copy.parent / "run/../run")
    assert refused.exit_code == 1
    assert "that is the run itself" in refused.stderr


def test_a_manifest_of_an_earlier_version(copy: Path) -> None:
    change(copy / "manifest.json", lambda manifest: manifest.pop("threads"))
    with pytest.raises(UserError, match="lacks threads"):
        read_origin(copy, [])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("manifest.json", '{"seed": 1', "manifest.json is damaged (Expecting"),
        ("manifest.json", "", "manifest.json is damaged (Expecting value"),
        ("manifest.json", "[]", "manifest.json is damaged (not a JSON object)"),
        ("metrics.jsonl", '{"step": 1, "spl', "metrics.jsonl holds no step"),
        ("metrics.jsonl", '{"x": 1}\n', "metrics.jsonl is damaged (line 1 is not an object with"),
        ("metrics.jsonl", "\udcff\n", "metrics.jsonl is damaged ('utf-8' codec"),
    ],
)
def test_a_damaged_file_is_one_line(copy: Path, name: str, text: str, said: str) -> None:
    (copy / name).write_text(text, errors="surrogateescape")
    refused = call(copy)
    assert refused.exit_code == 1
    assert said in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "value"), [("world_size", "two"), ("devices", []), ("layout", None), ("history", {})]
)
def test_a_manifest_with_an_impossible_value(copy: Path, key: str, value: object) -> None:
    change(copy / "manifest.json", lambda manifest: manifest.update({key: value}))
    with pytest.raises(UserError, match=f"damaged .{key} is"):
        read_origin(copy, [])


def test_several_ranks_start_by_torchrun(copy: Path) -> None:
    change(copy / "manifest.json", lambda manifest: manifest.update(world_size=2))
    words = command(read_origin(copy, []), copy)
    assert words[words.index("--nproc-per-node") + 1] == "2"


def test_why_not_exact(copy: Path) -> None:
    then = read_origin(copy, []).manifest
    assert why_not_exact(then, then) == []
    assert why_not_exact(then, {**then, "threads": 7, "cpu": "x"}) == [
        "another processor", "another number of threads"
    ]  # fmt: skip
    assert "GPU" in why_not_exact(then, {**then, "devices": ["NVIDIA H200"]})[0]


def row(step: int, split: str = "train", **values: Any) -> dict[str, Any]:
    usual = {"loss": 1.0, "grad_norm": 2.0, "tokens": 5, "lr": {"a": 0.1}}
    return {"step": step, "split": split, **usual, **values}


@pytest.mark.parametrize(
    ("now", "tolerance", "wrong"),
    [
        (row(1), EXACT, None),
        (row(1, step_s=9.0, tokens_per_s=3.0, peak_gb=1.0), EXACT, None),   # no two runs are equally fast
        (row(1, loss=1 + 2**-52), EXACT, "loss"),
        (row(1, loss=1 + 9e-5), Tolerance(), None),
        (row(1, loss=1 + 2e-4), Tolerance(), "loss"),
        (row(1, grad_norm=2 * (1 + 9e-4)), Tolerance(), None),
        (row(1, grad_norm=2 * (1 + 2e-3)), Tolerance(), "grad_norm"),
        (row(1, tokens=6), Tolerance(), "tokens"),
        (row(1, lr={"a": 0.2}), Tolerance(), "lr.a"),
        (row(1, lr={}), Tolerance(), "lr.a"),
        (row(1, loss=float("nan")), Tolerance(), "loss"),
        (row(2), Tolerance(), "the whole row"),
        (row(1, "eval"), Tolerance(), "the whole row"),
    ],
)
def test_the_comparison_sees(now: dict[str, Any], tolerance: Tolerance, wrong: str | None) -> None:
    found = compare([row(1)], [now], tolerance, 5)
    assert [each.field for each in found if not each.equal][:1] == ([wrong] if wrong else [])


def test_a_killed_run_may_lack_its_last_evaluation() -> None:
    then, now = [row(1), row(2)], [row(1), row(1, "eval"), row(2), row(2, "eval")]
    lacking = [each.step for each in compare(then, now, EXACT, 2) if not each.equal]
    assert lacking == [1, 2]
    assert [each.step for each in compare(then, now, EXACT, 2, cut_short=True) if not each.equal] == [1]


def test_later_steps_have_more_room() -> None:
    pair = [[row(6)], [row(6, loss=1.04)]]
    assert compare(*pair, Tolerance(), 6)[0].equal
    assert not compare(*pair, Tolerance(last=0.03), 6)[0].equal
    assert compare(*pair, Tolerance(last=0.03), 5) == []
