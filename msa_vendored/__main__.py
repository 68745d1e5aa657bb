"""Command line of an installed msa_vendored: ``python -m msa_vendored doctor|verify|bench``.

Exit codes: 0 ok; 1 not available, or another error of this package; 2 usage; 10 files differ from the built tree.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from msa_vendored import __version__
from msa_vendored.bench.cli import add_arguments
from msa_vendored.errors import MSAVendoredError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. An error goes to standard error as ``error[MSAV<code>]: …``."""
    options = _make_parser().parse_args(arguments)
    try:
        return _run(options)
    except MSAVendoredError as error:
        print(f"error[{error.tag}]: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    if options.command == "bench":
        from msa_vendored.bench.cli import run_bench

        return run_bench(options)
    return run_doctor(as_json=options.json) if options.command == "doctor" else run_verify()


def run_doctor(*, as_json: bool) -> int:
    """Print what is there and what is missing; 0 only if ``kernels()`` binds in this process."""
    from msa_vendored.doctor import make_report, print_report

    report = make_report()
    if as_json:
        print(json.dumps(report.to_dict(), indent=2, sort_keys=True))
    else:
        print_report(report, sys.stdout)
    if report.error is not None:
        raise MSAVendoredError(**{key: value for key, value in report.error.items() if key != "type"})
    return 0


def run_verify() -> int:
    """Compare every installed file of the private package with its manifest; lists all differences at once.

    Raises:
        InstalledDriftError: there are differences.
    """
    from msa_vendored.installed import PACKAGE_DIR, InstalledDriftError, provenance, reinstall_command, verify_installed

    drift = verify_installed()
    if drift:
        lines = drift.to_lines()
        raise InstalledDriftError(
            f"the installed MSA differs from the built tree in {len(lines)} file{'s' if len(lines) > 1 else ''}",
            where=str(PACKAGE_DIR / provenance().folder),
            expected=provenance().built_tree_digest,
            got="\n            ".join(lines),
            next_command=reinstall_command(),
        )
    print(f"ok: {provenance().package} is as built ({provenance().built_tree_digest})")
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m msa_vendored", description="Look at an installed msa_vendored.")
    parser.add_argument("--version", action="version", version=f"msa_vendored {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what is installed, what is missing, whether the launchers bind")
    doctor.add_argument("--json", action="store_true", help="print JSON, schema 1")
    commands.add_parser("verify", help="compare every installed file of the patched MSA with what was built")
    bench = commands.add_parser("bench", help="measure sparse attention beside its peers on this GPU")
    add_arguments(bench)
    return parser


if __name__ == "__main__":
    sys.exit(main())
