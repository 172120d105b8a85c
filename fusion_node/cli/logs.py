"""Structured logs on standard error, pretty or JSON. No prompt, token or key is ever an argument."""

from __future__ import annotations

import logging
import sys
from enum import StrEnum

import structlog


class LogFormat(StrEnum):
    AUTO = "auto"
    PRETTY = "pretty"
    JSON = "json"


def configure_logs(log_format: LogFormat, *, verbose: bool = False, quiet: bool = False) -> None:
    """Sends everything, our own events and those of libraries, through one renderer to standard error."""
    level = logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if log_format is LogFormat.JSON else "%H:%M:%S", utc=False),
    ]
    renderer: structlog.typing.Processor
    if log_format is LogFormat.JSON:
        # Without local variables, here and below: they hold prompts and keys.
        frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        shared.append(structlog.processors.ExceptionRenderer(frames))
        renderer = structlog.processors.JSONRenderer()
    else:
        colors = log_format is LogFormat.PRETTY or sys.stderr.isatty()
        renderer = structlog.dev.ConsoleRenderer(
            colors=colors, pad_event_to=20, exception_formatter=structlog.dev.plain_traceback
        )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.PositionalArgumentsFormatter()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("aiohttp.access", "asyncio", "multiaddr", "urllib3", "httpx", "filelock", "transformers"):
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))
