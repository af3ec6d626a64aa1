"""inspect shows the batches of training, without a model; coloured text, or JSON.

That several ranks' batches are those they trained on is in tests/train/test_runner_ranks.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmms_engine.cli import app
from lmms_engine.commands.inspect import batches
from lmms_engine.config import Job
from lmms_engine.train.metrics import read_lines
from lmms_engine.train.samples import decode, text_runs
from tests.runs import make_config, train, write_rows


@pytest.fixture
def config(corpus, tmp_path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(make_config(corpus, tmp_path / "run", trainer__max_steps=5)))
    return path


def _inspect(config: Path, *arguments: str):
    return CliRunner().invoke(app, ["inspect", "--config", str(config), *arguments])


def test_json_equals_what_the_run_logged(config, mesh, tmp_path):
    train(mesh, json.loads(config.read_text()))
    done = _inspect(config, "--steps", "99", "--json")
    assert done.exit_code == 0, done.output
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    assert shown == read_lines(tmp_path / "run" / "rows-0.jsonl")
    assert {record["step"] for record in shown} == {1, 2, 3, 4, 5}   # over the end of the first epoch
    assert set(shown[0]) == {"step", "micro", "rows", "cu_seqlens", "tokens"}
    assert set(shown[0]["rows"][0]) == {"source", "shard", "row", "id", "length", "supervised"}


def test_workers_and_overrides_do_not_change_the_batches(config):
    plain = _inspect(config, "--steps", "2", "--json").stdout
    assert _inspect(config, "trainer_args.dataloader_num_workers=2", "--steps", "2", "--json").stdout == plain
    assert _inspect(config, "trainer_args.seed=7", "--steps", "2", "--json").stdout != plain


def test_text_shows_what_is_supervised(config, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    shown = _inspect(config, "--steps", "1").output
    assert "step 1, micro-batch 0:" in shown
    green = shown.split("\x1b[1;32m")[1:]
    marked = [part.split("\x1b[0m")[0] for part in green]
    assert any("<|im_end|>" in part for part in marked)
    assert not any("<|im_start|>" in part for part in marked)


def test_supervised_runs_are_the_answers(config, corpus):
    job = Job.from_dict(json.loads(config.read_text()))
    rows = {row["id"]: row for row in read_lines(corpus / "train.jsonl")}
    from lmms_engine.train.data import build_processor

    processor = build_processor(job)
    seen = 0
    for _, micros in batches(job, 0, 1, 3):
        for batch in micros:
            for index, ref in enumerate(batch.rows):
                answer = rows[ref.id]["messages"][1]["content"]
                supervised = [text for text, is_target in text_runs(batch, index, processor) if is_target]
                assert supervised == [f"{answer}<|im_end|>"]
                seen += 1
    assert seen == 14


def test_long_repeats_of_a_token_are_counted():
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return "".join(chr(i) for i in ids)

    assert decode([97, 98, 98, 98, 98, 98, 99, 99], Tokenizer()) == "ab×5cc"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dp-rank", "2", "--dp-size", "2"], "--dp-rank 2: legal are 0 to 1 for --dp-size 2"),
        (["trainer_args.sed=1"], "trainer_args.sed"),
        (["dataset_config.datasets.0.path=/absent/x.jsonl"], "/absent/x.jsonl"),
    ],
)
def test_mistakes_are_one_line(config, arguments, message):
    done = _inspect(config, *arguments)
    assert done.exit_code == 1
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.output


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_pass_without_a_usable_row_says_of_what_kinds_they_are(config, corpus, tmp_path, ranks):
    row = read_lines(corpus / "train.jsonl")[0]
    row["messages"][1]["content"] = "word " * 200
    write_rows(tmp_path / "rows.jsonl", [row, row, row, {"id": "x"}])
    changed = [f"dataset_config.datasets=[{{path: {tmp_path}/rows.jsonl, data_folder: {corpus}}}]",
               "dataset_config.on_bad_row=skip", "dataset_config.max_skip_fraction=1.0"]
    done = _inspect(config, *changed, "--dp-size", ranks)
    assert done.exit_code == 1
    assert "a whole pass gave no usable row (overlong 3, messages 1); `data-prep" in done.stderr


def test_debug_shows_the_traceback(config):
    arguments = ["--debug", "inspect", "--config", str(config), "trainer_args.sed=1"]
    assert "trainer_args.sed" in str(CliRunner().invoke(app, arguments).exception)


def test_only_verbs_that_exist_are_listed():
    shown = CliRunner().invoke(app, ["--help"]).output
    for verb in ("inspect", "export", "report", "verify", "doctor", "reproduce"):
        assert verb in shown
    for verb in ("plan", "bench"):
        assert verb not in shown
