"""What options accept on the command line."""

from __future__ import annotations

import pytest

from fusion_node.cli.options import parse_price, parse_rate, parse_size
from fusion_node.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 2**20),
        ("4096", 4096 * 2**20),
        ("1.5", 3 * 2**19),
        ("6GiB", 6 * 2**30),
        ("6gib", 6 * 2**30),
        ("6G", 6 * 2**30),
        ("6 GB", 6 * 10**9),
        ("500MiB", 500 * 2**20),
        (" 0.5 TiB ", 2**39),
        ("64k", 2**16),
    ],
)
def test_sizes_are_read_with_their_unit_and_as_mib_without(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "0GiB", "-1", "GiB", "6 6", "6PiB", "6iB", "1e3", "nan", "6,5G", "9" * 16])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="for example 500MiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "rate_Bps"),
    [
        ("10Mbit", 1_250_000.0),
        ("10 mbit/s", 1_250_000.0),
        ("2MB", 2_000_000.0),
        ("1.5MiB", 1.5 * 1024**2),
        ("500kbps", 500_000.0),
        ("8kbit", 1000.0),
        ("1Gbit", 125_000_000.0),
        ("1000B", 1000.0),
    ],
)
def test_rate_is_read(text: str, rate_Bps: float) -> None:
    assert parse_rate(text) == rate_Bps


@pytest.mark.parametrize("text", ["", "10", "10M", "Mbit", "-1Mbit", "0Mbit", "7kbit", "1e6B", "10Mbit extra", "999B"])
def test_text_that_is_no_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="10Mbit"):
        parse_rate(text)


@pytest.mark.parametrize(("text", "price"), [("0", 0.0), ("0.25", 0.25), ("1e9", 1e9)])
def test_price_is_read(text: str, price: float) -> None:
    assert parse_price(text) == price


@pytest.mark.parametrize("text", ["", "free", "nan", "inf", "-1", "1e10"])
def test_text_that_is_no_price_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"for example 0\.5"):
        parse_price(text)
