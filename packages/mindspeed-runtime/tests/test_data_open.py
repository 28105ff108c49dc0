"""The data of a recipe, as a trainer opens it: alone and by several ranks."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mindspeed_kernels.device import open_device
from mindspeed_runtime.config import ConfigError, build_recipe
from mindspeed_runtime.data.loader import Cut
from mindspeed_runtime.data.open import open_data
from mindspeed_runtime.data.prepare import Encoder, RowError
from mindspeed_runtime.data.sources import DataError
from mindspeed_runtime.data.store import Example
from mindspeed_runtime.launch import LaunchError, Pool, Rank, world


def _encode(row):
    text = row.content["text"]
    if "!" in text:
        raise RowError("too loud")
    return [Example(tokens=[ord(c) % 200 for c in text], trained=[n > 1 for n in range(len(text))])]


def _encoder():
    return Encoder(encode=_encode, key="k", vocabulary=200)


def _recipe(folder, **data):
    given = {"train": [str(folder / "rows.jsonl")], "format": "messages", "sequence": 16, **data}
    return build_recipe({"model": {"path": "none"}, "data": given, "training": {"seed": 5, "global_batch": 4}})


def _open(recipe, cache, rank=0, size=1, **changes):
    cut = Cut(global_batch=4, micro_batch=1, data_rank=rank, data_size=size)
    given = {"cache": cache, "share": lambda value: value, "is_main": True}
    return open_data(recipe, _encoder, cut, **{**given, **changes})


def _rows(folder, texts, name="rows.jsonl"):
    (folder / name).write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))


TEXTS = ["abcdef", "ghijk", "lmnopqrstuvwxyzABCDEFGHIJ", "ab", "KLMNOP", "QRSTUV"]


def test_a_recipe_gives_loaders_and_says_what_became_of_the_rows(tmp_path):
    _rows(tmp_path, [*TEXTS, "loud!"])
    _rows(tmp_path, TEXTS[:3], "check.jsonl")
    recipe = _recipe(tmp_path, validation=[str(tmp_path / "check.jsonl")], bad_rows="skip")
    data = _open(recipe, tmp_path / "cache")
    assert data.train.num_rows == 5
    assert data.validation is not None
    assert data.validation.num_rows == 3
    where = f"(all are named in {tmp_path / 'cache'}/train-"
    notes = [note.split(where)[0] for note in data.notes]
    assert notes == [
        "data.train: 6 rows, 5 documents, 48 tokens, 38 trained",
        "data.train: 1 of the documents are longer than data.sequence and cut there; 8 of their trained tokens are lost",
        "data.train: skipped 1 ",
        f"data.train: skipped {tmp_path}/rows.jsonl:7: too loud",
        "data.train: left out 1 ",
        f"data.train: left out {tmp_path}/rows.jsonl:4: no trained token within data.sequence=16",
        "data.validation: 3 rows, 3 documents, 36 tokens, 30 trained",
        "data.validation: 1 of the documents are longer than data.sequence and cut there; 8 of their trained tokens are lost",
    ]


def test_validation_rows_come_in_order_and_training_rows_do_not(tmp_path):
    texts = [f"{n:04}" for n in range(40)]
    _rows(tmp_path, texts)
    recipe = _recipe(tmp_path, validation=[str(tmp_path / "rows.jsonl")])
    data = _open(recipe, tmp_path / "cache")
    assert data.validation is not None
    in_order = [sample for n in range(10) for (sample,) in data.validation.samples(n)]
    shuffled = [sample for n in range(10) for (sample,) in data.train.samples(n)]
    assert in_order == list(range(40)) == sorted(shuffled)
    assert shuffled != in_order


def test_opening_again_tokenises_nothing_again(tmp_path):
    _rows(tmp_path, TEXTS)
    first = _open(_recipe(tmp_path), tmp_path / "cache")
    silent = Encoder(encode=lambda row: pytest.fail("tokenised again"), key="k", vocabulary=200)
    cut = Cut(global_batch=4, micro_batch=1, data_rank=0, data_size=1)
    second = open_data(
        _recipe(tmp_path), lambda: silent, cut, cache=tmp_path / "cache", share=lambda value: value, is_main=True
    )
    assert second.notes == first.notes
    assert torch.equal(second.train.step(3)[0].tokens, first.train.step(3)[0].tokens)


def test_where_the_files_lie_does_not_change_the_order(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        _rows(tmp_path / name, TEXTS[3:], "b.jsonl")
    _rows(tmp_path / "here", TEXTS[:3], "a.jsonl")
    _rows(tmp_path / "there", TEXTS[:3], "a.jsonl")
    found = [
        _open(_recipe(tmp_path, train=train), tmp_path / f"cache{n}").train.step(7)[0].tokens.tolist()
        for n, train in enumerate(
            (
                [str(tmp_path / "here")],
                [str(tmp_path / "there" / "b.jsonl"), str(tmp_path / "there" / "a.jsonl")],
                [str(tmp_path / "here" / "*.jsonl")],
            )
        )
    ]
    assert found[0] == found[1] == found[2]


def test_text_too_short_to_predict_anything_is_refused(tmp_path):
    _rows(tmp_path, ["a"])
    with pytest.raises(ConfigError, match=r"data\.train: 1 tokens in all leave nothing to predict"):
        _open(_recipe(tmp_path, format="text"), tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"data\.train: names no files"):
        _open(_recipe(tmp_path, train=[]), tmp_path / "cache")


SLOW_S = 7.0
TIMEOUT_S = 4.0  # of a collective: shorter than tokenising takes


def _slow_encoder(folder: Path, rank: int, seconds: float) -> Encoder:
    def encode(row):
        (folder / f"tokenised-by-{rank}").touch()
        time.sleep(seconds / len(TEXTS))
        return _encode(row)

    return Encoder(encode=encode, key="k", vocabulary=200)


def _opened(rank: Rank, folder: Path, caches: str, waiting: str, seconds: float) -> list:
    with world(rank, open_device("cpu"), TIMEOUT_S):

        def share(value):
            box = [value]
            dist.broadcast_object_list(box, src=0)
            return box[0]

        if waiting == "at a collective":
            if rank.rank == 0:
                time.sleep(seconds)
            share(None)
        data = open_data(
            _recipe(folder),
            lambda: _slow_encoder(folder, rank.rank, seconds),
            Cut(global_batch=4, micro_batch=1, data_rank=rank.rank, data_size=2),
            cache=folder / caches.format(rank=rank.rank),
            share=share,
            is_main=rank.rank == 0,
        )
        return [batch.tokens.tolist() for batch in data.train.step(2)]


@pytest.mark.dist
@pytest.mark.parametrize(("caches", "who", "seconds"), [("cache", [0], SLOW_S), ("cache-{rank}", [0, 1], 0)])
def test_ranks_wait_for_tokenising_however_long_it_takes(pool, tmp_path, caches, who, seconds):
    _rows(tmp_path, TEXTS)
    first, second = pool.run(_opened, tmp_path, caches, "at the lock", seconds, nproc=2, timeout_s=60)
    # With one folder the main rank tokenises; where its folder is not seen, each machine does.
    assert sorted(path.name for path in tmp_path.glob("tokenised-by-*")) == [f"tokenised-by-{n}" for n in who]
    alone = _open(_recipe(tmp_path), tmp_path / "alone").train.step(2)
    together = [row for pair in zip(first, second, strict=True) for row in pair]
    assert together == [batch.tokens.tolist() for batch in alone]


@pytest.mark.dist
def test_the_timeout_that_ranks_outwait_is_a_real_one(tmp_path):
    _rows(tmp_path, TEXTS)
    with Pool(2) as pool, pytest.raises(LaunchError):
        pool.run(_opened, tmp_path, "cache", "at a collective", SLOW_S, timeout_s=60)


def test_another_machine_with_other_files_is_refused(tmp_path):
    for name in ("main", "other"):
        (tmp_path / name).mkdir()
        _rows(tmp_path / name, TEXTS[: 3 if name == "main" else 4])
    said = []
    _open(_recipe(tmp_path / "main"), tmp_path / "one", share=said.append)
    with pytest.raises(DataError, match=r"data\.train: the files, or the tokenizer, are not those of the main rank's"):
        _open(_recipe(tmp_path / "other"), tmp_path / "two", share=lambda _: said[0], is_main=False)
