"""Identity, signed records, discovery and the data plane: everything that touches other machines."""
