"""export writes a folder that transformers alone opens, and report a page."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from lmms_engine.cli import app
from lmms_engine.parallel.mesh import build_mesh, leave_mesh
from lmms_engine.train import checkpoint
from tests.runs import make_config, train


@pytest.fixture(scope="module")
def run_dir(corpus, tmp_path_factory):
    """Two steps, both saved."""
    folder = tmp_path_factory.mktemp("exported") / "run"
    train(build_mesh(), make_config(corpus, folder, trainer__max_steps=2, trainer__save_steps=1))
    leave_mesh()
    return folder


def _run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_newest_checkpoint_opens_with_transformers(run_dir):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    done = _run("export", run_dir, "--dtype", "fp32")
    assert done.exit_code == 0, done.output
    folder = run_dir / "export"
    model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    trained = dict(checkpoint.model_only_state(run_dir / "checkpoints" / "step-00000002"))
    loaded = model.state_dict()
    for name, tensor in trained.items():
        assert torch.equal(loaded[name], tensor), name
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight   # tied, as in training
    processor = AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template([{"role": "user", "content": [{"type": "text", "text": "one"}]}])
    assert "<|im_start|>" in text
    assert sorted(path.name for path in run_dir.iterdir() if path.name.startswith(".")) == []


def test_a_named_checkpoint_and_folder_in_bf16(run_dir, tmp_path):
    out = tmp_path / "out"
    done = _run("export", run_dir / "checkpoints" / "step-00000001", "--out", out)
    assert done.exit_code == 0, done.output
    assert "step-00000001" in done.output
    first = dict(checkpoint.model_only_state(run_dir / "checkpoints" / "step-00000001"))
    with safe_open(out / "model.safetensors", framework="pt") as file:
        name = "model.visual.merger.linear_fc1.weight"
        assert torch.equal(file.get_tensor(name), first[name].bfloat16())
    again = _run("export", run_dir, "--out", out)   # a model folder may be written over
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize("verb", ["export", "report"])
def test_what_is_no_run_is_refused_by_name(verb, tmp_path):
    done = _run(verb, tmp_path / "absent")
    assert done.exit_code == 1
    assert f"error: {tmp_path / 'absent'}" in done.stderr


def test_other_folders_are_not_written_over(run_dir, tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    done = _run("export", run_dir, "--out", tmp_path)
    assert done.exit_code == 1
    assert "is no model folder" in done.stderr
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_run_without_a_checkpoint_is_refused(run_dir, tmp_path):
    shutil.copy(run_dir / "config.yaml", tmp_path)
    done = _run("export", tmp_path)
    assert done.exit_code == 1
    assert "no complete checkpoint yet" in done.stderr


def test_report_is_written_anew_also_when_the_data_are_gone(run_dir, corpus, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    (copy / "report.html").unlink()
    done = _run("report", copy)
    assert done.exit_code == 0, done.output
    assert "<mark>" in (copy / "report.html").read_text()
    config = (copy / "config.yaml").read_text()
    gone = config.replace(str(corpus / "train.jsonl"), str(tmp_path / "gone.jsonl"))
    (copy / "config.yaml").write_text(gone)
    assert _run("report", copy).exit_code == 0
    page = (copy / "report.html").read_text()
    assert "gone.jsonl" in page
    assert "not available" in page
