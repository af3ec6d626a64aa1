"""`data-prep encode`: what a run gets of it, and when a set that is there counts."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner, Result

from data_prep.cli import app
from lmms_engine.config import load_job
from lmms_engine.datasets.batch import PackedBatch
from lmms_engine.datasets.loader import Loader
from lmms_engine.errors import UserError
from lmms_engine.models.build import build_processor
from tests.runs import MODEL, logged, make_config, train

runner = CliRunner()


def run(data: Path, out: Path, *arguments: object) -> Result:
    return runner.invoke(app, ["encode", str(data), "--out", str(out), *map(str, arguments)])


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def data(sample: Path, tmp_path: Path) -> Path:
    """The held-out rows of the sample: text, pictures, clips; one that cannot be used, one of many turns."""
    lines = (sample / "heldout.jsonl").read_text().splitlines()
    turns = [{"role": "user", "content": [{"type": "image", "image": "none.png"}]}]
    lines.insert(11, json.dumps({"messages": [*turns, {"role": "assistant", "content": "a"}]}))
    talk = [{"role": role, "content": "a red one"} for role in ("user", "assistant")] * 9
    lines.insert(3, json.dumps({"messages": talk}))
    for name in ("images", "videos"):
        (tmp_path / name).symlink_to(sample / name)
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def config(sample: Path, tmp_path: Path) -> Callable[..., Path]:
    """`config(path, key=value)`: the file of a run on a data set; keys are of dataset_config."""

    def write(path: Path, family: str = "qwen3_vl", **keys: Any) -> Path:
        dataset = {"packing_length": 256, "num_logical_shards": 3, "on_bad_row": "skip", "fps": 2.0, **keys}
        processor = {"processor_name": str(sample / "processor" / family), "processor_type": family}
        model = MODEL if family == "qwen3_vl" else {"model_type": family}
        text = {
            "model_config": {"load_from_config": model},
            "dataset_config": {"datasets": [{"path": str(path)}], "processor_config": processor, **dataset},
            "trainer_args": {"dataloader_num_workers": 0, "max_steps": 9},
        }
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(text))
        return file

    return write


def batches(config: Path, path: Path) -> list[Any]:
    """What a run on the set in `path` sees of an epoch; without the names of sources."""
    job = load_job([config], [])
    entry = job.dataset.datasets[0].model_copy(update={"path": str(path)})
    job = job.model_copy(update={"dataset": job.dataset.model_copy(update={"datasets": (entry,)})})
    loader = Loader(job, partial(build_processor, job), dp_rank=0, dp_size=1)
    seen: list[Any] = []
    while micros := loader.next_step():
        seen += map(everything, micros)
    skipped = [record[1:3] + record[4:] for record in loader.take_skipped()]
    return [*seen, skipped]


def everything(batch: PackedBatch) -> Any:
    tensors = {
        "ids": batch.input_ids, "labels": batch.labels, "weights": batch.loss_weights,
        "positions": batch.position_ids, "cu": batch.segments.cu_seqlens, **batch.media, **batch.tower,
    }  # fmt: skip
    plain = {
        name: value if isinstance(value, int) else (str(value.dtype), value.shape, value.numpy().tobytes())
        for name, value in tensors.items()
    }
    return plain, [(row.shard, row.row) for row in batch.rows]


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen3_vl", {}),
        ("qwen2_5_vl", {"overlong": "truncate", "max_length": 60, "packing_strategy": "balanced"}),
    ],
)
def test_a_run_on_the_encoded_set_gets_the_same_batches(
    data: Path, tmp_path: Path, config: Callable[..., Path], family: str, keys: dict[str, Any]
) -> None:
    file = config(data, family, **keys)
    result = run(data, tmp_path / "out", "--config", file, "--on-bad-row", "skip")
    assert result.exit_code == 0, result.output
    assert "kept as unusable: media_missing 1" in result.stdout
    expected = batches(file, data)
    found = batches(file, tmp_path / "out")
    assert found == expected
    assert any("pixel_bytes" in batch[0] for batch in expected[:-1])
    assert "media_missing" in {record[2] for record in expected[-1]}
    assert ("truncated" in {record[2] for record in expected[-1]}) == bool(keys)


def test_a_run_trains_on_it_to_the_same_numbers(corpus: Path, tmp_path: Path) -> None:
    """The whole way: encoded by the run's config, trained on, validated on, and shown in the report."""
    from lmms_engine.parallel.mesh import build_mesh, leave_mesh

    def config(name: str, data: Path, heldout: Path) -> dict[str, Any]:
        entries = {"data__datasets": [{"path": str(data)}], "data__eval_datasets": [{"path": str(heldout)}]}
        more = {"trainer__max_steps": 2, "trainer__eval_steps": 2, "trainer__save_steps": 2}
        return make_config(corpus, tmp_path / name, **entries, **more)

    sets = [corpus / "train.jsonl", corpus / "heldout.jsonl"]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config("rows", *sets)))
    for path in sets:
        assert run(path, tmp_path / "encoded" / path.stem, "--config", file).exit_code == 0
    numbers = []
    for name, paths in (("rows", sets), ("encoded", [tmp_path / "encoded" / path.stem for path in sets])):
        train(build_mesh(), config(f"run-{name}", *paths))
        leave_mesh()
        logs = [row for split in ("train", "eval") for row in logged(tmp_path / f"run-{name}", split)]
        numbers.append([(row["loss"], row["grad_norm"], row["tokens"], row["epoch"]) for row in logs])
        assert "<mark>" in (tmp_path / f"run-{name}" / "report.html").read_text()
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) == 3


def test_settings_are_those_of_a_run_by_default(data: Path, sample: Path, tmp_path: Path) -> None:
    """`--processor` alone gives a set that a run with the defaults reads."""
    folder = sample / "processor" / "qwen3_vl"
    assert run(data, tmp_path / "out", "--processor", folder, "--on-bad-row", "skip").exit_code == 0
    key = json.loads((tmp_path / "out" / "encoded.json").read_text())["identity"]
    assert (key["fps"], key["max_length"], key["processor"]) == (1.0, None, "Qwen3VLProcessor")


# Prepared data after a change ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"fps": 1.0}, "fps was 2.0 and is 1.0"),
        ({"video_max_pixels": 20_000}, "video_processor.max_video_tokens was"),
        ({"video_max_frames": 6}, "video_processor.max_frames was 768 and is 6"),
        ({"overlong": "truncate", "max_length": 77}, "max_length was None and is 77"),
    ],
)
def test_a_run_with_other_settings_is_refused_by_name(
    encoded: tuple[Path, Path], config: Callable[..., Path], changes: dict[str, Any], part: str
) -> None:
    data, out = encoded
    with pytest.raises(UserError, match=r"was encoded with other settings than this run's: ") as error:
        batches(config(data, **changes), out)
    assert part in str(error.value)
    again = run(data, out, "--config", config(data, **changes), "--on-bad-row", "skip")
    assert (again.exit_code, "--overwrite encodes anew" in again.stderr) == (1, True)
    assert part in again.stderr


@pytest.fixture
def encoded(data: Path, tmp_path: Path, config: Callable[..., Path]) -> tuple[Path, Path]:
    """(rows, their encoded set)"""
    result = run(data, tmp_path / "out", "--config", config(data), "--on-bad-row", "skip")
    assert result.exit_code == 0, result.output
    return data, tmp_path / "out"


@pytest.mark.parametrize("part", ["tokenizer", "chat_template", "image_processor.size.longest_edge"])
def test_another_tokenizer_template_or_limit_is_named(
    encoded: tuple[Path, Path], config: Callable[..., Path], sample: Path, tmp_path: Path, part: str
) -> None:
    data, out = encoded
    file = config(data)
    folder = shutil.copytree(sample / "processor" / "qwen3_vl", tmp_path / "processor")
    options = []
    if part == "tokenizer":   # of the same class; the same vocabulary, otherwise cut
        text = json.loads((folder / "tokenizer.json").read_text())
        text["model"]["merges"].pop()
        (folder / "tokenizer.json").write_text(json.dumps(text))
    elif part == "chat_template":
        template = folder / "chat_template.jinja"
        text = template.read_text()
        template.write_text(text.replace("<|im_end|>", "<|im_end|>\n", 1))
        assert template.read_text() != text
    else:
        options = ["--set", "dataset_config.processor_config.extra_kwargs.image_max_pixels=9000"]
    options += ["--set", f"dataset_config.processor_config.processor_name={folder}"]
    again = run(data, out, "--config", file, *options, "--on-bad-row", "skip")
    assert (again.exit_code, f"settings: {part} was " in again.stderr) == (1, True)
    before = contents(out)
    anew = run(data, out, "--config", file, *options, "--on-bad-row", "skip", "--overwrite")
    assert anew.exit_code == 0, anew.output
    new_key = json.loads((out / "encoded.json").read_text())
    assert new_key["content"] != json.loads(before["encoded.json"])["content"]
    assert [before[name] for name in sorted(before)] != [contents(out)[name] for name in sorted(before)]


def test_no_change_is_a_hit_and_changed_rows_or_media_are_seen(
    encoded: tuple[Path, Path], config: Callable[..., Path], tmp_path: Path
) -> None:
    data, out = encoded
    arguments = ("--config", config(data), "--on-bad-row", "skip")
    before, text = contents(out), data.read_text()
    assert run(data, out, *arguments).stdout.splitlines()[-1].startswith("present: ")
    data.touch()
    assert run(data, out, *arguments).exit_code == 0
    data.write_text(text.replace("colour", "colors", 1))   # of equal size
    assert "made of other rows or media than are there now" in run(data, out, *arguments).stderr
    data.write_text(text)
    images = data.parent / "images"
    copies = shutil.copytree(images, data.parent / "copies")
    images.unlink()
    copies.rename(images)
    assert run(data, out, *arguments).exit_code == 0   # moved, and the same
    used = next(line for line in text.splitlines() if ".png" in line)
    name = used[used.index("images/") :].split('"')[0]
    Image.new("RGB", (64, 64), "pink").save(data.parent / name)
    assert "made of other rows or media than are there now" in run(data, out, *arguments).stderr
    assert contents(out) == before


def test_killed_at_any_instant_it_goes_on_to_the_same_bytes(
    encoded: tuple[Path, Path], config: Callable[..., Path], killed: Callable[..., int], tmp_path: Path
) -> None:
    data, _ = encoded
    other, parts = tmp_path / "other", tmp_path / ".other.parts"
    arguments = (data, "--out", other, "--config", config(data), "--on-bad-row", "skip")
    for count in (1, 4, 7):   # two files a part, so also between them
        assert killed(["encode", *arguments], parts, count) >= count
        assert not other.exists()
    first = min(parts.glob("part-*.arrow"))
    seen = first.stat().st_mtime_ns
    last = max(parts.glob("part-*.json"))
    last.write_text(last.read_text().replace('"content": "', '"content": "0'))   # as of other rows
    assert runner.invoke(app, ["encode", *map(str, arguments)]).exit_code == 0
    assert (other / first.name).stat().st_mtime_ns == seen   # not done again
    undisturbed = tmp_path / "undisturbed"
    assert run(data, undisturbed, *arguments[3:]).exit_code == 0
    assert contents(other) == contents(undisturbed)
    assert not parts.exists()


def test_two_calls_at_once_both_succeed(
    data: Path, config: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ["encode", str(data), "--out", str(out), "--config", str(config(data))]
    arguments += ["--on-bad-row", "skip"]
    processes = [multiprocessing.get_context("fork").Process(target=app, args=(arguments,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert run(data, out, *arguments[4:]).stdout.splitlines()[-1].startswith("present: ")


def test_tasks_and_processes_give_the_same_bytes(
    encoded: tuple[Path, Path], config: Callable[..., Path], tmp_path: Path
) -> None:
    data, out = encoded
    other = tmp_path / "other"
    arguments = ("--config", config(data), "--on-bad-row", "skip", "--executor", "local", "--tasks", 2)
    assert run(data, other, *arguments).exit_code == 0
    assert contents(other) == contents(out)


# Faults ------------------------------------------------------------------------------------------------


def test_a_bad_row_ends_the_call_with_its_place(
    data: Path, config: Callable[..., Path], tmp_path: Path
) -> None:
    result = run(data, tmp_path / "out", "--config", config(data))
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert f"{data}, line 13: " in result.stderr
    assert "none.png" in result.stderr
    assert not (tmp_path / "out").exists()


def test_other_verbs_ask_for_the_rows(encoded: tuple[Path, Path]) -> None:
    for verb in (["validate"], ["stats"], ["shard", "--out", "x"], ["preview", "--out", "x.html"]):
        result = runner.invoke(app, [verb[0], str(encoded[1]), *verb[1:]])
        assert (result.exit_code, "is an encoded data set" in result.stderr) == (1, True), result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --config FILE, the config of the run, or --processor FOLDER; not both"),
        (("--processor", "p", "--set", "dataset_config.fps=2"), "changes a config; give --config"),
        (("--config", "c.yaml", "--processor-type", "qwen3_vl"), "--processor-type is for --processor"),
    ],
)
def test_misuse_is_one_line(data: Path, tmp_path: Path, arguments: tuple, message: str) -> None:
    result = run(data, tmp_path / "out", *arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert message in result.stderr


def test_a_folder_of_something_else_is_refused(
    data: Path, config: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    result = run(data, tmp_path / "out", "--config", config(data))
    assert (result.exit_code, "holds something else than an encoded set" in result.stderr) == (1, True)
