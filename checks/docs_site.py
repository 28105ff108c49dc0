"""The hooks of mkdocs.yml: pages made of the sources, a nav that takes in new pages, links into the repository.

They run inside mkdocs, which `nox -s docs` installs; the rest of the workspace has no use for it.
"""

from typing import Any

from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

from checks import command_lines, docs_reference


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, then put every page of a folder that the nav names into it."""
    homes = docs_reference.homes(docs_reference.ROOT)
    pages = docs_reference.generated_pages(docs_reference.ROOT, command_lines.programs())
    for page, (source, text) in pages.items():
        files.append(File.generated(config, page, content=docs_reference.relinked(text, source, page, homes)))
    config.nav = docs_reference.expanded(config.nav, [file.src_uri for file in files.documentation_pages()])
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links out of docs/ to where the site shows what they name."""
    if page.file.generated_by is not None:
        return markdown
    path = page.file.src_uri
    return docs_reference.relinked(markdown, f"docs/{path}", path, docs_reference.homes(docs_reference.ROOT))
