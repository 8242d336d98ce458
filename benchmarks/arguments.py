"""What is compared, and on what: the arguments that name the arms and their task."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from trl import ModelConfig

from fr3e_trl.commands.data import FR3EScriptArguments, check_reward_columns
from fr3e_trl.commands.usage import usage_errors

from .arms import check_settings, make_config, read_settings, whole_prompts
from .own_task import OwnTask
from .policies import starting_policy
from .tasks import TASKS, Task
from .tuning import GRIDS

# Of a task of the user's own: what its base is laid over, and the arms that there are if none are named
OWN_BASE: dict[str, Any] = {
    "num_prompts": 16,
    "num_generations": 8,
    "max_completion_length": 256,
    "learning_rate": 1e-6,
    "gradient_checkpointing": True,
    # FR3E's defaults; GRPOConfig's are others
    "epsilon_high": 0.28,
    "scale_rewards": "none",
}
PEFT_LEARNING_RATE = 1e-5
OWN_ARMS: dict[str, Any] = {"grpo": {"trainer": "grpo"}, "fr3e": {"trainer": "fr3e"}}


@dataclass(kw_only=True)
class ArmsArguments(FR3EScriptArguments, ModelConfig):
    """
    What is compared, and on what: a task of the bench, or one of the user's own by the names of its model, dataset and
    reward functions.
    """

    task: str | None = field(
        default=None,
        metadata={
            "help": f"Task to learn: {', '.join(TASKS)}. If `None`, model_name_or_path, dataset_name and "
            "reward_funcs are the task."
        },
    )
    output_dir: str = field(
        default="outputs/compare", metadata={"help": "Directory of the results. What was cut goes on from it."}
    )
    base: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Settings that all arms have: `trainer` ('fr3e' or 'grpo'), `num_prompts` (prompts per generation "
            "batch), `num_train_examples`, and those of FR3EConfig or GRPOConfig. On the command line, in JSON."
        },
    )
    arms: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Settings of each arm, by its name. On the command line, in JSON. If `None`, for a task of your "
            "own, those of TRL's GRPO and of FR3E."
        },
    )
    policy: str | None = field(
        default=None,
        metadata={"help": "Directory of the starting policy. If `None`, the task's own, made on first use."},
    )
    eval_dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Dataset or file with the held-out examples, with the same columns. If `None`, the test split of "
            "the dataset (`dataset_test_split`), and if that is a file some of its examples, at random."
        },
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Whether code of the model's repository may be run."}
    )

    def __post_init__(self) -> None:
        FR3EScriptArguments.__post_init__(self)
        ModelConfig.__post_init__(self)
        if self.task is None:
            self._complete_own()
        elif self.task not in TASKS:
            raise ValueError(f"task={self.task!r} must be one of {', '.join(TASKS)}.")
        else:
            self._check_of_bench()
        self.base = read_settings(self.base, "base")
        arms = read_settings(self.arms, "arms")
        self.arms = {name: read_settings(settings, f"arms.{name}") for name, settings in arms.items()}
        if self.policy is not None and not (Path(self.policy) / "config.json").is_file():
            raise ValueError(
                f"policy={self.policy!r} must be the directory of a model, with its config.json. Leave it out for the "
                "task's own policy."
            )
        if not self.arms:
            raise ValueError(
                "arms is empty. Name at least one, for example {'grpo': {'trainer': 'grpo', 'num_generations': 8}}."
            )

    def _check_of_bench(self) -> None:
        """Raise a `ValueError` if something is told of a task that has it already."""
        plain = FR3EScriptArguments(), ModelConfig()
        own = {name: value for default in plain for name, value in vars(default).items()} | {"eval_dataset_name": None}
        for name, default in own.items():
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is of a task of your own. Leave it out, or task={self.task!r}, "
                    "which has a dataset, rewards and a model, of which all weights are trained."
                )

    def _complete_own(self) -> None:
        """Lay what is told of a task of the user's own over what it is by default."""
        for name in ("model_name_or_path", "dataset_name"):
            if getattr(self, name) is None:
                raise ValueError(
                    f"{name} is not set. A task of your own has a model_name_or_path, a dataset_name and reward_funcs; "
                    f"one of the bench is a task: {', '.join(TASKS)}."
                )
        if self.policy is not None:
            raise ValueError(f"policy={self.policy!r} is of a task of the bench. Use model_name_or_path.")
        if self.dataset_streaming:
            raise ValueError("dataset_streaming=True cannot be: runs draw from all of the dataset.")
        given = read_settings({} if self.base is None else self.base, "base")
        tried = [setting for setting, name in GRIDS.items() if getattr(self, name, None) is not None]
        base = {name: value for name, value in OWN_BASE.items() if name not in tried}
        if self.use_peft and "learning_rate" in base:
            base["learning_rate"] = PEFT_LEARNING_RATE
        base |= {"bf16": torch.cuda.is_available(), "trust_remote_code": self.trust_remote_code} | given
        if "steps_per_generation" not in base:  # one prompt's rows at a time: a real model has no room for all
            base.setdefault("per_device_train_batch_size", base["num_generations"])
        self.base = base
        self.arms = OWN_ARMS if self.arms is None else self.arms

    def task_and_policy(self, num_heldout: int) -> tuple[Task | OwnTask, Path]:
        """
        What the arms learn, and where their policy starts.

        A task of the user's own is loaded, and held to what the arms ask of it, so that what is wrong is told at once.
        """
        if self.task is not None:
            task = TASKS[self.task]
            return task, Path(self.policy) if self.policy is not None else starting_policy(task)
        own = OwnTask(self, num_heldout)
        num_examples = len(own.splits["train"])
        rewards = dict(zip(self.reward_funcs, own.rewards, strict=True))
        for split in own.splits.values():
            check_reward_columns(rewards, split)
        assert isinstance(self.base, dict)
        self.base.setdefault("num_train_examples", num_examples)
        with usage_errors(f"dataset_name={self.dataset_name!r}", "Change the base, or the arms.", ValueError):
            self.check_arms()
        return own, Path(self.model_name_or_path or "")

    def settings_of(self, arm: str) -> dict[str, Any]:
        """The base's settings with the arm's over them."""
        assert isinstance(self.base, dict) and isinstance(self.arms, dict)
        return self.base | self.arms[arm]

    def check_arms(self) -> None:
        """Raise a `ValueError` that names the arm and says what to do, if the settings of one cannot be."""
        for name in self.arms or {}:
            try:
                self.check_arm(name, self.settings_of(name))
            except (TypeError, ValueError) as error:
                raise ValueError(f"Arm {name!r}: {error}") from None

    def check_arm(self, name: str, settings: dict[str, Any]) -> None:
        """What [`check_arms`] checks of an arm. Its prompts per batch may still have to be found."""
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError("An arm's name is a file's too: use letters, digits, '-' and '_'.")
        if "num_prompts" not in settings:
            check_settings(settings | {"num_prompts": 1})
            settings = settings | {"num_prompts": whole_prompts(1, settings)}
        make_config(settings, Path(self.output_dir), seed=0)
