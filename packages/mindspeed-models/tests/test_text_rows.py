"""From rows of files to stored tokens, through the whole data path, with a real tokenizer."""

import gzip
import json
import math

import pytest
from mindspeed_models.errors import ModelError
from mindspeed_models.testing import CHATML, tiny_tokenizer
from mindspeed_models.text.encode import alpaca_messages, encode_text, make_encoder, messages_of
from mindspeed_runtime.config import build_recipe
from mindspeed_runtime.data.batch import IGNORE
from mindspeed_runtime.data.loader import Cut
from mindspeed_runtime.data.open import open_data
from mindspeed_runtime.data.prepare import EmptyRowError, RowError
from mindspeed_runtime.data.sources import DataError, Row
from mindspeed_runtime.data.store import write_store
from mindspeed_runtime.recipe import DataConfig


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def _open(tokenizer, tmp_path, *paths, cut=None, **data):
    given = {"train": [str(path) for path in paths], "sequence": 64, "shuffle": False, **data}
    recipe = build_recipe({"model": {"path": "none"}, "data": given})
    return open_data(
        recipe,
        lambda: make_encoder(tokenizer, recipe.data, 311),
        cut or Cut(global_batch=1, micro_batch=1, data_rank=0, data_size=1),
        cache=tmp_path / "cache",
        share=lambda value: value,
        is_main=True,
    )


def _documents(data):
    store = data.train.rows.store
    return [store.document(n)[0].tolist() for n in range(len(store))]


def _put(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_empty_documents_and_files_leave_no_trace(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    empty = [{"text": ""}, {"text": "   "}, {"text": None}, ""]
    _put(tmp_path / "b.jsonl", *empty, {"text": "hello"}, *empty, {"text": "world"})
    (tmp_path / "c.jsonl").write_text("")
    data = _open(tokenizer, tmp_path, tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl")
    end = tokenizer.eos_token_id
    assert _documents(data) == [[*tokenizer(text).input_ids, end] for text in ("hello", "world")]
    said = "\n".join(data.notes)
    for count in ("4 x empty text", "2 x null text", "2 x blank line", "2 x empty file"):
        assert count in said
    _put(tmp_path / "only.jsonl", *empty)
    with pytest.raises(DataError, match="nothing is left to train on") as caught:
        _open(tokenizer, tmp_path, tmp_path / "only.jsonl")
    assert "2 x empty text" in str(caught.value)


def test_the_same_documents_in_other_containers_give_the_same_tokens(tokenizer, tmp_path):
    rows = [{"text": f"document {n}: na\u00efve \u6f22\u5b57"} for n in range(5)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    contents = {
        "bom.jsonl": b"\xef\xbb\xbf" + lines.encode(),
        "crlf.jsonl": lines.replace("\n", "\r\n").encode(),
        "end.jsonl": lines[:-1].encode(),
        "packed.jsonl.gz": gzip.compress(lines.encode()),
        "array.jsonl": json.dumps(rows).encode(),
        "pretty.json": json.dumps(rows, indent=1).encode(),
    }
    (tmp_path / "clean.jsonl").write_text(lines)
    expected = _documents(_open(tokenizer, tmp_path, tmp_path / "clean.jsonl"))
    assert len(expected) == 5
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        assert _documents(_open(tokenizer, tmp_path, tmp_path / name)) == expected, name


def _alpaca():
    """Ten rows, six of them bad, and the reason for each by its line."""
    lines = [json.dumps({"instruction": f"ask {n}", "input": "", "output": f"answer {n}"}) for n in range(1, 11)]
    lines[1] = json.dumps({"instruction": "ask 2", "input": None, "output": "answer 2"})  # null input: empty
    lines[3] = lines[3][:22]
    lines[4] = json.dumps({"instruction": 5, "output": "answer 5"})
    lines[5] = json.dumps({"instruction": "ask 6", "output": None})
    lines[6] = json.dumps({"instruction": "ask 7"})
    lines[7] = json.dumps({"instruction": "ask 8", "output": ""})
    lines[8] = '{"instruction": "ask 9", "output": NaN}'
    reasons = {
        4: "not JSON: Unterminated string",
        5: "'instruction' is not text",
        6: "'output' is null",
        7: "no key 'output'",
        8: "'output' is empty",
        9: "not JSON: NaN is not a JSON value",
    }
    return lines, reasons


def test_every_bad_alpaca_row_is_listed_or_skipped_and_none_is_ever_written_out(tokenizer, tmp_path):
    lines, reasons = _alpaca()
    path = _put(tmp_path / "rows.jsonl", *lines)
    with pytest.raises(DataError) as caught:
        _open(tokenizer, tmp_path, path, format="alpaca")
    said = str(caught.value).splitlines()[1:]
    for line, (number, reason) in zip(said, reasons.items(), strict=True):
        assert line.startswith(f"{path}:{number}: {reason}")
    data = _open(tokenizer, tmp_path, path, format="alpaca", bad_rows="skip")
    assert [note for note in data.notes if ".jsonl:" in note] == [f"data.train: skipped {line}" for line in said]
    text = [tokenizer.decode(tokens) for tokens in _documents(data)]
    assert text == [
        f"<|im_start|>user\nask {n}<|im_end|>\n<|im_start|>assistant\nanswer {n}<|im_end|>" for n in (1, 2, 3, 10)
    ]
    assert "None" not in "".join(text)
    assert "null" not in "".join(text)


def test_prompts_that_fill_the_window_are_left_out_and_named(tokenizer, tmp_path):
    def row(words):
        return {"messages": [{"role": "user", "content": "word " * words}, {"role": "assistant", "content": "yes"}]}

    path = _put(tmp_path / "rows.jsonl", row(3), row(60), row(4))
    data = _open(tokenizer, tmp_path, path, format="messages")
    assert data.train.num_rows == 2
    named = [note for note in data.notes if "left out" in note]
    assert named[-1] == f"data.train: left out {path}:2: no trained token within data.sequence=64"
    assert all(batch.num_trained > 0 for n in range(2) for batch in data.train.step(n))
    only = _put(tmp_path / "only.jsonl", row(60), row(61))
    with pytest.raises(DataError) as caught:
        _open(tokenizer, tmp_path, only, format="messages")
    assert [f"{only}:{n}: no trained token within data.sequence=64" for n in (1, 2)] == str(caught.value).splitlines()[
        1:
    ]


def test_batches_train_the_answers_and_nothing_else(tokenizer, tmp_path):
    chats = [
        [("user", f"question {n}"), ("assistant", f"answer {n}"), ("user", "more"), ("assistant", "x" * n)]
        for n in range(1, 9)
    ]
    lines = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    path = _put(tmp_path / "rows.jsonl", *lines)
    expected = sorted(text + "<|im_end|>" for chat in chats for role, text in chat if role == "assistant")
    for packing in (False, True):
        data = _open(tokenizer, tmp_path, path, format="messages", sequence=256, packing=packing, shuffle=True)
        found = []
        for step in range(math.ceil(data.train.steps_per_epoch)):
            for batch in data.train.step(step):
                labels = batch.labels[0].tolist()
                answer: list[int] = []
                for label in [*labels, IGNORE]:
                    if label != IGNORE:
                        answer.append(label)
                    elif answer:
                        found.append(tokenizer.decode(answer))
                        answer = []
        assert sorted(found) == expected


def test_a_template_that_rewrites_history_makes_a_document_a_turn(tmp_path):
    dropping = CHATML.replace("message['content']", "(message['content'] if loop.last else message['content'][-1:])")
    tokenizer = tiny_tokenizer(template=dropping)
    chat = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "bc")) * 2]
    data = _open(tokenizer, tmp_path, _put(tmp_path / "rows.jsonl", {"messages": chat}), format="messages")
    assert data.train.num_rows == 2
    assert data.notes[0].startswith("data.train: 1 rows, 2 documents")


def test_a_refused_conversation_is_a_bad_row(tokenizer, tmp_path):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    bad = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<|im_end|>c"}]}
    path = _put(tmp_path / "rows.jsonl", good, bad)
    with pytest.raises(DataError, match=r"rows\.jsonl:2: an assistant message holds the text of <\|im_end\|>"):
        _open(tokenizer, tmp_path, path, format="messages")
    assert _open(tokenizer, tmp_path, path, format="messages", bad_rows="skip").train.num_rows == 1


def test_a_tokenizer_without_a_template_names_the_option(tmp_path):
    bare = tiny_tokenizer(template=None)
    path = _put(tmp_path / "rows.jsonl", {"instruction": "a", "output": "b"})
    for kind in ("messages", "alpaca"):
        with pytest.raises(ModelError, match=r"no chat template; name a file with one in data\.chat_template"):
            _open(bare, tmp_path, path, format=kind)
    assert _open(bare, tmp_path, _put(tmp_path / "text.jsonl", {"text": "a b"})).train.num_rows == 1


def test_a_template_that_is_not_jinja_is_the_users_mistake_and_not_the_rows(tmp_path):
    broken = tiny_tokenizer(template="{% for m in messages %}{{ m.content }")
    path = _put(tmp_path / "rows.jsonl", {"instruction": "a", "output": "b"})
    with pytest.raises(ModelError, match=r"data\.chat_template: the template is not Jinja: .* \(line 1\)"):
        _open(broken, tmp_path, path, format="alpaca", bad_rows="skip")


def test_a_tokenizer_of_a_larger_model_is_refused(tokenizer):
    with pytest.raises(ModelError, match="the tokenizer has tokens up to 302 and the model 302"):
        make_encoder(tokenizer, DataConfig(train=("x",)), 302)
    assert make_encoder(tokenizer, DataConfig(train=("x",)), 303).vocabulary == 303


def test_all_that_tokens_depend_on_is_in_the_key():
    def key(tokenizer, **data):
        return make_encoder(tokenizer, DataConfig(**{"train": ("x",), **data}), 400).key

    first = key(tiny_tokenizer())
    assert key(tiny_tokenizer()) == first
    other_end, other_start, added = tiny_tokenizer(), tiny_tokenizer(), tiny_tokenizer()
    other_end.eos_token = "<|endoftext|>"
    other_start.bos_token = "<|im_start|>"
    added.add_tokens(["<tool>"])
    others = [
        key(other_end),
        key(other_start),
        key(added),
        key(tiny_tokenizer(template=CHATML + " ")),
        key(tiny_tokenizer(texts=("quite other words in here",) * 9)),
        key(tiny_tokenizer(), format="alpaca"),
        key(tiny_tokenizer(), text_key="content"),
    ]
    assert len({first, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"instruction": "a"}, "no key 'output'"),
        ({"output": "a"}, "no key 'instruction'"),
        ({"instruction": "a", "output": None}, "'output' is null"),
        ({"instruction": "a", "output": " \n"}, "'output' is empty"),
        ({"instruction": None, "output": "b"}, "'instruction' is null"),
        ({"instruction": 3, "output": "b"}, "'instruction' is not text"),
        ({"instruction": "a", "input": 4, "output": "b"}, "'input' is not text"),
        ({"instruction": "a", "output": "b", "system": ["x"]}, "'system' is not text"),
        ({"instruction": "a", "output": "\ud800b"}, "'output' holds half of a surrogate pair at character 0"),
        ([1], "not an object"),
        (None, "not an object"),
        ("text", "not an object"),
    ],
)
def test_alpaca_rows_are_checked_by_name(content, reason):
    with pytest.raises(RowError, match=reason):
        alpaca_messages(content)


def test_alpaca_rows_become_messages():
    for extra in ({}, {"input": None}, {"input": ""}, {"input": "  "}, {"system": ""}, {"system": None}):
        messages = alpaca_messages({"instruction": "a", "output": "b", **extra})
        assert [(m["role"], m["content"]) for m in messages] == [("user", "a"), ("assistant", "b")]
    messages = alpaca_messages({"instruction": "a", "input": "i", "output": "b", "system": "s"})
    assert [(m["role"], m["content"]) for m in messages] == [("system", "s"), ("user", "a\n\ni"), ("assistant", "b")]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, "no list under the key 'messages'"),
        ([], "no list under the key 'messages'"),
        ({"messages": None}, "no list under the key 'messages'"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": ["hello"]}, r"messages\[0\] has no role"),
        ({"messages": [{"role": "bot", "content": "x"}]}, r"messages\[0\] has no role among"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"messages\[0\] has no role among"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant"}]},
            r"messages\[1\]\.content is not text",
        ),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\]\.content is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"messages\[0\]\.content is not text"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, r"messages\[0\]\.content holds half of a surrogate"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]},
            r"messages\[0\] calls tools",
        ),
    ],
)
def test_messages_rows_are_checked_by_name(content, reason):
    with pytest.raises(RowError, match=reason):
        messages_of(content)


def test_text_ends_with_one_end_token_and_is_trained_whole(tokenizer):
    example = encode_text(tokenizer, "hello world")
    assert example.tokens == [*tokenizer("hello world").input_ids, tokenizer.eos_token_id]
    assert all(example.trained)
    bare = tiny_tokenizer()
    bare.eos_token = None
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        encode_text(bare, "hello")


@pytest.mark.parametrize(
    ("content", "error", "reason"),
    [
        ({"text": None}, EmptyRowError, "null text"),
        (None, EmptyRowError, "null text"),
        ({"text": " \n"}, EmptyRowError, "empty text"),
        ({"txt": "a"}, RowError, r"no key 'text' \(data\.text_key\)"),
        ({"text": 3}, RowError, "not a string"),
        ([1], RowError, "not a string"),
        ({"text": "a\ud800"}, RowError, "half of a surrogate pair at character 1"),
    ],
)
def test_text_rows_are_checked(tokenizer, content, error, reason):
    encode = make_encoder(tokenizer, DataConfig(train=("x",)), 311).encode
    with pytest.raises(error, match=reason):
        encode(Row(content=content, origin="f:1"))


def test_megatron_core_reads_the_store(tokenizer, tmp_path):
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    examples = [encode_text(tokenizer, text) for text in ("one", "two words", json.dumps({"a": 1}), "z" * 99)]
    for vocabulary in (len(tokenizer), 100_000):  # either token type
        write_store(tmp_path / "tokens", examples, vocabulary)
        theirs = indexed.IndexedDataset(str(tmp_path / "tokens"))
        assert len(theirs) == len(examples)
        assert [theirs[n].tolist() for n in range(len(examples))] == [example.tokens for example in examples]
        assert theirs.document_indices.tolist() == list(range(len(examples) + 1))
