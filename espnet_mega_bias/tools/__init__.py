"""What the command `espnet-mega-bias` does, for use from Python too."""
