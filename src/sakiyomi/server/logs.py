"""Log lines, as text or as JSON. They hold no prompts and no replies by default."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from typing import TextIO


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.levelname.lower():<8}"
        text += _one_line(record.getMessage())
        for name, value in getattr(record, "fields", {}).items():
            if name not in ("method", "path", "status"):
                text += f" {name}={_one_line(str(value))}"
        return text + (f"\n{found}" if (found := _trace(self, record)) else "")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if found := _trace(self, record):
            line["traceback"] = found
        return json.dumps(line, ensure_ascii=False, default=str)


def _one_line(text: str) -> str:
    """Escape control characters, so that a path or a name cannot add lines to the log."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info else str(getattr(record, "where", ""))


def failure(logger: logging.Logger, message: str, error: BaseException, *, prompts: bool) -> None:
    """Log an internal error that ended a request.

    Args:
        logger: to log with.
        message: before the traceback.
        error: what happened.
        prompts: log the error's message; otherwise only its place and type, since the message may quote a prompt.
    """
    if prompts:
        logger.error(message, exc_info=error)
        return
    where = ""
    found: BaseException | None = error
    while found is not None:
        kind = type(found).__qualname__
        where = f"{''.join(traceback.format_tb(found.__traceback__))}{kind} (what it says: --log-prompts)\n{where}"
        found = found.__cause__ or found.__context__
    logger.error(message, extra={"where": where.rstrip()})


def set_up(kind: str, stream: TextIO | None = None) -> None:
    """Log the library and the server to stderr, or to a stream.

    Args:
        kind: "text" or "json".
        stream: None for stderr.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json() if kind == "json" else _Text())
    for name in ("sakiyomi", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger("sakiyomi").setLevel(logging.INFO)
    # It logs every start and stop.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
