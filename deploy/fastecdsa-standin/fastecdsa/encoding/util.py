"""Lengths of integers."""


def int_bytelen(x: int) -> int:
    """Returns: how many bytes hold the non-negative `x`; none hold 0."""
    return (x.bit_length() + 7) // 8
