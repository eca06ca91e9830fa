"""The only loop over policy and environments, with groups, resets, hooks and rows of a lane."""
