"""Breaks ten key lines on purpose, one at a time, and shows that the named check fails.

    python tools/mutations.py                 # all
    python tools/mutations.py "label shift"   # one

A check is a case of `lmms-engine verify` on a smoke recipe, or a test. Each is run twice in a scratch copy of
the repository, whose sample data must exist (`make prep`): untouched, where it must pass, and broken, where
it must fail. Prints a Markdown table; exits with 1 if a fault went unseen.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("lmms_engine", "data_prep", "recipes", "tests", "pyproject.toml", "requirements.lock")
SHORT = "dataset_config.packing_length=512"


@dataclass(frozen=True)
class Check:
    """What must notice. recipe: whose smoke preset is compared in `case`; None: `test` is a pytest id."""

    recipe: str | None = None
    case: str = ""
    overrides: tuple[str, ...] = ()
    test: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return f"verify {self.recipe}: {self.case}" if self.recipe else self.test


@dataclass(frozen=True)
class Mutation:
    """One fault: `old` occurs once in `file` and becomes `new`."""

    name: str
    fault: str
    file: str
    old: str
    new: str
    check: Check


MUTATIONS = (
    Mutation(
        "loss denominator",
        "each rank divides by its own tokens",
        "lmms_engine/train/step.py",
        "totals = mesh.sum_over_data(total_weights(objective, micros))",
        "totals = total_weights(objective, micros)",
        Check("qwen3_vl", "fsdp-2", (SHORT,)),
    ),
    Mutation(
        "all-to-all order",
        "heads go to the ranks in reverse",
        "lmms_engine/parallel/ulysses.py",
        "mixed = torch.cat(by_rank, dim=2).transpose(0, 1)",
        "mixed = torch.cat(by_rank, dim=2).transpose(0, 1).flip(0)",
        Check("qwen3_vl", "sp-2", (SHORT,)),
    ),
    Mutation(
        "position slice",
        "every rank of a sequence takes the first positions",
        "lmms_engine/models/spec.py",
        'inputs["position_ids"][..., part]',
        'inputs["position_ids"][..., : part.stop - part.start]',
        Check("qwen3_vl", "sp-2", (SHORT,)),
    ),
    Mutation(
        "router reduction",
        "the balance counts the visits of one rank's part of a sequence",
        "lmms_engine/objectives/routing.py",
        "dist.all_reduce(visits_NE, group=group)",
        "visits_NE = visits_NE * dist.get_world_size(group)",
        Check("qwen3_moe", "ep-2-sp-2", (SHORT,)),
    ),
    Mutation(
        "label shift",
        "a position is to predict itself",
        "lmms_engine/datasets/processor/vision_language.py",
        "labels[:-1] = np.where(supervised[1:], ids[1:], IGNORE)",
        "labels[:-1] = np.where(supervised[1:], ids[:-1], IGNORE)",
        Check(
            test="tests/datasets/processor/test_vision_language.py::test_labels_are_shifted_inside_the_sample"
        ),
    ),
    Mutation(
        "divide factor",
        "gradients are halved when they are reduced",
        "lmms_engine/parallel/fsdp.py",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(2.0)",
        Check("qwen3_vl", "fsdp-2", (SHORT,)),
    ),
    Mutation(
        "KV repeat",
        "key/value heads are repeated in turn, not in blocks",
        "lmms_engine/parallel/ulysses.py",
        "x.repeat_interleave(repeats, dim=1)",
        "x.repeat(1, repeats, 1)",
        Check(
            "qwen3_vl",
            "sp-4",
            (SHORT, "model_config.load_from_config.config.text_config.num_key_value_heads=2"),
        ),
    ),
    Mutation(
        "norm reduction",
        "each rank clips by the norm of its own shards",
        "lmms_engine/parallel/grad_norm.py",
        "dist.all_reduce(square, group=mesh.get_group(axis))",
        "square = square + 0",
        Check("qwen3_vl", "fsdp-2", (SHORT,)),
    ),
    Mutation(
        "resume rng",
        "a resumed run draws from the beginning again",
        "lmms_engine/train/runner.py",
        'generator(trainer.seed, "draw", mesh.dp_rank, self.step)',
        'generator(trainer.seed, "draw", mesh.dp_rank, self.step - self.start.step)',
        Check("sit", "resumed"),
    ),
    Mutation(
        "moment mapping",
        "the second moment is loaded as the first",
        "lmms_engine/train/checkpoint.py",
        'self.optimizer.state[parameter][key] = state[f"{name}.{key}"]',
        "source = key if key == 'step' else 'exp_avg_sq'\n"
        '                self.optimizer.state[parameter][key] = state[f"{name}.{source}"]',
        Check("qwen3_vl", "resumed", (SHORT,)),
    ),
)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="mutations to try; none: all")] = None,
) -> None:
    """Break key lines one at a time and show that the named check fails."""
    unknown = set(names or ()) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        raise typer.BadParameter(f"{sorted(unknown)} (legal: {[mutation.name for mutation in MUTATIONS]})")
    healthy: dict[Check, str] = {}
    unseen = 0
    print("| line | fault | check | untouched | broken |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for mutation in MUTATIONS:
        if names and mutation.name not in names:
            continue
        if mutation.check not in healthy:
            healthy[mutation.check] = outcome(mutation.check, None)[1]
        failed, said = outcome(mutation.check, mutation)
        unseen += not failed or healthy[mutation.check] != "passes"
        cells = (mutation.name, mutation.fault, f"`{mutation.check.name}`", healthy[mutation.check], said)
        print(f"| {' | '.join(cells)} |", flush=True)
    raise typer.Exit(1 if unseen else 0)


def outcome(check: Check, mutation: Mutation | None) -> tuple[bool, str]:
    """Whether the check failed in a scratch copy, with or without a fault, and what it said."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        folder = Path(name)
        scratch_copy(folder)
        if mutation is not None:
            apply(mutation, folder)
        return run(check, folder)


def scratch_copy(folder: Path) -> None:
    """The repository's code in `folder`, with the data linked."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    (folder / "data").symlink_to(ROOT / "data")


def apply(mutation: Mutation, folder: Path) -> None:
    """Breaks the line; it must be there exactly once."""
    path = folder / mutation.file
    text = path.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.name}: '{mutation.old}' is not once in {mutation.file}"
    path.write_text(text.replace(mutation.old, mutation.new))


def run(check: Check, folder: Path) -> tuple[bool, str]:
    """Whether the check failed as a check does (not by a wrong command), and what it said."""
    env = {**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    if check.recipe is None:
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", check.test]
        done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            raise RuntimeError(done.stdout + done.stderr)
        last = done.stdout.strip().splitlines()[-1]
        return done.returncode == 1, "passes" if done.returncode == 0 else f"fails: {last}"
    configs = [f"--config=recipes/{check.recipe}/{name}.yaml" for name in ("config", "smoke")]
    command = ["-m", "lmms_engine", "verify", *configs, f"--only={check.case}", "--steps=1", "--out=out"]
    done = subprocess.run(
        [sys.executable, *command, *check.overrides], cwd=folder, env=env, capture_output=True, text=True
    )
    record = folder / "out" / "verify.json"
    if not record.is_file():
        raise RuntimeError(done.stdout + done.stderr)
    (result,) = json.loads(record.read_text())["results"]
    if result["status"] == "ok":
        return False, "passes"
    if result["status"] == "not run":
        return False, f"not run: {result['reason']}"
    return done.returncode == 1, f"fails: {result['reason']}{_figures(result)}"


def _figures(result: dict) -> str:
    """How far off it was."""
    names = {"loss_difference": "loss", "norm_difference": "norm", "gradient_difference": "gradients"}
    known = [f"{label} {result[key]:.0e}" for key, label in names.items() if isinstance(result[key], float)]
    return f" ({', '.join(known)})" if known else ""


if __name__ == "__main__":
    typer.run(main)
