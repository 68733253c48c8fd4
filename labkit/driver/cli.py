"""The command `labkit`. So far it has one subcommand, `labkit doctor`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from labkit import __version__

STATUSES = """exit status:
  0  all is well; there may be warnings
  1  a check failed; its remedy says what to do
  2  the command was used wrongly
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Raises:
        SystemExit: from argparse, after --help and --version (0) or wrong usage (2).
    """
    parser().parse_args(argv)
    try:
        from labkit.driver import doctor  # late: --version needs none of its imports
    except ImportError as error:
        print(f"failed   packages: {error}\n         Do: install labkit again with pip")
        return 1
    return doctor.run()


def parser() -> argparse.ArgumentParser:
    shape = {
        "epilog": STATUSES,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
    top = argparse.ArgumentParser("labkit", **shape)
    top.add_argument("--version", action="version", version=f"labkit {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    about = "say whether this machine can run labkit, and what to do if not"
    commands.add_parser("doctor", help=about, description=about, **shape)
    return top
