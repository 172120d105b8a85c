"""Drafters without a model. Those with one are in fusion_node.engine, where torch is."""
