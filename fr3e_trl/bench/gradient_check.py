"""
Arms compared by how well their updates point along the true gradient, at a fixed policy.

    fr3e gradient-check --config recipes/bench/gradient_chain.yaml

A learning curve is one number that depends on every batch before it. A gradient is a direction in as many dimensions as
the policy has parameters, and its cosine with the gradient of the expected reward says what a batch was worth: a dozen
batches of each arm show what takes dozens of training runs otherwise. It says nothing of what happens far from this
policy: see `fr3e compare` for that.
"""

import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from trl import TrlParser

from .arms import ArmsArguments
from .checks import check_counts, check_share
from .gradients import batch_gradients, cosine, progress, progress_error, reference_quality
from .own_task import OwnTask
from .policies import cache_dir
from .progress import CONSOLE, minutes
from .runs import be_quiet, prompts_per_batch, write_json, write_whole
from .tasks import Task

# The trainer of the reference: plain sampling, each row's baseline independent of the row, every row and token with the
# same weight. So its gradient is that of the expected reward but for a factor, and the shrunk baseline makes it need
# half the rows. Nothing is clipped in the first update of a batch.
REFERENCE: dict[str, Any] = {
    "trainer": "fr3e",
    "num_anchors": 0,
    "num_generations": 2,
    "num_prompts": 256,
    "value_prior_strength": 2.0,
    "reject_degenerate_states": False,
    "loss_type": "dr_grpo",
    "scale_rewards": "none",
    "epsilon_high": 0.28,
    "beta": 0.0,
}
REFERENCE_SEED = 1_000_000  # and those above: arms have others
CHUNK = 8  # batches of the reference between two looks at it, even: as many for each half


@dataclass(kw_only=True)
class GradientCheckArguments(ArmsArguments):
    """
    Arguments of `fr3e gradient-check`.

    Parameters, beside those of [`ArmsArguments`]:
        tokens_per_batch (`int`):
            Tokens that a batch generates in every arm, as nearly as whole prompts allow.
        num_batches (`int`, *optional*, defaults to `12`):
            Batches of each arm.
        agreement (`float`, *optional*, defaults to `0.98`):
            Cosine of its two halves at which the reference is good enough.
        max_reference_tokens (`int`, *optional*, defaults to `20000000`):
            Tokens at which it has to do, whatever its halves.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the arms.
        output_dir (`str`, *optional*, defaults to `"outputs/gradient_check"`):
            Directory of the results.
        versus (`str`, *optional*):
            Arm that the others are compared with, batch by batch. If `None`, the first.
    """

    tokens_per_batch: int = field(
        metadata={
            "help": "Tokens that a batch generates in every arm, as nearly as whole prompts allow: the prompts per "
            "batch are chosen by it."
        },
    )
    num_batches: int = field(default=12, metadata={"help": "Independent batches of each arm, at least 2."})
    agreement: float = field(
        default=0.98, metadata={"help": "Cosine of its two halves at which the reference is good enough."}
    )
    max_reference_tokens: int = field(
        default=20_000_000, metadata={"help": "Generated tokens at which the reference has to do, as good as it is."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the arms: decides their prompts and the sampling."})
    output_dir: str = field(
        default="outputs/gradient_check",
        metadata={"help": "Directory of the results. What was cut goes on from it."},
    )
    versus: str | None = field(
        default=None,
        metadata={
            "help": "Arm that the others are compared with, batch by batch: arms whose sampling settings are the same "
            "draw the same completions, and differ by less than their errors tell. If `None`, the first."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.arms, dict)
        check_counts(self, tokens_per_batch=1, num_batches=2, max_reference_tokens=1, seed=0)
        check_share("agreement", self.agreement)
        if self.versus is None:
            self.versus = next(iter(self.arms))
        if self.versus not in self.arms:
            raise ValueError(f"versus={self.versus!r} must be one of the arms: {', '.join(self.arms)}.")
        self.check_arms()


@dataclass
class Reference:
    """
    The gradient of the expected reward, as far as it is known.

    Args:
        halves (`torch.Tensor` of shape (2, P)):
            Sums of the gradients of independent batches.
        num_batches (`int`):
            Batches of both.
        generated_tokens (`int`):
            Tokens of them.
        reward (`float`):
            Mean reward of them.
    """

    halves: torch.Tensor
    num_batches: int = 0
    generated_tokens: int = 0
    reward: float = 0.0

    @property
    def gradient(self) -> torch.Tensor:
        return self.halves.sum(0)

    @property
    def agreement(self) -> float:
        """Cosine of the halves."""
        return cosine(*self.halves)

    @property
    def quality(self) -> float:
        """Cosine with the true gradient: what the cosine of a perfect arm would be."""
        return reference_quality(self.agreement)


@dataclass
class ArmResult:
    """
    How well an arm's updates point along the reference.

    Args:
        settings (`dict[str, Any]`):
            All its settings, with the prompts per batch.
        cosines (`list[float]`):
            Cosine of each batch's update with the reference.
        generated_tokens (`float`):
            Tokens of a batch, on average.
        rows, rows_with_signal (`float`):
            Rows of a batch, and those in the loss with an advantage other than 0, on average.
        mean_cosine (`float`):
            Cosine of the mean of all batches' updates with the reference.
    """

    settings: dict[str, Any]
    cosines: list[float]
    generated_tokens: float
    rows: float
    rows_with_signal: float
    mean_cosine: float


def main(argv: list[str]) -> None:
    """Run a gradient check, or what is missing of it, and write its report."""
    be_quiet()
    (args,) = TrlParser([GradientCheckArguments]).parse_args_and_config(argv)
    gradient_check(args)


def gradient_check(args: GradientCheckArguments) -> dict[str, Any]:
    """Run a gradient check, or what is missing of it, and write its report."""
    task, policy = args.task_and_policy()
    reference = find_reference(task, policy, args.agreement, args.max_reference_tokens)
    assert isinstance(args.arms, dict)
    results = {}
    for i, arm in enumerate(args.arms, start=1):
        start = time.monotonic()
        results[arm] = _check_arm(args, arm, task, policy, reference)
        seconds, cos = time.monotonic() - start, mean(results[arm].cosines)
        _say(f"[{i}/{len(args.arms)}] {arm}: cosine {cos:.3f}, after {minutes(seconds)}")
    report = make_report(args, reference, results)
    write_report(report, Path(args.output_dir))
    return report


def find_reference(task: Task | OwnTask, policy: Path, agreement: float, max_tokens: int) -> Reference:
    """
    Sample until the halves of the reference agree. What was sampled is kept in the user's cache, for the next time.

    Args:
        task ([`Task`]):
            Prompts and reward.
        policy (`Path`):
            Directory of the policy.
        agreement (`float`):
            Cosine of the halves that is enough.
        max_tokens (`int`):
            Generated tokens that are enough whatever their cosine.
    """
    path = cache_dir() / "gradients" / f"{task.name}-{_digest(task, policy)}.pt"
    reference = Reference(**torch.load(path)) if path.exists() else Reference(torch.zeros(2, 1))
    while not reference.num_batches or (reference.agreement < agreement and reference.generated_tokens < max_tokens):
        start = time.monotonic()
        reference = _extended(reference, task, policy)
        write_whole(path, partial(torch.save, asdict(reference)))
        _tell(reference, agreement, max_tokens, time.monotonic() - start)
    if reference.agreement < agreement:
        _say(
            f"The reference's halves agree to {reference.agreement:.3f}, less than {agreement}: its cosine with the "
            f"true gradient is about {reference.quality:.3f}. Raise max_reference_tokens for a better one."
        )
    return reference


def _extended(reference: Reference, task: Task | OwnTask, policy: Path) -> Reference:
    """The reference with another chunk of batches, every other one for each half."""
    gradients: list[torch.Tensor] = []
    seed = REFERENCE_SEED + reference.num_batches // CHUNK
    trainer = batch_gradients(REFERENCE, policy, task, CHUNK, seed, gradients.append)
    sums = torch.stack([torch.stack(gradients[half::2]).sum(0) for half in (0, 1)])
    num_batches = reference.num_batches + CHUNK
    reward = reference.reward * reference.num_batches + sum(batch["reward"] for batch in trainer.batches)
    return Reference(
        halves=reference.halves + sums,
        num_batches=num_batches,
        generated_tokens=reference.generated_tokens + trainer.costs.generated_tokens,
        reward=reward / num_batches,
    )


def _tell(reference: Reference, agreement: float, max_tokens: int, seconds: float) -> None:
    """Say how good the reference is by now, and how long it may still take: ρ / (1 − ρ) grows with the batches."""
    by_agreement = math.inf
    if reference.agreement > 0 and agreement < 1:
        by_agreement = agreement / (1 - agreement) * (1 - reference.agreement) / reference.agreement
    wanted = reference.num_batches * min(by_agreement, max_tokens / reference.generated_tokens)
    left = max(0.0, wanted - reference.num_batches) / CHUNK * seconds
    _say(
        f"Reference: {reference.num_batches} batches, {reference.generated_tokens:,} tokens, halves agree to "
        f"{reference.agreement:.3f} of {agreement}, about {minutes(left)} left"
    )


def _digest(task: Task | OwnTask, policy: Path) -> str:
    """Of everything that the reference depends on."""
    digest = hashlib.sha256(repr((CHUNK, sorted(REFERENCE.items()), task)).encode())
    digest.update(repr(list(task.examples("train", REFERENCE_SEED, 16))).encode())
    files = policy.iterdir() if policy.is_dir() else []  # a model on the hub is named by the task
    for path in sorted(path for path in files if path.suffix in (".json", ".safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _check_arm(
    args: GradientCheckArguments, arm: str, task: Task | OwnTask, policy: Path, reference: Reference
) -> ArmResult:
    """The result of an arm, taken from the output directory if it is there."""
    path = Path(args.output_dir) / "arms" / f"{arm}.json"
    made_of = {
        "settings": args.settings_of(arm),
        "policy": _digest(task, policy),
        "reference_batches": reference.num_batches,
        **{name: getattr(args, name) for name in ("tokens_per_batch", "num_batches", "seed")},
    }
    if path.exists():
        stored = json.loads(path.read_text())
        if stored["made_of"] == made_of:
            return ArmResult(**stored["result"])
    settings = dict(args.settings_of(arm))
    if "num_prompts" not in settings:
        settings["num_prompts"] = prompts_per_batch(args.tokens_per_batch, settings, policy, task)
    result = measure_arm(settings, policy, task, args.num_batches, args.seed, reference)
    write_json(path, {"made_of": made_of, "result": asdict(result)})
    return result


def measure_arm(
    settings: dict[str, Any], policy: Path, task: Task | OwnTask, num_batches: int, seed: int, reference: Reference
) -> ArmResult:
    """Compare the updates of an arm's batches with the reference, see [`batch_gradients`]."""
    cosines: list[float] = []
    total = torch.zeros_like(reference.gradient)

    def receive(gradient: torch.Tensor) -> None:
        cosines.append(cosine(gradient, reference.gradient))
        total.add_(gradient)

    trainer = batch_gradients(settings, policy, task, num_batches, seed, receive)
    rows = trainer.costs.training_rows / num_batches
    return ArmResult(
        settings=settings,
        cosines=cosines,
        generated_tokens=trainer.costs.generated_tokens / num_batches,
        rows=rows,
        rows_with_signal=rows * mean(batch["signal"] for batch in trainer.batches),
        mean_cosine=cosine(total, reference.gradient),
    )


def make_report(args: GradientCheckArguments, reference: Reference, results: dict[str, ArmResult]) -> dict[str, Any]:
    """All numbers of the report."""
    assert args.versus is not None
    versus = results[args.versus]
    return {
        "arguments": asdict(args),
        "reference": {
            name: getattr(reference, name)
            for name in ("num_batches", "generated_tokens", "reward", "agreement", "quality")
        },
        "arms": {
            arm: asdict(result) | summarize(result, versus, args.tokens_per_batch, reference.quality)
            for arm, result in results.items()
        },
    }


def summarize(result: ArmResult, versus: ArmResult, tokens_per_batch: int, quality: float) -> dict[str, float]:
    """
    Mean cosine of an arm, its difference from another's, and expected progress, with their standard errors.

    The cosine is with the reference, which is lower than that with the true gradient by the factor `quality`; progress
    is by the latter, and by `tokens_per_batch` tokens. The difference is taken batch by batch.
    """
    cos, error = _mean_and_error(result.cosines)
    difference, difference_error = _mean_and_error(
        [own - other for own, other in zip(result.cosines, versus.cosines, strict=True)]
    )
    scale = tokens_per_batch / result.generated_tokens
    return {
        "cosine": cos,
        "cosine_error": error,
        "difference": difference,
        "difference_error": difference_error,
        "true_cosine": cos / quality,
        "progress": progress(cos / quality) * scale,
        "progress_error": progress_error(cos / quality, error / quality) * scale,
    }


def _mean_and_error(values: list[float]) -> tuple[float, float]:
    return mean(values), stdev(values) / math.sqrt(len(values))


def as_markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    arguments, reference = report["arguments"], report["reference"]
    lines = [
        f"# Gradient check: {arguments['task'] or arguments['dataset_name']}",
        "",
        f"Cosine of a batch's update with the gradient of the expected reward, mean ± standard error of "
        f"{arguments['num_batches']} independent batches of about {arguments['tokens_per_batch']:,} generated tokens. "
        f"The policy's pass rate is {reference['reward']:.3f}. Progress by token is c² / (1 − c²) of the cosine with "
        "the true gradient, for as many tokens: twice as much is the same with half the tokens.",
        "",
        f"The reference is the mean of {reference['num_batches']} batches, {reference['generated_tokens']:,} tokens. "
        f"Its two halves agree to {reference['agreement']:.3f}, so that its own cosine with the true gradient is about "
        f"{reference['quality']:.3f}: cosines with it are lower by that factor.",
        "",
        f"− `{arguments['versus']}`: the difference of the cosines, batch by batch. Arms whose sampling settings are "
        "the same draw the same completions, so that it is more certain than either.",
        "",
        f"| arm | cosine | − `{arguments['versus']}` | with the true gradient | progress by token | prompts | rows | "
        "rows with a signal | tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, row in sorted(report["arms"].items(), key=lambda item: -item[1]["progress"]):
        lines.append(
            f"| {arm} | {row['cosine']:.3f} ± {row['cosine_error']:.3f} | "
            f"{row['difference']:+.3f} ± {row['difference_error']:.3f} | {row['true_cosine']:.3f} | "
            f"{row['progress']:.3f} ± {row['progress_error']:.3f} | {row['settings']['num_prompts']} | "
            f"{row['rows']:.0f} | {row['rows_with_signal']:.0f} | {row['generated_tokens']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def write_report(report: dict[str, Any], output_dir: Path) -> None:
    """Write the report as JSON, Markdown and a figure, and print it."""
    write_json(output_dir / "gradient_check.json", report)
    page = as_markdown(report)
    (output_dir / "gradient_check.md").write_text(f"{page}\n![](gradient_check.png)\n")
    _plot(report, output_dir / "gradient_check.png")
    print(page)


def _plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = sorted(report["arms"].items(), key=lambda item: item[1]["progress"])
    names, rows = [arm for arm, _ in arms], [row for _, row in arms]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 1.5 + 0.32 * len(arms)), sharey=True)
    for panel, key, label in (
        (axes[0], "cosine", "cosine with the reference gradient"),
        (axes[1], "progress", "progress by token, c² / (1 − c²)"),
    ):
        panel.errorbar(
            [row[key] for row in rows], names, xerr=[row[f"{key}_error"] for row in rows], fmt="o", capsize=3
        )
        panel.set_xlabel(f"{label}, ± standard error")
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _say(line: str) -> None:
    CONSOLE.print(line, markup=False, highlight=False, soft_wrap=True)
