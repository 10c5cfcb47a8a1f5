"""Rules for arguments that are written one by one, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from sakiyomi.server.errors import bad_request
from sakiyomi.server.fields import DEFINITIONS, kind_of, kinds, resolved
from sakiyomi.server.notations import KEY, KIND, Pairs

GAP = "/\\n?/"  # between marks
Words = Callable[[str], str]
Value = Callable[[Mapping[str, Any]], str]
NOTES = {"type", "title", "description", "default", "examples"}
_OBJECT = frozenset({
    "anyOf", "oneOf", "allOf", "const", "enum", "not", "if", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
})  # fmt: skip
"""What restricts an object as a whole."""
_BOUNDS = {"minLength", "maxLength", "pattern"}


class PairRules:
    """Makes the rules for one format.

    Arguments come in the order of the schema, as in objects. One that may be a string or another type takes any text,
    which is read as JSON of an allowed type if it is that.

    Args:
        pairs: the format.
        words: makes terminals of a text with marks.
        value: makes a rule for values of a schema.
    """

    def __init__(self, pairs: Pairs, words: Words, value: Value) -> None:
        self._pairs, self._words, self._json = pairs, words, value
        self._pad = words(pairs.pad)
        self._opened = f"{GAP} {words(pairs.opened)} {self._pad}" if pairs.opened else self._pad
        # The mark is a special token, or plain characters, whose first occurrence ends the text.
        self._mark, self._again, self._rest = pairs.after.partition(KEY)
        self._apart = words(self._mark).startswith("<[")
        self.shared = "RAW: /(.|\\n)*/\n" + ("" if self._apart else f"raw[lazy]: RAW {words(self._mark)}\n")

    def of(self, call: str, schema: Mapping[str, Any], field: str) -> str:
        """Rules for the arguments of a call; the first one is ``{call}_arguments``.

        Raises:
            ApiError: the schema cannot be enforced in plain text.
        """
        root = plain_object(schema, field, "one by one")
        names, rules = [], ""
        properties = root.get("properties", {})
        before = self._words(self._pairs.before)
        for number, (key, wanted) in enumerate(properties.items()):
            rule = f"{call}_argument_{number}"
            names.append(rule if key in root.get("required", ()) else f"{rule}?")
            if (end := self._pairs.named.partition(KIND)[0]) in key:
                raise refused(field, f"ends names with {end}, which is in {key!r}")
            if re.fullmatch(r"[^/<>\s]([^<>]*[^<>\s])?", key) is None:
                raise refused(field, f"writes names of arguments as they are, which {key!r} does not allow")
            written, *terminal = self._typed(rule, key, wanted, root, field).split("\n")
            rules += "\n".join([f"{rule}: {before} {json.dumps(key)} {written}", *terminal, ""])
        more = root.get("additionalProperties", not properties)
        if isinstance(more, Mapping) and more and not properties:
            raise refused(field, "writes arguments one by one, without a schema for additionalProperties")
        if (more is True or more == {}) and not self._again:
            names.append(f"{call}_other*")
            named = f"/[^\\/<>\\s][^<>\\n]*/ {self._named('string')}"
            rules += f"{call}_other: {before} {named} {self._opened} {self._raw('')}\n"
        return f"{call}_arguments: {' '.join(names) or json.dumps('')}\n{rules}"

    def _named(self, kind: str) -> str:
        return self._words(self._pairs.named.replace(KIND, self._pairs.kinds.get(kind, "")))

    def _closed(self, key: str) -> str:
        return f"{self._words(self._mark)} {self._ending(key)} {GAP}"

    def _ending(self, key: str) -> str:
        return f"{json.dumps(key)} {self._words(self._rest)}" if self._again else ""

    def _raw(self, key: str) -> str:
        return f"RAW {self._closed(key)}" if self._apart else f"raw {self._ending(key)} {GAP}"

    def _typed(self, rule: str, key: str, wanted: Any, root: Mapping[str, Any], field: str) -> str:
        """What follows a name; where the type of a value is written, one way for each type."""
        if not self._pairs.kinds:
            return f"{self._named('')} {self._opened} {self._value(rule, key, wanted, root, field)}"
        allowed, found = kinds(wanted, root), resolved(wanted, root)
        plain = isinstance(found, Mapping) and "type" in found
        ways = []
        for kind in sorted(allowed, reverse=True):  # strings first, whose rule may need a terminal
            rules = found if isinstance(found, Mapping) and (plain or kind != "string") else {}
            whole = kind == "number" and plain and "number" not in found["type"]
            only = wanted if len(allowed) == 1 else {**rules, "type": "integer" if whole else kind}
            if isinstance(found, Mapping) and found.keys() & {"enum", "const"}:
                every = found.get("enum", [found.get("const")])
                only = {"enum": [value for value in every if kind_of(value) == kind]}
            ways.append(f"{self._named(kind)} {self._opened} {self._value(rule, key, only, root, field)}")
        first, *terminal = ways[0].split("\n")
        return "\n".join([f"({' | '.join([first, *ways[1:]])})", *terminal])

    def _value(self, rule: str, key: str, wanted: Any, root: Mapping[str, Any], field: str) -> str:
        """Rule for a value and the mark after it, with a terminal of its own if it needs one."""
        found, allowed, closed = resolved(wanted, root), kinds(wanted, root), self._closed(key)
        if "string" not in allowed:
            shared = {name: root[name] for name in DEFINITIONS if name in root}
            return f"{self._json(shared | dict(wanted))} {self._pad} {closed}"
        if isinstance(found, Mapping) and found.keys() & {"enum", "const"}:
            every = found.get("enum", [found.get("const")])
            if wrong := [each for each in every if isinstance(each, str) and self._mark in each]:
                raise refused(field, f"ends texts with {self._mark}, which is in {wrong[0]!r}")
            texts = [json.dumps(each if isinstance(each, str) else json.dumps(each)) for each in every]
            return f"({' | '.join(texts)}) {self._pad} {closed}"
        if isinstance(found, Mapping) and (unkept := found.keys() & {"allOf", "not", "if"}):
            raise refused(field, f"writes texts as they are, without {', '.join(sorted(unkept))}")
        if allowed != {"string"} or not found.keys() - NOTES:
            return self._raw(key)
        if unknown := found.keys() - NOTES - _BOUNDS:
            raise refused(field, f"writes texts as they are, without {', '.join(sorted(unknown))}")
        closing = re.escape(self._mark).replace("/", "\\/")
        parts = [f"/(.|\\n){{{found.get('minLength', 0)},{found.get('maxLength', '')}}}/"]
        parts += [_anchored(found["pattern"])] if "pattern" in found else []
        terminal = f"{rule.upper()}: {' & '.join(parts)} & ~/(.|\\n)*{closing}(.|\\n)*/"
        return f"{rule.upper()} {self._pad} {closed}\n{terminal}"


def _anchored(pattern: str) -> str:
    """A JSON schema pattern, which may match anywhere in a text, as a pattern of the whole text."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = _ascii(pattern[begins : len(pattern) - ends]).replace("/", "\\/")
    anything = "(.|\\n)*"
    return f"/{'' if begins else anything}({inner}){'' if ends else anything}/"


def _ascii(pattern: str) -> str:
    """The same with the letters and digits that a JSON schema means, which are those of ASCII."""
    result, inside = "", False
    for part in re.findall(r"\\.|.", pattern, re.DOTALL):
        inside = (inside or part == "[") and part != "]"
        known = {"\\w": "A-Za-z0-9_", "\\d": "0-9"}.get(part)
        result += part if known is None else known if inside else f"[{known}]"
    return result


def plain_object(schema: Mapping[str, Any], field: str, how: str) -> Mapping[str, Any]:
    """The schema of parameters that are written ``how``.

    Raises:
        ApiError: they are no plain object.
    """
    root = resolved(schema, schema)
    if not isinstance(root, Mapping) or root.keys() & _OBJECT or root.get("type", "object") != "object":
        raise refused(field, f"writes arguments {how}, and parameters are no plain object")
    return root


def refused(field: str, why: str) -> Exception:
    """The error for parameters that a notation cannot enforce."""
    return bad_request(f"{field} cannot be enforced: the model {why}", field, code="invalid_schema")
