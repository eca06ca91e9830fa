"""Saving and restoring: states of environments, checkpoints, crash reports and their replay."""
