"""What libp2p imports from fastecdsa 2.3.2, without C: P-256 keys by the `cryptography` package.

Guarantees: keys, points and encodings are those of fastecdsa, bit for bit; a point off the curve is refused.
Does not offer: signatures, other curves, and arithmetic on points (it would have to be written here, and neither
in constant time nor for a caller that exists: only libp2p's SECIO transport multiplies points).
"""
