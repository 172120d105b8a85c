"""Public keys as SEC 1, sections 2.3.3 and 2.3.4, encodes points."""

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fastecdsa.curve import Curve
from fastecdsa.point import Point


class InvalidSEC1PublicKey(Exception):
    """The bytes are not the SEC 1 encoding of a public key."""


class SEC1Encoder:
    """Encodes and decodes public keys."""

    @staticmethod
    def encode_public_key(point: Point, compressed: bool = True) -> bytes:
        """Returns: 33 bytes compressed, 65 uncompressed."""
        public = ec.EllipticCurvePublicNumbers(point.x, point.y, point.curve.impl).public_key()
        form = PublicFormat.CompressedPoint if compressed else PublicFormat.UncompressedPoint
        return public.public_bytes(Encoding.X962, form)

    @staticmethod
    def decode_public_key(key: bytes, curve: Curve) -> Point:
        """Returns: the point.

        Raises:
            InvalidSEC1PublicKey: malformed, or not on the curve.
        """
        try:
            numbers = ec.EllipticCurvePublicKey.from_encoded_point(curve.impl, key).public_numbers()
        except ValueError as error:
            raise InvalidSEC1PublicKey(str(error)) from error
        return Point(numbers.x, numbers.y, curve)
