"""Command-line entry points: they read options and print; `tools` does the work."""
