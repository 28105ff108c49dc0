"""The data of a recipe: loaders for training and validation."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..config import ConfigError, length_multiple
from ..recipe import Recipe
from .loader import Cut, Loader
from .prepare import Encode, open_store, prepare
from .rows import Packed, Rows, Single, Windows
from .store import Store


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """How rows become tokens, and all that this depends on in a string."""

    encode: Encode
    key: str
    vocabulary: int


@dataclass(frozen=True, kw_only=True)
class Data:
    """Loaders of a run, and what was found while preparing them."""

    train: Loader
    validation: Loader | None
    notes: tuple[str, ...]


def open_data(
    recipe: Recipe, encoder: Callable[[], Encoder], cut: Cut, *, cache: Path, is_main: bool, barrier: Callable[[], None]
) -> Data:
    """Prepare (on the main rank, the others wait) and open the data of ``recipe``.

    ``encoder`` is called where rows are tokenised. DataError for data that cannot be used.
    """
    prefixes = _prepared(recipe, encoder, cache) if is_main else None
    barrier()
    if prefixes is None:
        prefixes = _prepared(recipe, encoder, cache)  # finds what the main rank made
    notes: list[str] = []
    train = _loader(recipe, prefixes["train"], cut, notes, shuffle=recipe.data.shuffle)
    validation = None
    if "validation" in prefixes:
        validation = _loader(recipe, prefixes["validation"], cut, notes, shuffle=False)
    return Data(train=train, validation=validation, notes=tuple(notes))


def _prepared(recipe: Recipe, encoder: Callable[[], Encoder], cache: Path) -> dict[str, Path]:
    data = recipe.data
    made = encoder()
    found = {}
    for name, patterns in (("train", data.train), ("validation", data.validation)):
        if patterns:
            found[name] = prepare(
                patterns,
                made.encode,
                name=name,
                cache=cache,
                key=made.key,
                sequence=None if data.format == "text" else data.sequence,
                vocabulary=made.vocabulary,
                skip_bad=data.bad_rows == "skip",
            )
    return found


def _loader(recipe: Recipe, prefix: Path, cut: Cut, notes: list[str], *, shuffle: bool) -> Loader:
    store, counts = open_store(prefix)
    name = prefix.parent.name.split("-")[0]
    notes.append(
        f"{name}: {counts['rows']} rows, {len(store)} documents, {store.num_tokens} tokens, {store.num_trained} trained"
    )
    for kind in ("skipped", "unlabelled"):
        notes += [f"{name}: {kind} {row['origin']}: {row['reason']}" for row in counts[kind]]
    rows = _rows(recipe, store, shuffle)
    if rows.per_epoch(0) == 0:
        raise ConfigError(
            f"data.{name}: {store.num_tokens} tokens do not fill one row of data.sequence={recipe.data.sequence}; "
            "give more text or a shorter sequence"
        )
    apart = recipe.data.packing
    return Loader(rows, cut, padding=recipe.data.padding, multiple=length_multiple(recipe), apart=apart)


def _rows(recipe: Recipe, store: Store, shuffle: bool) -> Rows:
    data, seed = recipe.data, recipe.training.seed
    if data.format == "text":
        return Windows(store, data.sequence, seed, shuffle, apart=data.packing)
    kind = Packed if data.packing else Single
    return kind(store, data.sequence, seed, shuffle)
