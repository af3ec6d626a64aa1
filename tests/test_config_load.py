"""YAML's scalars, merging, overrides."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmms_engine.config_load import (
    dump_yaml,
    expand,
    layer_for,
    merge,
    parse_override,
    parse_yaml,
    read_yaml,
    show,
)
from lmms_engine.errors import UserError


class TestScalars:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("1e-5", 1e-5),
            ("5E-5", 5e-5),
            ("1e5", 1e5),
            ("1.0e-5", 1e-5),
            ("-.5", -0.5),
            ("1.", 1.0),
            (".inf", math.inf),
            ("-.inf", -math.inf),
            ("3", 3),
            ("-3", -3),
            ("010", 10),
            ("0o17", 15),
            ("0x1F", 31),
            ("true", True),
            ("False", False),
            ("null", None),
            ("~", None),
            ("", None),
        ],
    )
    def test_typed(self, text: str, value: Any) -> None:
        found = parse_yaml(text, "test")
        assert found == value
        assert type(found) is type(value)

    @pytest.mark.parametrize(
        "text", ["no", "on", "yes", "off", "12:30:45", "2026-01-31", "1_000", "1e", "e5", "1e-", ".", "0b1"]
    )
    def test_text(self, text: str) -> None:
        assert parse_yaml(text, "test") == text

    def test_nan(self) -> None:
        assert math.isnan(parse_yaml(".nan", "test"))

    @pytest.mark.parametrize(
        "value",
        [
            "1e-5",
            "no",
            "010",
            "null",
            "",
            "12:30",
            "~",
            "true",
            " a ",
            "x: y",
            "$HOME/x",
            "é",
            1e-5,
            1e20,
            None,
            True,
        ],
    )
    def test_dump_reads_back(self, value: Any) -> None:
        tree = {"a": value, "b": [value, {"c": value}]}
        assert parse_yaml(dump_yaml(tree), "test") == tree

    @pytest.mark.parametrize("value", ["1e-5", "no", "010"])
    def test_dump_means_the_same_to_other_readers(self, value: str) -> None:
        assert yaml.safe_load(dump_yaml({"a": value})) == {"a": value}

    def test_dump_of_equal_objects_has_no_anchors(self) -> None:
        shared = {"x": 1}
        assert "&" not in dump_yaml({"a": shared, "b": shared})


class TestBadYaml:
    def test_key_twice(self) -> None:
        with pytest.raises(UserError, match=r"c\.yaml:2: .*'seed' is given twice"):
            parse_yaml("seed: 1\nseed: 2\n", "c.yaml")

    def test_merge_key_may_be_overridden(self) -> None:
        tree = parse_yaml("base: &b {x: 1, y: 2}\nover: {<<: *b, y: 3}", "c.yaml")
        assert tree["over"] == {"x": 1, "y": 3}

    def test_syntax(self, tmp_path: Path) -> None:
        file = tmp_path / "broken.yaml"
        file.write_text("a: 1\nb: [1, 2\n")
        with pytest.raises(UserError, match=r"broken\.yaml:\d+: not valid YAML"):
            read_yaml(file)

    @pytest.mark.parametrize("text", ["!!python/object/apply:os.getcwd []", "? [a, b]\n: 1"])
    def test_only_plain_data(self, text: str) -> None:
        with pytest.raises(UserError, match="not valid YAML"):
            parse_yaml(text, "c.yaml")

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"gone\.yaml: cannot be read: No such file"):
            read_yaml(tmp_path / "gone.yaml")

    def test_binary_file(self, tmp_path: Path) -> None:
        file = tmp_path / "binary.yaml"
        file.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(UserError, match="not UTF-8"):
            read_yaml(file)


class TestLayers:
    def test_mappings_merge_and_lists_replace(self) -> None:
        base = {"a": {"x": 1, "y": [1, 2]}, "b": 1}
        assert merge(base, {"a": {"y": [3]}, "c": 2}) == {"a": {"x": 1, "y": [3]}, "b": 1, "c": 2}
        assert base == {"a": {"x": 1, "y": [1, 2]}, "b": 1}

    def test_null_replaces(self) -> None:
        assert merge({"a": {"x": 1}}, {"a": None}) == {"a": None}

    @pytest.mark.parametrize(
        ("text", "parts", "value"),
        [
            ("a.b=1e-5", ["a", "b"], 1e-5),
            ("a=[x, y]", ["a"], ["x", "y"]),
            ("a.b={c: 1}", ["a", "b"], {"c": 1}),
            ("a=", ["a"], None),
            ("a=b=c", ["a"], "b=c"),
        ],
    )
    def test_override(self, text: str, parts: list[str], value: Any) -> None:
        assert parse_override(text) == (parts, value)

    @pytest.mark.parametrize("text", ["a.b", "=1", "a..b=1", ".a=1"])
    def test_no_override(self, text: str) -> None:
        with pytest.raises(UserError, match=r"not of the form section\.key=value"):
            parse_override(text)

    def test_item_of_a_list(self) -> None:
        tree = {"a": [{"x": 1, "y": 2}, {"x": 3}]}
        layer = layer_for(tree, ["a", "0", "x"], 9)
        assert merge(tree, layer) == {"a": [{"x": 9, "y": 2}, {"x": 3}]}

    @pytest.mark.parametrize("item", ["2", "x", "-1"])
    def test_no_such_item(self, item: str) -> None:
        with pytest.raises(UserError, match=rf"a\.{item}=9: no such item \(legal: 0 to 1\)"):
            layer_for({"a": [1, 2]}, ["a", item], 9)


class TestExpand:
    def test_variables_and_home(self) -> None:
        env = {"HOME": "/h", "A": "x", "B_1": "y"}
        assert expand("~/$A/${B_1}z", env) == "/h/x/yz"
        assert expand("a~b $ 5", env) == "a~b $ 5"

    def test_unset(self) -> None:
        with pytest.raises(KeyError, match="NOT_SET"):
            expand("${NOT_SET}/x", {})


@pytest.mark.parametrize(
    ("value", "text"),
    [("3", '"3"'), ("a", "a"), (None, "null"), (False, "false"), (1e-5, "1e-05"), ("", '""')],
)
def test_show(value: Any, text: str) -> None:
    assert show(value) == text


def test_show_is_short() -> None:
    assert len(show(["x"] * 1000)) <= 120


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a {b: *a}", "an alias hold itself"),
        ("a: " + "[" * 5000 + "]" * 5000, "an alias hold itself"),
        ("x0: &x0 [1]\n" + "".join(f"x{i}: &x{i} [{f'*x{i - 1},' * 9}]\n" for i in range(1, 9)), "aliases"),
    ],
    ids=["itself", "deep", "many"],
)
def test_texts_that_blow_up(text: str, said: str) -> None:
    with pytest.raises(UserError, match=f"^a.yaml: (nested|more) .*{said}"):
        parse_yaml(text, "a.yaml")
