"""The form of the log: lines of text for people, or of JSON for programs that collect them."""

from __future__ import annotations

import json
import logging
import os
import traceback
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
FORMAT_VARIABLE = "QUIRE_LOG_FORMAT"
LEVEL_VARIABLE = "QUIRE_LOG_LEVEL"

_OF_REQUESTS = ("quire.service", "quire.router", "uvicorn")
# What would begin a line of its own, or change a terminal, as its escape: no client can make up a line.
_CONTROLS = {code: f"\\u{code:04x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}
_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}


def configure_logging(form: LogFormat | None = None, level: LogLevel | None = None) -> None:
    """Configure this process and, through the environment, those that it starts; None: as that says.

    What other packages say for debugging is left out at any level: it may hold what clients sent.
    """
    chosen = form or log_format()
    least = level or os.environ.get(LEVEL_VARIABLE, "info")
    os.environ[FORMAT_VARIABLE] = chosen
    os.environ[LEVEL_VARIABLE] = least
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if chosen == "json" else TextFormatter())
    number = logging.getLevelNamesMapping()[least.upper()]
    logging.basicConfig(level=max(number, logging.INFO), handlers=[handler])
    if number < logging.INFO:
        logging.getLogger("quire").setLevel(number)


def log_format() -> str:
    """Return the form of this process's log, once it is configured."""
    return os.environ.get(FORMAT_VARIABLE, "text")


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        begin = f"{self.formatTime(record)} {_name(record)} {record.levelname} "
        begin += record.getMessage().translate(_CONTROLS)
        return "\n  ".join([begin, *trace_of(record)])


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, what was given as `extra`, and a failure's `trace`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": _name(record),
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _PLAIN}
        if trace := trace_of(record):
            line["trace"] = trace
        return json.dumps(line, default=str, ensure_ascii=False).translate(_CONTROLS)


def _name(record: logging.LogRecord) -> str:
    """Return whose line it is: the HTTP library calls its own `uvicorn.error`, whether it is one or not."""
    return "quire.service" if record.name.startswith("uvicorn") else record.name


def trace_of(record: logging.LogRecord) -> list[str]:
    """Return the lines that an exception came through, and what it is.

    Its words are left out where they may quote what a client sent.
    """
    if record.exc_info is None or record.exc_info[1] is None:
        return []
    error = record.exc_info[1]
    frames = [
        f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)
    ]
    kind = type(error).__name__
    return [*frames, kind if record.name.startswith(_OF_REQUESTS) else f"{kind}: {error}"]
