"""Going on from before: states of environments, checkpoints, crash reports and their replay."""
