"""What a collector says about itself: numbers, loggers, spans of time, profiles."""
