"""Whole rollouts as one recorded graph of the device's operations (``capture``)."""
