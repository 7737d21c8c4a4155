"""`python -m espnet_mega_bias` is the command `espnet-mega-bias`."""

import sys

from espnet_mega_bias.bin.main import main

if __name__ == "__main__":
    sys.exit(main())
