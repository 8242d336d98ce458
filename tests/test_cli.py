"""The `fr3e` command: its help, its errors, and what follows a subcommand."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fr3e_trl.commands import cli
from fr3e_trl.commands.data import FR3EScriptArguments
from fr3e_trl.commands.eval import EvalArguments
from fr3e_trl.commands.options import read_recipe
from fr3e_trl.commands.recipe import RecipeParser
from fr3e_trl.commands.statistics import t_quantile

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("module", "arguments", "commands"),
    [
        ("fr3e_trl.commands.cli", [], ["check", "eval", "init", "train", "tree"]),
        ("benchmarks.__main__", [], ["compare", "cost", "make-policy", "pooled"]),
        ("benchmarks.__main__", ["cost"], ["bookkeeping", "step"]),
    ],
)
def test_help_is_quick(module, arguments, commands):
    code = (
        f"import atexit, sys; from {module} import main; "
        "atexit.register(lambda: print('torch' in sys.modules)); "
        f"main({[*arguments, '--help']})"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    prog = "fr3e" if module.startswith("fr3e") else "python -m benchmarks"
    assert f"usage: {' '.join([prog, *arguments])} " in output
    assert all(re.search(rf"^ +{command}\b", output, re.MULTILINE) for command in commands)
    assert output.splitlines()[-1] == "False"


def test_installed_command_gives_a_subcommand_what_follows(monkeypatch):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"fr3e": "fr3e_trl.commands.cli:main"}
    given = []
    monkeypatch.setattr("fr3e_trl.commands.tree.main", given.extend)
    cli.main(["tree", "--config", "x.yaml", "--help"])
    assert given == ["--config", "x.yaml", "--help"]
    arguments = ["train", "--debug", "underflow_overflow", "--debug"]  # the first is the trainers'
    assert cli.without_debug(arguments) == (["train", "--debug", "underflow_overflow"], True)
    # A mistake in the code keeps its traceback. Nobody raised it: Python did, in no file of the user's
    monkeypatch.setattr("fr3e_trl.commands.tree.main", int)
    with pytest.raises(TypeError, match=r"int.* argument must be"):
        cli.main(["tree"])


def test_missing_extra(monkeypatch, capsys):
    import benchmarks.__main__ as benchmarks

    monkeypatch.setitem(sys.modules, "scipy", None)
    for name in ("compare", "outcomes", "statistics"):
        monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)
    with pytest.raises(SystemExit) as ended:
        benchmarks.main(["compare"])
    assert ended.value.code == 2
    assert "error: scipy is missing. Install it with: pip install 'fr3e-trl[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, shows", [([], False), (["--debug"], True)])
def test_debug_shows_the_traceback(arguments, shows, capsys, monkeypatch):
    for variable in ("", "1"):
        monkeypatch.setenv("FR3E_DEBUG", variable)
        with pytest.raises(SystemExit) as ended:
            cli.main(["tree", "nowhere", *arguments])
        told = capsys.readouterr().err
        assert ended.value.code == 2
        assert ("Traceback" in told) is (shows or bool(variable))
        assert bool(os.environ["FR3E_DEBUG"]) is (shows or bool(variable))  # of processes that a command starts
        assert told.splitlines()[-1].startswith("fr3e tree: error: nowhere has no folder")


def test_t_quantiles_of_the_tables():
    told = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 30: 2.0423}
    assert {degrees: t_quantile(degrees) for degrees in told} == pytest.approx(told, rel=2e-3)


def test_recipe_extends_another():
    """By a path from its own folder; entries of mappings are laid over at every depth, and all else is replaced."""
    Path("folder").mkdir()
    Path("folder/low.yaml").write_text("seeds: [0]\nnum_evals: 3\nbase: {a: 1, b: 1}\narms: {x: {c: 1, d: 1}, y: {}}\n")
    Path("folder/middle.yaml").write_text("extends: low.yaml\nseeds: [1]\nbase: {b: 2}\n")
    Path("recipe.yaml").write_text("extends: folder/middle.yaml\nseeds: [2]\narms: {x: {d: [2]}}\n")
    expected = {"seeds": [2], "num_evals": 3, "base": {"a": 1, "b": 2}, "arms": {"x": {"c": 1, "d": [2]}, "y": {}}}
    assert read_recipe(Path("recipe.yaml")) == expected


def test_the_environment_of_a_recipe_that_is_extended(monkeypatch):
    """The recipe's own comes first, and is TRL's to set."""
    for name in ("OF_BOTH", "OF_BASE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    Path("low.yaml").write_text("dataset_name: x\nenv: {OF_BOTH: low, OF_BASE: 1}\n")
    Path("recipe.yaml").write_text("extends: low.yaml\nenv: {OF_BOTH: own}\n")
    RecipeParser([FR3EScriptArguments]).parse_args_and_config(["--config", "recipe.yaml"])
    assert os.environ["OF_BOTH"] == "own" and os.environ["OF_BASE"] == "1"


def test_a_mapping_of_the_command_line_is_laid_over_the_recipes():
    Path("recipe.yaml").write_text("chat_template_kwargs: {a: 1, b: {c: 2}}\n")
    given = ["--config", "recipe.yaml", "--chat_template_kwargs", '{"b": {"d": 3}}']
    (args,) = RecipeParser([EvalArguments]).parse_args_and_config(given)
    assert args.chat_template_kwargs == {"a": 1, "b": {"c": 2, "d": 3}}
    with pytest.raises(ValueError, match="is not JSON"):
        RecipeParser([EvalArguments]).parse_args_and_config([*given[:3], "{b"])
