"""Changing names in modules of the library."""

from __future__ import annotations

from types import ModuleType


def rebind(name: str, value: object, *modules: ModuleType) -> None:
    """Changes a constant in every module that has imported it. A name that is gone is our error, at import."""
    for module in modules:
        if not hasattr(module, name):
            raise ImportError(f"{module.__name__} has no {name}: this libp2p is not the one that was hardened")
        setattr(module, name, value)
