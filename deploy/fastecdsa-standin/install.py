"""Put fastecdsa into this interpreter's environment: the real one where it can be built, the stand-in elsewhere.

Run by `make setup` with the environment's own python, before anything that needs libp2p. What fastecdsa needs (a C
compiler, Python.h, gmp and its header) is found out by compiling, not by letting pip fail after minutes.
Standard library only, since it runs first. Arguments are passed on to pip.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

REAL = "fastecdsa==2.3.2"  # libp2p 0.8.1 pins this release
HERE = Path(__file__).resolve().parent
PROBES = {
    "C compiler": ("int main(void) { return 0; }", []),
    "Python.h": ("#include <Python.h>\nint main(void) { return 0; }", ["-c"]),
    "gmp.h": ("#include <gmp.h>\nint main(void) { mpz_t n; mpz_init(n); return 0; }", ["-lgmp"]),
}
REMEDIES = {  # by the package manager that is there
    "apt-get": "apt install gcc python3-dev libgmp-dev",
    "dnf": "dnf install gcc python3-devel gmp-devel",
    "pacman": "pacman -S gcc gmp",
    "zypper": "zypper install gcc python3-devel gmp-devel",
    "apk": "apk add gcc musl-dev python3-dev gmp-dev",
}


def missing_tools() -> list[str]:
    """Returns: what building fastecdsa needs and this machine lacks, by compiling as setuptools would."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    # Without its developer tools, macOS answers a call of cc with a dialog: ask xcode-select, which is silent.
    no_developer_tools = platform.system() == "Darwin" and _fails(["xcode-select", "-p"])
    if shutil.which(compiler[0]) is None or no_developer_tools:
        return ["C compiler"]
    flags = [word for name in ("CPPFLAGS", "CFLAGS", "LDFLAGS") for word in shlex.split(os.environ.get(name, ""))]
    include = {f"-I{sysconfig.get_path(name)}" for name in ("include", "platinclude")}
    missing = []
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "probe.c")
        for what, (program, options) in PROBES.items():
            source.write_text(program + "\n")
            command = [*compiler, *include, *flags, str(source), *options, "-o", str(Path(scratch, "probe.out"))]
            if _fails(command):
                missing.append(what)
    return missing


def remedy() -> str:
    """Returns: the command that installs what fastecdsa needs on this platform."""
    if platform.system() == "Darwin":
        return (
            "xcode-select --install; brew install gmp; "
            'export CFLAGS="-I$(brew --prefix)/include" LDFLAGS="-L$(brew --prefix)/lib"'
        )
    known = (command for manager, command in REMEDIES.items() if shutil.which(manager))
    return next(known, "your package manager: a C compiler, Python's and GMP's headers")


def main(pip_arguments: list[str]) -> int:
    try:
        version = importlib.metadata.version("fastecdsa")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        if version.startswith("2.3.2"):
            return 0
    missing = missing_tools()
    if not missing and _pip(pip_arguments, REAL) == 0:
        return 0
    why = f"this machine has no {' and no '.join(missing)}" if missing else "building it failed (see above)"
    print(
        f"fastecdsa: {why}; using the stand-in, which serves fusion-node as well (its keys are Ed25519). "
        f"For the real one: {remedy()} and then make clean setup",
        flush=True,
    )
    return _pip(pip_arguments, str(HERE))


def _fails(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode != 0
    except OSError:
        return True


def _pip(arguments: list[str], what: str) -> int:
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments, what]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
