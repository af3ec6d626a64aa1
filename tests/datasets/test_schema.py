"""Every accepted shape of a row gives one Row; everything else is refused by name."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmms_engine.datasets.schema import MediaPart, Row, TextPart, dump_row, parse_row
from lmms_engine.datasets.sources.remote import RemoteFolder
from lmms_engine.errors import BadRow

FOLDER = Path("/data/set")
ANSWER = {"role": "assistant", "content": "Red."}
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def parse(**row: Any) -> Row:
    return parse_row(row, FOLDER)


def chat(*parts: Any, **row: Any) -> Row:
    return parse(messages=[{"role": "user", "content": list(parts)}, ANSWER], **row)


def shape(row: Row) -> list[list[str]]:
    return [
        [part.text if isinstance(part, TextPart) else part.label for part in m.content] for m in row.messages
    ]


def refused(kind: str, *words: str, **row: Any) -> None:
    with pytest.raises(BadRow) as caught:
        parse(**row)
    assert caught.value.kind == kind
    for word in words:
        assert word in str(caught.value)


def test_importing_the_schema_loads_no_torch() -> None:
    code = "import sys, lmms_engine.datasets.schema as s; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PARTS = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "Which colour?"}]
SAME = {
    "parts": {"messages": [{"role": "user", "content": PARTS}, ANSWER]},
    "image part": {
        "messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, PARTS[1]]}, ANSWER]
    },
    "nulls": {
        "messages": [{"role": "user", "content": [{**PARTS[0], "text": None}, PARTS[1]]}, ANSWER],
        "tools": None,
    },
    "untyped": {
        "messages": [{"role": "user", "content": [{"image": "a.png"}, {"text": "Which colour?"}]}, ANSWER]
    },
    "absolute": {
        "messages": [
            {"role": "user", "content": [{"type": "image", "path": "/data/set/a.png"}, PARTS[1]]},
            ANSWER,
        ]
    },
    "filled": {
        "messages": [{"role": "user", "content": [{"type": "image"}, PARTS[1]]}, ANSWER],
        "images": ["a.png"],
    },
    "llava": {
        "conversations": [
            {"from": "human", "value": "<image>\nWhich colour?"},
            {"from": "gpt", "value": "Red."},
        ],
        "image": "a.png",
    },
    "no mark": {
        "conversations": [{"from": "human", "value": "Which colour?"}, {"from": "gpt", "value": "Red."}],
        "image": ["a.png"],
    },
    "json": {"messages": json.dumps([{"role": "user", "content": PARTS}, ANSWER])},
}


@pytest.mark.parametrize("name", SAME)
def test_every_shape_of_one_conversation_gives_the_same_row(name: str) -> None:
    row = parse_row(SAME[name], FOLDER)
    assert row == parse_row(SAME["parts"], FOLDER)
    assert shape(row) == [["/data/set/a.png", "Which colour?"], ["Red."]]


def test_marks_are_filled_in_order_over_all_turns() -> None:
    row = parse(
        conversations=[
            {"from": "human", "value": "<image>\n<image>\nCompare."},
            {"from": "gpt", "value": "Done."},
            {"from": "human", "value": "And <video> now?\n<image>"},
            {"from": "gpt", "value": "Yes."},
        ],
        images=["a.png", "b.png", "c.png"],
        video="v.mp4",
    )
    assert shape(row) == [
        ["/data/set/a.png", "/data/set/b.png", "Compare."],
        ["Done."],
        ["And ", "/data/set/v.mp4", " now?", "/data/set/c.png"],
        ["Yes."],
    ]
    assert [part.kind for part in row.media()] == ["image", "image", "video", "image"]


def test_marks_in_a_list_of_parts_are_text_unless_that_key_is_given() -> None:
    assert shape(chat({"type": "text", "text": "What is <video> in HTML?"}))[0] == [
        "What is <video> in HTML?"
    ]
    assert shape(chat({"type": "text", "text": "<video> what?"}, video="v.mp4"))[0] == [
        "/data/set/v.mp4",
        " what?",
    ]


@pytest.mark.parametrize(
    ("source", "field", "value"),
    [
        ("https://host/a.png", "url", "https://host/a.png"),
        ("s3://bucket/图.png", "url", "s3://bucket/图.png"),
        ("file:///tmp/a%20b.png", "path", "/tmp/a b.png"),
        ("子/图片.png", "path", "/data/set/子/图片.png"),
        ("data:image/png;base64," + base64.b64encode(PNG).decode(), "bytes", PNG),
        (base64.b64encode(PNG).decode(), "bytes", PNG),
        (PNG, "bytes", PNG),
        ({"bytes": PNG, "path": "a.png"}, "bytes", PNG),
        ({"bytes": None, "path": "a.png"}, "path", "/data/set/a.png"),
        ({"url": "a.png", "detail": "auto"}, "path", "/data/set/a.png"),
    ],
)
def test_sources_of_a_picture(source: Any, field: str, value: Any) -> None:
    (part,) = parse(messages=[{"role": "user", "content": "?"}, ANSWER], image=source).media()
    assert part == MediaPart(kind="image", **{field: value})
    (part,) = chat({"type": "image", "image": source}).media()
    assert part == MediaPart(kind="image", **{field: value})


def test_spans_of_a_clip() -> None:
    (part,) = chat(
        {"type": "video_url", "video_url": {"url": "v.mp4"}, "video_start": 1, "end": 2.5, "fps": 4}
    ).media()
    assert (part.start, part.end, part.fps) == (1.0, 2.5, 4.0)
    for span in ({"start": 3, "end": 3}, {"fps": 0}, {"start": -1}, {"end": "2"}):
        with pytest.raises(BadRow, match=r"span|number"):
            chat({"type": "video", "video": "v.mp4", **span})


@pytest.mark.parametrize(
    ("row", "kind", "words"),
    [
        ({"imgs": ["a.png"]}, "unknown_key", ["'imgs'", "did you mean 'images'"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "media_missing",
            ["messages[0].content[0]"],
        ),
        (
            {"messages": [{"role": "user", "content": "<image> what?"}]},
            "media_missing",
            ["<image>", "0 given"],
        ),
        (
            {"image": ["a.png", "b.png"], "messages": [{"role": "user", "content": "<image>"}]},
            "media_unused",
            ["2 given"],
        ),
        ({"image": "a.png", "messages": [{"role": "user", "content": PARTS}]}, "media_unused", ["twice"]),
        (
            {"image": "a.png", "messages": [{"role": "assistant", "content": "x"}]},
            "media_unused",
            ["no user turn"],
        ),
        ({"image": ""}, "media_missing", ["image[0]"]),
        ({"image": {"path": None, "bytes": None}}, "media_missing", ["image[0]"]),
        ({"image": b""}, "media_missing", ["0 bytes"]),
        ({"images": [["1.jpg", "2.jpg"]]}, "media_source", ["images[0]", "list"]),
        ({"videos": [["1.jpg", ["2.jpg"]]]}, "media_source", ["videos[0][1]", "list"]),
        ({"videos": [["1.jpg", ""]]}, "media_missing", ["videos[0][1]", "empty"]),
        ({"videos": [[]]}, "media_missing", ["videos[0]", "no frames"]),
        ({"image": 7}, "media_missing", ["image[0]", "7"]),
        ({"image": "a.png", "images": ["b.png"]}, "media_source", ["not both"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "imag", "image": "a"}]}]},
            "content",
            ["did you mean 'image'"],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "txt": "a"}]}]},
            "unknown_key",
            ["'txt'"],
        ),
        ({"messages": [{"role": "usr", "content": "a"}]}, "role", ["messages[0]", "did you mean 'user'"]),
        ({"messages": [{"role": "user", "content": None}]}, "content", ["messages[0]"]),
        ({"messages": [{"role": "user", "content": 3}]}, "content", ["messages[0]"]),
        ({"messages": []}, "messages", ["at least one turn"]),
        ({"messages": None}, "messages", ["neither"]),
        ({"conversations": [{"from": "human", "value": "a"}]}, "messages", ["both"]),
        ({"messages": [{"role": "user", "content": "half \ud800"}]}, "text_invalid", ["surrogate"]),
        ({"id": 1.5}, "id", ["1.5"]),
        ({"meta": "x"}, "json", ["meta"]),
        ({"meta": "[]"}, "meta", ["meta"]),
    ],
)
def test_refused_rows_name_the_key(row: dict[str, Any], kind: str, words: list[str]) -> None:
    refused(kind, *words, **{"messages": [{"role": "user", "content": "?"}, ANSWER], **row})


def test_a_row_that_is_no_object() -> None:
    with pytest.raises(BadRow, match="object"):
        parse_row(["not", "a", "row"], FOLDER)  # type: ignore[arg-type]


def test_system_text_appears_once_wherever_it_stands() -> None:
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    first = parse(conversations=[{"from": "system", "value": "Be kind."}, *turns])
    top = parse(conversations=turns, system="Be kind.")
    both = parse(conversations=[{"from": "system", "value": "Be kind."}, *turns], system="Be kind.")
    assert first == top == both
    assert [message.role for message in top.messages] == ["system", "user", "assistant"]
    refused("system", "two different", conversations=[{"from": "system", "value": "A"}, *turns], system="B")


CALL = {"name": "suche", "arguments": {"wort": "Größe", "n": None}}
TOOLS = [{"type": "function", "function": {"name": "suche", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    "arguments",
    [CALL["arguments"], json.dumps(CALL["arguments"]), json.dumps(CALL["arguments"], ensure_ascii=False)],
)
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])], [TOOLS[0]["function"]]])
def test_tools_and_calls_in_every_form_give_one_row(arguments: Any, tools: Any) -> None:
    openai = parse(
        messages=[
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "content": "Moment.",
                "tool_calls": [{"id": "1", "type": "function", "function": {**CALL, "arguments": arguments}}],
            },
            {"role": "tool", "content": {"größe": 3}, "tool_call_id": "1"},
            {"role": "assistant", "content": "3"},
        ],
        tools=tools,
    )
    call = openai.messages[1].tool_calls[0]
    assert (call.name, call.arguments, call.id) == ("suche", {"wort": "Größe", "n": None}, "1")
    assert openai.messages[1].text == "Moment."
    assert openai.messages[2].text == '{"größe": 3}'
    assert list(openai.tools) == TOOLS

    sharegpt = parse(
        conversations=[
            {"from": "human", "value": "?"},
            {"from": "gpt", "value": "Moment."},
            {"from": "function_call", "value": json.dumps({**CALL, "arguments": arguments})},
            {"from": "observation", "value": '{"größe": 3}'},
            {"from": "gpt", "value": "3"},
        ],
        tools=tools,
    )
    assert [message.role for message in sharegpt.messages] == ["user", "assistant", "tool", "assistant"]
    assert sharegpt.messages[1].tool_calls[0].arguments == call.arguments
    assert sharegpt.messages[1].text == "Moment."
    assert shape(sharegpt) == shape(openai)


def test_calls_without_content_and_empty_turns() -> None:
    row = parse(
        messages=[{"role": "user", "content": []}, {"role": "assistant", "tool_calls": [{"function": CALL}]}]
    )
    assert row.messages[0].content == ()
    assert row.messages[1].content == ()
    assert row.messages[1].tool_calls[0].name == "suche"
    for bad in (
        "{'name': 1}",
        [{"function": {"arguments": {}}}],
        [{"function": {"name": "f", "arguments": "[1]"}}],
    ):
        with pytest.raises(BadRow, match=r"messages\[0\]"):
            parse(messages=[{"role": "assistant", "tool_calls": bad}])
    refused(
        "tool_calls", "only the assistant", messages=[{"role": "user", "content": "?", "tool_calls": [CALL]}]
    )
    refused("tools", "name", messages=[ANSWER], tools=[{"description": "nameless"}])


def test_written_rows_read_back_equal() -> None:
    row = chat(
        {"type": "image", "bytes": PNG},
        {"type": "video", "video": "v.mp4", "start": 1.0, "fps": 2.0},
        {"type": "audio", "audio": "https://host/a.wav"},
        {"type": "text", "text": "\u2028 <image> 图"},
        id="7",
        tools=TOOLS,
        meta={"split": "a"},
        source="made",
    )
    assert row.meta == {"source": "made", "split": "a"}
    assert parse_row(json.loads(json.dumps(dump_row(row))), Path("/elsewhere")) == row
    call = parse(
        messages=[
            {"role": "user", "content": "?"},
            {"role": "assistant", "tool_calls": [{"id": "1", "function": CALL}]},
        ]
    )
    assert parse_row(dump_row(call), FOLDER) == call


def test_a_clip_may_be_a_list_of_pictures() -> None:
    data = base64.b64encode(b"jpeg").decode()
    url = f"data:image/jpeg;base64,{data}"
    frames = ["a/1.jpg", {"path": "a/2.jpg"}, "https://host/3.jpg", {"bytes": b"4"}, url]
    row = chat({"type": "video", "video": frames, "fps": 2, "start": 1}, "What happens?")
    (clip,) = row.media()
    assert (clip.kind, clip.fps, clip.start, clip.path) == ("video", 2.0, 1.0, None)
    assert [frame.kind for frame in clip.frames] == ["image"] * 5
    assert [frame.path for frame in clip.frames[:2]] == [str(FOLDER / "a/1.jpg"), str(FOLDER / "a/2.jpg")]
    assert clip.frames[2].url == "https://host/3.jpg"
    assert [frame.bytes for frame in clip.frames[3:]] == [b"4", b"jpeg"]
    assert "5 frames" in clip.label
    assert parse_row(dump_row(row), FOLDER) == row
    for part in ({"type": "video_url", "video_url": {"url": frames}}, {"video": frames}):
        (same,) = chat({**part, "fps": 2, "start": 1}).media()
        assert same == clip
    (first, second) = chat({"type": "video"}, {"type": "video"}, videos=[frames[:2], "b.mp4"]).media()
    assert first.frames == clip.frames[:2]
    assert second.path == str(FOLDER / "b.mp4")


def test_a_sound_has_a_span_and_no_rate() -> None:
    (part,) = chat({"type": "audio", "audio": "a.wav", "audio_start": 1, "end": 2.5}).media()
    assert (part.start, part.end, part.fps) == (1.0, 2.5, None)
    misplaced = {"fps": "audio", "video_start": "audio", "audio_start": "video", "start": "image"}
    for key, kind in misplaced.items():
        message = [{"role": "user", "content": [{"type": kind, kind: "a", key: 1}]}, ANSWER]
        refused("unknown_key", key, messages=message)


def test_absolute_paths_in_rows_that_lie_elsewhere_stay_paths_of_this_machine() -> None:
    row = {"messages": [{"role": "user", "content": [{"type": "image", "image": "/mnt/a.png"}]}, ANSWER]}
    (medium,) = parse_row(row, RemoteFolder("https://host/rows")).messages[0].content
    assert isinstance(medium, MediaPart)
    assert (medium.path, medium.url) == ("/mnt/a.png", None)
