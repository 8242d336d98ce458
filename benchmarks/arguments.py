"""Arguments: what is compared, and on what; when runs end, how arms are tuned, and how they are evaluated."""

# ruff: noqa: RUF009 (`option` makes a field)

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from trl import ModelConfig

from benchmarks.counts import check_counts, check_distinct, check_lists, check_rate
from fr3e_trl.commands.data import FR3EScriptArguments, check_reward_columns, option
from fr3e_trl.commands.usage import usage_errors

from .arms import DEFAULTS, FALLING, check_settings, make_config, read_settings, whole_prompts
from .outcomes import BUDGETS, GRIDS
from .own_task import OwnTask
from .policies import starting_policy
from .tasks import TASKS, Task

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

    task: str | None = option(
        None,
        "Task of the bench to learn, such as chain. If `None`, model_name_or_path, dataset_name and reward_funcs are "
        "the task.",
    )
    output_dir: str = option("outputs/compare", "Directory of the results. What was cut goes on from it.")
    base: dict[str, Any] | str | None = option(
        None,
        "Settings that all arms have: `trainer` ('fr3e' or 'grpo'), `num_prompts` (prompts per generation "
        "batch), `num_train_examples`, and those of FR3EConfig or GRPOConfig. On the command line, in JSON.",
    )
    arms: dict[str, Any] | str | None = option(
        None,
        "Settings of each arm, by its name. On the command line, in JSON. If `None`, for a task of your "
        "own, those of TRL's GRPO and of FR3E.",
    )
    policy: str | None = option(None, "Directory of the starting policy. If `None`, the task's own, made on first use.")
    eval_dataset_name: str | None = option(
        None,
        "Dataset or file with the held-out examples, with the same columns. If `None`, the test split of "
        "the dataset (`dataset_test_split`), and if that is a file some of its examples, at random.",
    )
    trust_remote_code: bool = option(False, "Whether code of the model's repository may be run.")

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
        """Raise a `ValueError` if something is set for a task that has its own."""
        plain = FR3EScriptArguments(), ModelConfig()
        own = {name: value for default in plain for name, value in vars(default).items()} | {"eval_dataset_name": None}
        for name, default in own.items():
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} only works with a task of your own. Remove it, or remove "
                    f"task={self.task!r}, which has its own dataset, rewards and model and trains all weights."
                )

    def _complete_own(self) -> None:
        """Lay the settings of a user's own task over its defaults."""
        for name in ("model_name_or_path", "dataset_name"):
            if getattr(self, name) is None:
                raise ValueError(
                    f"{name} is not set. A task of your own needs model_name_or_path, dataset_name and reward_funcs. "
                    f"For a built-in task, set task to one of {', '.join(TASKS)}."
                )
        if self.policy is not None:
            raise ValueError(f"policy={self.policy!r} only works with a built-in task. Use model_name_or_path instead.")
        if self.dataset_streaming:
            raise ValueError("dataset_streaming=True is not supported, because runs sample from the whole dataset.")
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

        A user's own task is loaded and checked against what the arms need, so that mistakes are reported at once.
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
            raise ValueError("The name of an arm is also a file name, so use only letters, digits, '-' and '_'.")
        if "num_prompts" not in settings:
            check_settings(settings | {"num_prompts": 1})
            settings = settings | {"num_prompts": whole_prompts(1, settings)}
        make_config(settings, Path(self.output_dir), seed=0)


# For a task of the user's own, where nothing else is said
OWN_TOKENS = 1_000_000
OWN_EVAL_BATCH_SIZE = 64

USUAL_K = 4  # of pass@k, with as many samples

SCHEDULES = ("constant", "constant_with_warmup", *FALLING)  # of the learning rate


@dataclass(kw_only=True)
class CompareArguments(ArmsArguments):
    """Arguments of `compare`."""

    reference: str | None = option(None, "Arm that the others are compared with. If `None`, the first.")
    generated_tokens: int | None = option(
        None,
        "Tokens that each run generates: it stops after the first batch at which it has. Tokens of "
        "prefixes that rollouts start from are not generated again, and not counted. If `None`, and with neither "
        "training_rows nor train_seconds, 1,000,000 for a task of your own.",
    )
    training_rows: int | None = option(
        None, "Completions that each run trains on, even if they teach nothing, in place of tokens."
    )
    train_seconds: float | None = option(
        None,
        "Seconds that each run trains, in place of tokens, without those of evaluation: by the clock on a "
        "GPU, and CPU time without one.",
    )
    only: list[str] | None = option(None, "Arms to compare, of those that are there. If `None`, all of them.")
    seeds: list[int] = option(
        [0, 1, 2, 3, 4], "Seeds of the runs of each arm. They decide the training prompts and the sampling."
    )
    learning_rates: list[float] | None = option(
        None,
        "Learning rates to try for each arm without a `learning_rate`, in every combination with "
        "`tokens_per_batch` and `num_iterations`. It is run with the one that has the best mean of held-out pass@1 "
        "along the tuning runs.",
    )
    tokens_per_batch: list[int] | None = option(
        None,
        "Sizes of a batch to try, in generated tokens. The prompts per batch of an arm without "
        "`num_prompts` follow from it and what a batch of the starting policy takes for each.",
    )
    num_iterations: list[int] | None = option(
        None,
        "Numbers of updates of each batch to try. If `None`, arms have the `num_iterations` of their settings, or 1.",
    )
    tuning_seeds: list[int] = option([1000, 1001], "Seeds by which combinations are tried, none of them among `seeds`.")
    tuning_finalists: int | None = option(
        3,
        "Combinations for each arm that are run whole with all tuning seeds: the best by the mean over the "
        "first two, with which all of them are run. If `None`, all.",
    )
    tuning_tokens: int | None = option(
        None,
        "Tokens that each of the runs generates by which these are found. If `None`, as any run. What an "
        "arm is run with is chosen by whole runs in any case.",
    )
    num_evals: int = option(10, "Evaluations along a run, evenly spaced in generated tokens, beside the one before it.")
    num_heldout: int = option(128, "Held-out prompts, the same in every evaluation.")
    num_samples: int = option(4, "Completions sampled of each held-out prompt.")
    pass_at: list[int] | None = option(
        None, "Values of k in pass@k, up to `num_samples`. If `None`, 4, or what there are."
    )
    eval_batch_size: int | None = option(
        None, "Completions that an evaluation generates at once. If `None`, 512, and 64 for a task of your own."
    )
    kept: str | None = option(
        None,
        "File that was kept of this comparison, a `kept.jsonl.gz` under any name. Its runs count as done: "
        "further seeds and arms are added to them.",
    )
    plan: bool = option(
        False,
        "Say what the comparison takes, in runs and tokens, and end. Nothing is run.",
    )
    keep_policies: bool | None = option(
        None,
        "Keep the trained policy of each run in `output_dir/policies`. If `None`, those of the bench's "
        "tasks, which have 0.6 MB each, and not those of a model of your own.",
    )
    num_workers: int | None = option(
        None,
        "Runs at the same time, each in a process with one thread, and with one GPU where there are any. "
        "If `None`, as many as there are GPUs, or 1.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.arms, dict)
        self._check_budget()
        if self.eval_batch_size is None:
            self.eval_batch_size = 512 if self.task is not None else OWN_EVAL_BATCH_SIZE
        if self.keep_policies is None:
            self.keep_policies = self.task is not None
        check_counts(self, tuning_tokens=1, num_evals=1, num_heldout=1)
        check_counts(self, num_samples=1, eval_batch_size=1, num_workers=1)
        if self.tuning_finalists is not None:
            check_counts(self, tuning_finalists=1)
        if self.pass_at is None:
            self.pass_at = [min(USUAL_K, self.num_samples)]
        check_lists(self, seeds=0, tuning_seeds=0, pass_at=1)
        if max(self.pass_at) > self.num_samples:
            raise ValueError(
                f"pass_at={self.pass_at} must be from 1 to num_samples={self.num_samples}, because pass@k needs k "
                "samples."
            )
        for name in self.only or []:
            if name not in self.arms:
                raise ValueError(f"only={self.only!r} names {name!r}. The arms are {', '.join(self.arms)}.")
        self.arms = {name: self.arms[name] for name in self.only or self.arms}
        if self.reference is None:
            self.reference = next(iter(self.arms))
        if self.reference not in self.arms:
            raise ValueError(f"reference={self.reference!r} must be one of the arms: {', '.join(self.arms)}.")
        self._check_tuning()
        self.check_arms()
        self._check_vllm()

    def _check_budget(self) -> None:
        check_counts(self, generated_tokens=1, training_rows=1)
        if self.train_seconds is not None and not self.train_seconds > 0:
            raise ValueError(f"train_seconds={self.train_seconds!r} must be above 0, for example 3600.")
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if not given and self.task is None:
            self.generated_tokens, given = OWN_TOKENS, ["generated_tokens"]
        if len(given) != 1:
            raise ValueError(f"Set exactly one of {', '.join(BUDGETS)}, which limit a run. {len(given)} are set.")
        if self.tuning_tokens is not None and self.generated_tokens is None:
            raise ValueError(f"tuning_tokens={self.tuning_tokens} needs generated_tokens, but {given[0]} is set.")

    def _check_vllm(self) -> None:
        for arm in self.arms or {}:
            settings = self.settings_of(arm)
            if not settings.get("use_vllm"):
                continue
            if settings.get("vllm_mode") != "server":
                raise ValueError(
                    f"Arm {arm!r}: a colocated vLLM engine keeps its memory after a run. Use a server instead, with "
                    "vllm_mode='server'."
                )
            if self.num_workers is None:
                self.num_workers = 1
            if self.num_workers > 1:
                raise ValueError(
                    f"Arm {arm!r}: a vLLM server holds the weights of a single run. Set num_workers=1 instead of "
                    f"{self.num_workers}."
                )

    def _check_tuning(self) -> None:
        assert isinstance(self.base, dict)
        for setting, name in GRIDS.items():
            values = getattr(self, name)
            if values is None:
                continue
            if setting in self.base:
                raise ValueError(
                    f"{name}={values!r} lists values to try, but the base sets {setting} for all arms. Remove one of "
                    "the two. An arm may still set its own."
                )
            setattr(self, name, values if isinstance(values, list) else [values])
            if name != "learning_rates":
                check_lists(self, **{name: 1})
        if self.learning_rates is not None:
            self.learning_rates = [float(rate) for rate in self.learning_rates]
            for rate in self.learning_rates:
                check_rate("learning_rates", rate)
            check_distinct("learning_rates", self.learning_rates)
        if set(self.seeds) & set(self.tuning_seeds):
            raise ValueError(
                f"tuning_seeds={self.tuning_seeds} and seeds={self.seeds} must not overlap, because what is chosen "
                "with a seed looks better on that seed than it is."
            )

    def check_arm(self, name: str, settings: dict[str, Any]) -> None:
        super().check_arm(name, settings)
        if "num_prompts" not in settings and self.tokens_per_batch is None:
            raise ValueError("num_prompts is not set. Set it in every arm or in the base, or set tokens_per_batch.")
        if "learning_rate" not in settings and self.learning_rates is None:
            raise ValueError(
                "learning_rate is not set. Set it in every arm or in the base, or set learning_rates to try."
            )
        for setting in ("max_steps", "num_train_epochs"):
            if setting in settings:
                raise ValueError(
                    f"{setting}={settings[setting]!r} does not limit the runs of a comparison. Remove it, and set one "
                    f"of {', '.join(BUDGETS)}."
                )
        schedule, warmup = (DEFAULTS | settings)["lr_scheduler_type"], settings.get("warmup_steps", 0)
        if schedule not in SCHEDULES:
            raise ValueError(f"lr_scheduler_type={schedule!r} must be one of {', '.join(SCHEDULES)} in a comparison.")
        if schedule in FALLING and warmup >= 1:
            raise ValueError(
                f"warmup_steps={warmup!r} is a number of steps, but lr_scheduler_type={schedule!r} follows the share "
                "of its budget that a run has spent. Use a share, for example 0.1."
            )
        if schedule not in FALLING and 0 < warmup < 1:
            raise ValueError(
                f"warmup_steps={warmup!r} is a share of the steps, whose number is not known, because a run ends after "
                "a number of tokens. Use a number of steps, for example 10."
            )
