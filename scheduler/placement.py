"""Which layers a node should take when its operator did not say: those that the swarm holds least."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fusion_node.types import LayerRange


def choose_layers(
    held: Iterable[LayerRange],
    *,
    num_layers: int,
    capacity_layers: int,
    first_layers: Collection[int] | None = None,
) -> LayerRange | None:
    """The window of layers to serve.

    Args:
        held: ranges that other nodes serve now.
        capacity_layers: how many layers fit on the node.
        first_layers: at which a range may begin, and so where the one before it has to stop; None: at any.

    Returns:
        The whole model when it fits; else the window of up to ``capacity_layers`` whose layers are held by the fewest
        nodes on average, the longest and then the first of equals. None when no window fits.
    """
    size = min(capacity_layers, num_layers)
    if size < 1:
        return None
    holders = [0] * num_layers
    for layers in held:
        for layer in range(layers.start, min(layers.stop, num_layers)):
            holders[layer] += 1
    cuts = range(num_layers + 1) if first_layers is None else sorted({*first_layers, num_layers})
    windows = [
        LayerRange(start, stop)
        for start in cuts
        if start < (stop := max(cut for cut in cuts if cut <= start + size))
        and (first_layers is not None or stop - start == size)
    ]
    return min(windows, key=lambda w: (sum(holders[w.start : w.stop]) / len(w), -len(w), w.start), default=None)
