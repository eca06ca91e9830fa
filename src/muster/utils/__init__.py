"""Python and the operating system: forks, Ctrl-C, files, imports of other packages."""
