"""Options that time candidates are for static sizes, whoever asks for them: the user or the environment."""

from __future__ import annotations

import pytest
from tests.compilation.backends.fake_gpu import gated_wrapper

from kerf_runtime.compilation.backends import CompileRequest, inductor
from kerf_runtime.compilation.backends.inductor import InductorBackend
from kerf_runtime.compilation.backends.options import settings_for, validate_options
from kerf_runtime.compilation.backends.warm_up import warm_up_program
from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.compilation.program import rebuild_program
from kerf_runtime.config.tuning import UNTIMED
from kerf_runtime.errors import CompileError, ConfigError

ASKED = {"max_autotune": True, "coordinate_descent_tuning": True, "triton.multi_kernel": 1}


def settings(options, *, general, on_gpu=True):
    return settings_for(options, timed=not general, on_gpu=on_gpu, hooks={})


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("options", [{}, ASKED])
def test_code_for_any_number_of_tokens_is_never_tuned(options, on_gpu):
    made = settings(options, general=True, on_gpu=on_gpu)
    assert {name: made[name] for name in UNTIMED} == dict(UNTIMED)


def test_a_static_size_is_tuned_on_a_gpu_only_and_the_user_decides():
    tuned, plain = settings({}, general=False), settings({}, general=False, on_gpu=False)
    for name in ("max_autotune", "coordinate_descent_tuning"):
        assert (tuned[name], plain[name]) == (True, False)
    assert settings(ASKED, general=False)["triton.multi_kernel"] == 1
    assert not settings({"max_autotune": False}, general=False)["max_autotune"]


def test_other_options_of_the_user_are_in_force_for_every_shape():
    for general in (True, False):
        assert settings({"size_asserts": True}, general=general)["size_asserts"] is True


def test_every_option_exists_and_has_its_type():
    allowed = {n: v for n, v in settings({}, general=False).items() if n in UNTIMED}
    validate_options({**UNTIMED, **allowed})


def test_the_environment_tunes_no_code_for_any_number_of_tokens():
    from torch._inductor import config

    names = ("max_autotune", "max_autotune_pointwise", "coordinate_descent_tuning")
    with config.patch(dict.fromkeys(names, True)):  # as their variables would have set them
        loose, _ = gated_wrapper(64)
        wrapper, _ = gated_wrapper(64, settings({}, general=True))
    assert "'max_autotune': True" in loose
    for name in ("max_autotune", "max_autotune_pointwise", "autotune_pointwise"):
        assert f"'{name}': False" in wrapper
    assert "'coordinate_descent_tuning': True" not in wrapper


@pytest.mark.parametrize(("tokens", "tuned"), [(None, False), (8, True)])
def test_the_back_end_tunes_static_pieces_alone(monkeypatch, tokens, tuned):
    seen = []

    def generate(request, values, made):
        seen.append(made)
        raise ConfigError("seen")

    monkeypatch.setattr(inductor, "_generate", generate)
    monkeypatch.setattr(inductor, "_on_gpu", lambda values: True)
    with pytest.raises(ConfigError, match="seen"):
        InductorBackend().compile(request(tokens, max_autotune_gemm=True))
    for name in ("max_autotune", "max_autotune_gemm", "coordinate_descent_tuning"):
        assert seen[0][name] is tuned


WRAPPER = """
class Runner:
    def call(self, args):
        arg0_1, arg1_1, arg2_1, arg3_1 = args
        args.clear()
        extern_kernels.{product}(arg1_1, arg2_1)
        return (arg1_1, )
"""


@pytest.fixture
def chooses(monkeypatch):
    """Tuning chooses a product that the loader does not know; gives the settings of every compilation."""
    made = []

    def generate(request, values, settings):
        made.append(settings)
        return WRAPPER.format(product="fastest_mm" if settings["max_autotune"] else "mm")

    monkeypatch.setattr(inductor, "_generate", generate)
    monkeypatch.setattr(inductor, "_on_gpu", lambda values: True)
    return made


def request(tokens, **options):
    module, values = rebuild_program(warm_up_program("cpu"))
    return CompileRequest(module, values, tokens=tokens, options=options)


def test_a_tuned_size_that_the_loader_does_not_know_is_compiled_without_tuning_and_counted(
    chooses, caplog
):
    with compilation_counter.expect(
        untuned_compilations=1, static_compilations=1, inductor_compilations=2
    ):
        artifact = InductorBackend().compile(request(8, max_autotune=True))
    assert b"extern_kernels.mm(" in artifact.files["wrapper.py"]
    assert [settings["max_autotune"] for settings in chooses] == [True, False]
    assert "8 tokens is compiled without tuning (TuningFailed)" in caplog.text
    assert "'fastest_mm'" in caplog.text


def test_a_size_that_cannot_be_tuned_is_compiled_without_tuning_and_counted(
    chooses, monkeypatch, caplog
):
    def generate(request, values, settings):
        if settings["max_autotune"]:
            raise RuntimeError("no valid choices")
        return WRAPPER.format(product="mm")

    monkeypatch.setattr(inductor, "_generate", generate)
    with compilation_counter.expect(
        untuned_compilations=1, static_compilations=1, inductor_compilations=1
    ):
        InductorBackend().compile(request(8, max_autotune=True))
    assert "8 tokens is compiled without tuning (TuningFailed)" in caplog.text
    assert "RuntimeError: no valid choices" in caplog.text


@pytest.mark.usefixtures("chooses")
def test_other_code_that_the_loader_does_not_know_is_an_error(monkeypatch):
    monkeypatch.setattr(inductor, "_generate", lambda *_: WRAPPER.format(product="fastest_mm"))
    for tokens in (None, 8):
        with pytest.raises(CompileError, match="extern kernel 'fastest_mm'"):
            InductorBackend().compile(request(tokens))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("assume_32bit_indexing", True),
        ("triton.num_decompose_k_splits", 4),
        ("triton.cudagraphs", True),
        ("freezing", True),
    ],
)
def test_what_cannot_be_used_is_refused_and_always_off(name, value):
    with pytest.raises(ConfigError, match=f"'{name}' cannot be used"):
        validate_options({name: value})
    for general in (True, False):
        assert not settings({}, general=general)[name]
