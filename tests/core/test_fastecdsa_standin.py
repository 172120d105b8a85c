"""The stand-in for fastecdsa under libp2p itself, in a process whose path it heads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

STANDIN = Path(__file__).resolve().parents[2] / "deploy" / "fastecdsa-standin"

# RFC 6979, appendix A.2.5.
VECTOR = """
import fastecdsa, pathlib
assert pathlib.Path(fastecdsa.__file__).is_relative_to({standin!r}), fastecdsa.__file__
d = 0xC9AFA9D845BA75166B5C215767B1D6934E50C3DB36E89B127B8A622B120F6721
x = 0x60FED4BA255A9D31C961EB74C6356D68C049B8923B61FA6CE669622E60F29FB6
y = 0x7903FE1008B8BC99A41AE9E95628BC64F2F1B20C2D7E9F5177A3C294D4462299
"""


def run(program: str) -> str:
    """The program's output, or its traceback as the failure."""
    done = subprocess.run(
        [sys.executable, "-c", VECTOR.format(standin=str(STANDIN)) + program],
        env={**os.environ, "PYTHONPATH": str(STANDIN)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_libp2p_p256_keys_with_the_standin_match_the_rfc() -> None:
    run(
        """
from libp2p.crypto.ecc import ECCPrivateKey, ECCPublicKey, create_new_key_pair, infer_local_type
import libp2p.crypto.key_exchange
public = ECCPrivateKey(d, infer_local_type("P-256")).get_public_key()
assert (public.impl.x, public.impl.y) == (x, y)
assert public.to_bytes() == b"\\x04" + x.to_bytes(32, "big") + y.to_bytes(32, "big")
assert ECCPublicKey.from_bytes(public.to_bytes(), "P-256").impl == public.impl
pair = create_new_key_pair("P-256")
assert pair.private_key.to_bytes().startswith(b"-----BEGIN EC PRIVATE KEY-----\\n")
"""
    )


def test_a_point_off_the_curve_is_refused() -> None:
    run(
        """
from fastecdsa.curve import P256
from fastecdsa.encoding.sec1 import InvalidSEC1PublicKey, SEC1Encoder
from fastecdsa.point import Point
off = b"\\x04" + x.to_bytes(32, "big") + (y + 1).to_bytes(32, "big")
for refused, kind in ((lambda: SEC1Encoder.decode_public_key(off, P256), InvalidSEC1PublicKey),
                      (lambda: Point(x, y + 1, P256), ValueError)):
    try:
        refused()
    except kind:
        continue
    raise SystemExit("accepted")
"""
    )


def test_the_arithmetic_that_is_missing_says_what_to_install() -> None:
    said = run(
        """
from fastecdsa.curve import P256
from fastecdsa.keys import get_public_key
try:
    get_public_key(d, P256) * 2
except NotImplementedError as error:
    print(error)
"""
    )
    assert "make clean setup" in said
