"""`python -m labkit`, the same as the command `labkit`."""

from __future__ import annotations

import sys

from labkit.driver.cli import main

if __name__ == "__main__":
    sys.exit(main())
