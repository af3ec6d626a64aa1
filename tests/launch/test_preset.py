"""The choice between the real model and the smoke preset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmms_engine.errors import UserError
from lmms_engine.launch.preset import (
    Need,
    choose,
    gpu_shortage,
    main,
    read_needs,
    split_arguments,
    weights_complete,
    weights_shortage,
)


def config(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_read_needs(tmp_path: Path) -> None:
    assert read_needs(config(tmp_path, "# GPU memory: 1 x 96 GB, or 2 x 80 GB\n")) == (
        Need(1, 96),
        Need(2, 80),
    )
    assert read_needs(config(tmp_path, "model_config: {}\n")) == ()
    with pytest.raises(UserError, match="legal: '# GPU memory: 1 x 96 GB"):
        read_needs(config(tmp_path, "# GPU memory: a lot\n"))


@pytest.mark.parametrize(
    ("memory_gb", "enough"),
    [
        ([], False),
        ([95.0], False),
        ([96.0], True),
        ([80.0], False),
        ([80.0, 80.0], True),
        ([141.0, 24.0], True),
    ],
)
def test_any_alternative_is_enough(memory_gb: list[float], enough: bool) -> None:
    shortage = gpu_shortage((Need(1, 96), Need(2, 80)), memory_gb)
    assert (shortage is None) == enough
    if shortage:
        assert "1 x 96 GB or 2 x 80 GB" in shortage


def test_without_a_stated_need_no_gpu_is_needed() -> None:
    assert gpu_shortage((), []) is None


@pytest.mark.parametrize(
    ("wanted", "shortage", "ngpu", "num_gpus", "result"),
    [
        ("auto", None, 0, 8, ("full", 8)),
        ("auto", None, 2, 8, ("full", 2)),
        ("auto", "no GPU", 0, 0, ("smoke", 1)),
        ("auto", "too small", 0, 8, ("smoke", 1)),
        ("smoke", None, 0, 8, ("smoke", 1)),
        ("smoke", None, 2, 0, ("smoke", 2)),
        ("full", None, 0, 1, ("full", 1)),
        ("full", None, 0, 0, ("full", 1)),
    ],
)
def test_choose(wanted: str, shortage: str | None, ngpu: int, num_gpus: int, result: tuple[str, int]) -> None:
    choice = choose(wanted, shortage, ngpu, num_gpus)
    assert (choice.preset, choice.processes) == result
    assert choice.reason == (shortage if wanted == "auto" and shortage else choice.reason)


@pytest.mark.parametrize(
    ("wanted", "shortage", "ngpu", "said"),
    [
        ("full", "it needs more", 0, "PRESET=full cannot run: it needs more"),
        ("big", None, 0, "legal: auto, smoke, full"),
        ("auto", None, 9, "NGPU=9: this machine has 8 GPUs"),
    ],
)
def test_choose_refuses(wanted: str, shortage: str | None, ngpu: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        choose(wanted, shortage, ngpu, 8)


def test_weights_on_disk(tmp_path: Path) -> None:
    assert "no complete weights" in weights_shortage(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").touch()
    assert not weights_complete(tmp_path)
    (tmp_path / "model-2.safetensors").touch()
    assert weights_shortage(str(tmp_path)) is None


def test_weights_not_to_be_had(tmp_path: Path) -> None:
    """The suite runs with the hub switched off."""
    assert "there is no such folder" in weights_shortage(str(tmp_path / "missing"))
    assert "neither a folder here nor a name" in weights_shortage("a model")
    assert "HF_HUB_OFFLINE" in weights_shortage("someone/some-model-that-is-nowhere")
    assert weights_shortage(None) is None  # random weights


def test_split_arguments() -> None:
    arguments = ["a.b=1", "--config", "x.yaml", "--debug", "c.d=[1,2]"]
    assert split_arguments(arguments) == ([Path("x.yaml")], ["a.b=1", "c.d=[1,2]"])


def recipe(folder: Path, need: str) -> Path:
    made = folder / "mine"
    made.mkdir()
    config(made, f"{need}\nmodel_config: {{load_from_pretrained_path: {folder}/weights}}\n"
                 "dataset_config: {datasets: [{path: data/x/train.jsonl}]}\n")  # fmt: skip
    (made / "smoke.yaml").write_text(
        "model_config: {load_from_pretrained_path: null, load_from_config: {model_type: qwen3_vl}}\n"
    )
    return made


def test_main(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recipe(tmp_path, "# GPU memory: 99 x 999 GB")
    assert main([str(folder), "trainer_args.max_steps=2"]) == 0
    out, err = capsys.readouterr()
    assert out == "smoke 1\n"
    assert len(err.splitlines()) == 1
    assert "needs GPU memory of 99 x 999 GB" in err
    assert main(["--preset", "full", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("PRESET=full cannot run: ")
    assert main(["--preset", "smoke", str(folder), "trainer_args.max_stepz=2"]) == 2
    assert "max_steps" in capsys.readouterr().err


def test_main_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config that needs no GPU and whose weights lie on disk runs in full, and says so of sample data."""
    monkeypatch.chdir(tmp_path)
    folder = recipe(tmp_path, "")
    weights = tmp_path / "weights"
    weights.mkdir()
    for name in ("config.json", "model.safetensors"):
        (weights / name).write_text("{}")
    assert main([str(folder)]) == 0
    out, err = capsys.readouterr()
    assert out.split()[0] == "full"
    assert "sample data" not in err
    (tmp_path / "data/x").mkdir(parents=True)
    (tmp_path / "data/x/sample.json").touch()
    assert main([str(folder)]) == 0
    assert "trains on the sample data" in capsys.readouterr().err
