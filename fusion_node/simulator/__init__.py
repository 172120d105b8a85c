"""A swarm in one process, on an event heap: the real cores over a modelled network, modelled devices and churn."""
