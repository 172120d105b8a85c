"""Planning, placement and repair: how fast, how good, and against whom."""
