"""Lines of the log: for a reader, or an object each for a program. Prompts and replies are in none by default."""

from __future__ import annotations

import json
import logging
import sys
import time

__all__ = ["set_up"]


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.levelname.lower():<8}"
        text += record.getMessage()
        for name, value in getattr(record, "fields", {}).items():
            if name not in ("method", "path", "status"):
                text += f" {name}={value}"
        return text + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


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
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up(kind: str) -> None:
    """Send what the library and the server say to stderr.

    Args:
        kind: "text" or "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if kind == "json" else _Text())
    for name in ("sakiyomi", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger("sakiyomi").setLevel(logging.INFO)
    # It tells of every start and stop, and of no request.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
