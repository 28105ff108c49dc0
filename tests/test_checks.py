"""The checks of `nox -s lint` find what they are for, and only that."""

import pytest

from checks import pins, sources

SOURCE = "packages/mindspeed-train/src/mindspeed_train/engine.py"
DEVICE_HOME = "packages/mindspeed-kernels/src/mindspeed_kernels/device.py"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('x.to("cuda")\n', "names the device 'cuda'"),
        ('torch.empty(3, device="npu:0")\n', "names the device 'npu:0'"),
        ("x = y.cuda()\n", "calls .cuda()"),
        ("import os\nos.environ['A']\n", "reads the environment"),
        ("def f():\n" + "    x = 1\n" * 61, "f: 62 lines"),
        ("x = 1\n" * 451, "451 lines"),
        ("# TODO mend this\n", "a TODO needs"),
        ('p = "/home/someone/data"\n', "a path of one machine"),
    ],
)
def test_a_planted_fault_is_found_with_its_line(text, said):
    (finding,) = sources.findings(SOURCE, text)
    assert finding.startswith(f"{SOURCE}:")
    assert said in finding


@pytest.mark.parametrize(
    "text",
    [
        '"""Runs on cuda and npu."""\n',
        "# TODO(#12) mend this\n",
        "# TODO 2026-01-31 mend this\n",
        'p = "framework/data", "a/home/b"\n',
        "def f():\n" + "    x = 1\n" * 59,
    ],
)
def test_what_only_looks_like_a_fault_is_left_alone(text):
    assert sources.findings(SOURCE, text) == []


def test_a_key_that_stands_twice_in_yaml_is_found_at_any_depth():
    text = "a: 1\nb:\n  - c: {x: 1}\n    d: 2\n    c: 3\na: 4\n"
    assert sources.findings("mkdocs.yml", text) == [
        "mkdocs.yml:5: has the key 'c' twice; the first is lost",
        "mkdocs.yml:6: has the key 'a' twice; the first is lost",
    ]


def test_device_names_have_their_homes():
    text = 'x.to("cuda")\n'
    assert sources.findings(DEVICE_HOME, text) == []
    assert sources.findings("packages/mindspeed-train/tests/test_engine.py", text) == []
    assert sources.findings(SOURCE, text) != []


def test_this_tree_has_no_findings():
    assert [
        f for name in sources.tracked(sources.ROOT) for f in sources.findings(name, (sources.ROOT / name).read_text())
    ] == []


def test_a_pin_loses_its_marker_unless_a_distribution_has_two_versions():
    lines = ["a==1 ; x == 'y'", "b==1 ; x == 'y'", "b==2 ; x != 'y'"]
    assert pins.merged(lines) == ["a==1", "b==1 ; x == 'y'", "b==2 ; x != 'y'"]


def test_pins_are_written_to_both_files_and_a_change_in_one_is_found(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("[tool.uv]\nconstraint-dependencies = [\n]\n[tool.x]\ny = [\n]\n")
    pins.write(tmp_path, ["a==1", "b==2"])
    assert pins.pinned(tmp_path) == ["a==1", "b==2"]
    monkeypatch.setattr(pins, "resolved", lambda root, uv: ["a==1", "b==2"])
    assert pins.stale(tmp_path, "uv") == []
    (tmp_path / "constraints.txt").write_text("a==1\nb==3\n")
    (finding,) = pins.stale(tmp_path, "uv")
    assert "constraints.txt differs" in finding


def test_a_distribution_that_is_resolved_and_not_pinned_is_named(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("[tool.uv]\nconstraint-dependencies = [\n]\n")
    pins.write(tmp_path, ["a==1"])
    monkeypatch.setattr(pins, "resolved", lambda root, uv: ["a==1", "b==2"])
    assert pins.stale(tmp_path, "uv") == ["b==2: resolved but not pinned"]
