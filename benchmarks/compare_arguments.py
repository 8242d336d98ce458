"""Arguments of `python -m benchmarks compare`: when runs end, how arms are tuned, and how they are evaluated."""

from dataclasses import dataclass, field
from typing import Any

from fr3e_trl.commands.counts import check_counts, check_distinct, check_lists, check_rate

from .arguments import ArmsArguments
from .arms import DEFAULTS, FALLING
from .outcomes import BUDGETS
from .tuning import GRIDS

# For a task of the user's own, where nothing else is said
OWN_TOKENS = 1_000_000
OWN_EVAL_BATCH_SIZE = 64

USUAL_K = 4  # of pass@k, with as many samples

SCHEDULES = ("constant", "constant_with_warmup", *FALLING)  # of the learning rate


@dataclass(kw_only=True)
class CompareArguments(ArmsArguments):
    """Arguments of `python -m benchmarks compare`."""

    reference: str | None = field(
        default=None, metadata={"help": "Arm that the others are compared with. If `None`, the first."}
    )
    generated_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Tokens that each run generates: it stops after the first batch at which it has. Tokens of "
            "prefixes that rollouts start from are not generated again, and not counted. If `None`, and with neither "
            "training_rows nor train_seconds, 1,000,000 for a task of your own."
        },
    )
    training_rows: int | None = field(
        default=None,
        metadata={"help": "Completions that each run trains on, even if they teach nothing, in place of tokens."},
    )
    train_seconds: float | None = field(
        default=None,
        metadata={
            "help": "Seconds that each run trains, in place of tokens, without those of evaluation: by the clock on a "
            "GPU, and CPU time without one."
        },
    )
    only: list[str] | None = field(
        default=None, metadata={"help": "Arms to compare, of those that are there. If `None`, all of them."}
    )
    seeds: list[int] = field(
        default_factory=lambda: [0, 1, 2, 3, 4],
        metadata={"help": "Seeds of the runs of each arm. They decide the training prompts and the sampling."},
    )
    learning_rates: list[float] | None = field(
        default=None,
        metadata={
            "help": "Learning rates to try for each arm without a `learning_rate`, in every combination with "
            "`tokens_per_batch` and `num_iterations`. It is run with the one that has the best mean of held-out pass@1 "
            "along the tuning runs."
        },
    )
    tokens_per_batch: list[int] | None = field(
        default=None,
        metadata={
            "help": "Sizes of a batch to try, in generated tokens. The prompts per batch of an arm without "
            "`num_prompts` follow from it and what a batch of the starting policy takes for each."
        },
    )
    num_iterations: list[int] | None = field(
        default=None,
        metadata={
            "help": "Numbers of updates of each batch to try. If `None`, arms have the `num_iterations` of their "
            "settings, or 1."
        },
    )
    tuning_seeds: list[int] = field(
        default_factory=lambda: [1000, 1001],
        metadata={"help": "Seeds by which combinations are tried, none of them among `seeds`."},
    )
    tuning_finalists: int | None = field(
        default=3,
        metadata={
            "help": "Combinations for each arm that are run whole with all tuning seeds: the best by the mean over the "
            "first two, with which all of them are run. If `None`, all."
        },
    )
    tuning_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Tokens that each of the runs generates by which these are found. If `None`, as any run. What an "
            "arm is run with is chosen by whole runs in any case."
        },
    )
    num_evals: int = field(
        default=10,
        metadata={"help": "Evaluations along a run, evenly spaced in generated tokens, beside the one before it."},
    )
    num_heldout: int = field(default=128, metadata={"help": "Held-out prompts, the same in every evaluation."})
    num_samples: int = field(default=4, metadata={"help": "Completions sampled of each held-out prompt."})
    pass_at: list[int] | None = field(
        default=None, metadata={"help": "Values of k in pass@k, up to `num_samples`. If `None`, 4, or what there are."}
    )
    eval_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Completions that an evaluation generates at once. If `None`, 512, and 64 for a task of your own."
        },
    )
    kept: str | None = field(
        default=None,
        metadata={
            "help": "File that was kept of this comparison, a `kept.jsonl.gz` under any name. Its runs count as done: "
            "further seeds and arms are added to them."
        },
    )
    plan: bool = field(
        default=False, metadata={"help": "Say what the comparison takes, in runs, tokens and hours, and end."}
    )
    keep_policies: bool | None = field(
        default=None,
        metadata={
            "help": "Keep the trained policy of each run in `output_dir/policies`. If `None`, those of the bench's "
            "tasks, which have 0.6 MB each, and not those of a model of your own."
        },
    )
    num_workers: int | None = field(
        default=None,
        metadata={
            "help": "Runs at the same time, each in a process with one thread, and with one GPU where there are any. "
            "If `None`, as many as there are GPUs, or 1."
        },
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
                f"pass_at={self.pass_at} must be from 1 to num_samples={self.num_samples}: pass@k takes k samples."
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
            raise ValueError(f"One of {', '.join(BUDGETS)} ends the runs, and {len(given)} are set.")
        if self.tuning_tokens is not None and self.generated_tokens is None:
            raise ValueError(f"tuning_tokens={self.tuning_tokens} are part of generated_tokens, and {given[0]} is set.")

    def _check_vllm(self) -> None:
        for arm in self.arms or {}:
            settings = self.settings_of(arm)
            if not settings.get("use_vllm"):
                continue
            if settings.get("vllm_mode") != "server":
                raise ValueError(
                    f"Arm {arm!r}: vLLM's engine in the same process keeps its memory when a run is over. Use a "
                    "server, vllm_mode='server'."
                )
            if self.num_workers is None:
                self.num_workers = 1
            if self.num_workers > 1:
                raise ValueError(
                    f"Arm {arm!r}: a vLLM server has the weights of one run. Set num_workers=1, not {self.num_workers}."
                )

    def _check_tuning(self) -> None:
        assert isinstance(self.base, dict)
        for setting, name in GRIDS.items():
            values = getattr(self, name)
            if values is None:
                continue
            if setting in self.base:
                raise ValueError(
                    f"{name}={values!r} are to be tried, and the base has a {setting} for all arms. Leave one of them "
                    "out. An arm may have its own."
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
                f"tuning_seeds={self.tuning_seeds} and seeds={self.seeds} must have none in common: what is chosen by "
                "a seed looks better on it than it is."
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
                    f"{setting}={settings[setting]!r} cannot end a run. Leave it out, and set one of "
                    f"{', '.join(BUDGETS)}."
                )
        schedule, warmup = (DEFAULTS | settings)["lr_scheduler_type"], settings.get("warmup_steps", 0)
        if schedule not in SCHEDULES:
            raise ValueError(f"lr_scheduler_type={schedule!r} must be one of {', '.join(SCHEDULES)} in a comparison.")
        if schedule in FALLING and warmup >= 1:
            raise ValueError(
                f"warmup_steps={warmup!r} is a number of steps, and lr_scheduler_type={schedule!r} goes by the share "
                "of its budget that a run has spent. Use a share, for example 0.1."
            )
        if schedule not in FALLING and 0 < warmup < 1:
            raise ValueError(
                f"warmup_steps={warmup!r} is a share of the steps, and a run ends by its tokens. Use a number of "
                "steps, for example 10."
            )
