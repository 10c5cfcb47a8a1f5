"""Rules for arguments that are written one by one, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from sakiyomi.server.errors import bad_request
from sakiyomi.server.fields import DEFINITIONS, kinds, resolved
from sakiyomi.server.tools import Pairs

GAP = "/\\n?/"  # between marks
_NOTES = {"type", "title", "description", "default", "examples"}
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

    def __init__(self, pairs: Pairs, words: Callable[[str], str], value: Callable[[Mapping[str, Any]], str]) -> None:
        self._pairs, self._words, self._json = pairs, words, value
        self._pad = words(pairs.pad)
        self._opened = f"{GAP} {words(pairs.opened)} {self._pad}" if pairs.opened else self._pad
        self._closed = f"{words(pairs.after)} {GAP}"
        # The mark is a special token, or plain characters, whose first occurrence ends the text.
        apart = words(pairs.after).startswith("<[")
        self._raw = f"RAW {self._closed}" if apart else f"raw {GAP}"
        self.shared = "RAW: /(.|\\n)*/\n" + ("" if apart else f"raw[lazy]: RAW {words(pairs.after)}\n")

    def of(self, call: str, schema: Mapping[str, Any], field: str) -> str:
        """Rules for the arguments of a call; the first one is ``{call}_arguments``.

        Raises:
            ApiError: the schema cannot be enforced in plain text.
        """
        root = resolved(schema, schema)
        if not isinstance(root, Mapping) or root.keys() & {"anyOf", "oneOf", "allOf"}:
            raise _refused(field, "writes arguments one by one, and parameters are no plain object")
        names, rules = [], ""
        properties = root.get("properties", {})
        for number, (key, wanted) in enumerate(properties.items()):
            rule = f"{call}_argument_{number}"
            names.append(rule if key in root.get("required", ()) else f"{rule}?")
            if self._pairs.named in key:
                raise _refused(field, f"ends names with {self._pairs.named}, which is in {key!r}")
            before, named = self._words(self._pairs.before), self._words(self._pairs.named)
            rules += f"{rule}: {before} {json.dumps(key)} {named} {self._opened} "
            rules += self._value(rule, wanted, schema, field) + "\n"
        if root.get("additionalProperties", not properties) is not False:
            names.append(f"{call}_other*")
            before, named = self._words(self._pairs.before), self._words(self._pairs.named)
            rules += f"{call}_other: {before} /[^<>\\n]+/ {named} {self._opened} {self._raw}\n"
        return f"{call}_arguments: {' '.join(names) or json.dumps('')}\n{rules}"

    def _value(self, rule: str, wanted: Any, root: Mapping[str, Any], field: str) -> str:
        """Rule for a value and the mark after it, with a terminal of its own if it needs one."""
        found, allowed = resolved(wanted, root), kinds(wanted, root)
        if "string" not in allowed:
            shared = {name: root[name] for name in DEFINITIONS if name in root}
            return f"{self._json(shared | dict(wanted))} {self._pad} {self._closed}"
        if isinstance(found, Mapping) and found.keys() & {"enum", "const"}:
            every = found.get("enum", [found.get("const")])
            if wrong := [each for each in every if isinstance(each, str) and self._pairs.after in each]:
                raise _refused(field, f"ends texts with {self._pairs.after}, which is in {wrong[0]!r}")
            texts = [json.dumps(each if isinstance(each, str) else json.dumps(each)) for each in every]
            return f"({' | '.join(texts)}) {self._pad} {self._closed}"
        if allowed != {"string"} or not found.keys() - _NOTES:
            return self._raw
        if unknown := found.keys() - _NOTES - _BOUNDS:
            raise _refused(field, f"writes texts as they are, without {', '.join(sorted(unknown))}")
        closing = re.escape(self._pairs.after).replace("/", "\\/")
        parts = [f"/(.|\\n){{{found.get('minLength', 0)},{found.get('maxLength', '')}}}/"]
        parts += [_anchored(found["pattern"])] if "pattern" in found else []
        terminal = f"{rule.upper()}: {' & '.join(parts)} & ~/(.|\\n)*{closing}(.|\\n)*/"
        return f"{rule.upper()} {self._pad} {self._closed}\n{terminal}"


def _anchored(pattern: str) -> str:
    """A JSON schema pattern, which may match anywhere in a text, as a pattern of the whole text."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends].replace("/", "\\/")
    anything = "(.|\\n)*"
    return f"/{'' if begins else anything}({inner}){'' if ends else anything}/"


def _refused(field: str, why: str) -> Exception:
    return bad_request(f"{field} cannot be enforced: the model {why}", field, code="invalid_schema")
