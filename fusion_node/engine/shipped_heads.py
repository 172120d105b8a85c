"""Draft heads that come with the program, each for one model of a known id.

A folder per model under ``draft_heads/``, as ``fusion-node draft train`` writes it. Which head is for which model says
its own configuration.
"""

from __future__ import annotations

from pathlib import Path

from fusion_node.engine.draft_head_files import CONFIG_FILE
from fusion_node.engine.trained_head import read_head_config

SHIPPED_HEADS = Path(__file__).parent.parent / "draft_heads"


def shipped_head(model_id: str, *, heads: Path | None = None) -> Path | None:
    """The folder of the head for a model; None: the program brings none.

    Args:
        heads: where to look, if not among those that were installed.

    Raises:
        ConfigError: what was installed is damaged.
    """
    for config in sorted((heads or SHIPPED_HEADS).glob(f"*/{CONFIG_FILE}")):
        if read_head_config(config.parent).target_model_id == model_id:
            return config.parent
    return None
