"""From files to batches: nothing lost, nothing twice, nothing that depends on ranks."""

import gzip
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspeed_runtime.data.batch import IGNORE
from mindspeed_runtime.data.loader import Cut, Loader
from mindspeed_runtime.data.order import Order
from mindspeed_runtime.data.prepare import RowError, open_store, prepare
from mindspeed_runtime.data.rows import Packed, Single, Windows
from mindspeed_runtime.data.sources import BadRow, DataError, expand, read_rows
from mindspeed_runtime.data.store import Example, Store, write_store


@given(size=st.integers(1, 300), seed=st.integers(0, 2**31), epoch=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_epoch_is_a_whole_permutation_and_any_position_is_found_alone(size, seed, epoch):
    order = Order(num_rows=size, seed=seed)
    found = [order[epoch * size + n] for n in range(size)]
    assert sorted(found) == list(range(size))
    assert order[epoch * size + size // 2] == found[size // 2]


def test_seeds_and_epochs_differ_and_an_order_looks_random():
    first = [Order(num_rows=97, seed=1)[n] for n in range(194)]
    assert first[:97] != first[97:]
    assert first[:97] != [Order(num_rows=97, seed=2)[n] for n in range(97)]
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(first[:97])) < 10
    assert [Order(num_rows=5, seed=1, shuffle=False)[n] for n in range(7)] == [0, 1, 2, 3, 4, 0, 1]


def _store(tmp_path, lengths, seed=0):
    chance = np.random.default_rng(seed)
    at, examples = 1, []
    for length in lengths:
        # Every token of the store has a number of its own, so that any mix-up shows.
        examples.append(Example(tokens=list(range(at, at + length)), trained=list(chance.random(length) < 0.6)))
        at += length
    write_store(tmp_path / "tokens", examples, 1 << 20)
    return Store(tmp_path / "tokens"), examples


LENGTHS = [5, 9, 3, 12, 7, 4, 8, 6, 11, 2, 10]


def _cut(global_batch=4, micro_batch=1, data_rank=0, data_size=1):
    return Cut(global_batch=global_batch, micro_batch=micro_batch, data_rank=data_rank, data_size=data_size)


def test_a_store_gives_back_what_was_written(tmp_path):
    store, examples = _store(tmp_path, LENGTHS)
    assert len(store) == len(examples) and store.num_tokens == sum(LENGTHS)
    for number, example in enumerate(examples):
        tokens, trained = store.document(number)
        assert tokens.tolist() == example.tokens and trained.tolist() == example.trained
    assert store.num_trained == sum(sum(example.trained) for example in examples)


def _pairs(batches):
    """(token, label) of every trained position."""
    return sorted(
        (int(token), int(label))
        for batch in batches
        for token, label in zip(batch.tokens.flatten(), batch.labels.flatten(), strict=True)
        if label != IGNORE
    )


@pytest.mark.parametrize("kind", [Single, Packed])
def test_every_trained_token_is_predicted_once_an_epoch_from_the_token_before_it(tmp_path, kind):
    store, examples = _store(tmp_path, LENGTHS)
    loader = Loader(kind(store, 16, 3, True), _cut(), apart=kind is Packed)
    expected = sorted(
        (example.tokens[n - 1], example.tokens[n])
        for example in examples
        for n in range(1, len(example.tokens))
        if example.trained[n]
    )
    assert _pairs([batch for part in loader.once() for batch in part]) == expected


def test_windows_flow_over_documents_and_predict_every_trained_token_once(tmp_path):
    store, examples = _store(tmp_path, [40, 3, 38])
    trained = [flag for example in examples for flag in example.trained]
    for apart in (False, True):
        loader = Loader(Windows(store, 16, 3, True, apart=apart), _cut(), apart=apart)
        starts = {1, 41, 44}  # first tokens of documents
        expected = [(n, n + 1) for n in range(1, 81) if trained[n] and not (apart and n + 1 in starts)]
        assert _pairs([batch for part in loader.once() for batch in part]) == expected


def test_packed_documents_have_numbers_and_positions_of_their_own(tmp_path):
    store, _ = _store(tmp_path, LENGTHS)
    for part in Loader(Packed(store, 16, 3, True), _cut(), apart=True).once():
        for batch in part:
            for tokens, positions, documents, labels in zip(
                batch.tokens, batch.positions, batch.documents, batch.labels, strict=True
            ):
                for number in documents.unique():
                    here = documents == number
                    assert positions[here].tolist() == list(range(int(here.sum())))
                    if number:  # padding is 0
                        assert (tokens[here].diff() == 1).all()
                    else:
                        assert (labels[here] == IGNORE).all()
                inside = labels != IGNORE
                assert (labels[inside] == tokens[inside] + 1).all()


@pytest.mark.parametrize("kind", [Single, Packed])
def test_the_rows_of_a_step_are_the_same_in_every_cut_and_after_a_restart(tmp_path, kind):
    store, _ = _store(tmp_path, LENGTHS)
    whole = {}
    for data_size in (1, 2, 4):
        for micro_batch in (1, 2):
            if 4 % (data_size * micro_batch):
                continue
            for step in (7, 0, 3):  # in any order: a loader keeps no place
                rows = []
                for rank in range(data_size):
                    loader = Loader(kind(store, 16, 3, True), _cut(4, micro_batch, rank, data_size), apart=True)
                    rows += [tuple(row) for batch in loader.step(step) for row in batch.tokens.tolist()]
                assert sorted(rows) == whole.setdefault(step, sorted(rows))
    assert len({str(rows) for rows in whole.values()}) == 3


def test_the_longest_row_of_the_global_batch_sets_the_length_on_every_rank(tmp_path):
    store, _ = _store(tmp_path, LENGTHS)
    for step in range(4):
        lengths = {
            batch.tokens.shape[1]
            for rank in range(4)
            for batch in Loader(Single(store, 32, 3, True), _cut(4, 1, rank, 4), padding="longest", multiple=4).step(
                step
            )
        }
        assert len(lengths) == 1
        assert lengths.pop() in (8, 12)


def test_the_last_validation_batch_is_filled_with_rows_that_do_not_count(tmp_path):
    store, _ = _store(tmp_path, LENGTHS)
    parts = Loader(Single(store, 16, 3, False), _cut()).once()
    assert [sum(batch.tokens.shape[0] for batch in part) for part in parts] == [4, 4, 4]
    last = parts[-1][-1]
    assert last.num_trained == 0 and torch.isfinite(last.tokens.float()).all()


def _write(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def _texts(*patterns):
    return [row.content["text"] for row in read_rows(expand(patterns))]


def test_the_same_rows_in_other_wrappings_are_the_same_rows(tmp_path):
    rows = [json.dumps({"text": f"row {n}"}) for n in range(5)]
    clean = "\n".join(rows) + "\n"
    (tmp_path / "clean.jsonl").write_text(clean)
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + clean.encode())
    (tmp_path / "crlf.jsonl").write_bytes(clean.replace("\n", "\r\n").encode())
    (tmp_path / "end.jsonl").write_text(clean.rstrip("\n"))
    (tmp_path / "blank.jsonl").write_text(clean.replace("\n", "\n\n"))
    (tmp_path / "array.jsonl").write_text("[" + ",\n".join(rows) + "]")
    (tmp_path / "pretty.json").write_text(json.dumps([json.loads(row) for row in rows], indent=2))
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(clean.encode()))
    (tmp_path / "hidden.jsonl").write_bytes(gzip.compress(clean.encode()))
    for path in tmp_path.iterdir():
        assert _texts(str(path)) == [f"row {n}" for n in range(5)], path.name


def test_what_cannot_be_read_is_refused_by_name(tmp_path):
    (tmp_path / "wide.jsonl").write_bytes('{"text": "x"}\n'.encode("utf-16"))
    with pytest.raises(DataError, match=r"wide\.jsonl: encoded as UTF-16"):
        _texts(str(tmp_path / "wide.jsonl"))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 99)[:40])
    with pytest.raises(DataError, match=r"cut.jsonl.gz: the gzip data is cut short"):
        _texts(str(tmp_path / "cut.jsonl.gz"))
    with pytest.raises(DataError, match="no such file, folder or match"):
        expand([str(tmp_path / "absent*.jsonl")])
    (tmp_path / "notes.docx").write_text("x")
    with pytest.raises(DataError, match="this kind of file is not read"):
        expand([str(tmp_path / "notes.docx")])


def test_files_come_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a", "c"):
        _write(tmp_path / f"{name}.jsonl", [json.dumps({"text": name})])
    (tmp_path / "README").write_text("not data")
    assert _texts(str(tmp_path)) == _texts(str(tmp_path / "*.jsonl")) == ["a", "b", "c"]


def _encode(row):
    text = row.content.get("text")
    if not isinstance(text, str):
        raise RowError("the text is not a string")
    return [Example(tokens=[ord(c) % 50 for c in text], trained=[c == "!" for c in text])]


def _prepare(tmp_path, pattern, **options):
    settings = {"name": "train", "cache": tmp_path / "cache", "key": "k", "sequence": 4, "vocabulary": 50}
    return prepare([pattern], _encode, **{**settings, **options})


BAD = ['{"text": "ab!"}', '{"text": "cut', "[1]", '{"text": null}', '{"text": NaN}', '{"text": "cd!"}']


def test_every_bad_row_is_listed_with_its_place_and_stops_the_run(tmp_path):
    path = _write(tmp_path / "rows.jsonl", [BAD[0], BAD[1], BAD[3], BAD[4], BAD[5]])
    with pytest.raises(DataError) as caught:
        _prepare(tmp_path, path)
    text = str(caught.value)
    assert "3 rows cannot be used" in text
    for line, reason in ((2, "not JSON"), (3, "the text is not a string"), (4, "not JSON: NaN is not a JSON value")):
        assert f"rows.jsonl:{line}: {reason}" in text
    assert not list((tmp_path / "cache").glob("train-*"))
    store, counts = open_store(_prepare(tmp_path, path, skip_bad=True))
    assert len(store) == 2 and len(counts["skipped"]) == 3


def test_rows_without_a_label_inside_the_window_are_left_out_and_named(tmp_path):
    path = _write(tmp_path / "rows.jsonl", ['{"text": "abcdefgh!"}', '{"text": "ab!"}'])
    store, counts = open_store(_prepare(tmp_path, path))
    assert len(store) == 1
    assert counts["unlabelled"][0]["origin"].endswith("rows.jsonl:1")
    only = _write(tmp_path / "only.jsonl", ['{"text": "abcdefgh!"}'])
    with pytest.raises(DataError, match=r"nothing to train on in .*\n.*only.jsonl:1: no trained token among"):
        _prepare(tmp_path, only)


def test_prepared_data_is_found_again_and_made_anew_when_anything_changes(tmp_path):
    path = _write(tmp_path / "rows.jsonl", ['{"text": "ab!"}'])
    first = _prepare(tmp_path, path)
    assert _prepare(tmp_path, path) == first
    assert _prepare(tmp_path, path, key="other") != first
    assert _prepare(tmp_path, path, sequence=5) != first
    _write(tmp_path / "rows.jsonl", ['{"text": "ac!"}'])
    assert _prepare(tmp_path, path) != first


def test_a_bad_row_knows_where_it_is(tmp_path):
    path = _write(tmp_path / "rows.jsonl", BAD[:2])
    assert [type(row) for row in read_rows(expand([path]))][1] is BadRow
