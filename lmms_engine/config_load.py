"""YAML, layers and overrides under config.py. Knows no key of ours by name.

YAML is read with the scalar rules of version 1.2 and no others: `1e-5` is a number, `010` is ten, `no`, `on`
and `12:30` are text. A key given twice in one mapping is an error.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from lmms_engine.errors import UserError

INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")
# A data set of the hub: org/name[@revision][:config[:split]]
HUB_ID = (
    r"(?P<repo>(?:[\w.-]+/)?[\w.-]+)(?:@(?P<revision>[^:@]+))?"
    r"(?::(?P<config>[\w.-]*)(?::(?P<split>[\w.-]+))?)?"
)
MAX_DEPTH, MAX_VALUES = 100, 1_000_000   # of a YAML text
NESTED = "nested too deeply; does an alias hold itself?"
MAX_SHOWN = 120   # characters of a value in an error message


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalar types of YAML 1.2."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping; a key that occurs twice raises."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue   # what `<<` brings in may be overridden beside it
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (dict, list)):
                raise _error("a key must be a name", key_node)
            if key in seen:
                raise _error(f"the key '{key}' is given twice", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Writes what Loader reads back: text that either YAML version takes for something else is quoted."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {
        first: list(resolvers) for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _error(text: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, text, node.start_mark)


def _construct_int(loader: Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text, 10)


def _construct_float(loader: Loader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _set_up() -> None:
    for tag, pattern, first in (
        ("null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
        ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")),
        ("int", INT, list("-+0123456789")),
        ("float", FLOAT, list("-+.0123456789")),
        ("merge", re.compile(r"<<"), ["<"]),
    ):
        whole = re.compile(rf"(?:{pattern.pattern})\Z")
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", whole, first)
        Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", whole, first)
    Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
    Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
    Dumper.add_representer(tuple, yaml.SafeDumper.represent_list)


_set_up()


def parse_yaml(text: str, where: str) -> Any:
    """The value that a YAML text holds; `where` names it in the error."""
    try:
        value = yaml.load(text, Loader=Loader)   # a subclass of SafeLoader: builds plain data only
    except RecursionError:
        raise UserError(f"{where}: {NESTED}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{where}{line}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error
    _check_size(value, where)
    return value


def _check_size(value: Any, where: str) -> None:
    """Refuses what aliases (`*name`) can blow up: values that hold themselves, or one another many times."""
    level, depth, seen = [value], 0, 0
    while level:
        depth, seen = depth + 1, seen + len(level)
        if depth > MAX_DEPTH:
            raise UserError(f"{where}: {NESTED}")
        if seen > MAX_VALUES:
            raise UserError(f"{where}: more than {MAX_VALUES:,} values; do its aliases multiply?")
        mappings = [item.values() for item in level if isinstance(item, dict)]
        level = [one for items in (*mappings, *(i for i in level if isinstance(i, list))) for one in items]


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; unreadable files raise UserError with the path."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text") from error


def dump_yaml(value: Any) -> str:
    """YAML text in the order of the keys given."""
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`: mappings merge, everything else (lists, null) replaces."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
    return merged


def parse_override(text: str) -> tuple[list[str], Any]:
    """`a.b=value` -> (["a", "b"], value as YAML)."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"override '{text}': not of the form section.key=value")
    return parts, parse_yaml(value, f"override '{text}'")


def layer_for(tree: Any, parts: list[str], value: Any, done: tuple[str, ...] = ()) -> Any:
    """The smallest tree that, merged over `tree`, sets `parts` to `value`. A number names a list's item."""
    if not parts:
        return value
    head, rest = parts[0], parts[1:]
    if isinstance(tree, list):
        if not head.isdigit() or int(head) >= len(tree):
            have = f"0 to {len(tree) - 1}" if tree else "none: the list is empty"
            raise UserError(f"{'.'.join((*done, head))}={show(value)}: no such item (legal: {have})")
        items, index = list(tree), int(head)
        new = layer_for(items[index], rest, value, (*done, head))
        both = isinstance(items[index], dict) and isinstance(new, dict)
        items[index] = merge(items[index], new) if both else new
        return items
    below = tree.get(head) if isinstance(tree, dict) else None
    return {head: layer_for(below, rest, value, (*done, head))}


def is_elsewhere(path: str, data_type: str | None = None) -> bool:
    """Whether the path of a dataset is an address or a hub id, and no file or folder of this machine.

    `org/name` is one of the hub unless it is here, names a format, or lies in a folder that is here.
    """
    if "://" in path:
        return True
    if os.path.lexists(path) or data_type not in (None, "auto", "hf_dataset"):
        return False
    found = re.fullmatch(HUB_ID, path)
    if found is None or data_type == "hf_dataset":
        return found is not None
    file = path.lower().endswith((".jsonl", ".json", ".csv", ".parquet", ".arrow"))
    return "/" in found["repo"] and not file and not os.path.isdir(path.partition("/")[0])


def expand(text: str, env: Mapping[str, str]) -> str:
    """`text` with ~, $NAME and ${NAME} replaced; a name that is not set raises KeyError."""
    if text == "~" or text.startswith("~/"):
        text = env["HOME"] + text[1:]
    return VARIABLE.sub(lambda match: env[match[1] or match[2]], text)


def show(value: Any) -> str:
    """A value as YAML on one line, shortened. Text that looks like another type is quoted."""
    if isinstance(value, str):
        plain = value and "\n" not in value and isinstance(_quietly(value), str)
        text = value if plain else json.dumps(value, ensure_ascii=False)
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def _quietly(text: str) -> Any:
    try:
        return parse_yaml(text, "")
    except UserError:
        return text
