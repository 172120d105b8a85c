"""What options accept on the command line."""

from __future__ import annotations

import pytest

from fusion_node.cli.options import parse_size
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
