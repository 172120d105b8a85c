"""The one way to matplotlib, which is not part of the product: the extra ``bench`` has it."""

from __future__ import annotations

from typing import Any

from fusion_node.errors import ConfigError


def load_pyplot(option: str) -> Any:
    """``matplotlib.pyplot``, drawing to files only.

    Args:
        option: that asked for a picture.

    Raises:
        ConfigError: there is no matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib: pip install 'fusion-node[bench]', or leave out {option}") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    return pyplot
