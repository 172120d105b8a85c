#!/bin/sh
# Print an interpreter that fusion-node's environment can be made from: $PYTHON if set, otherwise the first of these that is
# 3.11 to 3.13 and has venv. One line on standard error, with the command that would help, if there is none.
# Not above 3.13: libp2p 0.8.1 pins a release of coincurve that has no builds for later ones.

candidates=${PYTHON:-python3.13 python3.12 python3.11 python3}
without_venv=

for candidate in $candidates; do
    "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || continue
    # Debian's python3 has the venv module without ensurepip, which `python3 -m venv` needs.
    if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "$candidate"
        exit 0
    fi
    without_venv=${without_venv:-$candidate}
done

has() { command -v "$1" >/dev/null 2>&1; }

if [ -n "$without_venv" ]; then
    name=$(basename "$without_venv")
    if has apt-get; then remedy="apt install $name-venv"; else remedy="your package manager: the venv and ensurepip modules"; fi
    echo "error: $without_venv has no venv module. Install it with: $remedy" >&2
else
    if has brew; then remedy="brew install python@3.13"
    elif has apt-get; then remedy="apt install python3 python3-venv, or python3.12 python3.12-venv where python3 is another"
    elif has dnf; then remedy="dnf install python3.13"
    else remedy="your package manager, or python.org"
    fi
    echo "error: no Python 3.11, 3.12 or 3.13 with the name(s) $candidates. Install one with: $remedy" >&2
fi
exit 1
