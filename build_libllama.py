#!/usr/bin/env python3
"""Build the native part of erllama; `--help` explains, tools/libllama/ does it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

if __name__ == "__main__":
    from tools.libllama.cli import main

    sys.exit(main())
