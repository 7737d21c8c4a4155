#!/usr/bin/env python3
"""AN4 with a rotary MEGA decoder, in ESPnet3's form; README.md tells more.

`python run.py` does everything, from the data to a scored, packed model.
`python run.py --help` lists the stages and the configurations.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "TEMPLATE"))
from esp2_asr.launch import main

# worker processes import this file again, and must not start all over
if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
