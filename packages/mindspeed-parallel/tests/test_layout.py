"""Layouts in words."""

import re

import pytest
from mindspeed_parallel.layout import Layout, LayoutError, parse_layout


@pytest.mark.parametrize(
    ("text", "layout", "ranks"),
    [
        ("tp1", Layout(), 1),
        ("tp2pp2sp", Layout(tensor=2, pipeline=2, sequence=True), 4),
        ("pp2vpp3", Layout(pipeline=2, virtual=3), 2),
        ("dp12", Layout(data=12), 12),
        ("cp2ep4dp4", Layout(context=2, expert=4, data=4), 8),
    ],
)
def test_a_layout_is_read_and_written(text, layout, ranks):
    assert parse_layout(text) == layout
    assert layout.ranks == ranks
    assert parse_layout(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read ''"),
        ("tp", "cannot read 'tp'"),
        ("tp2xx", "cannot read 'xx'"),
        ("2tp", "cannot read '2tp'"),
        ("tp2 pp2", "cannot read ' pp2'"),
        ("tp2tp4", "tp4 is the second word on one axis"),
        ("spsp", "sp is the second word on one axis"),
        ("tp0", "tensor=0; a degree is at least 1"),
        ("vpp2", "vpp2 needs a pipeline"),
        ("sp", "sp shares the work of the tensor axis"),
    ],
)
def test_a_layout_that_means_nothing_is_refused(text, message):
    with pytest.raises(LayoutError, match=re.escape(message)):
        parse_layout(text)
