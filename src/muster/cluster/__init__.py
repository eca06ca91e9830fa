"""Nodes: other machines (or processes) with workers of their own, and the engines that connect them."""
