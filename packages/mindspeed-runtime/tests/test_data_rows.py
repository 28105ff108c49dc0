"""From stored documents to batches: nothing lost, nothing twice, nothing across documents, nothing that depends on ranks.

Every token of a store has a number of its own (its place plus one), so that a batch says where each of its tokens came
from, and any mix-up shows.   Letters: S tokens a row.
"""

import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspeed_runtime.data.batch import IGNORE, Batch
from mindspeed_runtime.data.loader import Cut, Loader
from mindspeed_runtime.data.order import Order
from mindspeed_runtime.data.rows import Packed, Rows, Single, Windows
from mindspeed_runtime.data.sources import DataError
from mindspeed_runtime.data.store import Example, Store, write_store

LENGTHS = [5, 9, 3, 12, 7, 4, 8, 6, 11, 2, 10, 1, 40]
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)
some = settings(max_examples=40, deadline=None)


def _store(lengths, seed=0):
    """A store of documents of these lengths, some of their tokens trained; lives as long as its folder is open."""
    chance = np.random.default_rng(seed)
    ends = np.cumsum(lengths)
    examples = [
        Example(tokens=list(range(end - length + 1, end + 1)), trained=(chance.random(length) < 0.6).tolist())
        for length, end in zip(lengths, ends, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:  # what is mapped stays readable
        write_store(Path(folder) / "tokens", examples, 1 << 20)
        return Store(Path(folder) / "tokens"), examples


def _cut(global_batch=4, micro_batch=1, data_rank=0, data_size=1):
    return Cut(global_batch=global_batch, micro_batch=micro_batch, data_rank=data_rank, data_size=data_size)


def _rows(kind, store, sequence, *, shuffle=True, seed=3) -> Rows:
    if kind in ("flowing", "apart"):
        return Windows(store, sequence, seed, shuffle, apart=kind == "apart")
    return {"single": Single, "packed": Packed}[kind](store, sequence, seed, shuffle)


def _loader(kind, store, sequence, cut=None, **options):
    apart = kind in ("apart", "packed")
    return Loader(_rows(kind, store, sequence), cut or _cut(), apart=apart, **options)


KINDS = ["flowing", "apart", "single", "packed"]


def _all(loader) -> list[Batch]:
    return [batch for part in loader.once() for batch in part]


def _targets(batches):
    """Places of all targets, in order; each must follow the token that it is predicted from."""
    found = []
    for batch in batches:
        trained = batch.labels != IGNORE
        assert (batch.labels[trained] == batch.tokens[trained] + 1).all(), "a label is not the next token"
        found += (batch.labels[trained] - 1).tolist()
    return sorted(found)


def _expected_targets(examples, kind, sequence):
    found, start = [], 0
    for example in examples:
        reach = sequence + 1 if kind in ("single", "packed") else len(example.tokens)
        for n, flag in enumerate(example.trained[:reach]):
            # Only text that flows on predicts the first token of a document, from the last of the one before.
            # A window apart cannot predict its own first token from what is in another window either, but windows
            # share a token so that none is lost.
            if flag and (n > 0 or (kind == "flowing" and start > 0)):
                found.append(start + n)
        start += len(example.tokens)
    return found


def _check_rows_apart(batches):
    """Positions count each document from 0, a document is one run of the text, labels stay inside, padding is inert."""
    for batch in batches:
        assert batch.documents is not None
        for tokens, labels, positions, documents in zip(
            batch.tokens, batch.labels, batch.positions, batch.documents, strict=True
        ):
            numbers = documents[documents > 0]
            assert (numbers.diff() >= 0).all(), "documents of a row are mixed"
            assert (documents[len(numbers) :] == 0).all(), "padding stands between documents"
            for number in documents.unique():
                here = (documents == number).nonzero().flatten()
                assert positions[here].tolist() == list(range(len(here))), "positions do not restart"
                if number == 0:
                    assert (labels[here] == IGNORE).all(), "padding is trained"
                    continue
                assert (tokens[here].diff() == 1).all(), "a document is torn"
                inside = labels[here[:-1]]
                assert ((inside == IGNORE) | (inside == tokens[here[1:]])).all(), "a label leaves its document"


@given(lengths=lengths, kind=st.sampled_from(KINDS), sequence=st.integers(2, 24))
@some
def test_every_trained_token_is_a_target_once_an_epoch(lengths, kind, sequence):
    store, examples = _store(lengths)
    if sum(lengths) < 2:
        return
    assert _targets(_all(_loader(kind, store, sequence))) == _expected_targets(examples, kind, sequence)


@given(lengths=lengths, kind=st.sampled_from(["apart", "packed"]), sequence=st.integers(2, 24))
@some
def test_documents_of_a_row_know_nothing_of_one_another(lengths, kind, sequence):
    store, _ = _store(lengths)
    if sum(lengths) < 2:
        return
    _check_rows_apart(_all(_loader(kind, store, sequence)))


def _shift(batch):
    return replace(batch, labels=batch.labels.roll(1, 1))


def _across(batch):
    labels = batch.tokens.roll(-1, 1)
    labels[:, -1] = IGNORE
    return replace(batch, labels=torch.where(batch.documents > 0, labels, IGNORE))


def _one_text(batch):
    return replace(batch, documents=torch.ones_like(batch.documents))


def _straight(batch):
    return replace(batch, positions=torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens))


def _trained_padding(batch):
    return replace(batch, labels=torch.where(batch.documents == 0, batch.tokens + 1, batch.labels))


def _check(batches):
    _targets(batches)
    _check_rows_apart(batches)


@pytest.mark.parametrize("fault", [_shift, _across, _one_text, _straight, _trained_padding])
def test_the_checks_of_this_file_see_a_planted_fault(fault):
    store, _ = _store(LENGTHS)
    batches = _all(_loader("packed", store, 16))
    _check(batches)
    with pytest.raises(AssertionError):
        _check([fault(batch) for batch in batches])


def test_a_lost_document_and_a_repeated_one_show():
    store, examples = _store(LENGTHS)
    batches = _all(_loader("single", store, 50))
    expected = _expected_targets(examples, "single", 50)
    assert _targets(batches) == expected
    assert _targets(batches[1:]) != expected
    assert _targets([*batches, batches[0]]) != expected


@given(lengths=lengths, sequence=st.integers(2, 24), epoch=st.integers(0, 3))
@some
def test_packing_takes_documents_in_the_order_of_the_epoch_as_long_as_they_fit(lengths, sequence, epoch):
    store, _ = _store(lengths)
    rows = Packed(store, sequence, 5, True)
    order = Order(num_rows=len(lengths), seed=5).epoch(epoch).tolist()
    expected, filled = [[]], 0
    for number in order:
        room = min(lengths[number], sequence)
        if expected[-1] and filled + room > sequence:
            expected.append([])
            filled = 0
        expected[-1].append(number)
        filled += room
    assert [list(rows.samples(epoch, n)) for n in range(rows.per_epoch(epoch))] == expected


@given(lengths=lengths, sequence=st.integers(4, 24), ns=st.lists(st.integers(0, 40), min_size=1, max_size=3))
@some
def test_a_packed_row_is_found_without_those_before_it(lengths, sequence, ns):
    store, _ = _store(lengths)
    straight = Packed(store, sequence, 5, True)
    whole = []
    for epoch in range(41):
        whole += [(epoch, position) for position in range(straight.per_epoch(epoch))]
        if len(whole) > 40:
            break
    assert [Packed(store, sequence, 5, True).locate(n) for n in ns] == [whole[n] for n in ns]


@given(
    lengths=lengths,
    kind=st.sampled_from(KINDS),
    data_size=st.sampled_from([1, 2, 3, 4, 6]),
    micro_batch=st.sampled_from([1, 2]),
    padding=st.sampled_from(["full", "longest"]),
    steps=st.lists(st.integers(0, 20), min_size=1, max_size=3),
)
@some
def test_the_rows_of_a_step_are_the_same_in_every_layout_and_after_every_restart(
    lengths, kind, data_size, micro_batch, padding, steps
):
    store, _ = _store(lengths)
    if sum(lengths) < 2:
        return
    options = {"padding": padding, "multiple": 4}
    whole = _loader(kind, store, 16, _cut(24), **options)
    parts = [_loader(kind, store, 16, _cut(24, micro_batch, rank, data_size), **options) for rank in range(data_size)]
    for step in steps:  # in any order: a loader keeps no place
        expected = whole.step(step)
        found = [part.step(step) for part in parts]
        assert {len(batches) for batches in found} == {24 // (micro_batch * data_size)}
        # Micro-batch j of all ranks, in the order of the ranks, is the next stretch of the global batch.
        together = [batches[j] for j in range(len(found[0])) for batches in found]
        for name in ("tokens", "labels", "positions"):
            rows = torch.cat([getattr(batch, name) for batch in together])
            assert torch.equal(rows, torch.cat([getattr(batch, name) for batch in expected]))
        assert {str(part.samples(step)) for part in parts} == {str(whole.samples(step))}


def test_a_layout_that_lost_a_row_would_show():
    store, _ = _store(LENGTHS)
    whole = torch.cat([batch.tokens for batch in _loader("single", store, 16).step(0)])
    wrong = [_loader("single", store, 16, _cut(4, 1, 0, 2)).step(0) for _ in range(2)]  # one rank twice
    assert not torch.equal(torch.cat([wrong[rank][j].tokens for j in range(2) for rank in range(2)]), whole)


@given(lengths=lengths, kind=st.sampled_from(KINDS))
@some
def test_an_epoch_of_steps_takes_every_sample_once_and_says_which(lengths, kind):
    store, _ = _store(lengths)
    if sum(lengths) < 2:
        return
    loader = _loader(kind, store, 16, _cut(1))
    steps = [loader.samples(n) for n in range(loader.steps_for(1.0))]
    numbers = sorted(number for rows in steps for row in rows for number in row)
    num = math.ceil((sum(lengths) - 1) / 16) if kind in ("flowing", "apart") else len(lengths)
    assert numbers == list(range(num))
    assert loader.steps_per_epoch == len(steps) == loader.num_rows


def test_samples_name_the_documents_that_the_batches_hold():
    store, examples = _store(LENGTHS)
    loader = _loader("packed", store, 16)
    for step in range(5):
        for row, batch in zip(loader.samples(step), loader.step(step), strict=True):
            laid = [token for number in row for token in examples[number].tokens][:16]
            assert batch.tokens[0, : len(laid)].tolist() == laid


def test_steps_are_counted_from_epochs():
    store, _ = _store(LENGTHS)  # 13 documents
    loader = _loader("single", store, 16)
    assert [loader.steps_for(epochs) for epochs in (0.01, 0.5, 1.0, 1.5, 2.0)] == [1, 2, 4, 5, 7]
    packed = _loader("packed", store, 16)
    rows = sum(packed.rows.per_epoch(epoch) for epoch in range(3))
    assert packed.steps_for(3) == math.ceil(rows / 4)


def test_the_last_token_of_a_document_that_just_fits_is_trained_and_the_next_is_not():
    store, _ = _store([9, 10])
    for kind in ("single", "packed"):
        found = _targets(_all(_loader(kind, store, 8)))
        trained = [n for n in range(19) if store.span(n, 1)[1][0]]
        assert found == [n for n in trained if n in {*range(1, 9), *range(10, 18)}]


def test_the_longest_row_of_the_global_batch_sets_the_length_on_every_rank():
    store, _ = _store([5, 9, 3, 12, 7, 4, 8, 6, 11, 2, 10, 40])
    seen = set()
    for step in range(6):
        parts = [_loader("single", store, 32, _cut(4, 1, rank, 4), padding="longest", multiple=4) for rank in range(4)]
        sizes = {batch.tokens.shape[1] for part in parts for batch in part.step(step)}
        longest = max(store.lengths[number] for (number,) in parts[0].samples(step))
        assert sizes == {min(32, 4 * math.ceil(longest / 4))}
        seen |= sizes
    assert len(seen) > 2


def test_shorter_rows_hold_the_same_targets_as_full_ones():
    store, _ = _store(LENGTHS)
    for kind in KINDS:
        full, short = (_loader(kind, store, 32, padding=padding) for padding in ("full", "longest"))
        for step in range(4):
            assert _targets(full.step(step)) == _targets(short.step(step))


def test_the_last_validation_batch_is_filled_with_rows_that_do_not_count():
    store, examples = _store(LENGTHS[:11])
    parts = _loader("single", store, 16).once()
    assert [sum(batch.tokens.shape[0] for batch in part) for part in parts] == [4, 4, 4]
    assert parts[-1][-1].num_trained == 0
    assert _targets(batch for part in parts for batch in part) == _expected_targets(examples[:11], "single", 16)


def test_validation_is_the_same_for_every_number_of_ranks_and_can_be_limited():
    store, _ = _store(LENGTHS)
    whole = _loader("single", store, 16, _cut(6)).once()
    parts = [_loader("single", store, 16, _cut(6, 1, rank, 3)).once() for rank in range(3)]
    for n, part in enumerate(whole):
        assert _targets(part) == sorted(target for rank in parts for target in _targets(rank[n]))
    assert len(_loader("single", store, 16).once(2)) == 2
    assert len(list(_loader("single", store, 16).once(2))) == 2


def test_without_shuffling_rows_come_as_they_stand():
    store, examples = _store([3, 5, 4])
    loader = Loader(_rows("single", store, 8, shuffle=False), _cut(3))
    assert [batch.tokens[0, 0].item() for batch in loader.step(0)] == [e.tokens[0] for e in examples]
    assert torch.equal(loader.step(0)[1].tokens, loader.step(7)[1].tokens)


def test_a_cut_that_leaves_rows_over_is_refused():
    with pytest.raises(ValueError, match="not a multiple"):
        _cut(6, 2, 0, 2)
    store, _ = _store([9])
    with pytest.raises(ValueError, match="not a multiple of 4"):
        _loader("single", store, 10, multiple=4)


@pytest.mark.parametrize("vocabulary", [1000, 1 << 16, (1 << 16) + 1])
def test_a_store_gives_back_what_was_written(tmp_path, vocabulary):
    examples = [
        Example(tokens=[0, vocabulary - 1, 3], trained=[False, True, False]),
        Example(tokens=[7], trained=[True]),
    ]
    assert write_store(tmp_path / "tokens", iter(examples), vocabulary) == 2
    store = Store(tmp_path / "tokens")
    assert (len(store), store.num_tokens, store.num_trained) == (2, 4, 2)
    for number, example in enumerate(examples):
        tokens, trained = store.document(number)
        assert tokens.tolist() == example.tokens
        assert trained.tolist() == example.trained
    with pytest.raises(ValueError, match="outside a vocabulary"):
        write_store(tmp_path / "other", [Example(tokens=[vocabulary], trained=[True])], vocabulary)


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".trained.bin"])
def test_a_store_that_was_cut_short_is_refused(tmp_path, suffix):
    write_store(tmp_path / "tokens", [Example(tokens=[1, 2, 3], trained=[True] * 3)], 100)
    Store(tmp_path / "tokens")
    path = tmp_path / f"tokens{suffix}"
    for size in (path.stat().st_size - 1, 20, 0):
        if size < path.stat().st_size:
            path.write_bytes(path.read_bytes()[:size])
            with pytest.raises(DataError, match="are damaged; remove the folder"):
                Store(tmp_path / "tokens")


def test_a_document_needs_a_mark_for_every_token():
    with pytest.raises(ValueError, match="do not make a document"):
        Example(tokens=[1, 2], trained=[True])
