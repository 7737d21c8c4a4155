"""The error that the tools end with."""


class ToolError(Exception):
    """A tool cannot do what it was asked for; the message says why, in one line."""
