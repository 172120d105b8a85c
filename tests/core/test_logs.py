"""What the logs must not hold: the values of local variables, which are prompts and keys."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import structlog
from fusion_node.cli.logs import LogFormat, configure_logs

configure_logs(LogFormat({format!r}))

def fail(prompt):
    raise ValueError("it failed")

try:
    fail("crown" + " " + "jewels")
except ValueError as error:
    structlog.get_logger("test").error("request failed", exc_info=error)
    import logging
    logging.getLogger("foreign").exception("foreign failure")
"""


@pytest.mark.parametrize("log_format", ["auto", "pretty", "json"])
def test_traceback_in_the_log_has_no_local_variables(log_format: str) -> None:
    program = PROGRAM.replace("{format!r}", repr(log_format))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.count("it failed") >= 2
    assert "crown jewels" not in done.stderr + done.stdout
