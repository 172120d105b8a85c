"""Choosing who serves which layers. Pure functions: no I/O, no clock, no random source."""
