"""`python -m erllama`: the same as the command `erllama`."""

import sys

from erllama.cli import main

sys.exit(main())
