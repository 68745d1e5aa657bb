"""The options of the commands that change patches; apart from them, so that other commands load none of it."""

from __future__ import annotations

import argparse


def add_rebase_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``rebase``, besides those that every command has."""
    parser.add_argument("--to", metavar="WHAT", help="a pin id of the lock, PROJECT==VERSION, or a git commit")
    parser.add_argument("--from-source", metavar="FOLDER|ARCHIVE|GIT_URL", help="take the new sources there")
    parser.add_argument("--sha256", help="digest that the new wheel must have")
    parser.add_argument("--tested-with", action="append", default=[], metavar="NAME=VERSION", help="may be repeated")
    parser.add_argument("--make-default", action="store_true", help="make the new pin the default one")
    parser.add_argument("--dry-run", action="store_true", help="show what would become of each patch; write nothing")
    parser.add_argument("--continue", dest="go_on", action="store_true", help="go on after a stop")
    parser.add_argument("--skip", action="append", default=[], metavar="PATCH", help="do without it; may be repeated")
    parser.add_argument("--keep", action="append", default=[], metavar="PATCH", help="carry it although it stopped")
    parser.add_argument("--abort", action="store_true", help="give up; the checkout was not touched")
    parser.add_argument("--replace", action="store_true", help="replace the patches that the new pin has already")
    parser.add_argument("--check", action="store_true", help="only run the checks of the end, for --pin")
    parser.add_argument("--no-checks", action="store_true", help="do not build, prove and compile at the end")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")


def add_patch_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``patch``, besides those that every command has."""
    parser.add_argument("action", choices=("new", "refresh", "drop", "list"))
    parser.add_argument("name", nargs="?", metavar="NAME", help="file name of the patch; .patch may be left out")
    parser.add_argument("--only", action="store_true", help="for the pin alone, whatever the others have")
    parser.add_argument("--abort", action="store_true", help="give up the edit that new or refresh began")
