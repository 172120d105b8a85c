"""``fusion-node`` in a process that is forked from one which has imported everything.

Importing is most of what a command does, and most of what a node does until it serves: some seconds of CPU each. Tests
that start processes for what they do, and not for how they start, start them here. What is so not tested, that
a command imports by itself what it needs, is left to those that start a fresh interpreter (``CLI`` in
tests.live.swarm_process; tests/live/test_demo.py and others).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.live.everything"])
_STARTING = threading.Lock()

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """In the child: when the test run is killed itself, nobody is left to end its nodes (prctl(2))."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Fork:
    """One process, with what tests use of subprocess.Popen. It is killed when the test run ends.

    Args:
        arguments: of ``fusion-node``.
        environment: all of it.
        stdout, stderr: files that are appended to.
        stdin: a file.
        before: is called in the process before anything else. Pickled: a function of a module, or a partial of one.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: Path,
        stderr: Path,
        stdin: Path = Path(os.devnull),
        before: Callable[[], None] | None = None,
    ) -> None:
        for path in (stdout, stderr):
            path.touch()
        self._process = _FORKS.Process(
            target=_run,
            args=(list(arguments), dict(environment), (stdin, stdout, stderr), before),
            daemon=True,
        )
        with _STARTING:
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """As subprocess.Popen has it: that of a process which a signal ended is negative."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("fusion-node", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(
    arguments: list[str],
    environment: dict[str, str],
    files: tuple[Path, Path, Path],
    before: Callable[[], None] | None,
) -> None:
    # With this end of its pipe in our hands, the server of forks would outlive the test run, and we that server.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    die_with_parent()
    assert "tests.live.everything" in sys.modules, "the server of forks could not import it, and says nothing of that"
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout.flush()
    sys.stderr.flush()
    for number, path in enumerate(files):
        with path.open("ab" if number else "rb", buffering=0) as file:
            os.dup2(file.fileno(), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # for as long as the process lives
    if before is not None:
        before()
    sys.argv = ["fusion-node", *arguments]
    from fusion_node.cli.main import main

    main()
