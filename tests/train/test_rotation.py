"""What a rank holds changes from step to step: text alone, pictures, clips, or no held-out row any more.

Six steps with recomputation and a validation in the middle and at the end, the tower trained or frozen: two
ranks give the numbers of one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lmms_engine.config import Job
from lmms_engine.parallel.mesh import Mesh, build_mesh
from lmms_engine.train import TrainRunner
from tests import toy
from tests.distributed import run_ranks
from tests.runs import COLOURS, WORDS, logged, make_config, row_ids, write_rows

# Of rank 0 and rank 1 in each step.
STEPS = (
    ("picture", "text"),
    ("text", "picture"),
    ("clip", "text"),
    ("picture", "clip"),
    ("text", "text"),
    ("text", "clip"),
)
HELD_OUT = ("text", "clip", "text", "text", "picture")   # the last one has no partner
FROZEN: dict[str, list[str]] = {"trained": [], "frozen": ["visual"]}
WAIT_S = 20   # for other ranks: one that does not call the tower with them fails the test soon


def row(name: str, kind: str, i: int) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": f"{WORDS[i % 6]}?"}]
    pictures = [f"images/{COLOURS[(i + k) % 4]}.png" for k in range(4)]
    if kind == "picture":
        content.insert(0, {"type": "image_url", "image_url": {"url": pictures[0]}})
    if kind == "clip":
        content.insert(0, {"type": "video", "video": pictures, "fps": 2})
    answer = f"{COLOURS[i % 4]} {WORDS[(i * 5 + 1) % 6]}"
    return {
        "id": f"{name}-{i}-{kind}",
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}],
    }


def config(corpus: Path, run_dir: Path, frozen: str, ranks: int) -> dict[str, Any]:
    """A row is a micro-batch; rows go to the two shards in turn, so that a step has one of each."""
    changes: dict[str, Any] = {
        "data__datasets": [{"path": str(corpus / "rotating.jsonl")}],
        "data__eval_datasets": [{"path": str(corpus / "rotating-heldout.jsonl")}],
        "data__packing": False,
        "data__shuffle": False,
        "trainer__gradient_accumulation_steps": 2 // ranks,
        "trainer__freeze_modules": FROZEN[frozen],
        "trainer__fsdp_config": {"activation_checkpointing": True},
        "trainer__learning_rate": 1e-3,
        "trainer__eval_steps": 3,
        "trainer__ddp_timeout": WAIT_S,
    }
    return make_config(corpus, run_dir, **changes)


def trained(given: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Trains; the whole gradients of each step."""
    job = Job.from_dict(given)
    runner = TrainRunner(job, build_mesh(job.trainer)).build()
    found: list[dict[str, Tensor]] = []
    model = runner.objective.model
    runner.backend.optimizer.register_step_pre_hook(lambda *_: found.append(toy.gradients(model)))
    runner.run()
    return found


def on_two_ranks(mesh: Mesh, configs: list[dict[str, Any]]) -> list[list[dict[str, Tensor]]]:
    return [trained(given) for given in configs]


@pytest.fixture(scope="module")
def two_ranks(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """The data, the folder of the runs, and what each rank found in each of them."""
    folder = tmp_path_factory.mktemp("rotation")
    for name in ("images", "processor"):
        (folder / name).symlink_to(corpus / name)
    kinds = [kind for step in STEPS for kind in step]
    write_rows(folder / "rotating.jsonl", [row("train", kind, i) for i, kind in enumerate(kinds)])
    write_rows(folder / "rotating-heldout.jsonl", [row("held", kind, i) for i, kind in enumerate(HELD_OUT)])
    configs = [config(folder, folder / frozen, frozen, 2) for frozen in FROZEN]
    return folder, run_ranks(on_two_ranks, 2, configs, timeout=120)


@pytest.mark.parametrize("frozen", FROZEN)
def test_rotating_modalities_over_ranks_equal_one_process(two_ranks, frozen: str, tmp_path: Path) -> None:
    folder, found = two_ranks
    with toy.single_mesh():
        want = trained(config(folder, tmp_path / "one", frozen, 1))
    for rank in range(2):
        kinds = [ids[0].rpartition("-")[2] for _, _, ids in row_ids(folder / frozen, rank)]
        assert kinds == [step[rank] for step in STEPS]
        gradients = found[rank][list(FROZEN).index(frozen)]
        assert len(gradients) == len(want) == len(STEPS)
        for ours, theirs in zip(gradients, want, strict=True):
            toy.assert_same_gradients(ours, theirs, rtol=1e-4)
        toy.assert_same_gradients(gradients[0], want[0])
    tower = {name for name in want[0] if ".visual." in name}
    assert bool(tower) is (frozen == "trained")
    without = [not any(float(step[name].abs().max()) for name in tower) for step in want]
    assert without == [step == ("text", "text") or not tower for step in STEPS]   # stand-ins add exactly 0
    for split in ("train", "eval"):
        ours, theirs = logged(folder / frozen, split), logged(tmp_path / "one", split)
        for key in ("step", "tokens", "supervised_tokens", "samples", "skipped"):
            assert [line[key] for line in ours] == [line[key] for line in theirs]
        for key, rel in (("loss", 1e-5), ("grad_norm", 1e-4)):
            values = [[line[key] or 0.0 for line in lines] for lines in (ours, theirs)]
            assert values[0] == pytest.approx(values[1], rel=rel)
    assert [(line["step"], line["samples"]) for line in logged(folder / frozen, "eval")] == [(3, 5), (6, 5)]
