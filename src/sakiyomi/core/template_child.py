"""Runs chat templates; the program of the process that ``templates.py`` starts.

A template is somebody else's program. Here it can spend its time and memory, and no other's.
Reads requests and writes replies, one JSON object a line. Imports nothing of the package.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

MOST = 1 << 26
"""Characters that a template may write."""


def serve(seconds: float, memory: int) -> None:
    """Answer requests until there are no more.

    The system ends the process if a request takes longer; a failed allocation fails the request.

    Args:
        seconds: of CPU time for one request.
        memory: bytes of address space of this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends
    with suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    timed = hasattr(signal, "setitimer")
    for line in sys.stdin.buffer:
        if timed:
            signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = json.dumps(_answer(line))
        if timed:
            signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(reply.encode() + b"\n")
        sys.stdout.buffer.flush()


def _answer(line: bytes) -> dict[str, str]:
    try:
        template, values = json.loads(line)
        text = _compiled(template).render(**values)
        if len(text) > MOST:
            return {"error": f"it writes {len(text)} characters, and {MOST} are allowed"}
        return {"text": text}
    except MemoryError:
        return {"error": "MemoryError: it needs more memory than a template may use"}
    except Exception as error:  # a template is a program that may raise anything
        return {"error": f"{type(error).__name__}: {error}"[:10000]}


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    return _ENVIRONMENT.from_string(template)


class _Generation(Extension):
    """``{% generation %}``, which marks for training what the assistant says: here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        """See ``Extension``."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Namespace(Namespace):
    """Without names that begin with an underscore, which are Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a value may have the name self
        own, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(own, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the name {name!r}, which begins with an underscore")


def _fail(message: Any) -> None:
    raise TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _dict(*args: Any, **values: Any) -> dict[Any, Any]:
    return dict(*args, **values)


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without Jinja's escapes of HTML; what a filter yields one by one is a list."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_listed
    )


def _listed(value: Any) -> list[Any]:
    if not hasattr(value, "__next__"):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return list(value)


def _environment() -> SandboxedEnvironment:
    """Of transformers' words, with lists that a template may change: they are made for one request."""
    made = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    words: Mapping[str, Any] = {
        "raise_exception": _fail, "strftime_now": _now, "dict": _dict, "namespace": _Namespace,
    }  # fmt: skip
    made.globals.update(words)
    made.filters["tojson"] = _json
    return made


_ENVIRONMENT = _environment()
