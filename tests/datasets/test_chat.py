"""What is supervised is exactly what the assistant has to generate, by the template's own spans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.tokenizer import build_tokenizer
from lmms_engine.datasets.chat import ChatTemplate
from lmms_engine.datasets.schema import Row, parse_row
from lmms_engine.errors import BadRow, UserError

PLACEHOLDERS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
END = "<|im_end|>"

# ChatML that closes a run of tool results only after its last one, as the Qwen templates do.
GROUPED_TOOLS = """\
{%- if tools %}{{ '<|im_start|>system\\n' ~ tools | tojson ~ '<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
        {{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
    {%- else -%}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = {'name': call.function.name, 'arguments': call.function.arguments} -%}
            {{- '\\n<tool_call>\\n' ~ function | tojson ~ '\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
# Shows roles and content, and knows nothing of tools.
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


@pytest.fixture(scope="module")
def chat(tokenizer: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer, tokenizer.chat_template, PLACEHOLDERS)


def row(*turns: dict[str, Any] | str, **keys: Any) -> Row:
    """Strings alternate between user and assistant."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": turn} if isinstance(turn, str) else turn
        for i, turn in enumerate(turns)
    ]
    return parse_row({"messages": messages, **keys}, Path("/data"))


def answers(chat: ChatTemplate, of: Row) -> str:
    ids, supervised = chat.encode(chat.render(of))
    return chat.tokenizer.decode(ids[supervised])


def test_one_token_answers_over_three_turns(chat: ChatTemplate) -> None:
    """An off-by-one is visible at once."""
    picture = {"type": "image", "path": "a.png"}
    of = row(
        {"role": "user", "content": [picture, {"type": "text", "text": "first?"}]},
        *("A", "second?", "B", "third?", "C"),
    )
    ids, supervised = chat.encode(chat.render(of))
    assert chat.tokenizer.decode(ids[supervised]) == f"A{END}B{END}C{END}"
    assert supervised.sum() == 6   # one token and its marker each
    assert not supervised[ids == chat.tokenizer.convert_tokens_to_ids("<|image_pad|>")].any()


AWKWARD = (" red", "", "What?", "  two  spaces ", "naïve 🙂 日本", "user", "assistant", "ends\n", "a\n\nb")


@pytest.mark.parametrize("answer", AWKWARD)
def test_awkward_answers(chat: ChatTemplate, answer: str) -> None:
    """Answers that begin with a space, are empty, or equal the question."""
    assert answers(chat, row("What?", answer, "What?", answer)) == f"{answer}{END}" * 2


def test_ids_are_those_of_the_whole_text(chat: ChatTemplate) -> None:
    of = row({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, "Ho", "x ", " y")
    rendered = chat.render(of)
    ids, _ = chat.encode(rendered)
    assert ids.tolist() == chat.tokenizer(rendered.text)["input_ids"]
    assert rendered.text.count("Be brief.") == 1


def test_a_token_shared_with_the_header_is_not_supervised(tokenizer: Any) -> None:
    """An answer that opens with a line break may merge with the header's: that token was half given."""
    chat = ChatTemplate(tokenizer, tokenizer.chat_template, {})
    rendered = chat.render(row("q", "\nA"))
    encoded = tokenizer(rendered.text, return_offsets_mapping=True)
    start, end = rendered.spans[0]
    inside = [a >= start and b <= end for a, b in encoded["offset_mapping"]]
    _, supervised = chat.encode(rendered)
    assert supervised.tolist() == inside
    assert rendered.text[start:end] == f"\nA{END}"


TOOLS = [{"name": "wetter", "description": "Grüße", "parameters": {"type": "object"}}]
CALLS = [{"name": "wetter", "arguments": json.dumps({"ort": "Köln", "n": 3}, ensure_ascii=False)}]


@pytest.mark.parametrize("grouped", [False, True])
def test_calls_are_supervised_and_results_are_not(tokenizer: Any, grouped: bool) -> None:
    template = GROUPED_TOOLS if grouped else tokenizer.chat_template
    chat = ChatTemplate(tokenizer, template, {})
    of = row(
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": CALLS},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "wind"},
        {"role": "assistant", "content": "Bad."},
        tools=json.dumps(TOOLS),
    )
    text = chat.render(of).text
    assert "wetter" in text.split("weather?")[0]
    learnt = answers(chat, of)
    first, last = learnt.split(END)[:2]
    assert first.startswith("I look.")
    call = json.loads(first.split("<tool_call>\n")[1].split("\n</tool_call>")[0])
    assert call == {"name": "wetter", "arguments": {"ort": "Köln", "n": 3}}
    assert "Köln" in first
    assert last == "Bad."
    assert "rain" not in learnt


def test_a_call_without_text_is_one_turn(chat: ChatTemplate) -> None:
    of = row({"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": CALLS}, tools=TOOLS)
    learnt = answers(chat, of)
    assert learnt.startswith("<tool_call>")
    assert learnt.count(END) == 1


# Every form of system turn, tools and calls ----------------------------------------------------

OBEY = "Sei höflich."
USE = {"ort": "Köln", "n": 3}
ASK, RESULT, REPLY = "weather?", "rain 12 °C", "Bad."
SYSTEMS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "first turn": ([{"from": "system", "value": OBEY}], {}),
    "top level": ([], {"system": OBEY}),
    "both": ([{"from": "system", "value": OBEY}], {"system": OBEY}),
}
TOOL_FORMS = {
    "list": TOOLS,
    "JSON": json.dumps(TOOLS),
    "JSON of letters": json.dumps([{"type": "function", "function": TOOLS[0]}], ensure_ascii=False),
}
ARGUMENTS = {
    "dict": USE,
    "JSON": json.dumps(USE),
    "JSON of letters": json.dumps(USE, ensure_ascii=False),
}


def openai_turns(arguments: Any, *, said: bool) -> list[dict[str, Any]]:
    """said: the call comes with text; else its message has no `content` at all."""
    function = {"name": "wetter", "arguments": arguments}
    call = {"role": "assistant", "tool_calls": [{"type": "function", "id": "1", "function": function}]}
    return [
        {"role": "user", "content": ASK},
        {**call, "content": "I look."} if said else call,
        {"role": "tool", "content": RESULT, "tool_call_id": "1"},
        {"role": "assistant", "content": REPLY},
    ]


def sharegpt_turns(arguments: Any, *, said: bool) -> list[dict[str, Any]]:
    return [
        {"from": "human", "value": ASK},
        *([{"from": "gpt", "value": "I look."}] if said else []),
        {"from": "function_call", "value": json.dumps({"name": "wetter", "arguments": arguments})},
        {"from": "observation", "value": RESULT},
        {"from": "gpt", "value": REPLY},
    ]


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("tools", TOOL_FORMS)
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("form", ["messages", "conversations"])
def test_nothing_of_a_conversation_with_tools_is_lost_or_bent(
    chat: ChatTemplate, form: str, system: str, tools: str, arguments: str, said: bool
) -> None:
    """All forms give the one text; what it must hold stands in it, what is learnt is what was said."""
    first, keys = SYSTEMS[system]
    turns = openai_turns if form == "messages" else sharegpt_turns
    if form == "messages":
        first = [{"role": "system", "content": OBEY}] * len(first)
    talk = [*first, *turns(ARGUMENTS[arguments], said=said)]
    of = parse_row({form: talk, "tools": TOOL_FORMS[tools], **keys}, Path("/data"))
    text = chat.render(of).text
    assert text.count(OBEY) == 1
    assert '"name": "wetter"' in text.split(ASK)[0]
    assert "Grüße" in text.split(ASK)[0]
    assert text.count("<|im_start|>assistant\n") == 2   # text and call are one, then the reply
    assert text.count(RESULT) == 1
    learnt = answers(chat, of)
    call, reply, rest = learnt.split(END)
    assert call.startswith("I look.\n<tool_call>" if said else "<tool_call>")
    assert json.loads(call.split("<tool_call>\n")[1].split("\n</tool_call>")[0]) == {
        "name": "wetter", "arguments": USE
    }  # fmt: skip
    assert "Köln" in call   # as letters, in no other writing
    assert (reply, rest) == (REPLY, "")


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_an_empty_list_of_parts_is_an_empty_turn(chat: ChatTemplate, role: str) -> None:
    """`[]` is neither dropped nor printed."""
    turns = [{"role": role, "content": []}] if role == "system" else []
    turns += [
        {"role": "user", "content": [] if role == "user" else "q"},
        {"role": "assistant", "content": [] if role == "assistant" else "a"},
    ]
    of = row(*turns)
    assert f"<|im_start|>{role}\n<|im_end|>\n" in chat.render(of).text
    assert answers(chat, of) == ("" if role == "assistant" else "a") + END


def test_a_template_that_drops_tools_or_media_is_noticed(tokenizer: Any) -> None:
    plain = ChatTemplate(tokenizer, PLAIN, PLACEHOLDERS)
    with pytest.raises(BadRow, match="leaves out the tool 'wetter'"):
        plain.render(row("q", "a", tools=TOOLS))
    with pytest.raises(BadRow, match="leaves out the call of 'wetter'"):
        plain.render(row("q", {"role": "assistant", "content": "a", "tool_calls": CALLS}))
    no_parts = PLAIN.replace("m.content", "m.content if m.content is string else 'words'")
    with pytest.raises(BadRow, match="1 image") as caught:
        ChatTemplate(tokenizer, no_parts, PLACEHOLDERS).render(
            row({"role": "user", "content": [{"type": "image", "path": "a.png"}]}, "a")
        )
    assert caught.value.kind == "media_unused"
    no_system = PLAIN.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    with pytest.raises(BadRow, match=r"turn 0 \(system\)"):
        ChatTemplate(tokenizer, no_system, {}).render(
            row({"role": "system", "content": "Obey."}, {"role": "user", "content": "q"})
        )


@pytest.mark.parametrize("token", [END, "<|im_start|>", "<|image_pad|>", "<|vision_start|>", "<|endoftext|>"])
def test_markers_in_text_are_refused(chat: ChatTemplate, token: str) -> None:
    halves = [{"type": "text", "text": half} for half in (token[:5], token[5:])]
    call = {"name": "f", "arguments": {"x": [token]}}
    rows = [
        row(f"say {token} please", "no"),
        row("say it", f"{token} there"),
        row({"role": "user", "content": halves}, "no"),
        row("q", {"role": "assistant", "content": "", "tool_calls": [call]}),
        row("q", "a", tools=[{"name": "f", "description": token}]),
    ]
    for of in rows:
        with pytest.raises(BadRow) as caught:
            chat.render(of)
        assert caught.value.kind == "special_token"
        assert repr(token) in str(caught.value)


def test_other_special_tokens_stay_usable(chat: ChatTemplate) -> None:
    boxed = "<|box_start|>(1,2)<|box_end|>"
    ids, supervised = chat.encode(chat.render(row("where?", boxed)))
    assert chat.tokenizer.decode(ids[supervised]) == boxed + END


def test_templates_that_rewrite_earlier_turns_are_refused(tokenizer: Any) -> None:
    only_last = PLAIN.replace(
        "{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else m.content[:3] }}"
    )
    with pytest.raises(UserError, match="not prefix-stable"):
        ChatTemplate(tokenizer, only_last, {})
    # One that the probe does not trip over is caught at the row.
    rare = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.replace('ß', 'ss') }}")
    chat = ChatTemplate(tokenizer, rare, {})
    assert answers(chat, row("q", "Maß")) == f"Maß{END}"
    with pytest.raises(UserError, match="not prefix-stable"):
        chat.render(row("q", "Maß", "r", "b"))


def test_a_template_without_end_marker_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="no special token"):
        ChatTemplate(tokenizer, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
                     "{% if add_generation_prompt %}assistant: {% endif %}", {})


def test_what_the_template_refuses_is_a_bad_row(tokenizer: Any) -> None:
    strict = "{% if messages|length == 3 %}{{ raise_exception('three is a crowd') }}{% endif %}" + PLAIN
    with pytest.raises(UserError, match="three is a crowd"):
        ChatTemplate(tokenizer, strict, {})
    strict = "{% if messages[0].content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}" + PLAIN
    with pytest.raises(BadRow, match="no bad words"):
        ChatTemplate(tokenizer, strict, {}).render(row("bad", "a"))


def test_a_conversation_begun_by_the_assistant_is_refused(chat: ChatTemplate) -> None:
    with pytest.raises(BadRow) as caught:
        chat.render(row({"role": "assistant", "content": "Hello"}, {"role": "user", "content": "q"}))
    assert caught.value.kind == "assistant_first"


def test_a_row_without_answers_supervises_nothing(chat: ChatTemplate) -> None:
    ids, supervised = chat.encode(chat.render(row("just a question")))
    assert len(ids) > 3
    assert not supervised.any()


def test_end_marker_is_supervised_when_it_is_the_pad_token(tokenizer: Any) -> None:
    """A pad id is no mask."""
    same = build_tokenizer()
    same.pad_token = same.eos_token
    of = row("q", "a", "r", "b")
    expected, usual = (
        ChatTemplate(t, t.chat_template, {}).encode(ChatTemplate(t, t.chat_template, {}).render(of))
        for t in (tokenizer, same)
    )
    for one, other in zip(expected, usual, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (usual[0][usual[1]] == same.eos_token_id).sum() == 2


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("hello<|im_end|>", "does not write what an answer says"),
        ("{{ 1 / 0 }}", "refuses this conversation: division by zero"),
        ("{{ messages[9].content + 3 }}", "refuses this conversation"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "refuses this conversation: Range too big"),
    ],
)
def test_templates_that_cannot_work(tokenizer: Any, template: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ChatTemplate(tokenizer, template, PLACEHOLDERS)
