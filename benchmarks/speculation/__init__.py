"""Speculative decoding: what it brings, in three groups that are never mixed up."""
