"""A run that learns to draw: real runs from rows to report, resume and export, by the engine's one runner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from lmms_engine.cli import app
from lmms_engine.config import Job
from lmms_engine.errors import UserError
from lmms_engine.models.sit import SiT
from lmms_engine.models.sit.processor import Settings, SiTProcessor
from lmms_engine.parallel.mesh import Mesh
from lmms_engine.train.drawings import read_drawings
from lmms_engine.train.parallelize import build_model
from lmms_engine.train.samples import first_samples
from tests import toy
from tests.distributed import run_ranks
from tests.runs import logged, row_ids, train

CLASSES = ("red", "green", "blue & white")
SIZES = ((8, 8), (8, 4), (4, 6))
MODEL = {
    "model_type": "sit",
    "config": {
        "input_size": 8, "patch_size": 2, "hidden_size": 16, "depth": 2, "num_heads": 2,
        "mlp_ratio": 2.0, "num_classes": 3,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fourteen pictures to learn and five held out, of unlike sizes, and a processor folder."""
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for name, count in (("train", 14), ("heldout", 5)):
        lines = []
        for i in range(count):
            width, height = SIZES[i % 3]
            pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{name}{i}.png")
            picture = {"type": "image_url", "image_url": {"url": f"{name}{i}.png"}}
            messages = [
                {"role": "user", "content": CLASSES[i % 3]},
                {"role": "assistant", "content": [picture]},
            ]
            lines.append(json.dumps({"id": f"{name}-{i}", "messages": messages}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    SiTProcessor(Settings(CLASSES, 2)).save_pretrained(folder / "processor")
    return folder


def config(corpus: Path, run_dir: Path, **trainer: Any) -> dict[str, Any]:
    return {
        "model_config": {"load_from_config": MODEL},
        "dataset_config": {
            "datasets": [{"path": str(corpus / "train.jsonl")}],
            "eval_datasets": [{"path": str(corpus / "heldout.jsonl")}],
            "processor_config": {"processor_name": str(corpus / "processor")},
            "packing_length": 48,
            "num_logical_shards": 2,
        },
        "trainer_args": {
            "output_dir": str(run_dir),
            "max_steps": 6,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",   # a run cut short has the same rates
            "warmup_ratio": 0.0,
            "fsdp_config": {"activation_checkpointing": False},
            "dataloader_num_workers": 0,
            "report_to": "none",
            "log_rows": True,
            "eval_steps": 3,
            "save_steps": 3,
            **trainer,
        },
    }


@pytest.fixture(scope="module")
def mesh():
    with toy.single_mesh() as mesh:
        yield mesh


@pytest.fixture(scope="module")
def finished(corpus: Path, mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    train(mesh, config(corpus, run_dir))
    return run_dir


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    from lmms_engine.train import checkpoint

    return dict(checkpoint.model_only_state(checkpoint.latest(run_dir)))


def test_metrics_and_report(finished: Path) -> None:
    rows = logged(finished)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["tokens"] == row["supervised_tokens"] > 0 for row in rows)
    assert all(row["loss_terms"].keys() == {"flow"} for row in rows)
    assert [row["samples"] for row in logged(finished, "eval")] == [5, 5]
    drawings = read_drawings(finished)
    assert [caption for caption, _ in drawings] == ["red", "green", "blue _ white"]
    assert all(Image.open(path).size == (8, 8) for _, path in drawings)
    page = (finished / "report.html").read_text()
    assert page.count('class="drawing"') == 3
    assert "blue &amp; white, 4×6 pixels" in page or "red, 8×8 pixels" in page


def test_resume_is_exact(corpus: Path, mesh: Mesh, finished: Path, tmp_path: Path) -> None:
    """Same losses, validation, rows, weights and drawings as the run that was never interrupted."""
    train(mesh, config(corpus, tmp_path / "run", max_steps=3))
    (tmp_path / "run" / "report.html").unlink()
    train(mesh, config(corpus, tmp_path / "run"))
    for split in ("train", "eval"):
        ours, want = logged(tmp_path / "run", split), logged(finished, split)
        assert [(r["step"], r["loss"]) for r in ours[-3:]] == [(r["step"], r["loss"]) for r in want[-3:]]
    assert row_ids(tmp_path / "run") == row_ids(finished)
    theirs = weights(finished)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights(tmp_path / "run").items())


def test_export_opens_and_trains_on(corpus: Path, mesh: Mesh, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "export"
    done = CliRunner().invoke(app, ["export", str(finished), "--out", str(out), "--dtype", "fp32"])
    assert done.exit_code == 0, done.output
    model, trained = SiT.from_pretrained(out), weights(finished)
    assert model.state_dict().keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
    given = config(corpus, tmp_path / "more", max_steps=1)
    given["model_config"] = {"load_from_pretrained_path": str(out)}
    del given["dataset_config"]["processor_config"]   # the export holds it
    runner = train(mesh, given)
    assert runner.model_config.num_classes == 3


def test_inspect_and_samples(corpus: Path, tmp_path: Path) -> None:
    given = config(corpus, tmp_path / "run")
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(given))
    text = CliRunner().invoke(app, ["inspect", "--config", str(path)])
    assert text.exit_code == 0, text.output
    assert "red, 8×8 pixels" in text.output
    found = CliRunner().invoke(app, ["inspect", "--config", str(path), "--json"])
    first = json.loads(found.output.splitlines()[0])
    assert [row["length"] for row in first["rows"]] == [row["supervised"] for row in first["rows"]]
    (shown, *_) = first_samples(Job.from_dict(given).to_dict(), 1)
    assert len(shown.thumbnails) == 1
    ((words, supervised),) = shown.text
    assert words.endswith("pixels")
    assert supervised


def on_two_ranks(mesh: Mesh, given: dict[str, Any]) -> tuple[list[float], list[float]]:
    train(mesh, given)
    run_dir = Path(given["trainer_args"]["output_dir"])
    return [[row["loss"] for row in logged(run_dir, split)] for split in ("train", "eval")]


def test_validation_is_the_same_on_two_ranks(corpus: Path, mesh: Mesh, tmp_path: Path) -> None:
    """At the first step, where nothing was learned: noise belongs to the row, not to the rank."""
    options = {"max_steps": 1, "learning_rate": 1e-12}
    train(mesh, config(corpus, tmp_path / "one", **options))
    (want,) = logged(tmp_path / "one", "eval")
    (_, got), _ = run_ranks(on_two_ranks, 2, config(corpus, tmp_path / "two", **options))
    assert got == [pytest.approx(want["loss"], rel=1e-6)]
    assert (tmp_path / "two" / "drawings").is_dir()


def share_a_sequence(mesh: Mesh, given: dict[str, Any]) -> str:
    from lmms_engine.parallel.mesh import build_mesh

    job = Job.from_dict(given)
    try:
        build_model(job, build_mesh(job.trainer))
    except UserError as error:
        return str(error)
    return "no error"


def test_sequence_parallelism_is_refused_by_name(corpus: Path, tmp_path: Path) -> None:
    given = config(corpus, tmp_path / "run", sp_ulysses_degree=2)
    for said in run_ranks(share_a_sequence, 2, given):
        assert said.startswith("trainer_args.sp_ulysses_degree=2: ranks cannot share a sequence of sit")


def test_padded_path_is_refused(corpus: Path, mesh: Mesh, tmp_path: Path) -> None:
    job = Job.from_dict(config(corpus, tmp_path / "run", use_rmpad=False))
    with pytest.raises(UserError, match=r"trainer_args\.use_rmpad=false: sit has no padded path"):
        build_model(job, mesh)
