"""Which layers a node should take when its operator did not say: those that the swarm holds least."""

from __future__ import annotations

from collections.abc import Iterable

from fusion_node.types import LayerRange


def choose_layers(held: Iterable[LayerRange], *, num_layers: int, capacity_layers: int) -> LayerRange | None:
    """The window of layers to serve.

    Args:
        held: ranges that other nodes serve now.
        capacity_layers: how many layers fit on the node.

    Returns:
        The whole model when it fits; else the window of ``capacity_layers`` whose layers are held by the fewest
        nodes in all, the first of equals. None when not even one layer fits.
    """
    size = min(capacity_layers, num_layers)
    if size < 1:
        return None
    holders = [0] * num_layers
    for layers in held:
        for layer in range(layers.start, min(layers.stop, num_layers)):
            holders[layer] += 1
    start = min(range(num_layers - size + 1), key=lambda s: (sum(holders[s : s + size]), s))
    return LayerRange(start, start + size)
