"""The ``muster`` command. Starting it loads neither torch nor gymnasium; collecting does."""
