"""Checks a tree of settings against a pydantic schema and puts every problem into words.

Each line names the full dotted key, the value, what is legal and the nearest valid name. It knows no key
itself.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from lmms_engine.compat import same
from lmms_engine.config_load import show
from lmms_engine.registry import nearest

M = TypeVar("M", bound=BaseModel)
BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
UNIONS = (Union, types.UnionType)
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a mapping"}


class Schema:
    """What may be said where.

    legal_now: dotted path -> values legal until a later feature lands. input_only: dotted paths that are
    accepted and replaced before the check. known: further dotted paths, for keys put at the wrong level.
    """

    def __init__(
        self,
        model: type[BaseModel],
        legal_now: Mapping[str, tuple[Any, ...]],
        input_only: Iterable[str],
        known: Iterable[str],
    ) -> None:
        self.model = model
        self.legal_now = legal_now
        self.input_only = tuple(input_only)
        paths = {*known, *self.input_only, *_paths(model)}
        self.known = sorted(paths, key=lambda path: (path.count("."), path))

    def keys(self, section: str) -> list[str]:
        """The legal keys of a section."""
        model = self._type_at(section)
        own = list(_fields(model)) if _is_section(model) else []
        extra = [path.rpartition(".")[2] for path in self.input_only if path.rpartition(".")[0] == section]
        return own + extra

    def legal(self, path: str) -> str:
        """What a key may hold, in words."""
        if path in self.legal_now:
            return ", ".join(show(value) for value in self.legal_now[path])
        section, _, key = path.rpartition(".")
        if key != "*" and _is_section(model := self._type_at(section)):
            field = _fields(model)[key]
            return _describe(field.annotation, field.metadata)
        return _describe(self._type_at(path))

    def _type_at(self, path: str) -> Any:
        found: Any = self.model
        for part in path.split(".") if path else ():
            if part == "*":
                found = _item(found)
            elif get_origin(found) is dict:
                found = get_args(found)[1]
            else:
                found = _plain(_fields(found)[part].annotation)
        return found


def check(
    schema: Schema, model: type[M], tree: dict[str, Any], origins: Mapping[str, str], problems: list[str]
) -> tuple[M | None, set[str]]:
    """The validated model and the bad keys (`section.key`); what is wrong is appended to `problems`.

    Bad keys are taken out of `tree`, so that checks on the good ones can still be made. origins: dotted path
    -> how it is called in messages (a list that was read from another file).
    """
    bad: set[str] = set()
    seen: set[str] = set()
    result: M | None = None
    while result is None:
        try:
            result = model.model_validate(tree)
        except ValidationError as failure:
            errors = [_settled(model, tree, error) for error in failure.errors(include_url=False)]
            for error in errors:
                problems.append(_word(schema, error, origins))
                seen.add(".".join(map(str, error["loc"])))
            where = {error["loc"][:2] for error in errors}
            bad |= {".".join(map(str, loc)) for loc in where}
            if sum(_remove(tree, loc) for loc in where) < len(where):
                return None, bad
    for pattern, legal in schema.legal_now.items():
        for path, value in _matches(tree, pattern.split(".")):
            if path not in seen and not any(same(value, one) for one in legal):
                words = ", ".join(show(one) for one in legal)
                problems.append(f"{_called(path, origins)}={show(value)}: not supported yet (legal: {words})")
                bad.add(".".join(path.split(".")[:2]))
    return result, bad


def without_nulls(tree: Any, model: Any) -> Any:
    """`tree` without the keys of `model` that are null; what the schema leaves free is not touched."""
    model = _plain(model)
    if isinstance(tree, list) and _item(model) is not None:
        return [without_nulls(item, _item(model)) for item in tree]
    if not (isinstance(tree, dict) and _is_section(model)):
        return tree
    fields = _fields(model)
    return {
        key: without_nulls(value, fields[key].annotation) if key in fields else value
        for key, value in tree.items()
        if value is not None
    }


def _remove(tree: dict[str, Any], loc: tuple[Any, ...]) -> bool:
    parent: Any = tree
    for part in loc[:-1]:
        parent = parent.get(part) if isinstance(parent, dict) else None
    if not isinstance(parent, dict) or loc[-1] not in parent:
        return False
    del parent[loc[-1]]
    return True


def _settled(model: type[BaseModel], tree: Any, error: Any) -> dict[str, Any]:
    """An error inside one alternative of a key that may hold several kinds, as an error of the whole key."""
    kind: Any = model
    value: Any = tree
    for depth, part in enumerate(error["loc"]):
        kind = _plain(kind)
        if get_origin(kind) in UNIONS:
            return {"type": "union", "loc": error["loc"][:depth], "input": value}
        if _is_section(kind) and part in _fields(kind):
            kind = _fields(kind)[part].annotation
        elif get_origin(kind) in (dict, tuple):
            kind = get_args(kind)[1] if get_origin(kind) is dict else _item(kind)
        else:
            break
        reachable = isinstance(value, (dict, list)) and part != "[key]" and error["type"] != "missing"
        value = value[part] if reachable else None
    return error


def _word(schema: Schema, error: Any, origins: Mapping[str, str]) -> str:
    loc = error["loc"]
    path = ".".join(map(str, loc))
    called = _called(path, origins)
    pattern = ".".join("*" if isinstance(part, int) else str(part) for part in loc)
    if error["type"] == "invalid_key" or loc[-1] == "[key]":
        return f"{called.removesuffix('.[key]')}: not legal as a key (legal: text)"
    if error["type"] == "extra_forbidden":
        return f"{called}={show(error['input'])}: {_unknown(schema, pattern)}"
    legal = schema.legal(pattern)
    if error["type"] == "missing":
        return f"{called}: missing (legal: {legal})"
    value = error["input"]
    options = [word.strip() for word in legal.split(",")]
    hint = nearest(value, options) if isinstance(value, str) and len(options) > 1 else ""
    return f"{called}={show(value)}: not legal (legal: {legal}){hint}"


def _unknown(schema: Schema, pattern: str) -> str:
    section, _, key = pattern.rpartition(".")
    elsewhere = [path for path in schema.known if path.rpartition(".")[2] == key and path != pattern]
    if elsewhere:
        return f"unknown key here; it belongs at {elsewhere[0].replace('.*', '.<number>')}"
    legal = schema.keys(section)
    hint = _closest(key, legal)
    if hint is None:
        leaves = {path.rpartition(".")[2]: path for path in reversed(schema.known)}
        hint = leaves.get(_closest(key, list(leaves)) or "")
    return f"unknown key{f'; did you mean {hint!r}?' if hint else ''} (legal: {', '.join(legal)})"


def _closest(name: str, legal: list[str]) -> str | None:
    """The legal name that is spelt most like `name`, or else contains it."""
    close = difflib.get_close_matches(name, legal, n=1, cutoff=0.6)
    parts = [one for one in legal if len(name) >= 4 and name in one]
    return (close or parts or [None])[0]


def _called(path: str, origins: Mapping[str, str]) -> str:
    for prefix, name in origins.items():
        if path == prefix or path.startswith(f"{prefix}."):
            return name + path[len(prefix) :]
    return path


def _matches(tree: Any, parts: list[str], done: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything in `tree` that a pattern names; `*` is any item of a list."""
    if not parts:
        yield done, tree
    elif parts[0] == "*" and isinstance(tree, list):
        for i, item in enumerate(tree):
            yield from _matches(item, parts[1:], f"{done}.{i}")
    elif isinstance(tree, dict) and parts[0] in tree:
        yield from _matches(tree[parts[0]], parts[1:], f"{done}.{parts[0]}" if done else parts[0])


def _paths(model: type[BaseModel], section: str = "") -> Iterator[str]:
    for key, field in _fields(model).items():
        path = f"{section}.{key}" if section else key
        yield path
        inner = _plain(field.annotation)
        if _item(inner) is not None:
            inner, path = _item(inner), f"{path}.*"
        if _is_section(inner):
            yield from _paths(inner, path)


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _plain(kind: Any) -> Any:
    """A type without its constraints and without None."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    if get_origin(kind) in UNIONS:
        inner = [arg for arg in get_args(kind) if arg is not type(None)]
        return _plain(inner[0]) if len(inner) == 1 else kind
    return kind


def _item(kind: Any) -> Any:
    """The type of a list's items, or None."""
    plain = _plain(kind)
    return get_args(plain)[0] if get_origin(plain) is tuple else None


def _describe(kind: Any, constraints: Iterable[Any] = ()) -> str:
    if get_origin(kind) in UNIONS:
        kind, *others = (arg for arg in get_args(kind) if arg is not type(None))
        if others:
            return ", or ".join(_describe(arg) for arg in (kind, *others))
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        constraints = [*constraints, *more]
    kind = _plain(kind)
    if get_origin(kind) is Literal:
        return ", ".join(show(value) for value in get_args(kind))
    if _item(kind) is not None:
        item = get_args(kind)[0]
        return "a list of mappings" if _is_section(_plain(item)) else f"a list of {_describe(item)}"
    if _is_section(kind):
        return f"a mapping with the keys {', '.join(_fields(kind))}"
    word = WORDS.get(get_origin(kind) or kind, "anything")
    return word + (" that is not empty" if kind is str and list(constraints) else _bounds(constraints))


def _bounds(constraints: Iterable[Any]) -> str:
    flat = [inner for one in constraints for inner in (one.metadata if isinstance(one, FieldInfo) else [one])]
    found = [
        f" {sign} {getattr(one, name):g}" for one in flat for name, sign in BOUNDS if hasattr(one, name)
    ]
    return " and".join(found)
