"""Rules for arguments that are written as in a call of a program, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sakiyomi.server.fields import resolved
from sakiyomi.server.notations import Inline
from sakiyomi.server.pair_rules import NOTES, Words, plain_object, refused

_NUMBERS = {
    "integer": "/-?(0|[1-9][0-9]{0,17})/",
    "number": "/-?(0|[1-9][0-9]{0,17})(\\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?/",
}
_KINDS = ("string", "number", "boolean", "null", "array", "object")
_KNOWN = NOTES | {
    "enum", "const", "anyOf", "oneOf", "items", "properties", "required", "additionalProperties", "minItems",
    "maxItems", "minLength", "maxLength", "$ref", "$defs", "definitions",
}  # fmt: skip
_BESIDE = (NOTES - {"type"}) | {"$defs", "definitions"}
_DEPTH = 8


class InlineRules:
    """Makes the rules for one notation.

    Arguments come in the order of the schema, as in objects.

    Args:
        notation: of them.
        words: makes terminals of a text with marks.
    """

    def __init__(self, notation: Inline, words: Words) -> None:
        self._notation, self._words = notation, words
        quote, special = notation.quote, words(notation.quote).startswith("<[")
        self._between = words(notation.between)
        if special:
            text = f"{words(quote)} /(.|\\n)*/ {words(quote)}"
        elif len(quote) == 1:
            text = " | ".join(f"/{mark}([^{mark}\\\\\\n]|\\\\.)*{mark}/" for mark in "'\"")
        else:
            text = f"{words(quote)} inline_rest"
        words_of = ("True", "False", "None") if notation.python else ("true", "false", "null")
        true, false, null = map(json.dumps, words_of)
        name = "inline_text" if notation.python else "/[A-Za-z_][A-Za-z0-9_]*/"
        comma = '", "' if notation.python else self._between
        colon = '": "' if notation.python else words(notation.assign)
        self._words_of = {"boolean": f"({true} | {false})", "null": null}
        self._name, self._comma, self._colon = name, comma, colon
        self.shared = (
            f"inline_text: {text}\n"
            + ("" if special or len(quote) == 1 else f"inline_rest[lazy]: /(.|\\n)*/ {words(quote)}\n")
            + f"inline_any: inline_text | {_NUMBERS['number']} | {true} | {false} | {null}"
            + f' | "[" (inline_any ({comma} inline_any)*)? "]"'
            + " | inline_object\n"
            + f'inline_object: "{{" ({name} {colon} inline_any ({comma} {name} {colon} inline_any)*)? "}}"\n'
        )

    def of(self, call: str, schema: Mapping[str, Any], field: str) -> str:
        """Rules for the arguments of a call; the first one is ``{call}_arguments``.

        Raises:
            ApiError: the schema cannot be enforced in this notation.
        """
        root = plain_object(schema, field, "by name")
        more = root.get("additionalProperties", True)
        if not root.get("properties") and more is not False:
            value = self._value(more, schema, field, 0)
            pair = f"/[A-Za-z_][A-Za-z0-9_]*/ {self._words(self._notation.assign)} {value}"
            return f"{call}_arguments: ({pair} ({self._between} {pair})*)?\n"
        if wrong := [key for key in root.get("properties", {}) if re.fullmatch(r"[A-Za-z_][\w.-]*", key) is None]:
            raise refused(field, f"writes names of arguments as in a program, which {wrong[0]!r} does not allow")
        pairs = [
            (f"{json.dumps(key)} {self._words(self._notation.assign)} {self._value(wanted, schema, field, 0)}",
             key in root.get("required", ()))
            for key, wanted in self._sorted(root.get("properties", {}))
        ]  # fmt: skip
        return f"{call}_arguments: {_in_order(pairs, self._between)}\n"

    def _value(self, wanted: Any, root: Mapping[str, Any], field: str, depth: int) -> str:
        found = resolved(wanted, root)
        if depth > _DEPTH:
            raise refused(field, f"is limited to {_DEPTH} levels of nested parameters")
        if not isinstance(found, Mapping) or (not found.keys() - NOTES and "type" not in found):
            return "inline_any"
        if unknown := found.keys() - _KNOWN:
            raise refused(field, f"writes values by name, without {', '.join(sorted(unknown))}")
        for word in ("anyOf", "oneOf"):
            if word in found and found.keys() - _BESIDE - {word}:
                raise refused(field, f"writes values by name, without {word} beside other rules")
            if word in found:
                return f"({' | '.join(self._value(each, root, field, depth + 1) for each in found[word])})"
        if found.keys() & {"enum", "const"}:
            return f"({' | '.join(map(self._literal, found.get('enum', [found.get('const')])))})"
        named = found.get("type", list(_KINDS))
        ways = [self._kind(kind, found, root, field, depth) for kind in ([named] if isinstance(named, str) else named)]
        return f"({' | '.join(ways)})"

    def _kind(self, kind: str, found: Mapping[str, Any], root: Mapping[str, Any], field: str, depth: int) -> str:
        if kind in _NUMBERS:
            return _NUMBERS[kind]
        if kind in self._words_of:
            return self._words_of[kind]
        if kind == "string":
            if found.keys() & {"minLength", "maxLength"}:
                raise refused(field, "writes texts as they are, without minLength and maxLength")
            return "inline_text"
        if kind == "array":
            item = self._value(found.get("items", {}), root, field, depth + 1)
            least, most = int(found.get("minItems", 0)), found.get("maxItems")
            if most is not None and int(most) == 0:
                return '"[" "]"'
            if most is not None and int(most) == 1:
                return f'"[" ({item}){"" if least else "?"} "]"'
            more = f"({self._comma} {item}){{{max(least - 1, 0)},{'' if most is None else int(most) - 1}}}"
            return f'"[" ({item} {more}){"" if least else "?"} "]"'
        if not found.get("properties"):
            more = found.get("additionalProperties", True)
            if more is True or more == {}:
                return "inline_object"
            if more is False:
                return '"{" "}"'
            pair = f"{self._name} {self._colon} {self._value(more, root, field, depth + 1)}"
            return f'"{{" ({pair} ({self._comma} {pair})*)? "}}"'
        pairs = [
            (
                f"{self._key(key)} {self._colon} {self._value(wanted, root, field, depth + 1)}",
                key in found.get("required", ()),
            )
            for key, wanted in self._sorted(found["properties"])
        ]
        return f'"{{" ({_in_order(pairs, self._comma)}) "}}"'

    def _sorted(self, properties: Mapping[str, Any]) -> Sequence[tuple[str, Any]]:
        return sorted(properties.items()) if self._notation.ordered else [*properties.items()]

    def _key(self, key: str) -> str:
        if self._notation.python:  # names are strings, in quotes of either kind
            return f"({self._literal(key)} | {json.dumps(json.dumps(key))})"
        return json.dumps(key)

    def _literal(self, value: Any) -> str:
        """A value as it is written."""
        if isinstance(value, str) and len(self._notation.quote) == 1:
            quote = self._notation.quote
            escaped = value.replace("\\", "\\\\").replace(quote, f"\\{quote}").replace("\n", "\\n")
            return json.dumps(quote + escaped + quote)
        if isinstance(value, str):
            return f"{self._words(self._notation.quote)} {json.dumps(value)} {self._words(self._notation.quote)}"
        return json.dumps(repr(value) if self._notation.python else json.dumps(value))


def _in_order(pairs: list[tuple[str, bool]], between: str) -> str:
    """Pairs in their order, of which those that are not required may be left out."""
    if not pairs:
        return json.dumps("")
    ways = []
    for first, (pair, _) in enumerate(pairs):
        if any(required for _, required in pairs[:first]):
            break
        rest = [f"({between} {each})" + ("" if required else "?") for each, required in pairs[first + 1 :]]
        ways.append(" ".join([pair, *rest]))
    empty = [] if any(required for _, required in pairs) else [json.dumps("")]
    return " | ".join([*ways, *empty])
