"""``python -m msa_vendored.vendoring COMMAND``, run from the root of a checkout; the nox sessions call it.

Exit codes are those of ``vendoring/errors.py``: 0 is success, 2 usage, 10 drift, 11 bad hash, 12 patch, and so on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from msa_vendored.errors import MSAVendoredError
from msa_vendored.vendoring.errors import DriftError
from msa_vendored.vendoring.rebase.arguments import add_patch_arguments, add_rebase_arguments


def run_vendor(options: argparse.Namespace) -> None:
    """Put the pristine tree into third_party/msa/<pin>/, or verify the one that is there."""
    from msa_vendored.vendoring.pipeline import read_checkout
    from msa_vendored.vendoring.vendor import vendor_pin

    checkout = read_checkout(options.root, options.pin)
    result = vendor_pin(
        checkout.pin,
        checkout.manifest,
        checkout.third_party,
        source=options.source,
        offline=options.offline,
        replace=options.refresh,
    )
    how = "verified, already there" if result.reused else f"fetched from {result.fetched_from}"
    print(f"{result.path}: {len(checkout.manifest)} files, {checkout.pin.tree_digest}, {how}")


def run_build(options: argparse.Namespace) -> None:
    """Vendor, verify, patch, rewrite, build the wheel, install it into an empty environment and prove it."""
    from msa_vendored.vendoring.pipeline import build_wheel, prove_wheel

    wheel = build_wheel(options.root, options.out, pin_id=options.pin, source=options.source, offline=options.offline)
    provenance = prove_wheel(options.root, wheel, pin_id=options.pin)
    print(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB, {provenance['package']}")
    for patch in provenance["patches"]:  # type: ignore[attr-defined]  # JSON: a list of tables
        print(f"  {patch['kind']:<9} {patch['file']}: {patch['subject']}")


def run_verify(options: argparse.Namespace) -> None:
    """Report all drift in lock, manifests, patches and trees; with --red-green, run each patch's test both ways."""
    from msa_vendored.vendoring.checks import verify_checkout

    checked, findings = verify_checkout(options.root, options.pin)
    for line in checked:
        print(f"checked {line}")
    if findings:
        raise DriftError(
            f"{len(findings)} differences", got="\n".join(["", *(f"{f.subject}: {f.problem}" for f in findings)])
        )
    if options.red_green:
        run_red_green_check(options)


def run_red_green_check(options: argparse.Namespace) -> None:
    """Each patch's test must fail without it and pass with it."""
    from msa_vendored.vendoring.pipeline import read_checkout
    from msa_vendored.vendoring.rebase.proof import prepare_environment
    from msa_vendored.vendoring.redgreen import run_red_green
    from msa_vendored.vendoring.vendor import vendor_pin

    checkout = read_checkout(options.root, options.pin)
    tree = vendor_pin(
        checkout.pin, checkout.manifest, checkout.third_party, source=options.source, offline=options.offline
    )
    python = sys.executable
    if checkout.pin.tested_with != checkout.lock.pin().tested_with:  # not the versions that this environment has
        python = str(prepare_environment(options.root, checkout.pin, {}) / "bin" / "python")
    outcomes = run_red_green(
        checkout, tree.path, options.patch, report=lambda o: print(o.to_line(), flush=True), python=python
    )
    wrong = [outcome for outcome in outcomes if not outcome.ok]
    if wrong:
        raise DriftError("a patch and its test do not belong together", got="; ".join(o.to_line() for o in wrong))


def run_lock(options: argparse.Namespace) -> None:
    """Write the digests of patches, pre-images and post-images into the lock, after a reviewed change of a patch."""
    from msa_vendored.vendoring.pipeline import write_patch_locks

    for line in write_patch_locks(options.root, options.pin, source=options.source, offline=options.offline):
        print(line)


def run_repro(options: argparse.Namespace) -> None:
    """Build twice under different umask, folder, time zone and locale; the wheels must be equal byte for byte."""
    from msa_vendored.vendoring.repro import build_twice

    print(build_twice(options.root, pin_id=options.pin))


def run_rebase(options: argparse.Namespace) -> None:
    """Move the patches to another pin: --to WHAT; after a stop --continue, --skip PATCH, --keep PATCH or --abort."""
    from msa_vendored.vendoring.rebase.command import run_rebase

    run_rebase(options)


def run_patch(options: argparse.Namespace) -> None:
    """Make a patch from an edited tree, refresh it, drop it, or list all: new|refresh|drop NAME, or list."""
    from msa_vendored.vendoring.patchcmd import run_patch

    run_patch(options)


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "vendor": run_vendor,
    "build": run_build,
    "verify": run_verify,
    "lock": run_lock,
    "repro": run_repro,
    "rebase": run_rebase,
    "patch": run_patch,
}


def make_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = argparse.ArgumentParser(prog="python -m msa_vendored.vendoring", description=__doc__.split("\n")[0])
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="checkout (default: current folder)")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function in COMMANDS.items():
        command = commands.add_parser(name, help=function.__doc__)
        command.add_argument("--pin", help="pin id of third_party/msa.lock.toml (default: default_pin)")
        command.add_argument("--from", dest="source", metavar="FOLDER|ARCHIVE|GIT_URL", help="take the sources there")
        command.add_argument("--offline", action="store_true", help="fetch nothing")
        if name == "vendor":
            command.add_argument("--refresh", action="store_true", help="replace a tree that has drifted")
        if name == "build":
            command.add_argument("--out", type=Path, default=Path("dist"), help="folder of the wheel (default: dist)")
        if name == "rebase":
            add_rebase_arguments(command)
        if name == "patch":
            add_patch_arguments(command)
        if name == "verify":
            command.add_argument("--red-green", action="store_true", help="also run each patch's test both ways")
            command.add_argument("--patch", action="append", default=[], help="only this patch; may be repeated")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors go to stderr as ``error[MSAV12]: …`` and become the exit status."""
    options = make_parser().parse_args(arguments)
    options.root = options.root.resolve()
    try:
        COMMANDS[options.command](options)
    except MSAVendoredError as error:
        print(f"error[{error.tag}]: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
