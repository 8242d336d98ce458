"""The documentation says what the code has, all of it, and nothing else."""

import configparser
import contextlib
import functools
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig

import benchmarks.__main__ as benchmarks
from benchmarks.results import contrast, families, language, staleness
from fr3e_trl import FR3EConfig
from fr3e_trl.commands import cli
from fr3e_trl.commands.options import read_recipe
from fr3e_trl.compat import OPTIONAL, OVERRIDDEN

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DOCS = ROOT / "docs"
NOTEBOOK = ROOT / "benchmarks" / "results"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *sorted(NOTEBOOK.glob("*.md"))]
README_LINES = 120
COLUMNS = 120

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def cells(page: str) -> list[list[str]]:
    """The first cells of the rows of a page's table, by what they have in backquotes."""
    rows = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("| `")]
    return [re.findall(r"`([^`]+)`", row.split("|")[1]) for row in rows]


def test_every_setting_is_documented_with_its_default():
    settings = (DOCS / "reference" / "settings.md").read_text()
    own = [name for name in FR3EConfig.__dataclass_fields__ if name not in GRPOConfig.__dataclass_fields__]
    documented = [name for (name,) in cells("reference/settings.md")]
    assert sorted(documented) == sorted([*own, "epsilon_high", "scale_rewards"])
    for name in own:
        default = FR3EConfig.__dataclass_fields__[name].default
        text = f'"{default}"' if isinstance(default, str) else str(default)
        assert re.search(rf"\| `{name}` \| (`{re.escape(text)}`|chosen) \|", settings), (name, text)


def test_every_metric_is_documented():
    sources = (ROOT / "fr3e_trl").rglob("*.py")
    logged = {name for source in sources for name in re.findall(r'"(fr3e/[a-zA-Z0-9_/]+)"', source.read_text())}
    documented: list[str] = []
    for names in cells("reference/metrics.md"):
        if not names[0].startswith("fr3e/"):  # one of GRPO's
            continue
        for name in names:  # the others of a row end otherwise than the first
            documented.append(name if name.startswith("fr3e/") else f"{documented[-1].rpartition('/')[0]}/{name}")
    assert sorted(documented) == sorted(logged)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> list[tuple[Path, str]]:
    """The files of this repository that a page links to, each with the part of it that is meant."""
    targets = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    return [((page.parent / path).resolve() if path else page, part) for path, _, part in targets if ":" not in path]


@each_page
def test_links_lead_somewhere(page):
    for linked, part in links(page):
        assert linked.exists(), linked
        assert not part or part in anchors(linked), (linked, part)


def test_every_page_is_two_clicks_from_the_readme_and_in_the_menu():
    reached = {README}
    for _ in range(2):
        reached |= {linked for page in reached if page.suffix == ".md" for linked, _ in links(page)}
    assert len(README.read_text().splitlines()) <= README_LINES
    pages = set(DOCS.rglob("*.md"))
    assert pages <= reached, pages - reached
    menu = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(menu) == sorted(page.relative_to(DOCS).as_posix() for page in pages)


PROG = "(?:fr3e|python -m benchmarks)"


def commands(page: Path) -> list[str]:
    """Complete commands that a page names, but for those whose own line names the revision that they ran at."""
    text = page.read_text().replace("\\\n", " ")
    found = []
    for match in re.finditer(rf"`({PROG} [^`]+)`|^[ >]*({PROG} [^\n#]+)", text, flags=re.MULTILINE):
        line = text[text.rfind("\n", 0, match.start()) + 1 :].split("\n")[0]
        command = match[1] or match[2]
        if not re.search(r"[A-Z]{4,}|…|\.\.\.", command) and not re.search(r"revision `?[0-9a-f]{7}\b", line):
            found.append(command)
    return found


@functools.cache
def help_of(command: Any, *names: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        for option in ["--help", "--help-all"] if names == ("train",) else ["--help"]:
            with contextlib.suppress(SystemExit):
                command.main([*names, option])
    return output.getvalue()


@each_page
def test_commands_are_those_that_there_are(page):
    for command in commands(page):
        is_bench = command.strip().startswith("python")
        module = benchmarks if is_bench else cli
        words = shlex.split(command)[3 if is_bench else 1 :]
        if words in ([], ["--version"]):
            continue
        names = [word for word in words if not word.startswith("-")][: 2 if words[0] == "cost" else 1]
        assert names[0] in module.COMMANDS and (len(names) == 1 or names[1] in benchmarks.COSTS), command
        options = [word for word in words if word.startswith("--")]
        for option in options:
            assert option == "--config" or re.search(rf"{option}\b", help_of(module, *names)), (command, option)
        config = words[words.index("--config") + 1 :][:1] if "--config" in words else []
        if config and config[0].startswith("recipes/"):  # others are a user's
            recipe = read_recipe(ROOT / config[0])
            named = words[words.index("--only") + 1 :] if "--only" in words else []
            for arm in named[: next((i for i, word in enumerate(named) if word.startswith("--")), None)]:
                assert arm in recipe["arms"], (command, arm)


def test_the_revision_that_a_command_ran_at_excuses_it_alone(tmp_path):
    page, code = tmp_path / "page.md", "```bash\nfr3e tree run  # here\nfr3e old  # revision 1234abc\n```\n"
    page.write_text(f"At revision 1234abc `fr3e gone --x`.\n\n{code}")
    assert [command.strip() for command in commands(page)] == ["fr3e tree run"]


def lines_outside_code(page: Path) -> list[str]:
    """A page's lines, with an empty one in the place of each line of a code block; quotes without their mark."""
    lines, is_code = [], False
    for line in page.read_text().splitlines():
        line = line.removeprefix("> ").removeprefix(">")
        is_fence = line.lstrip().startswith("```")
        lines.append("" if is_code or is_fence else line)
        is_code ^= is_fence
    return lines


@each_page
def test_lines_are_short_and_tables_whole(page):
    lines = lines_outside_code(page)
    for i, line in enumerate(lines):
        if not line.startswith("|"):
            assert len(re.sub(r"\]\([^)]+\)", "]()", line)) <= COLUMNS, line
        elif not lines[i - 1].startswith("|"):
            assert re.fullmatch(r"\|( ?:?-+:? ?\|)+", lines[i + 1]), f"a table without a rule below its titles: {line}"
        else:
            num_cells = [len(re.findall(r"(?<!\\)\|", row)) for row in lines[i - 1 : i + 1]]
            assert num_cells[0] == num_cells[1], f"a row of other cells: {line}"


TABLES = {
    "results": lambda: [*families.tables(families.kept_families()), staleness.table()],
    "language": lambda: [language.summary_table()],
    "language-results": lambda: [*language.tables(), contrast.table()],
}


@pytest.mark.parametrize("page", TABLES)
def test_tables_of_results_are_those_of_the_kept_runs(page):
    text = (NOTEBOOK / f"{page}.md").read_text()
    for table in TABLES[page]():
        assert table.markdown() in text, table.markdown()


# Where what a page names in backquotes may lie
FOLDERS = [ROOT, ROOT / "fr3e_trl", ROOT / "tests"]
NAMED = r"(?<![\w/.{])(?:[\w.-]+/)+(?:[\w.-]+\.(?:py|md|yaml|yml|html|jsonl|json|gz|png))?(?![\w*{/])"


@each_page
def test_files_and_folders_that_are_named_exist(page):
    if page.name == "CHANGELOG.md":
        return
    for line in page.read_text().splitlines():
        if re.search(r"\brevision\b|`[0-9a-f]{7}`", line):
            continue
        for code in re.findall(r"`([^`]+)`", line):
            for name in re.findall(NAMED, code):
                is_meant = any((folder / name.split("/")[0]).is_dir() for folder in FOLDERS)
                if is_meant and not re.search("^outputs/|[A-Z]{4,}", name):
                    assert any((folder / name).exists() for folder in FOLDERS), f"{name}: {line}"


def test_what_make_is_asked_for_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in [*PAGES, ROOT / ".ci" / "run", *(ROOT / ".github" / "workflows").iterdir()]:
        for words in re.findall(r"(?:^|`|run: )make ([a-z][a-z -]*)", page.read_text(), flags=re.MULTILINE):
            named = [word for word in words.split() if not word.startswith("-")]
            assert set(named) <= targets, (page.name, words)


def test_contributing_has_the_layers_every_room_and_every_override():
    text = CONTRIBUTING.read_text()
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    layers = config["importlinter:contract:layers"]["layers"].split("\n")[1:]
    assert "\n".join(layer.replace(" | ", ", ") for layer in layers) in text
    for path in (ROOT / "fr3e_trl").iterdir():
        if path.suffix == ".py" and path.name != "__init__.py":
            assert f"`{path.name}`" in text
        elif path.is_dir() and (path / "__init__.py").exists():
            assert f"`{path.name}/`" in text
    assert {*OVERRIDDEN, *OPTIONAL} <= set(re.findall(r"`(\w+)`", text))
