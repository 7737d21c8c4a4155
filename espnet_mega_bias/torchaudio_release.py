"""Which release of torchaudio goes with a torch."""


def torchaudio_pip_line(torch_version: str) -> str:
    """Give the pip line that brings the torchaudio for a torch.

    torchaudio's metadata names no torch. Its release 2.11.1 is built for torch 2.13 and
    loads beside later ones, 2.11.0 is the one for torch 2.11; none loads beside 2.12.

    Args:
        torch_version: Version of torch.

    """
    base = torch_version.split("+")[0]
    major, minor = (int(number) for number in base.split(".")[:2])

    if (major, minor) >= (2, 13):
        return "pip install 'torchaudio==2.11.1'"

    if (major, minor) == (2, 11):
        return "pip install 'torchaudio==2.11.0'"

    if (major, minor) == (2, 12):
        return "pip install 'torch==2.11.0' 'torchaudio==2.11.0'"

    # Up to here, both had the same numbers.
    return f"pip install 'torchaudio=={base}'"
