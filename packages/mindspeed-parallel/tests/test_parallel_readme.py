"""The README's code runs."""

import re
from pathlib import Path


def test_the_code_of_the_readme_runs():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
