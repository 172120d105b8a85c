"""The shard engine against transformers alone and against itself, on the built-in model."""
