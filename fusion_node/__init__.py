"""fusion-node: serve a part of a large open-weight model, and use a swarm of such parts as one model."""

__version__ = "0.1.0"
