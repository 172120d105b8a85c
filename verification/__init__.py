"""Manifests and the checks that bind what a node serves to the weights it promised."""
