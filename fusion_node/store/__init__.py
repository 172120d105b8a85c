"""The model store: models on this disk, and where they come from."""
