"""Ranks that Ray starts on the nodes of a cluster."""
