"""`data-prep convert`: each form from real files, as rows that the engine parses, with their media."""

from __future__ import annotations

import base64
import csv
import io
import json
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner, Result

from data_prep.cli import app
from data_prep.convert import FORMATS, alpaca, asr, captions, llava, video_prompts, vqa, webdataset
from data_prep.convert.common import Options, read_records
from lmms_engine.datasets.schema import Row, parse_row
from lmms_engine.errors import BadRow

runner = CliRunner()


def run(form: str, data: Path, out: Path, *arguments: object) -> Result:
    return runner.invoke(app, ["convert", form, str(data), "--out", str(out), *map(str, arguments)])


def convert(form: str, data: Path, *arguments: object) -> list[Row]:
    out = data.parent / "out" / "rows.jsonl"
    result = run(form, data, out, *arguments)
    assert result.exit_code == 0, result.output
    return [parse_row(json.loads(line), out.parent) for line in out.read_text().splitlines()]


def shown(row: Row) -> list[tuple[str, list[str]]]:
    """(role, its parts: text, or the kind of a medium in brackets)."""
    return [
        (message.role, [part.text if part.kind == "text" else f"[{part.kind}]" for part in message.content])
        for message in row.messages
    ]


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(buffer, "PNG")
    return buffer.getvalue()


def media_bytes(row: Row) -> list[bytes]:
    return [Path(part.path).read_bytes() for part in row.media()]


def write_json(path: Path, rows: Any) -> Path:
    path.write_text(json.dumps(rows))
    return path


def test_llava(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "red"}]
    text = [{"from": "human", "value": "hi"}, {"from": "chatgpt", "value": "hello"}]
    rows = [
        {"id": 7, "image": "a.jpg", "conversations": turns, "model": "m", "meta": {"k": 1}},
        {"id": 0.5, "image": "", "conversations": text},
    ]
    (tmp_path / "p").mkdir()
    first, second = convert("llava", write_json(tmp_path / "d.json", rows), "--media-folder", tmp_path / "p")
    assert shown(first) == [("user", ["[image]", "what?"]), ("assistant", ["red"])]
    assert next(first.media()).path == str(tmp_path / "p" / "a.jpg")
    assert (first.id, first.meta) == ("7", {"model": "m", "k": 1})
    assert shown(second) == [("user", ["hi"]), ("assistant", ["hello"])]


def test_a_media_folder_that_is_not_there(tmp_path: Path) -> None:
    data = write_json(tmp_path / "d.json", [])
    for folder in (tmp_path / "nofolder", data):
        refused = run("llava", data, tmp_path / "out" / "rows.jsonl", "--media-folder", folder)
        assert refused.exit_code != 0
        assert f"--media-folder {folder}: there is no such folder" in refused.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["first turn", "top level"])
@pytest.mark.parametrize("form", ["list", "JSON"])
def test_llava_keeps_system_turns_and_tools(tmp_path: Path, place: str, form: str) -> None:
    """Neither the system text nor a tool or a call is lost on the way, nor a letter of them bent."""
    system, odd = "Sei höflich.\u2028Immer.", "Köln\u0085"
    tools = [{"name": "wetter", "description": "Grüße", "parameters": {"type": "object"}}]
    call = {"name": "wetter", "arguments": {"ort": odd}}
    turns = [
        *([{"from": "system", "value": system}] if place == "first turn" else []),
        {"from": "human", "value": "weather?"},
        {"from": "gpt", "value": "I look."},
        {"from": "function_call", "value": json.dumps(call, ensure_ascii=False)},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "Bad."},
    ]
    raw = {"conversations": turns, "tools": tools if form == "list" else json.dumps(tools)}
    raw |= {"system": system} if place == "top level" else {}
    data = tmp_path / "d.jsonl"
    data.write_bytes(json.dumps(raw, ensure_ascii=False).encode() + b"\n")
    out = tmp_path / "rows.jsonl"
    assert run("llava", data, out).exit_code == 0
    (line,) = out.read_bytes().strip().split(b"\n")
    row = parse_row(json.loads(line), tmp_path)
    assert row.messages == parse_row(raw, tmp_path).messages
    assert [message.role for message in row.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert row.messages[0].text == system
    assert row.messages[2].text == "I look."
    assert row.messages[2].tool_calls[0].arguments == {"ort": odd}
    assert [tool["function"] for tool in row.tools] == tools


def test_alpaca(tmp_path: Path) -> None:
    rows = [
        {"instruction": "add", "input": "1 2", "output": "3", "system": "be short"},
        {"instruction": "what is an <image> mark?", "input": "", "output": "a mark", "history": [["a", "b"]]},
    ]
    first, second = convert("alpaca", write_json(tmp_path / "d.json", rows), "--source", "sums")
    assert shown(first) == [("system", ["be short"]), ("user", ["add\n\n1 2"]), ("assistant", ["3"])]
    assert first.meta == {"source": "sums"}
    assert shown(second)[:2] == [("user", ["a"]), ("assistant", ["b"])]
    assert shown(second)[2] == ("user", ["what is an <image> mark?"])   # text, no picture


def test_vqa_csv_with_quotes_line_breaks_and_named_columns(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerows([("index", "image", "ask", "reply"), (1, "a.jpg", 'the "red",\none?', "yes")])
        writer.writerow((2, "", "no picture?", "none"))
    first, second = convert("vqa", path, "--columns", "question=ask", "--columns", "answer=reply")
    assert shown(first) == [("user", ["[image]", 'the "red",\none?']), ("assistant", ["yes"])]
    assert next(first.media()).path == str(tmp_path / "a.jpg")
    assert (first.id, shown(second)[0]) == ("1", ("user", ["no picture?"]))


def test_vqa_choices_and_many_answers(tmp_path: Path) -> None:
    answers = [{"answer": "one"}, {"answer": "two"}, {"answer": "two"}]
    rows = [
        {"question": "q", "answers": answers},
        {"question": "q", "choices": ["x", "y"], "answer": 1},
        {"question": "q", "choices": ["x", "y"], "answer": "x"},
        {"question": "q", "A": "x", "B": "y", "answer": "B"},
    ]
    found = [shown(row) for row in convert("vqa", write_json(tmp_path / "d.json", rows))]
    assert [turns[1][1] for turns in found] == [["two"], ["B"], ["A"], ["B"]]
    assert {turns[0][1][0] for turns in found[1:]} == {"q\nA. x\nB. y"}
    bad = run("vqa", write_json(tmp_path / "d.json", [{**rows[3], "answer": "C"}]), tmp_path / "o.jsonl")
    assert "'C' is none of the choices: x, y" in bad.stderr


def test_vqa_tsv_with_pictures_in_base64_become_files(tmp_path: Path) -> None:
    data = base64.b64encode(png("red")).decode()
    path = tmp_path / "d.tsv"
    path.write_text(f"image\tquestion\tanswer\n{data}\tq\ta\n{data}\tr\tb\n")
    rows = convert("vqa", path)
    assert media_bytes(rows[0]) == media_bytes(rows[1]) == [png("red")]
    files = [file for file in (tmp_path / "out" / "rows_media").rglob("*") if file.is_file()]
    assert [file.suffix for file in files] == [".png"]   # the same bytes are one file
    line = json.loads((tmp_path / "out" / "rows.jsonl").read_text().splitlines()[0])
    assert line["messages"][0]["content"][0]["image_url"]["url"].startswith("rows_media/")


def test_captions_in_parquet(tmp_path: Path) -> None:
    pictures = [{"bytes": png("red"), "path": "a.png"}, {"bytes": png("blue"), "path": None}]
    table = pa.table({"image": pictures, "caption": [["one", "two"], ["three"]]})
    pq.write_table(table, tmp_path / "d.parquet")
    rows = convert("captions", tmp_path / "d.parquet", "--prompt", "Say.")
    assert [shown(row) for row in rows] == [
        [("user", ["[image]", "Say."]), ("assistant", [text])] for text in ("one", "three")
    ]
    assert [media_bytes(row) for row in rows] == [[png("red")], [png("blue")]]


def tar(path: Path, *members: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def test_webdataset(tmp_path: Path, sample: Path) -> None:
    clip = sorted((sample / "videos").glob("*.mp4"))[0].read_bytes()
    turns = [{"from": "human", "value": "<image>\n<image>\nwhich?"}, {"from": "gpt", "value": "both"}]
    talk = json.dumps({"conversations": turns, "image": ["1.png", "2.png"]}).encode()
    (tmp_path / "shards").mkdir()
    first = [("a/0.png", png("red")), ("a/0.txt", b" red \n"), ("b/0.mp4", clip)]
    tar(tmp_path / "shards" / "0.tar", *first, ("b/0.json", b'{"caption": "it moves"}'))
    tar(tmp_path / "shards" / "1.tar", ("c.1.png", png("red")), ("c.2.png", png("blue")), ("c.json", talk))
    rows = convert("webdataset", tmp_path / "shards")
    assert [row.id for row in rows] == ["a/0", "b/0", "c"]
    assert shown(rows[0]) == [("user", ["[image]", "Describe the picture."]), ("assistant", ["red"])]
    assert shown(rows[1]) == [("user", ["[video]", "Describe the clip."]), ("assistant", ["it moves"])]
    assert media_bytes(rows[1]) == [clip]
    assert next(rows[1].media()).path.endswith(".mp4")
    assert shown(rows[2])[0] == ("user", ["[image]", "[image]", "which?"])
    assert media_bytes(rows[2]) == [png("red"), png("blue")]


def test_a_cut_tar_is_named_and_its_whole_samples_are_kept(tmp_path: Path) -> None:
    pair = (("png", png("red")), ("txt", b"r"))
    members = [(f"{n}.{ending}", data) for n in range(2) for ending, data in pair]
    path = tar(tmp_path / "d.tar", *members)
    path.write_bytes(path.read_bytes()[: 4 * 512 + 512 + 40])   # inside the second picture
    stopped = run("webdataset", path, tmp_path / "o.jsonl")
    assert stopped.exit_code == 1
    assert f"{path}: is damaged" in stopped.stderr
    assert not (tmp_path / "o.jsonl").exists()
    skipped = run("webdataset", path, tmp_path / "o.jsonl", "--on-bad-row", "skip")
    assert (skipped.exit_code, skipped.stdout.splitlines()[0]) == (0, "left out: tar 1")
    assert len((tmp_path / "o.jsonl").read_text().splitlines()) == 1


def test_asr_manifest(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(
        '{"audio_filepath": "a.wav", "text": "one", "duration": 2.0}\n'
        '{"audio_filepath": "a.wav", "text": "two", "duration": 2.0, "offset": 1.5}\n'
    )
    first, second = convert("asr", path)
    assert shown(first) == [("user", ["[audio]", "Write down what is said."]), ("assistant", ["one"])]
    spans = [(part.start, part.end) for row in (first, second) for part in row.media()]
    assert spans == [(None, None), (1.5, 3.5)]


def test_imagenet_folder(tmp_path: Path) -> None:
    for name in ("n02", "n01"):
        (tmp_path / "d" / name).mkdir(parents=True)
        (tmp_path / "d" / name / "x.JPEG").write_bytes(png("red"))
    (tmp_path / "d" / "classes.txt").write_text("n01 goldfish\n")
    rows = convert("imagenet", tmp_path / "d")
    assert [(row.id, shown(row)[1][1]) for row in rows] == [("n01/x", ["goldfish"]), ("n02/x", ["n02"])]
    assert media_bytes(rows[0]) == [png("red")]


def test_imagenet_folder_to_draw(tmp_path: Path) -> None:
    (tmp_path / "d" / "n01").mkdir(parents=True)
    (tmp_path / "d" / "n01" / "x.png").write_bytes(png("red"))
    (row,) = convert("imagenet", tmp_path / "d", "--draw")
    assert shown(row) == [("user", ["n01"]), ("assistant", ["[image]"])]
    refused = run("vqa", tmp_path / "d", tmp_path / "o.jsonl", "--draw")
    assert "--draw: form 'vqa' has no text that could ask" in refused.stderr
    twice = run("imagenet", tmp_path / "d", tmp_path / "o.jsonl", "--draw", "--prompt", "?")
    assert "--draw and --prompt exclude each other" in twice.stderr


def test_video_prompts(tmp_path: Path) -> None:
    path = tmp_path / "metadata.csv"
    path.write_text('file_name,text,start,end,fps\na.mp4,"a cat, running",,,\nb.mp4,a dog,0.5,2,8\n')
    (tmp_path / "clips").mkdir()
    first, second = convert("video_prompts", path, "--media-folder", tmp_path / "clips")
    assert shown(first) == [("user", ["a cat, running"]), ("assistant", ["[video]"])]
    clip = next(second.media())
    assert (clip.path, clip.start, clip.end, clip.fps) == (str(tmp_path / "clips" / "b.mp4"), 0.5, 2.0, 8.0)
    asked, _ = convert("video_prompts", path, "--prompt", "What is it?")
    assert shown(asked) == [("user", ["[video]", "What is it?"]), ("assistant", ["a cat, running"])]


def big_table(tmp_path: Path) -> Path:
    """A table with line breaks of all kinds in its cells, a byte order mark, stray quotes, odd rows."""
    path = tmp_path / "d.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerow(("index", "question", "answer"))
        for n in range(60):
            writer.writerow((n, f'Größe "{n}",\n\r\nor\rwhat?' * (n % 5), "yes"))
            if n % 9 == 4:
                file.write(f'{n},a 5" pipe,no\r\n{n},too,many,fields\r\n\r\n')
    return path


def test_a_table_cut_in_parts_is_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = big_table(tmp_path)
    whole = [item for part in read_records(path).parts for item in read_records(path).read(part)]
    with path.open(newline="", encoding="utf-8-sig") as file:
        expected = list(csv.DictReader(file, strict=True))
    assert [record for _, record in whole if isinstance(record, dict)] == [
        row for row in expected if None not in row
    ]
    assert sum(isinstance(record, BadRow) for _, record in whole) == 7
    monkeypatch.setattr("data_prep.convert.common.CSV_ROWS", 3)
    records = read_records(path)
    assert len(records.parts) > 20
    found = [item for part in records.parts for item in records.read(part)]
    assert [(place, str(record)) for place, record in found] == [(p, str(r)) for p, r in whole]


def test_killed_at_any_instant_it_goes_on_to_the_same_bytes(
    tmp_path: Path, killed: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.convert.common.CSV_ROWS", 4)
    lines = [f"{n},{base64.b64encode(png('red') + bytes([n // 2])).decode()},q,a" for n in range(60)]
    path = tmp_path / "d.csv"
    path.write_text("\n".join(["id,image,question,answer", *lines]))
    out, parts = tmp_path / "out" / "rows.jsonl", tmp_path / "out" / ".rows.jsonl.parts"
    for count in (1, 8, 17):   # two files a part, so also between them
        assert killed(["convert", "vqa", path, "--out", out], parts, count) >= count
        assert not out.exists()
    first = parts / "part-000000.json"
    seen = first.stat().st_mtime_ns
    assert killed(["convert", "vqa", path, "--out", out], parts, len(list(parts.glob("part-*"))) + 1)
    assert first.stat().st_mtime_ns == seen   # not done again
    assert run("vqa", path, out).exit_code == 0
    undisturbed = tmp_path / "undisturbed" / "rows.jsonl"
    assert run("vqa", path, undisturbed, "--workers", 2).exit_code == 0
    left, right = (
        {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
        for folder in (out.parent, undisturbed.parent)
    )
    assert left == right
    assert len(left) == 30 + 1   # each picture twice; the rows


def test_a_glob_of_tables_and_one_that_is_not_there(tmp_path: Path) -> None:
    for name in "ba":
        (tmp_path / f"{name}.csv").write_text(f"question,answer\nq,{name}\n")
    assert run("vqa", tmp_path / "*.csv", tmp_path / "o.jsonl").exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [row["messages"][1]["content"][0]["text"] for row in rows] == ["a", "b"]
    gone = run("vqa", tmp_path / "gone.csv", tmp_path / "o2.jsonl")
    assert gone.exit_code == 1
    assert f"{tmp_path / 'gone.csv'} does not exist" in gone.stderr


@pytest.mark.parametrize("form", ["vqa", "llava"])
def test_columns_of_names_that_a_form_does_not_look_for_are_refused(tmp_path: Path, form: str) -> None:
    (tmp_path / "d.csv").write_text("question,answer\nq,a\n")
    result = run(form, tmp_path / "d.csv", tmp_path / "o.jsonl", "--columns", "qestion=question")
    assert result.exit_code == 1
    assert "--columns qestion=question: no such name" in result.stderr
    assert ("did you mean 'question'?" in result.stderr) == (form == "vqa")


BAD_TABLE = 'question,answer\nq,a\nonly\nq,a,more\nq,"cut\n'


def test_bad_rows_of_a_table_stop_or_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text(BAD_TABLE)
    stopped = run("vqa", path, tmp_path / "o.jsonl")
    assert (stopped.exit_code, stopped.stderr.count("\n")) == (1, 1)
    assert f"{path}, line 3: has fewer fields than the 2 of the header" in stopped.stderr
    skipped = run("vqa", path, tmp_path / "o.jsonl", "--on-bad-row", "skip")
    assert skipped.stdout == f"left out: csv 3\nwrote: {tmp_path / 'o.jsonl'} (1 rows)\n"


@pytest.mark.parametrize(
    ("form", "text", "message"),
    [
        ("alpaca", '{"instruction": "a"}\n', "no output: it is looked for in any of output, response"),
        ("llava", '{"conversations": [\n', "line 1 (the last one: the file may be cut off) is not JSON"),
        ("llava", '{"conversations": [{"from": "human", "value": "<image>"}]}\n', "1 place(s) for images"),
        ("asr", '{"audio": "a", "text": "b", "offset": "x", "duration": 1}\n', "offset must be a number"),
        ("lava", "{}\n", "did you mean 'llava'?"),
    ],
)
def test_what_cannot_be_converted_is_one_line(tmp_path: Path, form: str, text: str, message: str) -> None:
    (tmp_path / "d.jsonl").write_text(text)
    result = run(form, tmp_path / "d.jsonl", tmp_path / "o.jsonl")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert message in result.stderr
    assert result.stderr.count(str(tmp_path / "d.jsonl")) == (form != "lava")   # the place, once
    assert not (tmp_path / "o.jsonl").exists()


def test_again_gives_the_same_bytes(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [png("red")], "caption": ["c"]}), tmp_path / "d.parquet")
    contents = []
    for _ in range(2):
        assert run("captions", tmp_path / "d.parquet", tmp_path / "o.jsonl").exit_code == 0
        files = sorted(file for file in tmp_path.rglob("*") if file.is_file())
        contents.append([(file, file.read_bytes()) for file in files])
    assert contents[0] == contents[1]


KEYS = (
    *("id", "image", "images", "conversations", "meta", "system", "history", "instruction", "input"),
    *("output", "question", "answer", "answers", "choices", "A", "B", "caption", "text", "audio"),
    *("offset", "duration", "video", "prompt", "start", "fps"),
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4)
turns = st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", 3]), "value": st.text(max_size=9)})
values = st.recursive(
    leaves | st.lists(turns, max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(KEYS, values)))
def test_any_record_gives_a_row_or_a_bad_row(record: dict[str, Any]) -> None:
    for form in (alpaca, asr, captions, llava, video_prompts, vqa):
        with suppress(BadRow):
            parse_row(form.row(record, Options()), Path("/"))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["png", "a.mp4", "txt", "json", ""]), st.binary(max_size=6)), values)
def test_any_sample_of_a_tar_gives_a_row_or_a_bad_row(record: dict[str, bytes], facts: Any) -> None:
    for text in (None, json.dumps(facts, default=str).encode()):
        more = {} if text is None else {"json": text}
        with suppress(BadRow):
            parse_row(webdataset.row({"__key__": "k", **record, **more}, Options()), Path("/"))


def test_every_form_has_a_file_and_is_in_the_docs(repo: Path) -> None:
    files = {path.stem for path in (repo / "data_prep" / "convert").glob("*.py")} - {"__init__", "common"}
    assert files == set(FORMATS)
    listed = (repo / "docs" / "data.md").read_text()
    assert all(f"| `{form}` |" in listed for form in FORMATS)
    result = runner.invoke(app, ["convert", "--help"], env={"COLUMNS": "200"})
    assert all(form in result.output for form in FORMATS)
