"""The node daemon: loads a shard, listens, announces, serves sessions."""
