"""Patches: checked before, composed in order, gone after."""

import functools
import sys

import pytest
from mindspeed_runtime.patch import Patch, PatchError, applied, diff, fingerprint

SOURCE = """
def twice(x):
    return 2 * x

class Thing:
    def name(self):
        return "thing"

    @staticmethod
    def still():
        return 1
"""


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    (tmp_path / "upstream_a.py").write_text(SOURCE)
    (tmp_path / "upstream_b.py").write_text("from upstream_a import twice\n")
    monkeypatch.syspath_prepend(tmp_path)
    import upstream_a
    import upstream_b

    yield upstream_a, upstream_b
    for name in ("upstream_a", "upstream_b"):
        sys.modules.pop(name)


def _more(original):
    return lambda x: original(x) + 1


def _outer(original):
    @functools.wraps(original)
    def outer():
        return lambda x: original(x) + 1

    return outer


def _patch(upstream, **changes):
    fields = {
        "target": "upstream_a:twice",
        "make": _more,
        "kind": "wrap",
        "why": "a test",
        "written_against": fingerprint(upstream[0].twice),
        "also": ("upstream_b",),
    }
    return Patch(**{**fields, **changes})


def test_wraps_compose_in_order_in_every_module_and_leave_no_trace(upstream):
    a, b = upstream
    before = (dict(vars(a)), dict(vars(b)), dict(vars(a.Thing)))
    square = _patch(upstream, make=lambda original: lambda x: original(x) ** 2)
    with applied([_patch(upstream), square]):
        assert a.twice(3) == b.twice(3) == 49
    assert (dict(vars(a)), dict(vars(b)), dict(vars(a.Thing))) == before


def test_an_error_inside_takes_everything_back(upstream):
    a, _ = upstream
    original = a.twice
    with pytest.raises(KeyError), applied([_patch(upstream)]):
        raise KeyError
    assert a.twice is original


def test_methods_and_statics_return_as_the_very_objects_they_were(upstream):
    a, _ = upstream
    before = dict(vars(a.Thing))
    renamed = Patch(target="upstream_a:Thing.name", make=lambda _: lambda self: "x", kind="replace", why="")
    still = Patch(target="upstream_a:Thing.still", make=lambda _: staticmethod(lambda: 2), kind="replace", why="")
    with applied([renamed, still]):
        assert (a.Thing().name(), a.Thing.still()) == ("x", 2)
    assert dict(vars(a.Thing)) == before


def test_a_defined_name_is_gone_afterwards(upstream):
    a, _ = upstream
    with applied([Patch(target="upstream_a:absent", make=lambda _: 5, kind="define", why="")]):
        assert a.absent == 5
    assert not hasattr(a, "absent")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"target": "upstream_a:gone"}, "upstream lacks it"),
        ({"target": "upstream_a:Gone.name"}, "no attribute 'Gone'"),
        ({"kind": "define", "also": ()}, "upstream now has it|replace and then define|wrap and then define"),
        ({"written_against": "0" * 12}, "its source changed"),
        ({"also": ("json",)}, "json no longer binds the same twice"),
        ({"also": ("upstream_gone",)}, "upstream_a:twice: No module named 'upstream_gone'"),
        ({"target": "math:sqrt", "also": ()}, "has no source to compare with"),
    ],
)
def test_drift_is_refused_before_anything_changes(upstream, changes, text):
    a, _ = upstream
    before = dict(vars(a))
    for patches in ([_patch(upstream, **changes)], [_patch(upstream), _patch(upstream, **changes)]):
        with pytest.raises(PatchError, match=text), applied(patches):
            pytest.fail("a patch that does not fit was applied")
    assert dict(vars(a)) == before


def test_a_replaced_target_cannot_be_replaced_again(upstream):
    replace = _patch(upstream, kind="replace")
    with pytest.raises(PatchError, match="only a wrap may come second"), applied([replace, replace]):
        pytest.fail("two replacements were applied")


def test_the_fingerprint_sees_code_and_not_its_layout(tmp_path, monkeypatch):
    texts = (
        "def f(x):\n    return x + 1\n",
        "def f( x ):\n    # why\n    return (x + 1)\n",
        "def f(x):\n    return x + 2\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    prints = []
    for number, text in enumerate(texts):
        (tmp_path / f"print_{number}.py").write_text(text)
        prints.append(fingerprint(__import__(f"print_{number}").f))
    assert prints[0] == prints[1] != prints[2]


def test_a_defined_name_can_be_wrapped(upstream):
    a, _ = upstream
    define = Patch(target="upstream_a:absent", make=lambda _: lambda x: x + 1, kind="define", why="")
    wrap = Patch(target="upstream_a:absent", make=lambda original: lambda x: 2 * original(x), kind="wrap", why="")
    with applied([define, wrap]):
        assert a.absent(3) == 8
    assert not hasattr(a, "absent")


def test_the_second_wrap_of_a_target_is_checked_against_upstream_too(upstream):
    stale = _patch(upstream, written_against="0" * 12)
    with pytest.raises(PatchError, match="its source changed"), applied([_patch(upstream), stale]):
        pytest.fail("a stale wrap was applied")


def test_a_diff_shows_what_is_taken_out_and_what_is_put_in(upstream):
    def thrice(x):
        return 3 * x

    shown = diff(_patch(upstream, make=lambda _: thrice, kind="replace")).splitlines()
    assert [line for line in shown if line.startswith(("-    ", "+    "))] == ["-    return 2 * x", "+    return 3 * x"]
    assert "+    return lambda x: original(x) + 1" in diff(_patch(upstream, make=_outer))
    assert "2 * x" not in diff(_patch(upstream, make=_outer))
    assert "+None" in diff(Patch(target="upstream_a:absent", make=lambda _: None, kind="define", why=""))
