"""
Arms compared at equal generated tokens, training rows or time, from one starting policy, over several seeds.

    python -m benchmarks compare --config recipes/bench/compare_chain.yaml
    python -m benchmarks compare --model_name_or_path MODEL --dataset_name FILE.jsonl --reward_funcs my_rewards.py:score

Every arm is first tuned in the same grid. A recipe sets the grid by:

    learning_rates: [3e-4, 1e-3, 3e-3]
    tokens_per_batch: [3000, 12000]    # generated tokens of a batch; the prompts of each arm follow from it
    num_iterations: [1, 2, 4]          # updates of a batch
    tuning_seeds: [1000, 1001]
    tuning_finalists: 3                # points of each arm's grid that are run with all of these seeds
    tuning_tokens: 100000              # length of the runs that find the finalists; left out, they are whole

Each axis of the grid is a list, or one value. An arm with a `learning_rate`, `num_prompts` or `num_iterations` of its
own keeps it. All points of the grid are run with the first two tuning seeds, and the three with the best mean are run
whole with all of them. The best mean of held-out pass@1 along those whole runs decides.

Every run is a file in `output_dir/runs` (or `screening` and `tuning`), written when the run is done. Until then, it is
saved at each evaluation but the first, in `output_dir/under_way`. After a cut, the same command goes on from these
files. With `kept`, the runs of a file that was kept of the comparison count as done.
"""

import itertools
import math
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fr3e_trl.commands.outputs import check_same, differing, read_object, resumable, weight_files, write_json
from fr3e_trl.commands.recipe import RecipeParser, parse_arguments
from fr3e_trl.commands.usage import UsageError

from .arguments import CompareArguments
from .arms import whole_prompts
from .kept import KEPT, read_kept
from .outcomes import BUDGETS, COSTS, GRIDS, TUNED, Results, mean_accuracy
from .own_task import OwnTask
from .report import write_report
from .runs import MEASURED, UNDER_WAY, Run, be_quiet, probe, read_result
from .tasks import HELDOUT_SEED, TASKS, Task
from .worker import execute_all, log

# Settings that may change between one call and the next: no finished run depends on them
FREE = (
    *("output_dir", "only", "reference", "seeds", *GRIDS.values(), "tuning_seeds", "tuning_finalists"),
    *("pass_at", "kept", "keep_policies", "num_workers", "plan"),
)

# Of the tuning seeds, as many run all points of a grid. Of some sixty points one seed chooses some that do badly with
# others: the best of many noisy means is the luckiest
SCREENING_SEEDS = 2

PROBES = "probes.json"  # what two batches of each arm took
POLICIES = "policies"

# All settings of an arm, its own over those of the base
Settings = dict[str, Any]


def main(argv: list[str]) -> None:
    """Run a comparison, or what is missing of it, and write its report."""
    be_quiet()
    (args,) = parse_arguments(RecipeParser([CompareArguments]), argv)
    if args.plan:
        return log(plan_of(args))
    with resumable(args.output_dir):
        compare(args, f"python -m benchmarks compare {shlex.join(argv)}")


def compare(args: CompareArguments, command: str) -> None:
    """Run a comparison, or what is missing of it, and write its report, which names the command to reproduce it."""
    output_dir = Path(args.output_dir)
    task, policy = args.task_and_policy(args.num_heldout)
    fixed = {name: value for name, value in asdict(args).items() if name not in FREE} | {"policy": policy.name}
    if isinstance(task, OwnTask):
        there_are = len(task.splits["heldout"])
        if there_are < args.num_heldout:
            log(f"num_heldout={args.num_heldout}: {there_are} prompts are held out, which is all that can be.")
        args.num_heldout = fixed["num_heldout"] = min(args.num_heldout, there_are)
        fixed |= {"files": task.digests(output_dir)}
    if isinstance(task, OwnTask) or args.policy is not None:
        fixed |= {"weights": weight_files(str(policy))}
    has_runs = any(output_dir.glob("*/*.json")) or any((output_dir / UNDER_WAY).glob(f"*/*/{MEASURED}"))
    comparison = Comparison(args, task, policy)
    kept = comparison.kept_results(fixed) if args.kept is not None else None
    if check_same(output_dir, fixed, has_runs, growing="arms"):
        (output_dir / PROBES).unlink(missing_ok=True)  # of other arguments
    if kept is not None:
        comparison.take_over(kept)
    log(comparison.plan())
    arms, screening, tuning = comparison.tuned_arms()
    runs = list(comparison.final_runs(arms))
    execute_all("runs", runs, args.num_workers)
    results = Results(
        arguments=asdict(args) | ({"files": fixed["files"]} if isinstance(task, OwnTask) else {}),
        command=command,
        arms=arms,
        runs=[read_result(run) for run in runs],
        screening=[read_result(run) for run in screening],
        tuning=[read_result(run) for run in tuning],
        tokens_per_prompt={arm: probed["tokens_per_prompt"] for arm, probed in comparison.probes().items()},
    )
    write_report(results, output_dir)
    log(f"Report: {output_dir / 'report.md'}")


def plan_of(args: CompareArguments) -> str:
    """What a comparison takes, see [`Comparison.plan`]. Nothing is run or written for it."""
    task = OwnTask(args, args.num_heldout) if args.task is None else TASKS[args.task]
    return Comparison(args, task, Path(args.policy or "")).plan()


@dataclass(frozen=True)
class Comparison:
    """The runs of a comparison: by which arms are tuned, and those that the report is about."""

    args: CompareArguments
    task: Task | OwnTask
    policy: Path  # directory of the starting policy

    def kept_results(self, fixed: dict[str, Any]) -> Results:
        """What was kept of this comparison, whose runs depend on the arguments `fixed`."""
        path = Path(str(self.args.kept))
        if not path.is_file():
            raise UsageError(f"kept={str(path)!r} is not a file. Pass the {KEPT} of a comparison.")
        kept = read_kept(path)
        given = kept.arguments.get("policy")  # None where the policy is the task's own
        if given is None and self.args.policy is not None:
            raise UsageError(
                f"kept={str(path)!r} has runs from the task's own policy, not from policy={self.args.policy!r}."
            )
        earlier = kept.arguments | {"policy": fixed["policy"] if given is None else Path(given).name}
        differences = differing(earlier, fixed, growing="arms")
        if differences:
            raise UsageError(f"kept={str(path)!r} belongs to another comparison: {differences}.")
        return kept

    def take_over(self, kept: Results) -> None:
        """Write the runs of a kept file where they are not there yet, and by how many tokens its batches were sized."""
        sizes = {arm: {"tokens_per_prompt": tokens} for arm, tokens in kept.tokens_per_prompt.items()}
        write_json(Path(self.args.output_dir) / PROBES, self.probes() | sizes)
        for folder, results in (
            (self.screening_folder, kept.screening),
            ("tuning", kept.tuning),
            ("runs", kept.runs),
        ):
            for result in results:
                run = self.make_run(result["arm"], result["settings"], result["seed"], result["amount"], folder)
                if not Path(run.path).exists():
                    write_json(Path(run.path), result)

    def plan(self) -> str:
        """
        What the comparison takes: runs, what they spend, and hours.

        Hours are by two batches of each arm and an evaluation, and take it that points with the most updates a batch
        will win. They are given where an earlier call has measured these, as it does for `tokens_per_batch`.
        """
        args = self.args
        grids = {
            arm: sorted(self.grid_of(arm), key=lambda point: -point.get("num_iterations", 1)) for arm in args.arms or {}
        }
        screening = self.screening_runs(grids)
        screened = {run.path for run in screening}
        finalists = {arm: points[: args.tuning_finalists] for arm, points in grids.items()}  # as many as there will be
        tuning = self.tuning_runs(finalists, args.tuning_seeds, None, "tuning")
        stages = {
            "screening": screening,
            "finalists": [run for run in tuning if run.path not in screened],
            "runs": list(self.final_runs({arm: points[0] for arm, points in grids.items()})),
        }
        cost = COSTS[stages["runs"][0].cost]
        probes = self.probes()
        lines = []
        total_amount, total_hours = 0.0, 0.0
        for stage, runs in stages.items():
            amount = sum(run.amount for run in runs)
            hours = sum(expected_seconds(run, probes.get(run.arm, {})) for run in runs) / 3600
            total_amount, total_hours = total_amount + amount, total_hours + hours
            if runs:
                lines.append(f"  {stage}: {len(runs)} runs of {runs[0].amount:,} {cost}{_hours_text(hours)}")
        head = f"Plan: {total_amount:,.0f} {cost}{_hours_text(total_hours)}, with what is done already"
        return "\n".join([head, *lines])

    def tuned_arms(self) -> tuple[dict[str, Settings], list[Run], list[Run]]:
        """
        Tune the arms.

        Returns:
            The settings of each arm, with the best point of its grid; the runs of all points with the first two tuning
            seeds; the runs of the finalists with all tuning seeds.
        """
        args = self.args
        grids = {arm: self.grid_of(arm) for arm in args.arms or {}}
        screening = self.screening_runs(grids)
        execute_all("screening", screening, args.num_workers)
        finalists = {arm: best_points(arm, points, screening)[: args.tuning_finalists] for arm, points in grids.items()}
        tuning = list(self.tuning_runs(finalists, args.tuning_seeds, None, "tuning"))
        execute_all("finalists", tuning, args.num_workers)
        arms = {arm: best_points(arm, points, tuning)[0] for arm, points in finalists.items()}
        return arms, screening, tuning

    def grid_of(self, arm: str) -> list[Settings]:
        """The settings of an arm at each point of its grid, the lowest values first. What it has set itself stays."""
        args, settings = self.args, self.args.settings_of(arm)
        axes: dict[str, list[Any]] = {"learning_rate": args.learning_rates or []}
        if "num_prompts" not in settings:
            sizes = args.tokens_per_batch or []
            if not args.plan or arm in self.probes():  # a plan runs nothing: it has as many points as there are sizes
                tokens = self.probed(arm)["tokens_per_prompt"]
                sizes = [whole_prompts(size / tokens, settings) for size in sizes]
            axes["num_prompts"] = sizes
        axes["num_iterations"] = args.num_iterations or []
        axes = {name: sorted({*values}) for name, values in axes.items() if values and name not in settings}
        return [settings | dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]

    def probed(self, arm: str) -> dict[str, float]:
        """What two batches of an arm took, measured once: see [`~.runs.probe`]."""
        probes = self.probes()
        if arm not in probes:
            log(f"Measuring what two batches of {arm} take")
            probes[arm] = probe(self.make_run(arm, self.args.settings_of(arm), HELDOUT_SEED, None, "runs"))
            write_json(Path(self.args.output_dir) / PROBES, probes)
        return probes[arm]

    def probes(self) -> dict[str, Any]:
        """What was measured of each arm, if it was."""
        path = Path(self.args.output_dir) / PROBES
        return read_object(path) if path.exists() else {}

    def tuning_runs(
        self, grids: dict[str, list[Settings]], seeds: list[int], amount: float | None, folder: str
    ) -> Iterator[Run]:
        """The runs that find the best points of each arm's grid, where it has more than one."""
        for seed in seeds:
            for arm, points in grids.items():
                for settings in points if len(points) > 1 else []:
                    yield self.make_run(arm, settings, seed, amount, folder)

    def screening_runs(self, grids: dict[str, list[Settings]]) -> list[Run]:
        """The runs of all points of each arm's grid, with the first two tuning seeds: these find the finalists."""
        args = self.args
        seeds = args.tuning_seeds[:SCREENING_SEEDS]
        return list(self.tuning_runs(grids, seeds, args.tuning_tokens, self.screening_folder))

    @property
    def screening_folder(self) -> str:
        """Whole runs are among those of the tuning."""
        return "tuning" if self.args.tuning_tokens is None else "screening"

    def final_runs(self, arms: dict[str, Settings]) -> Iterator[Run]:
        """The runs that are reported: all arms of one seed, then of the next."""
        for seed in self.args.seeds:
            for arm, settings in arms.items():
                yield self.make_run(arm, settings, seed, None, "runs")

    def make_run(self, arm: str, settings: Settings, seed: int, amount: float | None, folder: str) -> Run:
        """A run that spends `amount`, or all of the budget if that is `None`."""
        args = self.args
        rate, num_prompts, num_updates = (settings.get(name, 1) for name in TUNED)
        cost, budget = next((BUDGETS[name], value) for name in BUDGETS if (value := getattr(args, name)) is not None)
        amount = budget if amount is None else amount
        assert args.eval_batch_size is not None
        name = f"{arm}-rate{rate:g}-prompts{num_prompts}-updates{num_updates}-seed{seed}"
        return Run(
            arm=arm,
            settings=settings,
            seed=seed,
            cost=cost,
            amount=amount,
            task=self.task,
            policy=str(self.policy),
            num_evals=max(1, round(args.num_evals * amount / budget)),  # as far apart in all runs
            num_heldout=args.num_heldout,
            num_samples=args.num_samples,
            eval_batch_size=args.eval_batch_size,
            path=str(Path(args.output_dir) / folder / f"{name}.json"),
            policy_path=str(Path(args.output_dir) / POLICIES / name)
            if args.keep_policies and folder == "runs"
            else None,
        )


def expected_seconds(run: Run, probed: dict[str, float]) -> float:
    """Seconds that a run will take, by what was measured of its arm; NaN where nothing was."""
    evaluations = (run.num_evals + 1) * probed.get("evaluation", math.nan)
    if run.cost == "seconds":
        return run.amount + evaluations
    if run.cost != "generated_tokens":
        return math.nan
    updates = run.settings.get("num_iterations", 1)
    seconds_per_token = probed.get("batch", math.nan) + (updates - 1) * probed.get("update", math.nan)
    return run.amount * seconds_per_token + evaluations


def _hours_text(hours: float) -> str:
    if math.isnan(hours):
        return ""
    return f", {hours:.1f} hours of one worker" if hours >= 1 else f", {math.ceil(60 * hours)} minutes of one worker"


def best_points(arm: str, points: list[Settings], runs: list[Run]) -> list[Settings]:
    """Points of an arm's grid, that with the highest mean of pass@1 along its runs first; of two alike, the lower."""
    if len(points) == 1:
        return points
    scores = [(run.settings, mean_accuracy(read_result(run))) for run in runs if run.arm == arm]
    return sorted(
        points, key=lambda point: fmean(score for settings, score in scores if settings == point), reverse=True
    )
