"""The name that callers pass to `keys.export_key`."""


class PEMEncoder:
    """Chooses PEM."""
