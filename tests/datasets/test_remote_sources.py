"""Data sets that lie elsewhere, from real servers on this machine: equal to local ones, whatever fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmms_engine.config import DatasetEntry
from lmms_engine.datasets.loader import merge_states
from lmms_engine.datasets.media import read_media
from lmms_engine.datasets.schema import parse_row
from lmms_engine.datasets.sources import Source, cache, open_source, remote, text
from lmms_engine.datasets.sources.cache import BlockCache, CacheSettings
from lmms_engine.errors import UserError
from tests.datasets.servers import Server, serve
from tests.datasets.test_sources import ROWS, every_row, write_all
from tests.datasets.toy_data import (
    content,
    ids_of,
    make_job,
    make_loader,
    steps_of_epoch,
    text_row,
    write_jsonl,
)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of `tmp_path / "served"`; the pauses between attempts are short."""
    import fsspec

    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.01)
    (tmp_path / "served").mkdir()
    with serve(tmp_path / "served") as made:
        settings = {
            "AWS_ENDPOINT_URL": made.url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1", "STORAGE_EMULATOR_HOST": made.url,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }  # fmt: skip
        for key, value in settings.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        for name in ("s3", "gs", "http"):
            fsspec.get_filesystem_class(name).clear_instance_cache()
        yield made


@pytest.fixture
def cached(tmp_path: Path) -> CacheSettings:
    """A cache of 100 MB."""
    return CacheSettings(str(tmp_path / "cache"), 10**8)


def opened(path: str, cached: CacheSettings, **keys: Any) -> Source:
    return open_source(DatasetEntry(path=path, **keys), cache=cached, by_line=False)


NAMES = ("rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "file.arrow", "stream.arrow", "slots")


@pytest.mark.parametrize("name", NAMES)
def test_every_format_reads_as_it_does_here(
    server: Server, cached: CacheSettings, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write_all(server.folder, ROWS)
    if name == "slots":
        name = "rows.jsonl"
        monkeypatch.setattr(text, "NUMBERED_BYTES", 0)
    here = open_source(DatasetEntry(path=str(server.folder / name)), by_line=False)
    there = opened(f"{server.url}/files/{name}?sign=secret", cached)
    assert every_row(there) == every_row(here)
    assert there.fingerprint == here.fingerprint
    assert there.name == f"{server.url}/files/{name}"
    for shard in range(here.num_shards):
        for row, raw in reversed(list(here.rows(shard))):
            assert there.read(shard, row) == raw
            place = here.place(shard, row).replace(str(server.folder), f"{server.url}/files")
            assert there.place(shard, row) == place


def test_only_what_is_read_is_fetched_and_only_once(
    server: Server, cached: CacheSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "NUMBERED_BYTES", 0)
    path = write_jsonl(server.folder / "rows.jsonl", [text_row(f"r{i}", 2000) for i in range(4000)])
    source = opened(f"{server.url}/files/rows.jsonl", cached)
    assert path.stat().st_size > 8_000_000
    assert server.sent < 1_400_000                    # both ends, and what tells how long lines are
    before = server.sent
    middle = next(row for row, _ in source.rows(0, 4_000_000))
    assert source.read(0, middle)["id"].startswith("r")
    assert server.sent - before <= 2 * remote.BLOCK_BYTES
    asked = server.asked
    again = opened(f"{server.url}/files/rows.jsonl", cached)
    assert again.read(0, middle) == source.read(0, middle)
    assert server.asked == asked                      # all of it from the cache


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_and_failures_are_tried_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 64 * 1024)
    monkeypatch.setattr(remote, "MAX_REQUEST_BYTES", 64 * 1024)
    monkeypatch.setattr(text, "NUMBERED_BYTES", 0)
    rows = [text_row(f"r{i}", 60) | {"meta": {"x": "y" * 4000}} for i in range(150)]
    write_jsonl(server.folder / "rows.jsonl", rows)
    server.fail_every, server.cut_every = 3, 4
    keys = {"dataloader_num_workers": workers, "remote_cache": {"folder": str(tmp_path / "cache")}}
    loader = make_loader(make_job([{"path": f"{server.url}/files/rows.jsonl"}], **keys))
    there = steps_of_epoch(loader)
    loader.close()
    here = steps_of_epoch(make_loader(make_job(server.folder / "rows.jsonl")))

    def plain(steps: Any) -> list[Any]:
        made = [content(micro) for micros in steps for micro in micros]
        return [(tensors, [row[1:] for row in rows], *rest) for tensors, rows, *rest in made]

    assert plain(there) == plain(here)
    assert sorted(ids_of(there)) == sorted(f"r{i}" for i in range(150))
    assert server.asked > 12   # some of which failed


def test_a_run_goes_on_from_here_to_there(server: Server, tmp_path: Path) -> None:
    path = write_jsonl(server.folder / "rows.jsonl", [text_row(f"r{i}", 10 + i % 20) for i in range(60)])
    first = make_loader(make_job(path))
    seen = ids_of([first.next_step() for _ in range(3)])
    state = json.loads(json.dumps(merge_states([first.state_dict()])))
    keys = {"remote_cache": {"folder": str(tmp_path / "cache")}}
    second = make_loader(make_job([{"path": f"{server.url}/files/rows.jsonl"}], **keys))
    second.load_state_dict(state)
    assert sorted(seen + ids_of(steps_of_epoch(second))) == sorted(f"r{i}" for i in range(60))


@pytest.mark.parametrize("scheme", ["s3://bucket", "gs://bucket", "http"])
def test_files_globs_and_folders(server: Server, cached: CacheSettings, scheme: str) -> None:
    base = f"{server.url}/files" if scheme == "http" else scheme
    for name in ("c", "a", "b"):
        write_jsonl(server.folder / "in" / f"{name}.jsonl", [text_row(name + str(i)) for i in range(2)])
    (server.folder / "in" / "notes.txt").write_text("no rows", encoding="utf-8")
    for path in (f"{base}/in/", f"{base}/in/*.jsonl", f"{base}/in/[abc].jsonl"):
        source = opened(path, cached)
        assert [raw["id"] for raw in every_row(source)] == ["a0", "a1", "b0", "b1", "c0", "c1"]
        assert source.num_shards == 3
    assert [raw["id"] for raw in every_row(opened(f"{base}/in/b.jsonl", cached))] == ["b0", "b1"]
    for path, words in (
        (f"{base}/in/no.jsonl", "does not exist"),
        (f"{base}/in/*.parquet", "no file matches"),
        (f"{base}/", "no file ending in"),
    ):
        if (path, scheme) != (f"{base}/", "http"):
            with pytest.raises(UserError, match=words):
                opened(path, cached, data_type="parquet" if path.endswith("/") else "auto")


def test_pictures_are_relative_to_the_folder_of_the_rows(server: Server, cached: CacheSettings) -> None:
    row = {"image": "images/a.png", "messages": [{"role": "user", "content": "<image>"}]}
    write_jsonl(server.folder / "in" / "rows.jsonl", [row])
    (server.folder / "in" / "images").mkdir()
    (server.folder / "in" / "images" / "a.png").write_bytes(b"picture")
    source = opened(f"{server.url}/files/in/rows.jsonl?sign=secret", cached)
    (part,) = parse_row(source.read(0, 0), source.folder(0)).media()
    assert part.url == f"{server.url}/files/in/images/a.png"
    assert read_media(part) == b"picture"
    other = opened(f"{server.url}/files/in/rows.jsonl", cached, data_folder="../other")
    assert str(other.folder(0)) == f"{server.url}/files/in/../other"
    local = opened(f"{server.url}/files/in/rows.jsonl", cached, data_folder="/pictures")
    assert local.folder(0) == Path("/pictures")


# What cannot be read ---------------------------------------------------------------------------------


def test_what_will_not_get_better_is_said_at_once(server: Server, cached: CacheSettings) -> None:
    write_jsonl(server.folder / "rows.jsonl", ROWS)
    began = time.monotonic()
    server.ranges = False
    write_jsonl(server.folder / "long.jsonl", [text_row(f"r{i}", 900) for i in range(200)])
    with pytest.raises(UserError, match=r"does not give parts of files .* download the file"):
        opened(f"{server.url}/files/long.jsonl", cached)
    server.ranges, server.forbidden = True, True
    with pytest.raises(UserError, match=r"l: no permission .*403.* address that is signed") as caught:
        opened(f"{server.url}/files/rows.jsonl?secret=1", cached)
    assert "secret" not in str(caught.value)
    with pytest.raises(UserError, match=r"s3://bucket/rows.jsonl: no permission .*AWS_ACCESS_KEY_ID"):
        opened("s3://bucket/rows.jsonl", cached)
    with pytest.raises(UserError, match=r"ftp:// is not known \(legal: hf, s3, gs"):
        opened("ftp://host/rows.jsonl", cached)
    with pytest.raises(UserError, match="hub is switched off by HF_HUB_OFFLINE; unset it, or download"):
        opened("org/name", cached)
    assert time.monotonic() - began < 20


def test_a_dead_server_ends_the_run_with_the_address(
    server: Server, cached: CacheSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "NUMBERED_BYTES", 0)
    write_jsonl(server.folder / "rows.jsonl", [text_row(f"r{i}", 900) for i in range(4000)])
    keys = {"remote_cache": {"folder": cached.folder}, "on_bad_row": "skip"}
    loader = make_loader(make_job([{"path": f"{server.url}/files/rows.jsonl"}], **keys))
    server.fail_every = 1
    with pytest.raises(UserError, match=r"rows.jsonl could not be read in 6 attempts .*503.*check the net"):
        steps_of_epoch(loader)
    assert loader.skipped_total == 0   # rows that were not reached are not bad rows


def test_missing_packages_are_named() -> None:
    code = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from lmms_engine.config import DatasetEntry\n"
        "from lmms_engine.datasets.sources import open_source\n"
        "try: open_source(DatasetEntry(path='s3://bucket/a.jsonl'))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.startswith("UserError s3://bucket/a.jsonl: ")
    assert "pip install 'lmms-engine[cloud]'" in out


# The cache -------------------------------------------------------------------------------------------


def test_the_cache_keeps_to_its_size_and_drops_what_was_not_used_for_longest(tmp_path: Path) -> None:
    blocks = BlockCache(CacheSettings(str(tmp_path), 1000))
    for number in range(30):
        blocks.put("key", number, bytes([number]) * 100)
        for stamp, kept in enumerate(range(number + 1)):   # file times differ, whatever the clock's grain
            path = blocks._path("key", kept)
            if path.exists():
                os.utime(path, ns=(stamp + (10**9 if kept == 0 else 0),) * 2)   # block 0 is always in use
        assert sum(file.stat().st_size for file in tmp_path.rglob("key*")) <= 1000
    there = [number for number in range(30) if blocks.get("key", number, 100)]
    assert there[0] == 0
    assert there[1:] == list(range(30 - len(there) + 1, 30))
    assert blocks.get("key", 29, 99) is None   # not whole
    assert not blocks.get("other", 0, 100)


def test_a_damaged_or_unwritable_cache(server: Server, cached: CacheSettings, tmp_path: Path) -> None:
    write_jsonl(server.folder / "rows.jsonl", ROWS)
    rows = every_row(opened(f"{server.url}/files/rows.jsonl", cached))
    for block in Path(cached.folder).glob("*/*"):
        block.write_bytes(block.read_bytes()[:-1])
    assert every_row(opened(f"{server.url}/files/rows.jsonl", cached)) == rows
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cache of remote data cannot be written: .*remote_cache.folder"):
        opened(f"{server.url}/files/rows.jsonl", CacheSettings(str(tmp_path / "file")))


def test_a_file_that_changed_is_fetched_anew(server: Server, cached: CacheSettings) -> None:
    for word in ("one", "two"):
        write_jsonl(server.folder / "rows.jsonl", [text_row(word)])
        import fsspec

        fsspec.get_filesystem_class("http").clear_instance_cache()   # as another process would see it
        assert opened(f"{server.url}/files/rows.jsonl", cached).read(0, 0)["id"] == word


@pytest.mark.parametrize("scheme", ["https", "s3"])
def test_a_file_that_changes_while_it_is_read_is_said(
    server: Server, cached: CacheSettings, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    import fsspec

    rows = [text_row(f"r{i}", 2000) for i in range(1500)]
    write_jsonl(server.folder / "rows.jsonl", rows)
    path = f"{server.url}/files/rows.jsonl" if scheme == "https" else "s3://bucket/rows.jsonl"
    monkeypatch.setattr(text, "NUMBERED_BYTES", 0)   # only the beginning and the end are read
    source = opened(path, cached)
    assert source.read(0, 0)["id"] == "r0"
    write_jsonl(server.folder / "rows.jsonl", [*rows[1:], rows[0]])   # as long as before
    for name in ("s3", "http"):
        fsspec.get_filesystem_class(name).clear_instance_cache()   # as a worker begins
    with source.files[0].open() as file:
        file.seek(2_500_000)
        with pytest.raises(UserError, match=r"rows\.jsonl has changed since the run began"):
            file.read(10)


def use(blocks: BlockCache, child: int) -> bool:
    good = True
    for turn in range(150):
        number = (turn * 7 + child) % 40
        data = blocks.get("key", number, 100)
        good &= data in (None, bytes([number]) * 100)
        if data is None:
            blocks.put("key", number, bytes([number]) * 100)
    return good


def test_processes_share_a_cache_while_it_is_being_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "CHECKS", 10**9)   # look at every block
    settings = CacheSettings(str(tmp_path), 2000)
    children = []
    for child in range(3):
        pid = os.fork()
        if pid == 0:
            good = False
            try:
                good = use(BlockCache(settings), child)
            finally:
                os._exit(0 if good else 1)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]


# The hub ---------------------------------------------------------------------------------------------

CARD = """---
configs:
- config_name: main
  default: true
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: data/test-*}
- config_name: lines
  data_files: rows.jsonl
---
"""
ASK = """
import os, sys
from huggingface_hub import HfFileSystem
from lmms_engine.config import DatasetEntry
from lmms_engine.datasets.sources import open_source
from lmms_engine.datasets.sources.cache import CacheSettings
for path in sys.argv[2:]:
    if path.startswith("HF_TOKEN="):   # from here on
        os.environ["HF_TOKEN"] = path.removeprefix("HF_TOKEN=")
        HfFileSystem.clear_instance_cache()
        continue
    try:
        source = open_source(DatasetEntry(path=path), cache=CacheSettings(sys.argv[1]))
        ids = [raw["id"] for shard in range(source.num_shards) for _, raw in source.rows(shard)]
        print(source.name, *ids, source.fingerprint, source.place(0, 0), sep="|")
    except Exception as error:
        print(type(error).__name__, error, sep="|")
"""


def ask(server: Server, folder: Path, *paths: str) -> list[list[str]]:
    settings = {"HF_ENDPOINT": server.url, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", ASK, str(folder / "cache"), *paths]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=True)
    return [line.split("|") for line in done.stdout.splitlines()]


def test_hub_ids_configs_splits_and_revisions(server: Server, tmp_path: Path) -> None:
    for name in ("data/train-0", "data/train-1", "data/test-0"):
        rows = [text_row(f"{name}-{i}") for i in range(2)]
        (server.folder / "data").mkdir(exist_ok=True)
        write_all(server.folder / "data", rows)["rows.parquet"].rename(server.folder / f"{name}.parquet")
    for file in [*(server.folder / "data").glob("*.arrow"), *(server.folder / "data").glob("rows.*")]:
        file.unlink()
    write_jsonl(server.folder / "rows.jsonl", [text_row("line")])
    (server.folder / "README.md").write_text(CARD, encoding="utf-8")
    train = ["data/train-0-0", "data/train-0-1", "data/train-1-0", "data/train-1-1"]
    good = {
        "org/name": train,
        "org/name@main": train,
        "org/name::test": ["data/test-0-0", "data/test-0-1"],
        "org/name:lines": ["line"],
        "hf://org/name:main:train": train,
        "hf://datasets/org/name": train,
        "hf://datasets/org/name/data/train-*.parquet": train,
        "hf://datasets/org/name@main/rows.jsonl": ["line"],
    }
    bad = {
        "org/name:main:dev": "no split 'dev' (legal: train, test); write org/name:main:SPLIT",
        "org/name:no": "'no' not found",
        "org/name@v9": "v9",
        "org/none": "does not exist",
        "hf://datasets/org/name/none.jsonl": "does not exist",
    }
    server.token = "hf_right"
    tokens = [f"HF_TOKEN={token}" for token in ("hf_right", "hf_wrong")]
    found = ask(server, tmp_path, tokens[0], *good, *bad, tokens[1], "hf://datasets/org/name/rows.jsonl")
    assert "log in (`hf auth login`, or HF_TOKEN)" in found.pop()[1]
    for (path, ids), (name, *got) in zip(good.items(), found, strict=False):
        assert name == path
        assert got[: len(ids)] == ids, (path, got)
    assert found[0][-1].startswith("hf://datasets/org/name@555")   # of one commit, whatever comes later
    for (path, words), line in zip(bad.items(), found[len(good) :], strict=True):
        assert line[0] == "UserError", (path, line)
        assert words in line[1], (path, line)
    local = open_source(DatasetEntry(path=str(server.folder / "rows.jsonl")))
    assert found[3][-2] == local.fingerprint
