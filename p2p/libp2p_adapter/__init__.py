"""The only package that imports libp2p, trio and multiaddr: a hardened host, and what it does for discovery.

py-libp2p 0.8.1 as it comes accepts plaintext connections under anybody's name, answers from stale caches, and can be
made to allocate a gigabyte before authentication. What is changed here, and why, is listed in
docs/protocol-network.md, one entry per change; the entries are named in the comments (trap 1 …).

``runner`` is the thread's event loop, ``node`` what calls are made to; the other modules each do one thing for it.
Import it late: it takes more than a second.
"""

from p2p.libp2p_adapter.runner import Libp2pRunner

__all__ = ["Libp2pRunner"]
