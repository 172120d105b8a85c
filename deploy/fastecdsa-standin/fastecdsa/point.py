"""A point of P-256: a public key."""

from typing import NoReturn

from cryptography.hazmat.primitives.asymmetric import ec

from .curve import P256, Curve


class Point:
    """An affine point.

    Raises:
        ValueError: (x, y) is not on the curve.
    """

    def __init__(self, x: int, y: int, curve: Curve = P256) -> None:
        ec.EllipticCurvePublicNumbers(x, y, curve.impl).public_key()
        self.x = x
        self.y = y
        self.curve = curve

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Point):
            return NotImplemented
        return (self.x, self.y, self.curve.name) == (other.x, other.y, other.curve.name)

    def __hash__(self) -> int:
        return hash((self.x, self.y, self.curve.name))

    def __mul__(self, scalar: int) -> NoReturn:
        raise NotImplementedError(
            "This is the stand-in for fastecdsa, which has no arithmetic on P-256 points. Install a C compiler, "
            "Python.h and gmp.h, then run `make clean setup` to build the real one."
        )

    __rmul__ = __mul__
