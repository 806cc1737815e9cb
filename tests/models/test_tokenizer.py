"""Tokenizers from both formats, against transformers, and chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.checkpoints import make_llama, smollm2_path, write_gguf, write_safetensors
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen2Tokenizer

from kerf_runtime.errors import ModelError, RequestError
from kerf_runtime.models import Tokenizer, load_tokenizer
from kerf_runtime.models.chat_template import ChatTemplate
from kerf_runtime.models.gguf_file import read_gguf
from kerf_runtime.models.gguf_tokenizer import tokenizer_from_gguf

TEXTS = [
    "Hello world, don't  stop!\n\n\tNow.",
    "In 2024 there were 1234567 of them; 3.14159 too.",
    "naïve café 日本語 😀👩‍👩‍👧 ßΩ",
    "def f(x):\n    return x**2  # comment\n\n\n",
    "<|im_start|>user\nHi<|im_end|>\n",
    "   leading and trailing   ",
    "",
]


_COVERED = st.characters(min_codepoint=0x20, max_codepoint=0xFFFF, exclude_categories=["Cs"])
"""Characters all of whose bytes SmolLM2's vocabulary knows; it lacks 21 bytes of 256."""


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(smollm2_path())


def test_a_gguf_tokenizer_gives_the_tokens_of_transformers(smollm2: Tokenizer) -> None:
    path = smollm2_path()
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in TEXTS:
        assert smollm2.encode(text) == theirs(text)["input_ids"]


def test_digits_are_tokens_of_their_own(smollm2: Tokenizer) -> None:
    pieces = [smollm2.decode([token]) for token in smollm2.encode("x12345")]
    assert pieces == ["x", "1", "2", "3", "4", "5"]


@settings(max_examples=200, deadline=None)
@given(st.text(_COVERED))
def test_any_text_survives_encoding(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_recognised_and_skipped_when_decoding(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>user\nHi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert smollm2.decode(ids) == "user\nHi"
    assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>"


def test_facts_come_from_the_file(smollm2: Tokenizer) -> None:
    assert (smollm2.eos_token_ids, smollm2.bos_token_id, smollm2.vocab_size) == ((2,), 1, 49152)


def test_the_chat_template_of_the_file_makes_the_prompt(smollm2: Tokenizer) -> None:
    prompt = smollm2.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    without = smollm2.apply_chat_template([{"role": "user", "content": "Hi"}], False)
    assert not without.endswith("assistant\n")


def metadata(**changes: Any) -> dict[str, Any]:
    """A vocabulary of the 256 byte symbols and one merged word, as in a GGUF file."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *symbols, "hi", "<tool>"]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["h i"],
        "tokenizer.ggml.token_type": [3, 3, *[1] * len(symbols), 1, 4],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return {**values, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}


def test_first_and_last_tokens_are_added_as_the_file_says() -> None:
    def encode(**changes: Any) -> list[str]:
        backend = tokenizer_from_gguf(metadata(**changes), where="f")
        tokens: list[str] = backend.encode("hi").tokens
        return tokens

    assert encode() == ["hi"]
    assert encode(add_bos_token=True) == ["<s>", "hi"]
    assert encode(add_bos_token=True, add_eos_token=True) == ["<s>", "hi", "</s>"]
    assert encode(pre="llama-bpe") == ["<s>", "hi"], "the default of that kind"
    assert encode(pre="llama-bpe", add_bos_token=False) == ["hi"]


def test_the_qwen2_kind_gives_the_tokens_of_transformers() -> None:
    """With merges across words and digits, which only the right pre-tokenizer keeps apart."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = [*TEXTS, "cafe\u0301 is café", "DON'T we'll\r\n\r\n x  "]
    backend.train_from_iterator(texts * 4, trainer)
    model = json.loads(backend.to_str())["model"]
    vocabulary, merges = model["vocab"], [tuple(pair) for pair in model["merges"]]
    facts = metadata(
        pre="qwen2",
        tokens=sorted(vocabulary, key=vocabulary.__getitem__),
        merges=[" ".join(pair) for pair in merges],
        token_type=[1] * len(vocabulary),
        add_bos_token=False,
    )
    ours = tokenizer_from_gguf(facts, where="f")
    theirs = Qwen2Tokenizer(vocab=vocabulary, merges=merges)
    plain = tokenizer_from_gguf({**facts, "tokenizer.ggml.pre": "gpt-2"}, where="f")
    for text in texts:
        if "<|" not in text:  # theirs has special tokens of its own
            assert ours.encode(text).ids == theirs(text)["input_ids"]
    assert ours.encode("1234567").ids != plain.encode("1234567").ids
    assert ours.encode("cafe\u0301").ids == ours.encode("café").ids


def test_words_that_users_defined_are_whole_but_not_special() -> None:
    backend = tokenizer_from_gguf(metadata(), where="f")
    ids = backend.encode("<tool>hi").ids
    assert backend.decode(ids, skip_special_tokens=True) == "<tool>hi"
    assert len(ids) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"tokenizer model 'bert' is not supported\. Supported: gpt2 .*, llama"),
        ({"pre": "mystery"}, "pre-tokenizer 'mystery' is not supported. Supported: gpt-2, gpt2, smol"),
        ({"tokens": []}, "no vocabulary"),
        ({"merges": ["zz yy"]}, "do not fit together"),
    ],
)  # fmt: skip
def test_a_gguf_tokenizer_that_would_be_wrong_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        tokenizer_from_gguf(metadata(**changes), where="model.gguf")
    assert caught.value.where is not None
    assert caught.value.where.startswith("model.gguf: tokenizer.ggml.")


def test_a_gguf_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_llama())
    assert "tokenizer.ggml.model" not in read_gguf(path).metadata
    with pytest.raises(ModelError, match="tokenizer model None"):
        load_tokenizer(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder with a small trained tokenizer and a chat template."""
    write_safetensors(tmp_path, make_llama())
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(["the cat sat on the mat"] * 3, trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_a_folder_brings_its_own_tokenizer_and_template(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("the cat 猫")) == "the cat 猫"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert prompt == "<s>hi</s>"
    assert tokenizer.encode(prompt, False)[0] == 1
    assert tokenizer.eos_token_ids == (2,)


def test_a_template_file_wins_over_the_settings(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages|length }}")
    assert load_tokenizer(folder).apply_chat_template([{"role": "user", "content": ""}]) == "1"


def test_of_several_named_templates_the_default_is_used(folder: Path) -> None:
    templates = [{"name": "tools", "template": "x"}, {"name": "default", "template": "y"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert load_tokenizer(folder).apply_chat_template([]) == "y"


def test_without_a_template_the_request_is_refused_and_says_what_to_use(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="Use /v1/completions"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("text", [None, "{", '{"model": {"type": "Nonsense"}}'])
def test_a_missing_or_bad_tokenizer_file_is_named(folder: Path, text: str | None) -> None:
    path = folder / "tokenizer.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(folder)


def render(source: str, messages: list[dict[str, Any]]) -> str:
    template = ChatTemplate(source, {"eos_token": "</s>"}, where="f")
    return template.render(messages, add_generation_prompt=True)


def test_templates_may_use_the_usual_helpers() -> None:
    assert render("{{ {'a': 'ü<'} | tojson }}", []) == '{"a": "ü<"}'
    assert (
        render(
            "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", []
        )
        == "01"
    )
    assert len(render("{{ strftime_now('%Y') }}", [])) == 4


def test_lines_with_tags_alone_leave_no_blank_lines() -> None:
    assert render("{% if true %}\n  {% set x = 1 %}\nhi\n{% endif %}", []) == "hi\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param("{{ raise_exception('roles must alternate') }}", "roles must alternate", id="its own"),
        pytest.param("{{ messages[0]['content'] + 'x' }}", "content", id="no content"),
        pytest.param("{{ ''.__class__.__mro__ }}", "unsafe", id="sandbox"),
        pytest.param("{% for i in range(10**9) %}{% endfor %}", "Range too big", id="endless"),
        pytest.param("{{ messages.append(1) }}", "unsafe|not safe", id="immutable"),
    ],
)  # fmt: skip
def test_what_a_template_refuses_is_an_error_of_the_request(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render(source, [{"role": "user"}])
    assert caught.value.where == "messages"


def test_a_template_that_is_no_jinja_is_an_error_of_the_model() -> None:
    with pytest.raises(ModelError, match=r"not valid Jinja2: .* in line 2"):
        ChatTemplate("a\n{% if %}", {}, where="f")
