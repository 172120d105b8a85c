"""P-256 key pairs."""

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from .curve import Curve
from .encoding.pem import PEMEncoder
from .point import Point


def gen_private_key(curve: Curve) -> int:
    """Returns: a private key, uniform in [1, order of the curve)."""
    return ec.generate_private_key(curve.impl).private_numbers().private_value


def get_public_key(d: int, curve: Curve) -> Point:
    """Returns: the public key of the private key `d`."""
    numbers = ec.derive_private_key(d, curve.impl).public_key().public_numbers()
    return Point(numbers.x, numbers.y, curve)


def export_key(key: int | Point, curve: Curve, *, encoder: type[PEMEncoder] = PEMEncoder) -> str:
    """Returns: the key in PEM: RFC 5915 if private, RFC 5480 if public, without a final line break."""
    if encoder is not PEMEncoder:
        raise NotImplementedError("The stand-in for fastecdsa exports keys in PEM only.")
    if isinstance(key, Point):
        public = ec.EllipticCurvePublicNumbers(key.x, key.y, key.curve.impl).public_key()
        encoded = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    else:
        private = ec.derive_private_key(key, curve.impl)
        encoded = private.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    return encoded.decode().rstrip("\n")
