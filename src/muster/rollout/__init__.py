"""The only loop from policy to environment, and what it needs: groups, resets, hooks, rows of a lane."""
