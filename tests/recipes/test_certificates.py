"""The certificates that recipes ship: whole, passed, and what a fresh comparison would write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmms_engine.train.verify import CASES
from tests.shipped import RECIPES

REPO = Path(__file__).resolve().parents[2]
SHIPPED = [path.name for path in RECIPES]
EVERYWHERE = {
    "packed", "rows", "joined", "recompute", "selective", "fsdp-2", "offload", "uneven", "resumed", "fsdp-4",
    "hsdp-2x2",
}  # fmt: skip
# What a recipe's model lets be compared besides.
BESIDES = {
    "qwen3_moe": {"padded", "sp-2", "sp-4", "sp-2-hsdp", "ep-2", "ep-4", "ep-2-sp-2", "ep-2-hsdp"},
    "qwen3_vl": {"padded", "modalities", "sp-2", "sp-4", "sp-2-hsdp"},
    "qwen2_5_vl": {"padded", "modalities", "sp-2", "sp-4", "sp-2-hsdp"},
}


def certificate(recipe: str) -> dict:
    return json.loads((REPO / "recipes" / recipe / "certificate.json").read_text())


@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_shipped_certificate_is_whole_and_passed(recipe: str) -> None:
    shipped = certificate(recipe)
    assert shipped["passed"]
    assert shipped["overrides"] == []
    assert [result["case"] for result in shipped["results"]] == [case.name for case in CASES]
    for result in shipped["results"]:
        if result["status"] == "not run":
            assert result["reason"], result["case"]
            continue
        assert result["status"] == "ok", result["case"]
        assert result["loss_difference"] <= result["loss_tolerance"]
        if result["case"] != "resumed":
            assert result["gradient_difference"] <= result["gradient_tolerance"]
    ran = {result["case"] for result in shipped["results"] if result["status"] == "ok"}
    assert EVERYWHERE | BESIDES.get(recipe, set()) <= ran
    text = (REPO / "recipes" / recipe / "certificate.md").read_text()
    assert text.startswith("# Certificate: all equal")
    assert all(f"| {case.name} |" in text for case in CASES)


def test_a_fresh_comparison_says_the_same(clone: Path) -> None:
    """One recipe, one step and two cases of it: the same record, and losses as shipped."""
    recipe = "qwen3_moe"
    env = {**os.environ, "PYTHONPATH": str(clone), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    configs = [f"--config=recipes/{recipe}/{name}.yaml" for name in ("config", "smoke")]
    cases = ["--only=packed", "--only=modalities"]
    for command in (
        [f"recipes/{recipe}/prepare.py", "--if-missing"],
        ["-m", "lmms_engine", "verify", *configs, *cases, "--steps=1", "--out=runs/verify"],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=clone, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    fresh, shipped = json.loads((clone / "runs/verify/verify.json").read_text()), certificate(recipe)
    assert fresh.keys() == shipped.keys()
    assert fresh["config"] == shipped["config"]
    assert fresh["reference"] == shipped["reference"]
    assert fresh["rows"].keys() == shipped["rows"].keys()
    assert fresh["environment"].keys() == shipped["environment"].keys()
    old = {result["case"]: result for result in shipped["results"]}
    packed, modalities = fresh["results"]
    assert packed.keys() == old["packed"].keys()
    assert packed["losses"][0] == pytest.approx(old["packed"]["losses"][0], rel=1e-4), "run make verify again"
    assert modalities == old["modalities"]
