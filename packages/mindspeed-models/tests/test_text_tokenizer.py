"""Loading tokenizers: the one that is meant, or a sentence that says what is wrong."""

import json

import pytest
from mindspeed_models.errors import ModelError
from mindspeed_models.testing import CHATML, tiny_tokenizer
from mindspeed_models.text.tokenizer import load_tokenizer


@pytest.fixture
def folder(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_and_a_checkpoint_give_the_same_tokenizer(tmp_path, folder):
    (tmp_path / "step").mkdir()
    folder.rename(tmp_path / "step" / "hf")
    first, second = load_tokenizer(tmp_path / "step"), load_tokenizer(tmp_path / "step" / "hf")
    assert first("hello world").input_ids == second("hello world").input_ids
    assert first.chat_template == second.chat_template == CHATML


def test_a_template_file_takes_the_place_of_the_tokenizers_own_and_is_saved_with_it(tmp_path, folder):
    (tmp_path / "mine.jinja").write_text("\ufeff" + CHATML + "{# mine #}")
    tokenizer = load_tokenizer(folder, tmp_path / "mine.jinja")
    assert tokenizer.chat_template == CHATML + "{# mine #}"
    tokenizer.save_pretrained(tmp_path / "export")
    assert load_tokenizer(tmp_path / "export").chat_template == tokenizer.chat_template


def _cut(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text()[:500])


def _other(folder):
    (folder / "tokenizer.json").write_text('{"text": "not a tokenizer"}')


def _cut_settings(folder):
    (folder / "tokenizer_config.json").write_text("{")


def _no_files(folder):
    (folder / "tokenizer.json").unlink()


def _damaged_gguf(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "model.gguf").write_bytes(b"GGUF junk")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (_cut, r"tokenizer\.json: damaged \(Unterminated string"),
        (_other, r"tokenizer\.json: not a tokenizer"),
        (_cut_settings, r"model: its tokenizer cannot be loaded \(.*Expecting property name"),
        (_no_files, r"model: no tokenizer there"),
        (_damaged_gguf, r"model: its tokenizer cannot be loaded"),
    ],
)
def test_a_damaged_or_absent_tokenizer_is_named(folder, fault, reason):
    load_tokenizer(folder)
    fault(folder)
    with pytest.raises(ModelError, match=reason):
        load_tokenizer(folder)


def test_a_path_that_is_not_there_is_not_looked_for_elsewhere(tmp_path, folder):
    with pytest.raises(ModelError, match="organisation/model: no such file or folder"):
        load_tokenizer(tmp_path / "organisation" / "model")
    with pytest.raises(ModelError, match=r"tokenizer\.json: neither a folder nor a \.gguf file"):
        load_tokenizer(folder / "tokenizer.json")
    with pytest.raises(ModelError, match=r"data\.chat_template: .*none\.jinja cannot be read"):
        load_tokenizer(folder, tmp_path / "none.jinja")


def test_a_template_in_the_settings_gives_way_to_the_file_beside_them(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "old"}))
    assert load_tokenizer(folder).chat_template == CHATML  # chat_template.jinja
