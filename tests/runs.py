"""Small real training runs for tests: a data folder, a tiny Qwen3-VL, and one process or several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from data_prep.processors import write_processors
from lmms_engine.config import Job
from lmms_engine.parallel.mesh import Mesh
from lmms_engine.train.metrics import read_lines

ROOT = Path(__file__).resolve().parents[1]
COLOURS = ("red", "green", "blue", "white")
WORDS = ("one", "two three", "four five six", "seven", "eight nine", "ten eleven twelve thirteen")

MODEL = {
    "model_type": "qwen3_vl",
    "config": {
        "image_token_id": 524,
        "video_token_id": 525,
        "vision_start_token_id": 521,
        "vision_end_token_id": 522,
        "tie_word_embeddings": True,
        "text_config": {
            "vocab_size": 544, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 32,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
    },
}  # fmt: skip


def make_corpus(folder: Path, *, rows: int = 14, heldout: int = 5) -> Path:
    """train.jsonl, heldout.jsonl and other.jsonl with text and small pictures, and a processor folder."""
    (folder / "images").mkdir(parents=True)
    for colour in COLOURS:
        Image.new("RGB", (64, 32), colour).save(folder / "images" / f"{colour}.png")
    write_processors(folder / "processor")
    for name, count in (("train", rows), ("heldout", heldout), ("other", 4)):
        write_rows(folder / f"{name}.jsonl", [make_row(f"{name}-{i}", i) for i in range(count)])
    return folder


def make_row(name: str, i: int) -> dict[str, Any]:
    """A question of varying length, every third one about a picture, and its answer."""
    question: list[dict[str, Any]] = [{"type": "text", "text": f"{WORDS[i % 6]} {WORDS[(i + 2) % 5]}?"}]
    if i % 3 == 1:
        question.insert(0, {"type": "image_url", "image_url": {"url": f"images/{COLOURS[i % 4]}.png"}})
    answer = f"{COLOURS[i % 4]} {WORDS[(i * 5) % 6]}"
    return {
        "id": name,
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_config(corpus: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """A job on the corpus as a mapping; `changes` are `section__key=value`."""
    config: dict[str, Any] = {
        "model_config": {"load_from_config": MODEL},
        "dataset_config": {
            "datasets": [{"path": str(corpus / "train.jsonl")}],
            "processor_config": {"processor_name": str(corpus / "processor" / "qwen3_vl")},
            "packing_length": 96,
            "num_logical_shards": 2,
        },
        "trainer_args": {
            "output_dir": str(run_dir),
            "max_steps": 6,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "fsdp_config": {"activation_checkpointing": False},
            "dataloader_num_workers": 0,
            "report_to": "none",
            "log_rows": True,
        },
    }
    sections = {"data": "dataset_config", "model": "model_config", "trainer": "trainer_args"}
    for name, value in changes.items():
        section, _, key = name.partition("__")
        config[sections[section]][key] = value
    if "trainer__num_train_epochs" in changes:
        del config["trainer_args"]["max_steps"]
    return config


def train(mesh: Mesh, config: dict[str, Any]) -> Any:
    """Builds and runs in this process; returns the runner."""
    from lmms_engine.train import TrainRunner

    runner = TrainRunner(Job.from_dict(config), mesh).build()
    runner.run()
    return runner


def launch(config: dict[str, Any], where: Path, *overrides: str, **options: Any) -> subprocess.Popen[str]:
    """The training command in a process of its own, stderr joined to stdout."""
    path = where / "launched.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    command = [sys.executable, "-m", "lmms_engine.launch.cli", "--config", str(path), *overrides]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ,
        **options,
    )


def logged(run_dir: Path, split: str = "train") -> list[dict[str, Any]]:
    """The metrics rows of one split."""
    return [row for row in read_lines(run_dir / "metrics.jsonl") if row["split"] == split]


def row_ids(run_dir: Path, rank: int = 0) -> list[tuple[int, int, list[str]]]:
    """(step, micro-batch, ids) as a rank logged them."""
    lines = read_lines(run_dir / f"rows-{rank}.jsonl")
    return [(line["step"], line["micro"], [row["id"] for row in line["rows"]]) for line in lines]
