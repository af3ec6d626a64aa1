"""The script for several GPUs of one host: a dry run of each part with gloo, and what its figures mean."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))   # they import one another

import scaling
import scaling_ranks
import scaling_runs
from common import SIZES, model_config

from lmms_engine.parallel.mesh import Mesh
from tests.distributed import run_ranks

REPO = Path(__file__).resolve().parents[2]
SHORT = ["--tiny", "--steps", "1", "--warmup", "0", "--mixed-steps", "3"]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """`run(*words)`: the report of the script, which sets variables for what it starts; and what it says."""
    for name in ("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def call(*words: str) -> dict[str, Any]:
        out = tmp_path / "out.json"
        code = scaling.main([*words, *SHORT, "--out", str(out)])
        said = capsys.readouterr()
        assert code == 0, said.out + said.err
        return json.loads(out.read_text()) | {"said": said.out}

    return call


def on_two_ranks(mesh: Mesh, folder: str, out: str) -> dict[str, Any]:
    """What each of two ranks of the script does, and the report of the first."""
    words = ["throughput", "mixed", *SHORT, "--out", out, "--data", folder]
    given = scaling.parse([*words, "--layout", "fsdp,sp2", "--packing", "first_fit"])
    work = scaling.work_of(given, Path(folder))
    if mesh.is_main:
        scaling_ranks.write_data(work, given.case, ["throughput", "mixed"])
    mesh.barrier()
    fsdp, shared = given.case
    return {
        "fsdp": scaling_ranks.throughput(fsdp, work, 2),
        "sp2": scaling_ranks.throughput(shared, work, 2),
        "mixed": scaling_ranks.mixed(fsdp, work, 2),
    }


def test_one_rank_and_two(tmp_path: Path, run: Callable[..., dict[str, Any]]) -> None:
    report = run("throughput", "--ranks", "1", "--layout", "fsdp,sp2", "--packing", "first_fit")
    assert report["machine"]["backend"] == "gloo"
    (one,) = report["throughput"]
    assert (one["layout"], one["ranks"], one["efficiency"], one["base_ranks"]) == ("fsdp", 1, 1.0, 1)
    left_out = {each["what"]: each["reason"] for each in report["not_run"]}
    shared = left_out["throughput: qwen3_vl_tiny/sp2/first_fit on 1 ranks"]
    assert shared == "sp2 needs a multiple of 2 ranks"
    assert {"Muon", *scaling.NO_FAMILY} <= left_out.keys()
    assert all(f"not run: {what}: {reason}" in report["said"] for what, reason in left_out.items())

    first, second = run_ranks(on_two_ranks, 2, str(tmp_path / "data"), str(tmp_path / "two.json"))
    for key in ("tokens", "step_s", "data_s", "peak_gb", "loss"):   # of all ranks, so the same on each
        assert first["fsdp"][key] == second["fsdp"][key], key
    two, sp2, mixed = first["fsdp"], first["sp2"], first["mixed"]
    pack, long_pack, packs = scaling.TINY.pack, scaling.TINY.long_pack, scaling.TINY.accumulation
    assert packs * pack * 0.5 < one["tokens"] <= packs * pack
    assert 2 * packs * pack * 0.5 < two["tokens"] <= 2 * packs * pack
    assert (sp2["data_ranks"], sp2["pack"]) == (1, long_pack)
    assert long_pack * 0.5 < sp2["tokens"] <= long_pack   # once, though two ranks hold the sequence
    assert sp2["mfu"] is None
    assert 0 < sp2["tflops"] < 1

    assert (mixed["ranks"], mixed["steps"], mixed["finite"]) == (2, 3, True)
    seen = mixed["seen"]
    assert [seen[f"{name}: packs"] for name in scaling_ranks.MODALITIES] == [2, 2, 2]
    assert seen["pictures: picture tokens"] > 0 < seen["clips: clip tokens"]
    others = ("text: picture", "text: clip", "pictures: clip", "clips: picture")
    assert [seen[f"{name} tokens"] for name in others] == [0, 0, 0, 0]


def test_a_rank_is_killed_and_the_run_goes_on(run: Callable[..., dict[str, Any]]) -> None:
    report = run("kill", "--ranks", "1,2", "--kill-steps", "8")
    (row,) = report["kill"]
    assert row["ok"], row
    assert (row["ranks"], row["killed"], row["code"], row["crash_reports"]) == (2, 1, 137, [0])
    assert row["ranks_ended_s"] <= row["all_ended_s"] < scaling_runs.ALONE_S + 2
    assert (row["resumed_on"], row["steps"]) == (1, 8)
    assert 2 <= row["resumed_from"] <= row["at_step"] + 1
    assert {"what": "kill on 1 ranks", "reason": "nobody is left"} in report["not_run"]


def test_efficiency_is_against_the_fewest_ranks_of_the_same_case() -> None:
    def row(layout: str, ranks: int, speed: float) -> dict[str, Any]:
        return {"model": "m", "layout": layout, "packing": "p", "ranks": ranks, "tokens_per_s": speed}

    failed = {"model": "m", "layout": "big", "packing": "p", "ranks": 1, "problem": "OutOfMemoryError: no"}
    rows = [row("fsdp", 2, 180.0), row("fsdp", 1, 100.0), failed, row("big", 4, 100.0), row("big", 8, 150.0)]
    scaling.add_efficiency(rows)
    assert [(each.get("efficiency"), each.get("base_ranks")) for each in rows] == [
        (0.9, 1), (1.0, 1), (None, None), (1.0, 4), (0.75, 4),
    ]  # fmt: skip
    text = scaling.text_of({"throughput": rows, "not_run": []})
    assert "failed: throughput: m big p 1 ranks: OutOfMemoryError: no" in text


def test_what_fails() -> None:
    assert scaling.passed({"problem": "rank 3: OutOfMemoryError: CUDA out of memory"})
    assert not scaling.passed({"problem": "hung: not done within --limit 3600 s"})
    assert not scaling.passed({"finite": False})
    assert not scaling.passed({"ok": False})


def test_the_certificate_of_verify_is_taken_in() -> None:
    certificate = json.loads((REPO / "recipes/qwen3_vl/certificate.json").read_text())
    rows, left_out = scaling_runs.split_certificate(certificate)
    assert all(row["ok"] and row["gradient_difference"] <= 1e-5 for row in rows if row["case"] != "resumed")
    assert {"packed", "fsdp-2", "sp-2"} <= {row["case"] for row in rows}
    assert len(rows) + len(left_out) == len(certificate["results"])
    certificate["results"][0]["status"] = "failed"
    assert not scaling.passed(scaling_runs.split_certificate(certificate)[0][0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layout", "sp3"], "no sp3 (legal: fsdp, hsdp, sp2, sp4)"),
        (["--model", "qwen"], "no qwen (legal: qwen3_vl_4b"),
        (["--recompute", "some"], "--recompute some: not legal (legal: full, selective, none, or a number"),
    ],
)
def test_unknown_names(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scaling.parse(["throughput", "--out", "x.json", *words])
    assert said in capsys.readouterr().err


def test_layouts_are_asked_for_and_refused_by_ranks() -> None:
    hsdp, sp4 = (scaling.Case.parse(f"qwen3_vl_8b/{layout}/balanced") for layout in ("hsdp", "sp4"))
    assert [hsdp.shortage(ranks) is None for ranks in (1, 2, 4, 8)] == [False, False, True, True]
    assert [sp4.shortage(ranks) is None for ranks in (1, 2, 4, 8)] == [False, False, True, True]
    work = scaling.work_of(scaling.parse(["throughput", "--out", "x.json"]), Path("x"))
    job = scaling_ranks.job_of(hsdp, 8, work, "usual")
    assert (job.trainer.fsdp_config.hsdp_shard_size, job.trainer.sp_ulysses_degree) == (4, 1)
    assert job.dataset.packing_strategy == "balanced"
    job = scaling_ranks.job_of(sp4, 8, work, "long")
    assert (job.trainer.sp_ulysses_degree, job.dataset.packing_length) == (4, 131072)
    assert job.trainer.gradient_accumulation_steps == 1


@pytest.mark.parametrize(
    ("size", "parameters"), [("qwen3_vl_8b", 8_767_123_696), ("qwen2_5_vl_7b", 8_292_166_656)]
)
def test_published_sizes(size: str, parameters: int) -> None:
    """The numbers of parameters that the published weights have."""
    from lmms_engine.config import Job
    from lmms_engine.models import hf
    from lmms_engine.models.spec import for_type

    work = scaling.work_of(scaling.parse(["throughput", "--out", "x.json"]), Path("x"))
    job: Job = scaling_ranks.job_of(scaling.Case(size, "fsdp", "first_fit"), 1, work, "usual")
    config = hf.read_config(job.model)
    model = hf.build_meta(for_type(config.model_type), config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model_config(size)["text_config"]["hidden_size"] == SIZES[size]["vision_config"]["out_hidden_size"]
