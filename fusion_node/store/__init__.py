"""The model store: models on this disk, and where they come from."""

from fusion_node.store.model import StoredModel
from fusion_node.store.progress import NoProgress, Progress
from fusion_node.store.store import ModelStore, default_home

__all__ = ["ModelStore", "NoProgress", "Progress", "StoredModel", "default_home"]
