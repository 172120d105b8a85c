"""Reproducible measurements, each printing one table and writing JSON."""
