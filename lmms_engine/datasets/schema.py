"""Row: the one form of a conversation, and the parser that brings every accepted shape into it.

    row = parse_row(json.loads(line), data_folder)      # BadRow if anything is unusable, unknown or left over

On disk a row is OpenAI chat form: ``{"messages": [{"role", "content"}], ...}``. Read as well: ShareGPT and
LLaVA (``conversations`` with ``from`` / ``value``), top-level ``image(s)`` / ``video(s)`` / ``audio(s)``, a
top-level ``system``, tool calls as lists, dicts or JSON strings. Nothing is dropped silently: a key that is
not understood, a picture given but placed nowhere, one mentioned but not given: all are errors.

Where the media of the top-level keys go, kind by kind, in order:
1. into parts without a source of their own (``{"type": "image"}``);
2. into the marks ``<image>`` ``<video>`` ``<audio>`` of the text; one newline on either side of a mark
   belongs to it. In a string every mark counts; inside a list of parts only where that top-level key is
   given, which is how a text *about* such a mark is written;
3. if there are neither, before the first user text.

This module touches no file and imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lmms_engine.datasets.parts import (
    KINDS,
    SPAN_KEYS,
    Frozen,
    Kind,
    MediaPart,
    Part,
    TextPart,
    check_keys,
    dump_part,
    kind_of,
    media_part,
    present,
    span_of,
    text_of,
)
from lmms_engine.errors import BadRow
from lmms_engine.registry import nearest

Role = Literal["system", "user", "assistant", "tool"]

MEDIA_KEYS: dict[str, Kind] = {f"{kind}{plural}": kind for kind in KINDS for plural in ("", "s")}
ROW_KEYS = ("id", "messages", "conversations", "system", "tools", "meta", "source", *MEDIA_KEYS)
MESSAGE_KEYS = ("role", "content", "from", "value", "tool_calls", "function_call", "tool_call_id", "name")
ROLES: dict[str, str] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool", "tool_response": "tool",
    "function_call": "function_call", "tool_call": "function_call",
}  # fmt: skip
PART_TYPES = ("text", *KINDS, *(f"{kind}_url" for kind in KINDS), "input_audio")

MARK = re.compile(r"\n?<(image|video|audio)>\n?")


class ToolCall(Frozen):
    """A call of the assistant; `arguments` is an object, whatever form the row gave it in."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


class Message(Frozen):
    """One turn. An empty `content` is an empty turn."""

    role: Role
    content: tuple[Part, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


class Row(Frozen):
    """A conversation. `meta` is carried along for the user's own tools and never reaches the model."""

    messages: tuple[Message, ...]
    id: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    meta: dict[str, Any] = Field(default_factory=dict)

    def media(self) -> Iterator[MediaPart]:
        """All media, in the order in which the model meets them."""
        for message in self.messages:
            yield from (part for part in message.content if isinstance(part, MediaPart))


def parse_row(obj: dict[str, Any], data_folder: Path) -> Row:
    """The Row in a decoded JSON or table row; raises BadRow, naming the key, for what it cannot use fully.

    data_folder: absolute folder of relative media paths. Keys that are null count as absent.
    """
    if not isinstance(obj, dict):
        raise BadRow("row_type", f"a row is an object with `messages`, not {kind_of(obj)}")
    obj = present(obj)
    check_keys(obj, ROW_KEYS, "row")
    given = {kind: _top_level_media(obj, kind, data_folder) for kind in KINDS}
    messages = _messages(obj, {kind for kind in KINDS if given[kind]}, data_folder)
    messages = _with_system(obj.get("system"), messages)
    messages = _place_media(messages, given)
    meta = _decode_json(obj.get("meta", {}), "`meta`")
    if not isinstance(meta, dict):
        raise BadRow("meta", f"`meta` must be an object, got {kind_of(meta)}")
    if "source" in obj:
        meta = {"source": obj["source"], **meta}
    return Row(
        id=_row_id(obj.get("id")), messages=tuple(messages), tools=_tools(obj.get("tools", ())), meta=meta
    )


def dump_row(row: Row) -> dict[str, Any]:
    """The row in OpenAI chat form, JSON-ready; `parse_row` of it gives an equal row."""
    out: dict[str, Any] = {} if row.id is None else {"id": row.id}
    out["messages"] = [_dump_message(message) for message in row.messages]
    if row.tools:
        out["tools"] = list(row.tools)
    if row.meta:
        out["meta"] = row.meta
    return out


# Row level -------------------------------------------------------------------------------------------


def _row_id(value: Any) -> str | None:
    if value is None or (isinstance(value, str | int) and not isinstance(value, bool)):
        return _name(value, "`id`")
    raise BadRow("id", f"`id` must be a string or an integer, got {kind_of(value)}")


def _decode_json(value: Any, where: str) -> Any:
    """`value`, decoded if it is a string of JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow("json", f"{where} is not JSON ({error}): {kind_of(value)}") from None


def _json_text(value: Any, where: str) -> str:
    """`value` as JSON; BadRow if it cannot be written: bytes, half a surrogate pair, endless nesting."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow("json", f"{where} cannot be written as JSON ({error})") from None
    return text


def _name(value: Any, where: str) -> str | None:
    """An id or a name: text, or a whole number."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = _json_text(value, where)
    return None if value is None else text_of(value, where)


def _messages(obj: dict[str, Any], marked: set[str], data_folder: Path) -> list[_Draft]:
    keys = [key for key in ("messages", "conversations") if key in obj]
    if len(keys) != 1:
        found = "both `messages` and `conversations`" if keys else "neither `messages` nor `conversations`"
        raise BadRow("messages", f"a row has one conversation; this one has {found}")
    turns = _decode_json(obj[keys[0]], f"`{keys[0]}`")
    if not isinstance(turns, list) or not turns:
        raise BadRow("messages", f"`{keys[0]}` must be a list with at least one turn, got {kind_of(turns)}")
    messages: list[_Draft] = []
    for i, turn in enumerate(turns):
        where = f"{keys[0]}[{i}]"
        if not isinstance(turn, dict):
            raise BadRow("messages", f"`{where}` must be an object, got {kind_of(turn)}")
        message, is_call = _message(present(turn), where, marked, data_folder)
        before = messages[-1] if messages else None
        if is_call and before is not None and before.role == "assistant":   # text and its call are one turn
            before.tool_calls += message.tool_calls
        else:
            messages.append(message)
    return messages


def _with_system(system: Any, messages: list[_Draft]) -> list[_Draft]:
    if system is None:
        return messages
    text = text_of(system, "`system`")
    if messages[0].role == "system":
        if messages[0].content != _text_parts(text):
            raise BadRow("system", "`system` and the first turn hold two different system texts; keep one")
        return messages
    return [_Draft(role="system", content=_text_parts(text)), *messages]


def _text_parts(text: str) -> tuple[Part, ...]:
    return (TextPart(text=text),) if text else ()


@dataclass
class _Draft:
    """A Message whose content may still hold a _Slot where one of the top-level media goes."""

    role: Role
    content: tuple[Part | _Slot, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


# Turns -----------------------------------------------------------------------------------------------


def _message(turn: dict[str, Any], where: str, marked: set[str], data_folder: Path) -> tuple[_Draft, bool]:
    """The message, and whether it is a bare ShareGPT tool call, which belongs to the turn before it."""
    check_keys(turn, MESSAGE_KEYS, where)
    for one, other in (("role", "from"), ("content", "value"), ("tool_calls", "function_call")):
        if one in turn and other in turn:
            raise BadRow("messages", f"`{where}` has both `{one}` and `{other}`; keep one")
    name = turn.get("role", turn.get("from"))
    if not isinstance(name, str) or name not in ROLES:
        hint = nearest(name, list(ROLES)) if isinstance(name, str) else ""
        raise BadRow("role", f"`{where}` has the role {name!r} (legal: {', '.join(ROLES)}){hint}")
    role = ROLES[name]
    content = turn.get("content", turn.get("value"))
    if role == "function_call":
        if {"tool_calls", "function_call"} & turn.keys():
            raise BadRow("tool_calls", f"`{where}` is a {name} turn: the call stands in its content alone")
        return _Draft(role="assistant", tool_calls=_tool_calls(content, where)), True
    calls = _tool_calls(turn["tool_calls"], where) if "tool_calls" in turn else ()
    if "function_call" in turn:
        calls = _tool_calls([turn["function_call"]], where)
    if calls and role != "assistant":
        raise BadRow("tool_calls", f"`{where}` is a {name} turn; only the assistant calls tools")
    for key in ("tool_call_id", "name"):
        if key in turn and role != "tool":
            raise BadRow("unknown_key", f"`{where}.{key}` belongs in a tool turn, not in a {name} turn")
    if content is None and not calls:
        raise BadRow("content", f"`{where}` has no content")
    if role == "tool" and isinstance(content, dict):
        content = _json_text(content, f"`{where}`")
    draft = _Draft(
        role=role,
        content=_content(content, where, marked, data_folder),
        tool_calls=calls,
        tool_call_id=_name(turn.get("tool_call_id"), f"`{where}.tool_call_id`"),
        name=_name(turn.get("name"), f"`{where}.name`"),
    )
    return draft, False


def _tool_calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    decoded = _decode_json(value, f"the tool call in `{where}`")
    calls = []
    for item in decoded if isinstance(decoded, list) else [decoded]:
        call = _decode_json(item, f"a tool call in `{where}`")
        call_id = None
        if isinstance(call, dict) and "function" in call:
            check_keys(call, ("id", "type", "function", "index"), f"a tool call in {where}")
            call_id, call = call.get("id"), call["function"]
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise BadRow("tool_calls", f"a tool call in `{where}` needs a `name`, got {kind_of(call)}")
        check_keys(call, ("id", "type", "name", "arguments", "parameters"), f"a tool call in {where}")
        raw = call.get("arguments", call.get("parameters"))
        arguments = {} if raw is None or raw == "" else _decode_json(raw, f"the arguments in `{where}`")
        if not isinstance(arguments, dict):
            raise BadRow("tool_calls", f"arguments in `{where}` must be an object, got {kind_of(arguments)}")
        _json_text([call["name"], arguments], f"a tool call in `{where}`")
        call_id = _name(call_id or call.get("id"), f"the id of a tool call in `{where}`")
        calls.append(ToolCall(name=call["name"], arguments=arguments, id=call_id))
    return tuple(calls)


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Tool descriptions in the form ``{"type": "function", "function": {...}}``."""
    if value == "":
        return ()
    decoded = _decode_json(value, "`tools`")
    tools = []
    for item in decoded if isinstance(decoded, list | tuple) else [decoded]:
        tool = _decode_json(item, "an entry of `tools`")
        wrapped = isinstance(tool, dict) and "function" in tool
        function = tool["function"] if wrapped else tool
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow("tools", f"an entry of `tools` needs a `name`, got {kind_of(tool)}")
        if isinstance(function.get("parameters"), str):
            parameters = _decode_json(function["parameters"], f"the parameters of tool '{function['name']}'")
            function = {**function, "parameters": parameters}
        _json_text(tool, "an entry of `tools`")
        tools.append({**(tool if wrapped else {"type": "function"}), "function": function})
    return tuple(tools)


# Content ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Slot:
    """A place for one of the top-level media."""

    kind: Kind
    where: str


def _content(content: Any, where: str, marked: set[str], data_folder: Path) -> tuple[Part | _Slot, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return tuple(_split_marks(text_of(content, f"`{where}`"), where, set(KINDS)))
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise BadRow("content", f"`{where}` must be text or a list of parts, got {kind_of(content)}")
    parts: list[Part | _Slot] = []
    for i, item in enumerate(content):
        at = f"{where}.content[{i}]"
        if isinstance(item, str):
            item = {"type": "text", "text": item}
        if not isinstance(item, dict):
            raise BadRow("content", f"`{at}` must be an object, got {kind_of(item)}")
        parts.extend(_part(present(item), at, marked, data_folder))
    return tuple(parts)


def _split_marks(text: str, where: str, kinds: set[str]) -> Iterator[Part | _Slot]:
    start = 0
    for match in MARK.finditer(text):
        if match[1] not in kinds:
            continue
        if match.start() > start:
            yield TextPart(text=text[start : match.start()])
        yield _Slot(kind=match[1], where=where)
        start = match.end()
    if start < len(text):
        yield TextPart(text=text[start:])


def _part(item: dict[str, Any], where: str, marked: set[str], data_folder: Path) -> Iterator[Part | _Slot]:
    type_ = item.get("type")
    if type_ is None:
        found = [key for key in ("text", *KINDS) if key in item]
        if len(found) != 1:
            raise BadRow("content", f"`{where}` has no `type` (legal: {', '.join(PART_TYPES)})")
        type_ = found[0]
    if not isinstance(type_, str) or type_ not in PART_TYPES:
        hint = nearest(str(type_), list(PART_TYPES))
        raise BadRow("content", f"`{where}` has the type {type_!r} (legal: {', '.join(PART_TYPES)}){hint}")
    if type_ == "text":
        check_keys(item, ("type", "text"), where)
        if "text" not in item:
            raise BadRow("content", f"`{where}` is a text part without `text`")
        yield from _split_marks(text_of(item["text"], f"`{where}`"), where, marked)
        return
    kind: Kind = "audio" if type_ == "input_audio" else type_.removesuffix("_url")
    source_keys = dict.fromkeys((type_, kind, f"{kind}_url", "path", "url", "bytes"))
    check_keys(item, ("type", *source_keys, *SPAN_KEYS[kind]), where)
    sources = [key for key in source_keys if key in item]
    span = span_of(kind, item, where)
    # `bytes` beside `path` is one source: a picture that remembers its file's name.
    if set(sources) == {"path", "bytes"}:
        sources = ["bytes"]
    if len(sources) > 1:
        raise BadRow("media_source", f"`{where}` names its {kind} twice: {', '.join(sources)}; keep one")
    if sources:
        yield media_part(kind, item[sources[0]], f"{where}.{sources[0]}", data_folder, span)
    elif span:
        raise BadRow("media_missing", f"`{where}` is of type '{type_}' but names no {kind}")
    else:
        yield _Slot(kind=kind, where=where)


# Media -----------------------------------------------------------------------------------------------


def _top_level_media(obj: dict[str, Any], kind: Kind, data_folder: Path) -> list[MediaPart]:
    keys = [key for key, of in MEDIA_KEYS.items() if of == kind and key in obj]
    if len(keys) == 2:
        raise BadRow("media_source", f"a row has `{keys[0]}` or `{keys[1]}`, not both")
    if not keys:
        return []
    value = obj[keys[0]]
    items = value if isinstance(value, list) else [value]
    return [media_part(kind, item, f"{keys[0]}[{i}]", data_folder, {}) for i, item in enumerate(items)]


def _place_media(drafts: list[_Draft], given: dict[Kind, list[MediaPart]]) -> list[Message]:
    """Fills the slots from the top-level media; every one of both must be used."""
    slots = [part for draft in drafts for part in draft.content if isinstance(part, _Slot)]
    front: list[MediaPart] = []
    queues: dict[str, Iterator[MediaPart]] = {}
    for kind in KINDS:
        places = [slot for slot in slots if slot.kind == kind]
        items = given[kind]
        if places and len(places) != len(items):
            raise BadRow(
                "media_missing" if len(items) < len(places) else "media_unused",
                f"{len(places)} place(s) for {kind}s (parts without a source, marks <{kind}>; the first in"
                f" `{places[0].where}`) but {len(items)} given in `{kind}` / `{kind}s`",
            )
        queues[kind] = iter(items if places else [])
        if items and not places:
            front.extend(items)
    if front:
        _refuse_second_place(drafts, {part.kind for part in front})
    first_user = next((i for i, draft in enumerate(drafts) if draft.role == "user"), None)
    if front and first_user is None:
        raise BadRow("media_unused", f"{len(front)} media given, but there is no user turn to put them in")
    for i, draft in enumerate(drafts):
        content = tuple(next(queues[p.kind]) if isinstance(p, _Slot) else p for p in draft.content)
        draft.content = (*front, *content) if i == first_user else content
    return [Message(**vars(draft)) for draft in drafts]


def _refuse_second_place(drafts: list[_Draft], kinds: set[str]) -> None:
    for draft in drafts:
        for part in draft.content:
            if isinstance(part, MediaPart) and part.kind in kinds:
                raise BadRow(
                    "media_unused",
                    f"{part.kind}s are given twice: in the turns and in `{part.kind}` / `{part.kind}s`",
                )


# Writing ---------------------------------------------------------------------------------------------


def _dump_message(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": [dump_part(part) for part in message.content]}
    if message.tool_calls:
        out["tool_calls"] = [
            {
                **({"id": call.id} if call.id else {}),
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in message.tool_calls
        ]
    for key in ("tool_call_id", "name"):
        if getattr(message, key) is not None:
            out[key] = getattr(message, key)
    return out
