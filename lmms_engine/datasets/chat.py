"""Conversation to tokens: renders the model's own chat template and marks what is supervised.

    chat = ChatTemplate(tokenizer, template, placeholders={"image": "<|image_pad|>"})
    rendered = chat.render(row)                  # text and the character spans of the answers
    ids, supervised = chat.encode(rendered)      # int64 [T], bool [T]

Supervised is what the assistant would have to generate: its text, its tool calls and the end marker, and
nothing else: no header, no line break after the marker, no tool result. Where an answer lies is read off the
template itself: the rendering up to and including a turn must begin with the rendering up to that turn plus
the generation prompt, and must begin the rendering of the whole. A template that rewrites earlier turns is
refused, since its answers have no fixed place.

Refused, not escaped: rows whose own text contains one of the markers that structure the sequence (turn
markers, media placeholders). Inside text they would become real markers: a forged turn, a picture that is
not there. Dropping nothing silently also means that every text, medium, tool and call of the row must be
found in the rendering.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from lmms_engine.errors import BadRow, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from lmms_engine.datasets.schema import Message, Row

# What a template may raise: its own errors, and those of the Python expressions in it.
TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError,
)  # fmt: skip

_PROBE = (
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second question"},
    {"role": "assistant", "content": "second answer"},
)


@dataclass(frozen=True)
class Rendered:
    """A conversation as one string; `spans` are the supervised character ranges [start, end), ascending."""

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A chat template together with the tokenizer that reads its output.

    template: jinja source, as in the model's processor folder.
    placeholders: media kind -> the one token by which the template marks such a medium.
    Raises UserError if the template is not prefix-stable or ends a turn without a special token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, template: str, placeholders: Mapping[str, str]
    ) -> None:
        if not tokenizer.is_fast:
            raise UserError(f"{type(tokenizer).__name__} gives no character offsets: use a fast tokenizer")
        self.tokenizer, self.template, self.placeholders = tokenizer, template, dict(placeholders)
        special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        special = sorted({*special, *tokenizer.all_special_tokens}, key=len, reverse=True)
        named = {tokenizer.bos_token, tokenizer.eos_token, *placeholders.values()}
        if not _is_word(tokenizer, tokenizer.pad_token):   # nothing is padded: such a pad token is text
            named.add(tokenizer.pad_token)
        reserved = [token for token in special if token in template or token in named]
        reserved += [token for token in placeholders.values() if token not in reserved]
        self._reserved = re.compile("|".join(re.escape(token) for token in reserved))
        self._tail, self._marker_end = self._find_tail(special)

    @property
    def end_marker(self) -> str:
        """What closes an answer and is supervised with it."""
        return self._tail[: self._marker_end]

    def render(self, row: Row) -> Rendered:
        """The row as text. Raises BadRow for rows that the template cannot show fully."""
        self._refuse_markers(row)
        messages = [_as_dict(message) for message in row.messages]
        tools = list(row.tools) or None
        text = self._apply(messages, tools)
        spans = []
        for i, message in enumerate(row.messages):
            if message.role == "assistant":
                start, end = self._answer(messages, i, tools, text)
                _check_shown(message, i, text[start:end])
                spans.append((start, end))
            else:
                _check_shown(message, i, text)
        self._check_media_and_tools(row, text)
        return Rendered(text, tuple(spans))

    def encode(self, rendered: Rendered) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int64 [T] of the whole text at once, and bool [T]: is the token supervised.

        A token that begins before its span (a line break of the header merged with one that opens the
        answer) is not supervised: part of it was given.
        """
        ids, supervised, _ = self.encode_turns(rendered)
        return ids, supervised

    def encode_turns(self, rendered: Rendered) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `encode`, with int64 [answers]: the number of tokens up to and with each answer's end marker."""
        encoded = self.tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        supervised = np.zeros(len(offsets), dtype=bool)
        for start, end in rendered.spans:
            supervised |= (offsets[:, 0] >= start) & (offsets[:, 1] <= end) & (offsets[:, 1] > start)
        ends = np.searchsorted(offsets[:, 1], [end for _, end in rendered.spans], side="right")
        return np.asarray(encoded["input_ids"], dtype=np.int64), supervised, ends.astype(np.int64)

    # How the template places answers --------------------------------------------------------------

    def _apply(self, messages: list[dict[str, Any]], tools: Any = None, *, prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except TEMPLATE_ERRORS as error:
            raise BadRow("template", f"the chat template refuses this conversation: {error}") from None

    def _find_tail(self, special: list[str]) -> tuple[str, int]:
        """What the template writes after an answer, and where in it the end marker ends."""
        messages = list(_PROBE)
        try:
            text = self._apply(messages)
            prompts = [self._apply(messages[:i], prompt=True) for i in (1, 3)]
            turns = [self._apply(messages[: i + 1]) for i in (1, 3)]
        except BadRow as error:
            raise UserError(f"a chat of two questions and answers: {error}") from None
        for prompt, turn in zip(prompts, turns, strict=True):
            self._check_prefix(prompt, turn, text)
        if _PROBE[-1]["content"] not in text:
            raise UserError("the chat template does not write what an answer says; use the model's own")
        tail = text[text.rindex(_PROBE[-1]["content"]) + len(_PROBE[-1]["content"]) :]
        marker = re.search("|".join(re.escape(token) for token in special), tail)
        if marker is None:
            raise UserError(f"the chat template ends an answer with {tail!r}, which holds no special token")
        return tail, marker.end()

    def _answer(self, messages: list, i: int, tools: Any, text: str) -> tuple[int, int]:
        if i == 0:
            raise BadRow("assistant_first", "the conversation begins with the assistant: nothing to answer")
        head = self._apply(messages[:i], tools, prompt=True)
        upto = text if i + 1 == len(messages) else self._apply(messages[: i + 1], tools)
        self._check_prefix(head, upto, text)
        if not upto.endswith(self._tail):
            raise UserError(f"the chat template ends turn {i} with {upto[-30:]!r} instead of {self._tail!r}")
        return len(head), len(upto) - len(self._tail) + self._marker_end

    def _check_prefix(self, head: str, upto: str, text: str) -> None:
        for short, long in ((head, upto), (upto, text)):
            if long.startswith(short):
                continue
            at = next((k for k, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(long))
            raise UserError(
                "the chat template is not prefix-stable: a later turn changes how an earlier one is written,"
                f" so answers have no fixed place (…{short[max(at - 20, 0) : at + 20]!r} becomes"
                f" …{long[max(at - 20, 0) : at + 20]!r}). Use a template that writes every turn alike"
            )

    # What must be in the text, and what must not -----------------------------------------------------

    def _refuse_markers(self, row: Row) -> None:
        for where, text in _texts(row):
            if found := self._reserved.search(text):
                raise BadRow(
                    "special_token",
                    f"the text of {where} contains {found.group()!r}, a marker of the model's own format;"
                    " remove it or write it otherwise",
                )

    def _check_media_and_tools(self, row: Row, text: str) -> None:
        for kind, token in self.placeholders.items():
            given, shown = sum(part.kind == kind for part in row.media()), text.count(token)
            if given != shown:
                found = f"the chat template shows {shown} of them"
                raise BadRow("media_unused", f"the row has {given} {kind}(s), but {found}")
        for tool in row.tools:
            name = tool["function"]["name"]
            if name not in text:
                raise BadRow("not_rendered", f"the chat template leaves out the tool '{name}'")


def cut_at_turn(length: int, ends: np.ndarray, max_length: int) -> int:
    """The tokens to keep of a row of `length`: at most `max_length`, all or up to the end of an answer.

    Raises BadRow of the kind `overlong` if not even the first answer can be kept.
    """
    if length <= max_length:
        return length
    kept = max((int(end) for end in ends if end <= max_length), default=0)
    if kept == 0:
        why = f"its first question and answer are {ends[0]}" if len(ends) else "there is no answer to cut at"
        raise BadRow("overlong", f"{length} tokens, more than {max_length}, and {why}")
    return kept


def _is_word(tokenizer: PreTrainedTokenizerFast, token: str | None) -> bool:
    """Whether the vocabulary had the token before it was made a special one, as `!` with id 0 of Qwen's."""
    return token is not None and tokenizer.backend_tokenizer.model.token_to_id(token) is not None


def _check_shown(message: Message, i: int, shown: str) -> None:
    """Every text and tool call of the message must stand in `shown`."""
    for part in message.content:
        if part.kind == "text" and part.text.strip() not in shown:
            what = f"text of turn {i} ({message.role}): {part.text[:60]!r}"
            raise BadRow("not_rendered", f"the chat template leaves out {what}")
    for call in message.tool_calls:
        if call.name not in shown:
            what = f"the call of '{call.name}' in turn {i}"
            raise BadRow("not_rendered", f"the chat template leaves out {what}")


def _as_dict(message: Message) -> dict[str, Any]:
    """The message as templates expect it: plain text as a string, mixed content as a list of parts."""
    out: dict[str, Any] = {"role": message.role, "content": message.text}
    if any(part.kind != "text" for part in message.content):
        out["content"] = [
            {"type": "text", "text": part.text} if part.kind == "text" else {"type": part.kind}
            for part in message.content
        ]
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "type": "function",
                **({"id": call.id} if call.id else {}),
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    for key in ("tool_call_id", "name"):
        if getattr(message, key) is not None:
            out[key] = getattr(message, key)
    return out


def _texts(row: Row) -> Iterator[tuple[str, str]]:
    """(where, text) of every string that the template may print."""
    for i, message in enumerate(row.messages):
        where = f"turn {i} ({message.role})"
        yield where, message.text   # joined: a marker cut over two parts is a marker
        for value in (message.tool_call_id, message.name):
            yield from ((where, value),) if value else ()
        for call in message.tool_calls:
            yield from ((where, text) for text in _strings([call.name, call.id, call.arguments]))
    yield from (("the tools", text) for text in _strings(row.tools))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(list(value))
        yield from _strings(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
