"""The ``muster`` command. Its start imports neither torch nor gymnasium; collecting does."""
