"""Statistics of collectors, loggers, timelines and profiles."""
