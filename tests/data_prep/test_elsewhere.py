"""The verbs read what lies elsewhere as they read the same rows here."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from typer.testing import CliRunner, Result

from data_prep.cli import app
from lmms_engine.config import DatasetEntry
from lmms_engine.datasets.sources import open_source
from tests.datasets.servers import Server, serve


@pytest.fixture
def server(tmp_path: Path, sample: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of four rows with their media, and a home folder with an empty cache."""
    folder = tmp_path / "served" / "set"
    folder.mkdir(parents=True)
    lines = (sample / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:4]
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    for name in ("images", "videos", "audio"):
        shutil.copytree(sample / name, folder / name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with serve(tmp_path / "served") as made:
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(key, "a")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
        for scheme in ("s3", "http"):
            fsspec.get_filesystem_class(scheme).clear_instance_cache()
        yield made


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_every_verb_reads_addresses(server: Server, sample: Path, tmp_path: Path) -> None:
    here = tmp_path / "served" / "set" / "rows.jsonl"
    web, store = f"{server.url}/files/set/rows.jsonl", "s3://bucket/set/rows.jsonl"
    processor = ("--processor", sample / "processor" / "qwen3_vl")
    checked = run("validate", web, "--fix", tmp_path / "clean.jsonl")
    assert checked.stdout.startswith(run("validate", here).stdout), checked.output
    lines = [path.read_text(encoding="utf-8").splitlines() for path in (tmp_path / "clean.jsonl", here)]
    assert [json.loads(line)["id"] for line in lines[0]] == [json.loads(line)["id"] for line in lines[1]]
    assert run("stats", store).stdout == run("stats", here).stdout
    shown = run("preview", web, "--out", tmp_path / "page.html")
    assert shown.exit_code == 0, shown.output
    assert "data:image/jpeg;base64" in (tmp_path / "page.html").read_text(encoding="utf-8")
    for verb, more in (("shard", ("--shards", 2)), ("encode", processor)):
        for name, data in (("web", web), ("store", store), ("here", here)):
            made = run(verb, data, "--out", tmp_path / verb / name, *more)
            assert made.exit_code == 0, made.output
    for name in ("web", "store", "here"):
        source = open_source(DatasetEntry(path=str(tmp_path / "shard" / name)))
        ids = [raw["id"] for shard in range(source.num_shards) for _, raw in source.rows(shard)]
        assert ids == [json.loads(line)["id"] for line in lines[1]]


@pytest.mark.parametrize("verb", ["validate", "stats", "preview", "shard", "encode"])
def test_an_address_that_is_none_is_one_line(verb: str, sample: Path, tmp_path: Path) -> None:
    more = ["--processor", sample / "processor" / "qwen3_vl"] if verb == "encode" else []
    out = [] if verb == "validate" else ["--out", tmp_path / "out"]
    result = run(verb, "ftp://host/rows.jsonl", *out, *more)
    assert (result.exit_code, result.stderr.count(os.linesep)) == (1, 1)
    assert "ftp:// is not known (legal: hf, s3, gs" in result.stderr
