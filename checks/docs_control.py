"""That the build of the site fails where it should: faults planted in a copy of docs/ are each found.

`python checks/docs_control.py` runs in the environment of `nox -s docs`, and exits 1 when a fault goes unseen. Strictness
is easily lost: mkdocs counts warnings in its log, and with --quiet it counts none.
"""

import logging
import shutil
import tempfile
from pathlib import Path

from mkdocs.commands.build import build  # pyright: ignore[reportMissingImports]
from mkdocs.config import load_config  # pyright: ignore[reportMissingImports]
from mkdocs.exceptions import Abort  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parent.parent
PLANTED = {  # text at the end of a page: what must be said of it
    "[a](absent.md)": "link 'absent.md'",
    "[b](../src/absent.py)": "'../src/absent.py'",
    "[c](status.md#nowhere)": "anchor '#nowhere'",
    "[d](/style.md)": "absolute link '/style.md'",
    "[e][mindspeed_runtime.absent]": "'mindspeed_runtime.absent'",
}
ORPHAN = "orphan.md"


class _Heard(logging.Handler):
    """Keeps what is warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def unseen() -> list[str]:
    """The planted faults that the build says nothing of."""
    heard = _Heard()
    logging.getLogger("mkdocs").addHandler(heard)
    with tempfile.TemporaryDirectory() as folder:
        docs = Path(folder) / "docs"
        shutil.copytree(ROOT / "docs", docs)
        (docs / ORPHAN).write_text("# In no nav\n")
        with (docs / "style.md").open("a") as page:
            page.write("\n" + "\n\n".join(PLANTED) + "\n")
        try:
            build(load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(docs), site_dir=str(Path(folder) / "site")))
        except Abort:
            said = "\n".join(heard.texts)
            return [fault for fault in (*PLANTED.values(), ORPHAN) if fault not in said]
    return ["all of them: the build went through"]


def main() -> None:
    """Exit 1 if a planted fault is not found."""
    if found := unseen():
        raise SystemExit("\n".join(f"the build of the site does not notice {fault}" for fault in found))


if __name__ == "__main__":
    main()
