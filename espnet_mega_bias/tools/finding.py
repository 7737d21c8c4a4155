"""What a check found out."""

from dataclasses import dataclass

OK, NOTE, PROBLEM = "ok", "note", "PROBLEM"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Args:
        subject: What was checked.
        state: "ok"; "note", where something is missing that not everybody needs; or
            "PROBLEM".
        text: What was found, in one line.
        mend: Shell line that mends a problem, else None.

    """

    subject: str
    state: str
    text: str
    mend: str | None = None


def ok(subject: str, text: str) -> Finding:
    """Make the finding that all is well."""
    return Finding(subject, OK, text)


def note(subject: str, text: str) -> Finding:
    """Make a finding that stops nobody who does not need the thing."""
    return Finding(subject, NOTE, text)


def problem(subject: str, text: str, mend: str) -> Finding:
    """Make the finding of a problem, with the shell line that mends it."""
    return Finding(subject, PROBLEM, text, mend)
