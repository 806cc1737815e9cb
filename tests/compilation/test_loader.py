"""A wrapper runs without Inductor, and nothing that is not a known wrapper runs at all."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kerf_runtime.compilation import loader
from kerf_runtime.compilation.artifact import load_artifact
from kerf_runtime.compilation.loader import load_wrapper, parse_wrapper
from kerf_runtime.errors import CompileError

HEAD = '''"""An artifact."""
import torch
from torch._inductor.async_compile import AsyncCompile
aten = torch.ops.aten
async_compile = AsyncCompile()
'''
CALL = """
class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        buf0 = empty_strided_cpu((arg1_1, 3), (3, 1), torch.float32)
        extern_kernels.mm(arg0_1, reinterpret_tensor(arg0_1, (3, 3), (1, 3), 0), out=buf0)
        {body}
        return (buf0, max(arg1_1, 2), )

runner = Runner(partitions=[])
call = runner.call
"""


def wrapper(body="pass", head=""):
    return HEAD + head + CALL.format(body=body)


def load(source, num_inputs=2, libraries=()):
    return load_wrapper(source, libraries, num_inputs=num_inputs, identity="test")


def test_a_wrapper_runs_and_empties_its_list_of_inputs():
    x = torch.arange(9.0).view(3, 3)
    inputs = [x, 3]
    result, size = load(wrapper())(inputs)
    assert inputs == []
    assert torch.equal(result, x @ x.t())
    assert size == 3


BIASED = """
class Runner:
    def call(self, args):
        arg0_1, arg1_1, arg2_1 = args
        args.clear()
        buf0 = empty_strided_cpu((4, 5), (5, 1), torch.float32)
        extern_kernels.bias_addmm(BIAS, arg1_1, arg2_1, alpha=2, beta=3, out=buf0)
        return (buf0, )
"""


@pytest.mark.parametrize(
    ("shape", "bias"),
    [
        ((5,), "reinterpret_tensor(arg0_1, (4, 5), (0, 1), 0)"),
        ((1, 5), "arg0_1"),
        ((4, 5), "arg0_1"),
    ],
)
def test_a_product_with_a_bias_that_tuning_chose_runs(shape, bias):
    added, x, weight = (torch.randn(s) for s in (shape, (4, 3), (3, 5)))
    expected = torch.addmm(added, x, weight, alpha=2, beta=3)
    (result,) = load(HEAD + BIASED.replace("BIAS", bias), num_inputs=3)([added, x, weight])
    torch.testing.assert_close(result, expected)


def test_a_bias_that_is_the_same_in_every_row_goes_in_as_one_row(monkeypatch):
    given = []
    monkeypatch.setattr(torch, "addmm", lambda bias, *_, **__: given.append(bias.shape))
    for bias in (torch.ones(5).expand(4, 5), torch.ones(4, 5)):
        loader._bias_addmm(bias, torch.ones(4, 3), torch.ones(3, 5))
    assert given == [(5,), (4, 5)]


def test_the_sum_of_two_products_that_tuning_chose_runs():
    source = HEAD + BIASED.replace(
        "bias_addmm(BIAS, arg1_1, arg2_1, alpha=2, beta=3,",
        "_mm_plus_mm(arg0_1, arg2_1, arg1_1, arg2_1,",
    )
    x, y, weight = torch.randn(4, 3), torch.randn(4, 3), torch.randn(3, 5)
    (result,) = load(source, num_inputs=3)([x, y, weight])
    torch.testing.assert_close(result, x @ weight + y @ weight)


def test_every_product_that_is_tuned_is_known_under_the_name_torch_gives_it():
    from torch._inductor.kernel import bmm, mm, mm_plus_mm

    choices = [
        mm.aten_mm,
        mm.aten_mm_dtype,
        mm.aten_addmm,
        mm.aten_bias_addmm,
        mm.aten__fp8_mm,
        bmm.aten_bmm,
        bmm.aten_bmm_dtype,
        bmm.aten_baddbmm,
        mm_plus_mm.aten_mm_plus_mm,
    ]
    for choice in choices:
        parse_wrapper(wrapper(f"{choice.call_name()}(buf0)"))


def test_nothing_outside_the_call_function_runs():
    head = "if True:\n    import nothing_of_this_name\nx = 1 / 0\n"
    load(wrapper(head=head))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (wrapper("unknown_helper(buf0)"), "the name 'unknown_helper'"),
        (wrapper("open('/etc/passwd')"), "the name 'open'"),
        (wrapper("__import__('os')"), "the name '__import__'"),
        (wrapper("exec('1')"), "the name 'exec'"),
        (wrapper("import os; os.getpid()"), "the name 'os'"),
        (wrapper("self.partitions[0]([buf0])"), "partitions|the name 'self'"),
        (wrapper("extern_kernels.convolution(buf0)"), "the extern kernel 'convolution'"),
        (wrapper("cpp_fused_add_0(buf0)"), "the name 'cpp_fused_add_0'"),
        (wrapper(head="for i in range(3): pass\n"), "the statement 'for i in range"),
        (wrapper(head="with open('x') as f: pass\n"), r"the statement .with open"),
        (wrapper(head="def helper(): pass\n"), "the statement 'def helper"),
        (wrapper(head="x += 1\n"), "the statement"),
        (wrapper(head="k = async_compile.halide('k', 'source')\n"), "made by async_compile.halide"),
        (
            wrapper(head="k = async_compile.triton('j', 'source')\n"),
            "the kernel 'j' under the name",
        ),
        (wrapper(head="k = async_compile.cpp('source')\n"), "made by async_compile.cpp"),
        (wrapper(head="k = async_compile.cpp_pybinding(types, f'x{1}')\n"), "no wrapper"),
        (wrapper(head="k = async_compile.cpp_pybinding()\n"), "no wrapper"),
        (HEAD, r"no Runner\.call"),
        (
            wrapper().replace("def call(self, args)", "def call(self, args, more)"),
            r"no Runner\.call",
        ),
        (wrapper().replace("arg0_1, arg1_1 = args", "pass"), "the name 'arg0_1'"),
        (
            wrapper().replace("arg0_1, arg1_1 = args", "args[0]; arg0_1, arg1_1 = args"),
            "unpacking its arguments",
        ),
        ("this is no Python", "no wrapper"),
        ("\0", "no wrapper"),
        ("(" * 5000, "no wrapper"),
        ("", r"no Runner\.call"),
    ],
)
def test_a_wrapper_with_anything_unknown_is_refused_and_the_thing_is_named(source, message):
    with pytest.raises(CompileError, match=message) as raised:
        load(source)
    assert "tested with torch 2.11" in raised.value.hint


def test_another_number_of_inputs_is_refused():
    with pytest.raises(CompileError, match="2 inputs instead of 3"):
        load(wrapper(), num_inputs=3)


def test_another_number_of_libraries_is_refused(tmp_path):
    with pytest.raises(CompileError, match="0 kernels but 1 libraries"):
        load(wrapper(), libraries=[tmp_path / "kernel_0.so"])


def test_a_library_that_is_none_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "kernel_0.so"
    path.write_bytes(b"not a library")
    head = "k = async_compile.cpp_pybinding(['float*'], '''source''')\n"
    with pytest.raises(CompileError, match="cannot load the kernel") as raised:
        load(wrapper("k(buf0)", head), libraries=[path])
    assert raised.value.where == str(path)


@pytest.fixture(scope="module")
def artifact(cold):
    """The folder of a published artifact and the model it belongs to."""
    return cold.cache.folder, cold.loaded.model


def test_the_wrappers_of_a_real_model_are_understood(artifact):
    folder, _ = artifact
    sources = [path.read_text() for path in folder.glob("rank_0/pieces/*/general/wrapper.py")]
    assert len(sources) == 3
    for source in sources:
        assert parse_wrapper(source).kernels


@given(st.data())
def test_a_wrapper_with_a_damaged_line_is_understood_or_refused(artifact, data):
    folder, _ = artifact
    source = data.draw(
        st.sampled_from(sorted(folder.glob("rank_0/pieces/*/general/wrapper.py")))
    ).read_text()
    lines = source.splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    lines[at] = data.draw(st.text(max_size=20) | st.just("") | st.sampled_from(lines))
    try:
        parse_wrapper("\n".join(lines))
    except CompileError as error:
        assert "does not know" in str(error)  # noqa: PT017 - most damage is refused, some is harmless


@pytest.fixture
def copy(artifact, tmp_path):
    folder, model = artifact
    return shutil.copytree(folder, tmp_path / "copy"), model


def test_an_artifact_is_loaded_from_any_folder(copy):
    loaded = load_artifact(*copy)
    assert len(loaded.plan.steps) == 61


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "rank_0/graph/plan.json").unlink(),
        lambda folder: (folder / "rank_0/graph/plan.json").write_text("{"),
        lambda folder: (folder / "rank_0/graph/plan.json").write_text("[" * 10000),
        lambda folder: (folder / "rank_0/graph/plan.json").write_text("[]"),
        lambda folder: (folder / "rank_0/graph/plan.json").write_bytes(b"\xff"),
        lambda folder: shutil.rmtree(next(folder.glob("rank_0/pieces/*"))),
        lambda folder: next(folder.glob("rank_0/pieces/*/piece.json")).unlink(),
        lambda folder: next(folder.glob("rank_0/pieces/*/piece.json")).write_text(
            '{"backend": "other", "sizes": [], "tokens": null}'
        ),
        lambda folder: next(folder.glob("rank_0/pieces/*/piece.json")).write_text(
            '{"backend": "inductor", "sizes": [1e999], "tokens": null}'
        ),
        lambda folder: next(folder.glob("rank_0/pieces/*/piece.json")).write_text(
            '{"backend": "inductor", "sizes": [], "tokens": [1e999, 0]}'
        ),
        lambda folder: next(folder.glob("rank_0/pieces/*/general/wrapper.py")).write_bytes(b"\xff"),
        lambda folder: next(folder.glob("rank_0/pieces/*/general/kernel_0.so")).unlink(),
        lambda folder: next(folder.glob("rank_0/pieces/*/general/kernel_0.so")).write_bytes(
            b"\x7fELF"
        ),
    ],
    ids=[
        "no_plan",
        "cut_plan",
        "deep_plan",
        "list_plan",
        "binary_plan",
        "no_piece",
        "no_description",
        "foreign_backend",
        "endless_size",
        "endless_index",
        "binary_wrapper",
        "no_kernel",
        "cut_kernel",
    ],
)
def test_a_damaged_artifact_is_a_compile_error_whatever_is_damaged(copy, damage):
    folder, model = copy
    damage(folder)
    with pytest.raises(CompileError):
        load_artifact(folder, model)


def test_a_file_that_only_people_read_refuses_no_artifact_whatever_is_in_it(copy):
    folder, model = copy
    (folder / "rank_0/graph/computation_graph.py").write_bytes(b"\xff graph")
    assert load_artifact(folder, model).sources["computation_graph.py"] == "\ufffd graph"


def test_an_artifact_for_another_model_is_refused(copy):
    folder, _ = copy
    with pytest.raises(CompileError, match="which the model lacks"):
        load_artifact(folder, torch.nn.Linear(2, 2))
