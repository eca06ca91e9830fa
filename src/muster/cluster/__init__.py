"""Nodes: other machines (or processes) with workers of their own, and the connections to them."""
