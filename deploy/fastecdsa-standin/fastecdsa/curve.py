"""The one curve that libp2p asks for."""

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True, slots=True, repr=False)
class Curve:
    """A named curve."""

    name: str
    impl: ec.EllipticCurve

    def __repr__(self) -> str:
        return self.name


P256 = Curve("P256", ec.SECP256R1())
