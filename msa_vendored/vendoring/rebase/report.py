"""What a rebase did, as a table for people and as a JSON document for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from msa_vendored.errors import MSAVendoredError
from msa_vendored.vendoring.rebase.proof import Check
from msa_vendored.vendoring.rebase.target import parse_pin
from msa_vendored.vendoring.rebase.workflow import Result

JSON_SCHEMA = 1


def format_table(result: Result) -> str:
    """One line a patch: name, verdict and decision, then what explains it, indented."""
    decisions, rows = result.state.decisions, []
    width = max((len(outcome.name) for outcome in result.outcomes), default=0)
    for outcome in result.outcomes:
        decision = decisions.get(outcome.name)
        said = {None: "", "skip": ", left out", "keep": ", carried all the same"}[decision]
        rows.append(f"{outcome.name:<{width}}  {outcome.verdict}{said}")
        rows += [f"{'':<{width}}    {detail}" for detail in outcome.details]
    return "\n".join(rows)


def to_document(result: Result, checks: Sequence[Check], error: MSAVendoredError | None) -> dict[str, object]:
    """The same as JSON can hold it; ``exit_code`` and ``tag`` are those that the command returns."""
    state, pin = result.state, parse_pin(result.state.pin_text)
    patches = [
        {**asdict(outcome), "decision": state.decisions.get(outcome.name), "commit": outcome.commit}
        for outcome in result.outcomes
    ]
    return {
        "schema": JSON_SCHEMA,
        "old_pin": state.old_pin,
        "new_pin": pin.id,
        "source": pin.source.to_dict(),
        "tested_with": dict(pin.tested_with),
        "notes": list(state.notes),
        "patches": patches,
        "scratch": state.scratch if result.stop else None,
        "written": list(result.written),
        "summary": asdict(result.summary),
        "checks": [asdict(check) for check in checks],
        "exit_code": error.exit_code if error else 0,
        "tag": error.tag if error else None,
        "error": _describe(error) if error else None,
    }


def to_failure(error: MSAVendoredError) -> dict[str, object]:
    """The document when there is no result, since the rebase could not begin or go on."""
    return {"schema": JSON_SCHEMA, "exit_code": error.exit_code, "tag": error.tag, "error": _describe(error)}


def _describe(error: MSAVendoredError) -> dict[str, str | None]:
    return {name: getattr(error, name) for name in ("what", "where", "expected", "got", "next_command")}
