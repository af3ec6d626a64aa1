"""A run on a row that mentions a picture: the tower gets a gradient from it, or the run says why not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lmms_engine.config import Job
from lmms_engine.errors import UserError
from lmms_engine.train import TrainRunner
from lmms_engine.train.metrics import StepClock, read_lines
from tests.runs import logged, make_config
from tests.toy import whole

TEXT = {"type": "text", "text": "two three?"}
ANSWER = {"role": "assistant", "content": "red"}


def asked(*parts: dict[str, str]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, TEXT]}, ANSWER]


USED = {
    "image": {"messages": asked(), "image": "images/red.png"},
    "images": {"messages": asked(), "images": ["images/red.png"]},
}
REFUSED = {
    "imgs": ({"messages": asked(), "imgs": ["images/red.png"]}, "unknown key 'imgs'"),
    "no source": ({"messages": asked({"type": "image"})}, r"messages\[0\]"),
    "no file": ({"messages": asked({"type": "image", "image": "images/no.png"})}, r"images/no\.png"),
}


def config_of(corpus: Path, folder: Path, rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    shutil.copytree(corpus, folder / "data")
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_config(
        folder / "data", folder / "run", trainer__max_steps=1, trainer__gradient_accumulation_steps=1,
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize("key", USED)
def test_the_tower_learns_from_it(corpus, mesh, tmp_path, key) -> None:
    """A gradient in the tower, as many slots as features."""
    runner = TrainRunner(Job.from_dict(config_of(corpus, tmp_path, [{"id": "r", **USED[key]}])), mesh).build()
    norms: dict[str, float] = {}

    def note(*_: object) -> None:
        for name, parameter in runner.objective.model.named_parameters():
            norms[name] = float(whole(parameter.grad).norm())

    runner.backend.optimizer.register_step_pre_hook(note)
    with runner._trackers(), runner._progress_bar():
        window = runner._next_window()
        runner._train(window, StepClock(mesh.device))
    (micro,) = window.micros
    slots = int((micro.input_ids == runner.loader.processor.image_token).sum())
    assert [row.id for row in micro.rows] == ["r"]
    assert micro.segments.num_segments == 1   # no stand-in beside it
    assert slots * 4 == len(micro.media["pixel_bytes"]) == int(micro.media["image_grid_thw"].prod()) > 0
    tower = {name: norm for name, norm in norms.items() if name.startswith("model.visual.")}
    assert tower["model.visual.patch_embed.proj.weight"] > 0
    assert tower["model.visual.merger.linear_fc1.weight"] > 0


@pytest.mark.parametrize("case", REFUSED)
def test_or_it_is_named(corpus, mesh, tmp_path, case) -> None:
    """The run stops, or skips and counts, with row and key; never a step without the picture."""
    row, words = REFUSED[case]
    rows = [{"id": "bad", **row}, {"id": "good", **USED["image"]}]
    config = config_of(corpus, tmp_path, rows, data__on_bad_row="stop", data__shuffle=False)
    with pytest.raises(UserError, match=rf"train\.jsonl.*line 1.*{words}"):
        TrainRunner(Job.from_dict(config), mesh).build().run()
    config["dataset_config"] |= {"on_bad_row": "skip", "max_skip_fraction": 1.0}
    config["trainer_args"]["output_dir"] = str(tmp_path / "skipping")
    TrainRunner(Job.from_dict(config), mesh).build().run()
    (skipped,) = read_lines(tmp_path / "skipping" / "skipped.jsonl")
    assert skipped["id"] == "bad"
    (step,) = logged(tmp_path / "skipping")
    assert (step["samples"], step["skipped"]) == (1, 1)
