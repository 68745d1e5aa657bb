"""The command line of the rebase: ``python -m msa_vendored.vendoring rebase``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence

from msa_vendored.errors import MSAVendoredError
from msa_vendored.vendoring.errors import CheckError, UsageError
from msa_vendored.vendoring.pipeline import read_checkout
from msa_vendored.vendoring.rebase.proof import Check, run_checks
from msa_vendored.vendoring.rebase.report import format_table, to_document, to_failure
from msa_vendored.vendoring.rebase.state import Decision
from msa_vendored.vendoring.rebase.target import Wish
from msa_vendored.vendoring.rebase.workflow import Result, abort_rebase, continue_rebase, start_rebase


def run_rebase(options: argparse.Namespace) -> None:
    """Move the patches to another pin: --to WHAT; after a stop --continue, --skip PATCH, --keep PATCH or --abort."""
    _check_usage(options)
    if options.abort:
        abort_rebase(options.root)
        _say("the rebase was given up; the checkout is as it was")
        return
    if options.check:
        _, error = _check(options, read_checkout(options.root, options.pin).pin.id, {})
        if error is not None:
            raise error
        return
    try:
        result = _run(options)
    except MSAVendoredError as error:
        if options.json:
            print(json.dumps(to_failure(error), indent=2))
        raise
    checks, stop = list[Check](), result.stop
    if not options.json:
        _print_result(result, options)
    if stop is None and not options.dry_run and not options.no_checks:
        checks, stop = _check(options, result.new_pin, result.state.extras)
    if options.json:
        print(json.dumps(to_document(result, checks, stop), indent=2))
    if stop is not None:
        raise stop


def _check(
    options: argparse.Namespace, pin_id: str, extras: Mapping[str, tuple[str, ...]]
) -> tuple[list[Check], CheckError | None]:
    """Run what the build runs; the error if something failed."""
    checks = run_checks(options.root, pin_id, extras, offline=options.offline, report=lambda c: _say(c.to_line()))
    failed = [check.name for check in checks if not check.ok]
    if not failed:
        return checks, None
    return checks, CheckError(
        f"pin {pin_id} is not usable yet: a check failed",
        got=", ".join(failed),
        next_command=f"mend a patch: nox -s patch -- new|refresh NAME --pin {pin_id} --only; or the versions: edit "
        f"tested_with of {pin_id} in third_party/msa.lock.toml; then nox -s rebase -- --check --pin {pin_id}",
    )


def _check_usage(options: argparse.Namespace) -> None:
    modes = {"--to": options.to is not None, "--continue": options.go_on, "--abort": options.abort}
    modes["--check"] = options.check
    given = [name for name, is_given in modes.items() if is_given]
    decided = bool(options.skip or options.keep)
    if len(given) > 1 or (not given and not decided) or ((options.abort or options.check) and decided):
        raise UsageError(
            "one of --to, --continue, --skip, --keep, --abort and --check says what to do",
            expected="--to WHAT to begin (with --skip and --keep, if you know already), or one of the others to go on",
            got=" ".join(given) or "none",
        )
    starts = {"--dry-run": options.dry_run, "--from-source": options.from_source, "--sha256": options.sha256}
    starts |= {"--tested-with": options.tested_with, "--make-default": options.make_default}
    starts["--replace"] = options.replace
    if options.to is None and (wrong := [name for name, value in starts.items() if value]):
        raise UsageError(f"{wrong[0]} goes with --to", next_command="nox -s rebase -- --continue, or --abort")


def _run(options: argparse.Namespace) -> Result:
    decisions: dict[str, Decision] = {}
    for kind, names in (("skip", options.skip), ("keep", options.keep)):
        for name in names:
            decisions[patch_file(name)] = kind  # type: ignore[assignment]  # both are decisions
    if options.to is None:
        return continue_rebase(options.root, decisions=decisions, report=_say)
    wish = Wish(
        options.to,
        source=options.from_source,
        sha256=options.sha256,
        tested_with=_parse_versions(options.tested_with),
        offline=options.offline,
    )
    return start_rebase(
        options.root,
        wish,
        pin_id=options.pin,
        old_source=options.source,
        decisions=decisions,
        report=_say,
        dry_run=options.dry_run,
        make_default=options.make_default,
        replace_patches=options.replace,
    )


def patch_file(name: str) -> str:
    """File name of a patch that the user may have given without its suffix."""
    return name if name.endswith(".patch") else f"{name}.patch"


def _parse_versions(items: Sequence[str]) -> dict[str, str]:
    pairs = [item.partition("=") for item in items]
    if wrong := [item for item, pair in zip(items, pairs, strict=True) if not pair[0] or not pair[2]]:
        raise UsageError("--tested-with wants NAME=VERSION", got=wrong[0])
    return {name: version.lstrip("=") for name, _, version in pairs}


def _print_result(result: Result, options: argparse.Namespace) -> None:
    print(f"{result.state.old_pin} to {result.new_pin}")
    for note in result.state.notes:
        print(f"  {note}")
    print(format_table(result), end="\n\n", flush=True)
    if result.stop is None or options.dry_run:
        print(result.summary.to_markdown())
    if result.written:
        verb = "would write" if options.dry_run else "wrote"
        print("\n".join(f"{verb} {path}" for path in result.written), flush=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
