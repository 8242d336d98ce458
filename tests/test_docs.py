"""The documentation says what the code has, all of it, and nothing else."""

import contextlib
import functools
import io
import re
import shlex
from pathlib import Path

import pytest
from trl import GRPOConfig

from fr3e_trl import FR3EConfig
from fr3e_trl.commands.cli import COMMANDS, COSTS, main
from fr3e_trl.commands.recipe import read_recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def cells(page: str) -> list[list[str]]:
    """The first cells of the rows of a page's table, by what they have in backquotes."""
    rows = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| `")]
    return [re.findall(r"`([^`]+)`", row.split("|")[1]) for row in rows]


def test_every_setting_is_documented_with_its_default():
    settings = (ROOT / "docs" / "settings.md").read_text()
    own = [name for name in FR3EConfig.__dataclass_fields__ if name not in GRPOConfig.__dataclass_fields__]
    documented = [name for (name,) in cells("settings.md")]
    assert sorted(documented) == sorted([*own, "epsilon_high", "scale_rewards"])
    for name in own:
        default = FR3EConfig.__dataclass_fields__[name].default
        text = f'"{default}"' if isinstance(default, str) else str(default)
        assert re.search(rf"\| `{name}` \| (`{re.escape(text)}`|chosen) \|", settings), (name, text)


def test_every_metric_is_documented():
    sources = [*(ROOT / "fr3e_trl" / "method").glob("*.py"), ROOT / "fr3e_trl" / "trainer.py"]
    logged = {name for source in sources for name in re.findall(r'"(fr3e/[a-zA-Z0-9_/]+)"', source.read_text())}
    documented = []
    for names in cells("metrics.md"):
        for name in names:  # the others of a row end otherwise than the first
            documented.append(name if name.startswith("fr3e/") else f"{documented[-1].rpartition('/')[0]}/{name}")
    assert sorted(documented) == sorted(logged)


def anchors(page: Path) -> set[str]:
    """What links to parts of a page may name."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, part = target.partition("#")
        linked = page if not path else page.parent / path
        assert linked.exists(), target
        assert not part or part in anchors(linked), target


def commands(page: Path) -> list[str]:
    """Commands of the `fr3e` command that a page names, without those that leave something to be filled in."""
    text = page.read_text().replace("\\\n", " ")
    found = re.findall(r"`(fr3e [^`]+)`", text) + re.findall(r"^\s*(fr3e [^\n#]+)", text, flags=re.MULTILINE)
    return [command for command in found if not re.search(r"[A-Z]{4,}|…|\.\.\.", command)]


@functools.cache
def help_of(*names: str) -> str:
    """What a command says of its options."""
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
        main([*names, "--help"])
    return output.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_those_that_there_are(page):
    """Their subcommands, options, recipes and arms."""
    for command in commands(page):
        _, *words = shlex.split(command)
        names = [word for word in words if not word.startswith("-")][: 2 if words[0] == "cost" else 1]
        assert names[0] in COMMANDS and (names[0] != "cost" or len(names) == 1 or names[1] in COSTS), command
        options = [word for word in words if word.startswith("--")]
        for option in options:
            assert option == "--config" or re.search(rf"{option}\b", help_of(*names)), (command, option)
        if "--config" in words and "be0a890" not in page.read_text():
            recipe = read_recipe(ROOT / words[words.index("--config") + 1])
            named = words[words.index("--only") + 1 :] if "--only" in words else []
            for arm in named[: next((i for i, word in enumerate(named) if word.startswith("--")), None)]:
                assert arm in recipe["arms"], (command, arm)
