"""Vector environments whose environments are stepped by workers, without a policy."""
