"""The input that SentryWard gets, without SentryWard: the session itself is ``nox -s sentry``."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from ptx_emulator import Options, emulate, gemm, sentry
from ptx_emulator.launch import Kernel
from ptx_emulator.mutation import Session
from ptx_emulator.ptx import parse_entries
from ptx_emulator.sentry import Opinion, Verifier
from ptx_emulator.sentry_input import build_input, delete_statement, find_fields, find_types, replace_reductions
from ptx_emulator.snippets import module
from ptx_emulator.subjects import Outcome, Recorder, Subject
from ptx_emulator.tensor_map import decode_tensor_map, encode_tensor_map

STRUCTS = (".align 8 .b8 sizes[16]", ".align 4 .b8 one[4]")
PARAMETERS = (".u64 out", ".u64 lengths", ".f32 scale", ".s32 shift", *STRUCTS)
BODY = """
ld.param.u64 %d0, [out]; ld.param.u64 %d1, [lengths]; ld.param.f32 %r1, [scale]; ld.param.s32 %r2, [shift];
ld.param.v2.b32 {%r3, %r4}, [sizes+8]; ld.param.b32 %r6, [one];
ld.global.b32 %r5, [%d1]; add.s32 %r5, %r5, %r3; st.global.b32 [%d0], %r5;
"""


def record() -> tuple[str, Recorder]:
    """A launch with a pointer that is written, one that is read, scalars, and a struct read in part."""
    text = module(BODY, PARAMETERS)
    recorder = Recorder(Kernel(parse_entries(text)["test"]))
    out, lengths = torch.zeros(2, dtype=torch.int32), torch.tensor([5, -1], dtype=torch.int32)
    sizes = b"".join(n.to_bytes(4, "little") for n in (1, 2, 3, 4))
    report = emulate(recorder, out, lengths, 0.5, -2, sizes, bytes(3) + b"\x01", names=("out", "lengths"))
    assert not report.fatal
    assert int(out[0]) == 8
    return text, recorder


def test_fields_are_what_the_kernel_reads() -> None:
    """A field that is declared but never read, or read and not declared, is refused by the verifier."""
    _, recorder = record()
    fields = [(field.parameter.name, field.offset, field.size) for field in find_fields(recorder.entry)]
    assert fields == [
        ("out", 0, 8), ("lengths", 0, 8), ("scale", 0, 4), ("shift", 0, 4), ("sizes", 8, 4), ("sizes", 12, 4),
        ("one", 0, 4),
    ]  # fmt: skip


def test_input_describes_the_launch() -> None:
    """A wrong value or type: the verifier would prove something about another launch."""
    text, recorder = record()
    config = build_input(text, recorder.entry, recorder.launches[0], {"data_branch_loop_iterations": 2})
    json.dumps(config)
    assert config["launch"] == {"grid_dim": [1, 1, 1], "block_dim": [32, 1, 1], "dynamic_shared_bytes": 0}
    assert config["data_branch_loop_iterations"] == 2
    kinds = {d["name"]: (d["type"], d.get("object")) for d in config["declarations"]}
    assert kinds == {
        "out_at_0": ("pointer", "out"),
        "lengths_at_0": ("pointer", "lengths"),
        "scale_at_0": ("f32", None),
        "shift_at_0": ("s32", None),
        "sizes_at_8": ("u32", None),
        "sizes_at_12": ("u32", None),
        "one_at_0": ("u32", None),
    }
    values = {argument["field"]: argument["value"] for argument in config["arguments"]}
    assert values == {"scale_at_0": 0.5, "shift_at_0": -2, "sizes_at_8": 3, "sizes_at_12": 4, "one_at_0": 1 << 24}


def test_integers_that_the_kernel_leaves_alone_are_given_and_others_not() -> None:
    """The verifier takes them for constants, and refuses a kernel that writes one."""
    text, recorder = record()
    (array,) = build_input(text, recorder.entry, recorder.launches[0], {})["shape_arrays"]
    assert (array["parameter"], array["offset"], array["shapes"]) == ("lengths", 0, [[5, 0xFFFFFFFF]])


def test_tensor_maps_are_decoded() -> None:
    """Shape, strides, box and swizzle of the copies decide which bytes a copy touches."""
    tensor = torch.zeros(3, 40, 64, dtype=torch.bfloat16)
    decoded = decode_tensor_map(encode_tensor_map(tensor, (1, 8, 32), 64))
    assert decoded.sizes == (64, 40, 3)
    assert decoded.strides_bytes == (128, 40 * 128)
    assert decoded.box == (32, 8, 1)
    assert (decoded.swizzle_bytes, decoded.base, decoded.format) == (64, tensor.data_ptr(), 10)


def test_the_gemm_is_described_with_its_maps() -> None:
    """Maps are passed by value and told by the address that the kernel takes."""
    verifier = Verifier(gemm.subject(k_blocks=3))
    maps = {entry["parameter"]: entry for entry in verifier.config["tma_descriptors"]}
    assert set(maps) == {"map_a", "map_b"}
    assert maps["map_b"]["object"] == "b"
    assert maps["map_b"]["global_shape"] == [3 * gemm.K_BLOCK, gemm.COLUMNS]
    assert maps["map_b"]["swizzle"] == "128B"
    assert [d["parameter"] for d in verifier.config["declarations"]] == ["out", "blocks"]


def test_types_come_from_the_text_of_the_entry() -> None:
    """Another entry of the module may have parameters of the same names."""
    text, recorder = record()
    other = text.replace(".visible .entry test", ".visible .entry other").replace(".f32 scale", ".u32 scale")
    other = other.partition(".address_size 64")[2]
    assert find_types(text + other, recorder.entry)["scale"] == "f32"
    assert find_types(other + text, recorder.entry)["scale"] == "f32"


def test_types_of_pointers_with_attributes() -> None:
    """What NVVM writes for a pointer: state space and alignment between type and name."""
    text = module("ret;", (".u64 .ptr .global .align 16 a", ".align 4 .b8 sizes[16]", ".f32 b"))
    assert find_types(text, parse_entries(text)["test"]) == {"a": "u64", "sizes": "b8", "b": "f32"}


def test_deleting_from_the_text_deletes_what_the_session_deletes() -> None:
    """A mutant of the text that is not the emulator's mutant compares two different kernels."""
    subject = gemm.subject(k_blocks=3)
    session = Session(subject, (("eager", 0),), ())
    for site in session.sites:
        text = delete_statement(subject.ptx, site.line, site.text)
        kernels = {"test": Kernel(parse_entries(text)["test"])}
        outcome = gemm.run(kernels["test"], 3, Options(max_instructions=100_000))
        trial = session.try_deletion([site], stop=False)
        expected = trial.functional or trial.strict
        assert bool(outcome.wrong or outcome.report.findings) == bool(expected), site
    with pytest.raises(ValueError, match=r"bar\.sync 9"):
        delete_statement(subject.ptx, 5, "bar.sync 9")


def test_reductions_become_stores_of_the_same_bytes() -> None:
    """The verifier does not take them; a store of other bytes would hide or invent conflicts."""
    text = """red.relaxed.gpu.global.add.noftz.v4.bf16x2 [%rd1], {%r1, %r2, %r3, %r4};
    red.global.add.v2.f32 [%rd1], {%r1, %r2}; red.global.add.u64 [%rd1], %rd2; red.shared.add.u32 [%r1], %r2;"""
    assert (
        replace_reductions(text).replace("    ", "")
        == """st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};
st.global.v2.b32 [%rd1], {%r1, %r2}; st.global.b64 [%rd1], %rd2; red.shared.add.u32 [%r1], %r2;"""
    )


def answer(monkeypatch: pytest.MonkeyPatch, whole: str, mutants: str = "", detail: str = "") -> int:
    """Status of the session for the GEMM if SentryWard answered this."""

    def verify(ptx: str, *_arguments: object, **_options: object) -> Opinion:
        return Opinion(whole if ptx == gemm.make_text() else mutants or whole, detail, 0)

    monkeypatch.setattr(sentry, "verify", verify)
    return sentry.run_one("gemm")


@pytest.mark.parametrize(
    ("whole", "mutants", "status"),
    [
        ("race_free", "not_wellsynced", sentry.VERIFIED),
        ("race_free", "race_free", sentry.FAILED),
        ("race_free", "unsupported", sentry.FAILED),
        ("race_free", "timeout", sentry.NO_ANSWER),
        ("potential_race", "not_wellsynced", sentry.FAILED),
        ("timeout", "", sentry.NO_ANSWER),
        ("unsupported", "", sentry.FAILED),
    ],
)
def test_only_a_verified_kernel_with_a_rejected_mutant_counts(
    monkeypatch: pytest.MonkeyPatch, whole: str, mutants: str, status: int
) -> None:
    """A verifier that accepts everything, or that has stopped to take a kernel, must not pass for agreement."""
    assert answer(monkeypatch, whole, mutants) == status


def test_what_is_unsupported_is_registered_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another reason, or an answer at last, must be seen: the list is what the documents repeat."""
    monkeypatch.setattr(sentry, "EXPECTED_UNSUPPORTED", {"gemm": "wgmma"})
    assert answer(monkeypatch, "unsupported", detail="wgmma, line 3: wgmma.fence") == sentry.UNSUPPORTED
    assert answer(monkeypatch, "unsupported", detail="not_static, line 3: bra") == sentry.FAILED
    assert answer(monkeypatch, "race_free", "not_wellsynced") == sentry.FAILED


def test_the_session_needs_one_verified_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 0 where nothing was proven: every kernel unsupported, or without an answer; or one has crashed."""
    codes: list[int] = []
    monkeypatch.setattr("subprocess.run", lambda *_a, **_k: SimpleNamespace(returncode=codes.pop(0)))
    for statuses, status in (([0, 2, 3, 4], 0), ([2, 3, 4], 1), ([0, 1], 1), ([0, -11], 1)):
        codes[:] = statuses
        assert sentry.run_several([str(i) for i in range(len(statuses))], 1) == status


def test_a_kernel_that_is_wrong_in_the_emulator_is_not_put_to_the_verifier() -> None:
    """Its opinion on a kernel that does not even work is no second opinion."""
    made = gemm.subject()
    broken = Subject("", made.kernels, "test", lambda o: Outcome(made.run(o).report, frozenset({"product"})), made.ptx)
    with pytest.raises(AssertionError, match="product"):
        Verifier(broken)
