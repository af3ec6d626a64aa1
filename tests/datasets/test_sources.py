"""Sources: one set of rows in every format, addressable, and clear about files that are no good."""

from __future__ import annotations

import csv
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmms_engine.config import DatasetEntry
from lmms_engine.datasets import indexing
from lmms_engine.datasets.schema import parse_row
from lmms_engine.datasets.sources import Source, drop_nulls, open_source, source_names
from lmms_engine.errors import BadRow, UserError
from tests.datasets.toy_data import make_job, make_loader, steps_of_epoch, text_row, write_jsonl

ROWS = [
    {
        "id": "a",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "a.png"}, "text": None},
                    {"type": "text", "text": "What?", "image_url": None},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "Réd.", "image_url": None}]},
        ],
    },
    {"id": "b", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    {
        "id": "c",
        "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "Réd."}],
        "image": ["a.png"],
    },
    {
        "id": "d",
        "conversations": [{"from": "human", "value": "<image><image>?"}],
        "image": ["a.png", "b.png"],
    },
]


def entry(path: Path | str, **keys: Any) -> DatasetEntry:
    return DatasetEntry(path=str(path), **keys)


def every_row(source: Source) -> list[Any]:
    return [raw for shard in range(source.num_shards) for _, raw in source.rows(shard)]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A column per key, lists as JSON, with the line breaks inside cells that `indent` makes."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {key: json.dumps(v, indent=1) if isinstance(v, list) else v for key, v in row.items()}
            )
    return path


def write_all(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Path]:
    """The rows in every format: JSON twice, CSV, Parquet with row groups of 2, Arrow in three dresses."""
    table = _table(rows)
    write_csv(folder / "rows.csv", rows)
    write_jsonl(folder / "rows.jsonl", rows)
    (folder / "rows.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    pq.write_table(table, folder / "rows.parquet", row_group_size=2)
    with pa.OSFile(str(folder / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    with (
        pa.OSFile(str(folder / "stream.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=3)
    datasets.Dataset(table).save_to_disk(folder / "saved")
    names = ("rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "file.arrow", "stream.arrow", "saved")
    return {name: folder / name for name in names}


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "file.arrow", "stream.arrow", "saved"]
)
def test_all_formats_give_the_same_rows(tmp_path: Path, name: str) -> None:
    """Reader by reader."""
    path = write_all(tmp_path, ROWS)[name]
    source = open_source(entry(path, data_folder="media"))
    expected = [parse_row(row, path.parent / "media") for row in ROWS]
    base = path if path.is_dir() else path.parent
    expected = [parse_row(row, base / "media") for row in ROWS]
    got = [
        parse_row(raw, source.folder(shard))
        for shard in range(source.num_shards)
        for _, raw in source.rows(shard)
    ]
    assert got == expected
    assert [len([*row.media()]) for row in got] == [1, 0, 1, 2]
    assert got[0].messages == got[2].messages
    for shard in range(source.num_shards):
        for row in reversed(range(source.shard_rows(shard))):
            assert source.read(shard, row) == dict(source.rows(shard, row))[row]
    assert source.num_rows == 4


def test_sources_survive_pickling_and_know_their_content(tmp_path: Path) -> None:
    paths = write_all(tmp_path, ROWS)
    for path in paths.values():
        source = open_source(entry(path))
        source.read(0, 0)
        again = pickle.loads(pickle.dumps(source))
        assert every_row(again) == every_row(source)
        assert again.fingerprint == source.fingerprint == open_source(entry(path)).fingerprint
    more = write_jsonl(tmp_path / "more.jsonl", [*ROWS, ROWS[1]])
    moved = write_jsonl(tmp_path / "other" / "rows.jsonl", ROWS)
    first = open_source(entry(paths["rows.jsonl"]))
    assert open_source(entry(more)).fingerprint != first.fingerprint
    assert open_source(entry(moved)).fingerprint == first.fingerprint
    assert open_source(entry(paths["rows.jsonl"], limit=3)).fingerprint != first.fingerprint


def test_media_bytes_in_tables(tmp_path: Path) -> None:
    rows = [
        {"image": {"bytes": b"\x89PNG", "path": None}, "messages": [{"role": "user", "content": "<image>"}]}
    ]
    for name in ("rows.parquet", "file.arrow", "saved"):
        path = _tables(tmp_path / name, rows)[name]
        source = open_source(entry(path))
        (part,) = parse_row(source.read(0, 0), source.folder(0)).media()
        assert part.bytes == b"\x89PNG"


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    keys = dict.fromkeys(key for row in rows for key in row)
    return pa.Table.from_pylist([{key: row.get(key) for key in keys} for row in rows])


def _tables(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Path]:
    folder.mkdir()
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "rows.parquet")
    with pa.OSFile(str(folder / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    datasets.Dataset(table).save_to_disk(folder / "saved")
    return {name: folder / name for name in ("rows.parquet", "file.arrow", "saved")}


def test_each_arrow_batch_is_read_with_the_dictionary_before_it(tmp_path: Path) -> None:
    parts = [["cat", "cat"], ["dog", "fish"], ["cow", "cow"]]   # each has another dictionary
    batches = [pa.record_batch([pa.array(part).dictionary_encode()], names=["k"]) for part in parts]
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    rows = every_row(open_source(entry(tmp_path / "a.arrow")))
    assert [row["k"] for row in rows] == ["cat", "cat", "dog", "fish", "cow", "cow"]


def test_nulls_that_tables_add_are_dropped_and_others_kept() -> None:
    assert drop_nulls({"a": None, "b": {"c": None}, "d": {}, "e": [None, {"f": None, "g": 1}]}) == {
        "d": {},
        "e": [None, {"g": 1}],
    }


# Files -----------------------------------------------------------------------------------------------


def test_shards_from_a_folder_or_a_glob_in_sorted_order(tmp_path: Path) -> None:
    for name in ("c", "a", "b"):  # created in another order
        write_jsonl(tmp_path / "in" / f"{name}.jsonl", [text_row(name + str(i)) for i in range(2)])
    (tmp_path / "in" / "notes.txt").write_text("no rows here", encoding="utf-8")
    for path in (tmp_path / "in", tmp_path / "in" / "*.jsonl", tmp_path / "**" / "[abc].jsonl"):
        source = open_source(entry(path))
        assert [raw["id"] for raw in every_row(source)] == ["a0", "a1", "b0", "b1", "c0", "c1"]
        assert source.num_shards == 3
    assert [raw["id"] for raw in every_row(open_source(entry(tmp_path / "in", limit=3)))] == [
        "a0",
        "a1",
        "b0",
    ]


def test_a_folder_holds_what_is_linked_in_it_once_and_nothing_hidden(tmp_path: Path) -> None:
    for name in ("in/a.jsonl", "in/B.JSONL", "in/.copies/c.jsonl", "in/.d.jsonl", "elsewhere/e.jsonl"):
        write_jsonl(tmp_path / name, [text_row(name)])
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "f.jsonl").symlink_to(tmp_path / "elsewhere" / "e.jsonl")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "in")
    source = open_source(entry(tmp_path / "in"))
    names = [file.where.removeprefix(f"{tmp_path}/in/") for file in source.files]
    assert names == ["B.JSONL", "a.jsonl", "f.jsonl", "link/e.jsonl"]


def test_no_two_sources_have_one_name(tmp_path: Path) -> None:
    paths = [str(write_jsonl(tmp_path / name, ROWS)) for name in ("a", "a#2", "b#1")]
    given = [paths[i] for i in (0, 0, 1, 2, 2)]
    names = source_names(make_job([{"path": path} for path in given]).dataset, "train")
    assert names == [paths[0], f"{paths[0]}#2", f"{paths[1]}#2", paths[2], f"{paths[2]}#2"]


def test_media_folder_is_relative_to_the_dataset_file(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "one" / "rows.jsonl", ROWS)
    write_jsonl(tmp_path / "two" / "rows.jsonl", ROWS)
    assert open_source(entry(one)).folder(0) == tmp_path / "one"
    assert open_source(entry(one, data_folder="../pictures")).folder(0) == tmp_path / "pictures"
    assert open_source(entry(one, data_folder="/pictures")).folder(0) == Path("/pictures")
    glob = open_source(entry(tmp_path / "*" / "rows.jsonl", data_folder="m"))
    assert [glob.folder(shard) for shard in (0, 1)] == [tmp_path / "one" / "m", tmp_path / "two" / "m"]


@pytest.mark.parametrize(
    ("path", "keys", "words"),
    [
        ("nowhere.jsonl", {}, ["does not exist", "good.jsonl"]),
        ("nowhere/at/all", {}, ["does not exist"]),
        ("*.nothing", {}, ["no file matches"]),
        ("empty.jsonl", {}, ["is empty"]),
        ("empty.json", {}, ["is empty"]),
        ("blank.jsonl", {}, ["is empty"]),
        ("hollow", {}, ["no file ending in"]),
        ("mixed", {}, ["mixes formats", "jsonl, parquet"]),
        ("splits", {}, ["several splits", "train", "test"]),
        ("broken.parquet", {}, ["cannot read", "broken.parquet", "Parquet"]),
        ("broken.arrow", {}, ["cannot read", "broken.arrow", "Arrow"]),
        ("rows.tsv", {}, ["cannot tell the format", ".csv"]),
        ("rows.csv", {}, ["is empty"]),
        ("header.csv", {}, ["is empty"]),
        ("twice.csv", {}, ["header", "name twice"]),
        ("latin.csv", {}, ["header", "utf-8"]),
        ("zipped.jsonl", {}, ["is empty"]),
    ],
)
def test_clear_messages_for_what_cannot_be_opened(
    tmp_path: Path, path: str, keys: dict[str, str], words: list[str]
) -> None:
    write_jsonl(tmp_path / "good.jsonl", ROWS)
    for name in ("empty.jsonl", "empty.json", "rows.csv", "rows.tsv", "zipped.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "header.csv").write_text("id,messages\n", encoding="utf-8")
    (tmp_path / "twice.csv").write_text("id,messages,id\n1,[],2\n", encoding="utf-8")
    (tmp_path / "latin.csv").write_bytes("größe,messages\n1,[]\n".encode("latin-1"))
    (tmp_path / "blank.jsonl").write_bytes(b"\n \r\n")
    for name in ("broken.parquet", "broken.arrow"):
        (tmp_path / name).write_bytes(b"PAR1 this is no table" * 4)
    (tmp_path / "hollow").mkdir()
    write_jsonl(tmp_path / "mixed" / "a.jsonl", ROWS)
    (tmp_path / "mixed" / "b.parquet").touch()
    both = datasets.DatasetDict({name: datasets.Dataset.from_list(ROWS[1:2]) for name in ("train", "test")})
    both.save_to_disk(tmp_path / "splits")
    with pytest.raises(UserError) as caught:
        open_source(entry(tmp_path / path, **keys))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


UNREADABLE = """
import os, sys
from lmms_engine.config import DatasetEntry
from lmms_engine.datasets.sources import open_source
if os.getuid() == 0: os.setuid(65534)
try: open_source(DatasetEntry(path="rows.jsonl"))
except Exception as error: print(type(error).__name__, error)
"""


def test_a_file_that_may_not_be_read(open_folder: Path) -> None:
    write_jsonl(open_folder / "rows.jsonl", ROWS).chmod(0)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", UNREADABLE]
    out = subprocess.run(command, env=env, cwd=open_folder, capture_output=True, text=True, check=True).stdout
    assert out == "UserError cannot read rows.jsonl: Permission denied\n"


# Cut in the right places -----------------------------------------------------------------------------

ODD = "zeile\u2028trenner\u0085ende"


def odd_file(folder: Path) -> Path:
    """Byte-order mark, odd separators, CRLF, a blank line, a Chinese file name, a cut last line."""
    good = [
        text_row("first"),
        {**text_row("second"), "messages": [{"role": "user", "content": ODD}]},
        text_row("三", 12),
    ]
    good[2]["image"] = "图片.png"
    (folder / "图片.png").write_bytes(b"picture")
    first, second, third = (json.dumps(row, ensure_ascii=False).encode() for row in good)
    path = folder / "odd.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + first + b"\r\n" + second + b"\n\n" + third + b"\r\n" + third[:40])
    return path


def test_lines_are_cut_at_newlines_only(tmp_path: Path) -> None:
    """What separates lines elsewhere is text here; the cut line is named with its number."""
    path = odd_file(tmp_path)
    source = open_source(entry(path))
    rows = every_row(source)
    assert [None if raw is None else isinstance(raw, BadRow) for raw in rows] == [
        False,
        False,
        None,
        False,
        True,
    ]
    assert rows[1]["messages"][0]["content"] == ODD
    assert f"{path}, line 5 (the last one: the file may be cut off)" in str(rows[4])
    assert rows[4].kind == "json"


SCRIPT = """
import sys
from pathlib import Path
from tests.datasets.toy_data import *
keys = {"packing": False, "shuffle": False, "dataloader_num_workers": 1}
try:
    steps_of_epoch(make_loader(make_job(Path(sys.argv[1]), on_bad_row="stop", **keys)))
except Exception as error:
    print(type(error).__name__, error)
loader = make_loader(make_job(Path(sys.argv[1]), on_bad_row="skip", **keys))
steps = steps_of_epoch(loader)
texts = [bytes(i for i in m.input_ids[:m.num_tokens].tolist() if i < 256).decode() for s in steps for m in s]
print(ids_of(steps), texts, [tuple(r) for r in loader.take_skipped()], loader.skipped_total)
"""


def test_a_cut_file_under_both_policies_in_the_c_locale(tmp_path: Path) -> None:
    """As in a bare container: stop, or skip and count 1."""
    path = odd_file(tmp_path)
    env = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONIOENCODING": "utf-8",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-c", SCRIPT, str(path)]
    out = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", check=True).stdout
    stopped, skipped = out.split("\n", 1)
    assert stopped.startswith("UserError")
    for words in ("line 5", str(path), "on_bad_row=skip"):
        assert words in stopped
    assert skipped.startswith("['first', 'second', '三']")
    assert repr(ODD) in skipped
    assert skipped.rstrip().endswith("1")
    assert "'json'" in skipped
    assert "line 5" in skipped


def test_other_damage_is_one_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps(text_row("x")).encode()
    path.write_bytes(b"\n".join([good, b"\xff\xfe\xfd", b"[1, 2]", b"[" * 100_000, good]))
    rows = every_row(open_source(entry(path)))
    assert [raw.kind if isinstance(raw, BadRow) else raw["id"] for raw in rows] == [
        "x",
        "json",
        "row_type",
        "json",
        "x",
    ]
    assert "line 3 holds a list" in str(rows[2])


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("block", [7, 1 << 20])
def test_csv_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, block: int) -> None:
    monkeypatch.setattr(indexing, "BLOCK_BYTES", block)   # quotes and line ends on either side of a cut
    talk = [{"role": "user", "content": 'He said "no",\ntwice'}, {"role": "assistant", "content": "é"}]
    cell = json.dumps(talk, ensure_ascii=False, indent=1).replace('"', '""')
    big = "x" * 200_000   # more than the csv module takes unasked
    lines = [
        "\ufeffid,messages,image,system",
        f'7,"{cell}",a.png,"{{""not"": ""decoded""}}"',
        "",
        f'b,"{cell}","[""a.png"", ""b.png""]",',
        f'c,"{cell}",{big},{{sic}}',
        f'd,"{cell}"',
        'e,[not JSON],,"un""closed"',
        f'f,"{cell}',
    ]
    path = tmp_path / "rows.csv"
    path.write_text(end.join(lines), encoding="utf-8", newline="")
    source = open_source(entry(path))
    rows = every_row(source)
    system = '{"not": "decoded"}'
    assert rows[0] == {"id": "7", "messages": talk, "image": "a.png", "system": system}
    assert rows[1] is None
    assert rows[2] == {"id": "b", "messages": talk, "image": ["a.png", "b.png"]}
    assert rows[3] == {"id": "c", "messages": talk, "image": big, "system": "{sic}"}
    assert rows[5] == {"id": "e", "messages": "[not JSON]", "system": 'un"closed'}
    for row, word in ((4, "2 cells for 4 columns"), (6, "a quote may be open")):
        assert isinstance(rows[row], BadRow)
        assert rows[row].kind == "csv"
        assert word in str(rows[row])
        assert f"rows.csv, row {row + 1}" in str(rows[row])
    assert [str(source.read(0, row)) for row in reversed(range(7))] == [str(row) for row in reversed(rows)]


def test_sparse_line_index_addresses_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(indexing, "STRIDE_BYTES", 900)
    rows = [text_row(f"{i}-", 10 + i * 37 % 900) for i in range(60)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    source = open_source(entry(path))
    index = source._indices[0]  # type: ignore[attr-defined]
    assert 3 < len(index._starts) < 60
    for row in (*range(60), *range(59, -1, -1), *(i * 17 % 60 for i in range(60))):
        assert source.read(0, row) == rows[row]


def test_json_lists_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "BLOCK_BYTES", 64)
    rows = [{**text_row(f"ü{i}", 8 + i), "meta": {"odd": ["]", '"', "{é"]}} for i in range(20)]
    text = "\ufeff\n" + json.dumps(rows, ensure_ascii=False, indent=2)
    path = tmp_path / "rows.json"
    path.write_text(text, encoding="utf-8")
    source = open_source(entry(path))
    assert every_row(source) == rows
    assert source.read(0, 7) == rows[7]
    path.write_text(text[:-200], encoding="utf-8")
    cut = every_row(open_source(entry(path)))
    assert cut[:-1] == rows[: len(cut) - 1]
    assert len(cut) > 10
    assert f"element {len(cut)} (the last one" in str(cut[-1])
    path.write_text(
        "\n".join(json.dumps(row) for row in rows), encoding="utf-8"
    )  # lines, whatever the name says
    assert every_row(open_source(entry(path))) == rows


def test_formats_give_equal_batches_through_the_loader(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        for folder in (tmp_path, tmp_path / "saved"):
            folder.mkdir(exist_ok=True)
            (folder / name).write_bytes(name.encode())
    seen = set()
    for path in write_all(tmp_path, ROWS).values():
        steps = steps_of_epoch(
            make_loader(make_job(path, packing=False, shuffle=False, num_logical_shards=1))
        )
        micros = [micro for micros in steps for micro in micros]
        pictures = [len(micro.media["image_grid_thw"]) for micro in micros]
        assert pictures == [1, 1, 1, 2]   # the second row has none: that one is the stand-in
        assert [micro.segments.num_segments for micro in micros] == [1, 2, 1, 1]
        assert micros[0].input_ids.tolist() == micros[2].input_ids.tolist()
        assert micros[0].labels.tolist() == micros[2].labels.tolist()
        tensors = [(m.input_ids, m.labels, m.media["pixel_values"]) for m in micros]
        seen.add(str([[tensor.tolist() for tensor in each] for each in tensors]))
    assert len(seen) == 1
