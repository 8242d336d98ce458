"""
Lets the pages, whose links are those of the repository, link to files outside docs/ in the site too.

A linked Markdown file or notebook becomes a page, a picture is copied, a source file becomes a page that shows it, and
a folder a page that lists its files. The links of those pages are followed in turn.
"""

import json
import os
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)")
COPIED = (".png", ".svg", ".gz")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".slurm": "bash", ".jsonl": "json", ".toml": "toml"}
# Not found by a search, which is for the pages of docs/
HIDDEN = "---\nsearch:\n  exclude: true\n---\n"


def on_files(files, config):
    """Add what the pages link to outside docs/."""
    waiting = {target for file in files.documentation_pages() for target in outside(file.abs_src_path)}
    done = set()
    while waiting - done:
        path = min(waiting - done)
        done.add(path)
        if path.suffix == ".md":
            waiting |= outside(path)
        if (uri := in_site(path)) not in files.src_uris:
            content = page(path)
            source = {"content": content} if content is not None else {"abs_src_path": str(path)}
            files.append(File.generated(config, uri, **source))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrite links between files of the repository to links between files of the site."""
    name = page.file.src_uri
    folder = (ROOT / "docs" if (ROOT / "docs" / name).exists() else ROOT) / Path(name).parent

    def rewritten(match):
        return os.path.relpath(in_site(linked(folder, match[1])), Path(name).parent)

    return LINK.sub(rewritten, markdown)


def outside(path):
    """The files that a page links to, without those in docs/."""
    path = Path(path)
    targets = {linked(path.parent, target) for target in LINK.findall(path.read_text())}
    return {target for target in targets if target.exists() and not target.is_relative_to(ROOT / "docs")}


def linked(folder, target):
    """The file that a link in a folder leads to. A folder's is its README, if it has one."""
    path = Path(os.path.normpath(folder / target))
    readme = path / "README.md"
    return readme if readme.exists() else path


def in_site(path):
    """Where a file of the repository lies in the site's sources."""
    if path == ROOT / "README.md":
        return "readme.md"  # in capitals it would be the first page
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"{name}/index.md"
    return name if path.suffix in (".md", *COPIED) else f"{name}.md"


def page(path):
    """A page for a file outside docs/; `None` for what is copied."""
    name = path.relative_to(ROOT).as_posix()
    if path.suffix in COPIED:
        return None
    if path.is_dir():
        names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        shown, language = "\n".join(name for name in names if "__pycache__" not in name), "text"
    elif path.suffix == ".md":
        return HIDDEN + path.read_text()
    elif path.suffix == ".ipynb":
        return HIDDEN + "\n\n".join(parts(json.loads(path.read_text())["cells"]))
    else:
        shown, language = path.read_text(), LANGUAGES.get(path.suffix, "text")
    return f"{HIDDEN}# {name}\n\n````{language}\n{shown}\n````\n"


def parts(cells):
    """The cells of a notebook as Markdown, with what they printed and drew."""
    for cell in cells:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                yield f"![A picture that this draws](data:image/png;base64,{''.join(data['image/png']).strip()})"
            elif "text/html" not in data:  # which is a bar of progress
                yield f"```text\n{''.join(output.get('text') or data['text/plain'])}\n```"
