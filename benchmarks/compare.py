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
files. Once a comparison is complete, the command writes its report anew.

With `kept`, the runs of a file that was kept of the comparison count as done. So further seeds and arms can be added to
it on another machine.
"""

import dataclasses
import math
import shlex
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from fr3e_trl.commands.outputs import as_json, check_same, differing, read_object, resumable, weight_files, write_json
from fr3e_trl.commands.recipe import RecipeParser, parse_arguments
from fr3e_trl.commands.usage import UsageError

from .arms import whole_prompts
from .compare_arguments import CompareArguments
from .kept import KEPT, read_kept
from .outcomes import BUDGETS, COSTS, Results, mean_accuracy
from .own_task import OwnTask
from .progress import CONSOLE, RunProgress
from .report import write_report
from .runs import MEASURED, PROBE, UNDER_WAY, Run, be_quiet, probe, read_result
from .tasks import HELDOUT_SEED, Task
from .tuning import SCREENING_SEEDS, TUNED, grid, ranked
from .worker import execute_all

# Settings that may change between one call and the next: no finished run depends on them
FREE = (
    "output_dir",
    "only",
    "reference",
    "seeds",
    "learning_rates",
    "tokens_per_batch",
    "num_iterations",
    "tuning_seeds",
    "tuning_finalists",
    "pass_at",
    "kept",
    "keep_policies",
    "num_workers",
    "plan",
)

TOKENS_FILE = "tokens_per_prompt.json"
SECONDS_FILE = "seconds.json"
POLICIES = "policies"


def main(argv: list[str]) -> None:
    """Run a comparison, or what is missing of it, and write its report."""
    be_quiet()
    (args,) = parse_arguments(RecipeParser([CompareArguments]), argv)
    with resumable(args.output_dir):
        compare(args, f"python -m benchmarks compare {shlex.join(argv)}")


def compare(args: CompareArguments, command: str) -> None:
    """
    Run a comparison, or what is missing of it, and write its report.

    Args:
        args ([`CompareArguments`]):
            What to compare.
        command (`str`):
            The command that the report names as the one to reproduce it.
    """
    output_dir = Path(args.output_dir)
    task, policy = args.task_and_policy(args.num_heldout)
    if isinstance(task, OwnTask):
        there_are = len(task.splits["heldout"])
        if there_are < args.num_heldout:
            told = f"num_heldout={args.num_heldout}: {there_are} prompts are held out, which is all that can be."
            CONSOLE.print(told, highlight=False, soft_wrap=True)
        args.num_heldout = min(args.num_heldout, there_are)
    fixed = {name: value for name, value in asdict(args).items() if name not in FREE} | {"policy": policy.name}
    if isinstance(task, OwnTask):
        fixed |= {"files": task.digests(output_dir)}
    if isinstance(task, OwnTask) or args.policy is not None:
        fixed |= {"weights": weight_files(str(policy))}
    assert isinstance(args.arms, dict)
    forget_idle_arms(output_dir, args.arms)
    has_runs = any(output_dir.glob("*/*.json")) or any((output_dir / UNDER_WAY).glob(f"*/*/{MEASURED}"))
    comparison = Comparison(args, task, policy)
    kept = comparison.kept_results(fixed) if args.kept is not None else None
    if check_same(output_dir, fixed, has_runs, growing="arms", check_results=comparison.check_finished):
        for file in (TOKENS_FILE, SECONDS_FILE):  # measured for other arguments
            (output_dir / file).unlink(missing_ok=True)
    if kept is not None:
        comparison.take_over(kept)
    CONSOLE.print(comparison.plan(), markup=False, highlight=False, soft_wrap=True)
    if args.plan:
        return
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
        tokens_per_prompt=comparison.measured(TOKENS_FILE),
    )
    write_report(results, output_dir)
    CONSOLE.print(f"Report: {output_dir / 'report.md'}", highlight=False, soft_wrap=True)
    if args.keep_policies:
        size = sum(path.stat().st_size for path in (output_dir / POLICIES).glob("*/*"))
        kept_of = sum(Path(str(run.policy_path)).exists() for run in runs)
        told = f"Policies: {output_dir / POLICIES}, of {kept_of} of {len(runs)} runs, {size / 1e6:,.1f} MB"
        CONSOLE.print(told, highlight=False, soft_wrap=True)


def forget_idle_arms(output_dir: Path, arms: dict[str, Any]) -> None:
    """Forget what a directory says of arms that are other ones now, and that have no run there, done or under way."""
    path = output_dir / "arguments.json"
    earlier = read_object(path) if path.exists() else {}
    done = [path.name for path in output_dir.glob("*/*-rate*.json")]
    under_way = [path.parents[1].name.partition("-")[2] for path in (output_dir / UNDER_WAY).glob(f"*/*/{MEASURED}")]
    idle = [
        arm
        for arm, settings in arms.items()
        if earlier.get("arms", {}).get(arm, settings) != as_json(settings)
        and not any(name.startswith(f"{arm}-rate") for name in (*done, *under_way))
    ]
    for arm in idle:
        del earlier["arms"][arm]
    if idle:
        write_json(path, earlier)
        tokens_file = output_dir / TOKENS_FILE
        if tokens_file.exists():
            tokens = read_object(tokens_file)
            write_json(tokens_file, {arm: number for arm, number in tokens.items() if arm not in idle})


# All settings of an arm, its own over those of the base
Settings = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """
    The runs of a comparison: by which arms are tuned, and of which the report tells.

    Args:
        args ([`CompareArguments`]):
            What is compared.
        task ([`Task`] or [`OwnTask`]):
            What the arms learn.
        policy (`Path`):
            Directory of the starting policy.
    """

    args: CompareArguments
    task: Task | OwnTask
    policy: Path

    def kept_results(self, fixed: dict[str, Any]) -> Results:
        """
        What was kept of this comparison.

        Args:
            fixed (`dict[str, Any]`):
                The arguments that its runs depend on.

        Raises:
            UsageError: There is no such file, it is damaged, or it is of another comparison.
        """
        path = Path(str(self.args.kept))
        if not path.is_file():
            raise UsageError(f"kept={str(path)!r} is no file. Name the {KEPT} of a comparison.")
        kept = read_kept(path)
        given = kept.arguments.get("policy")  # None where the policy is the task's own
        if given is None and self.args.policy is not None:
            raise UsageError(
                f"kept={str(path)!r} has runs from the task's own policy, and policy={self.args.policy!r} is another."
            )
        earlier = kept.arguments | {"policy": fixed["policy"] if given is None else Path(given).name}
        differences = differing(earlier, fixed, growing="arms")
        if differences:
            raise UsageError(f"kept={str(path)!r} is of another comparison: {differences}.")
        return kept

    def take_over(self, kept: Results) -> None:
        """Write the runs of a kept file where they are not there yet, and by how many tokens its batches were sized."""
        write_json(Path(self.args.output_dir) / TOKENS_FILE, self.measured(TOKENS_FILE) | kept.tokens_per_prompt)
        for folder, results in (
            (self.screening_folder, kept.screening),
            ("tuning", kept.tuning),
            ("runs", kept.runs),
        ):
            for result in results:
                run = self.make_run(result["arm"], result["settings"], result["seed"], result["amount"], folder)
                if not Path(run.path).exists():
                    write_json(Path(run.path), result)

    def check_finished(self) -> None:
        """Raise a `UsageError` if a run that is there is not of this comparison, by what its file says of itself."""
        amounts = {"runs": None, "tuning": None, "screening": self.args.tuning_tokens}
        for folder, amount in amounts.items():
            for path in sorted((Path(self.args.output_dir) / folder).glob("*.json")):
                result = read_object(path)
                arm = str(result.get("arm"))
                if arm not in (self.args.arms or {}):
                    continue  # it is of arms that this call does not name
                tuned = {name: value for name, value in result.get("settings", {}).items() if name in TUNED}
                run = self.make_run(arm, tuned | self.args.settings_of(arm), result.get("seed", 0), amount, folder)
                read_result(dataclasses.replace(run, path=str(path)))

    def plan(self) -> str:
        """
        What the comparison takes: runs, what they spend, and hours.

        Hours are by the runs that are done, and before there are any by two batches of each arm and an evaluation. They
        take it that points with the most updates a batch will win.
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
        cost = stages["runs"][0].cost
        done = self.seconds_of_done_runs(cost)
        if args.plan:  # without a grid, nothing has been measured yet
            for arm in [arm for arm in grids if arm not in done]:
                self.tokens_per_prompt(arm)
        measured = self.measured(SECONDS_FILE)
        everything = [run for runs in stages.values() for run in runs]
        seconds = {run.path: expected_seconds(run, done, measured) for run in everything}
        known = [seconds[run.path] / run.amount for run in everything if not math.isnan(seconds[run.path])]
        usual = fmean(known) if known else math.nan  # of an arm that nothing tells of
        total_amount, total_hours, lines = 0.0, 0.0, []
        for stage, runs in stages.items():
            amount = sum(run.amount for run in runs)
            told = (run.amount * usual if math.isnan(seconds[run.path]) else seconds[run.path] for run in runs)
            hours = sum(told) / 3600
            total_amount, total_hours = total_amount + amount, total_hours + hours
            if runs:
                lines.append(f"  {stage}: {len(runs)} runs of {runs[0].amount:,} {COSTS[cost]}{_told_hours(hours)}")
        return "\n".join(
            [f"Plan: {total_amount:,.0f} {COSTS[cost]}{_told_hours(total_hours)}, with what is done already", *lines]
        )

    def seconds_of_done_runs(self, cost: str) -> dict[str, float]:
        """Seconds that each arm's runs took for a unit of what is spent, with evaluations, where some are done."""
        seconds: defaultdict[str, float] = defaultdict(float)
        spent: defaultdict[str, float] = defaultdict(float)
        for path in Path(self.args.output_dir).glob("*/*-rate*.json"):
            run = read_object(path)
            if {"arm", "evaluation_seconds"} <= run.keys():  # tuning runs that come from a kept file have no seconds
                seconds[run["arm"]] += run["evaluations"][-1]["seconds"] + run["evaluation_seconds"]
                spent[run["arm"]] += run["evaluations"][-1][cost]
        return {arm: seconds[arm] / spent[arm] for arm in seconds}

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
        """The settings of an arm at each point of its grid."""
        settings, sizes = self.args.settings_of(arm), []
        if "num_prompts" not in settings:
            tokens = self.tokens_per_prompt(arm)
            sizes = [whole_prompts(wanted / tokens, settings) for wanted in self.args.tokens_per_batch or []]
        return grid(settings, self.args.learning_rates or [], sizes, self.args.num_iterations or [])

    def tokens_per_prompt(self, arm: str) -> float:
        """Tokens that an arm generates for each prompt, measured once."""
        tokens = self.measured(TOKENS_FILE)
        if arm not in tokens:
            CONSOLE.print(f"Measuring what two batches of {arm} take", markup=False, highlight=False, soft_wrap=True)
            seconds = self.measured(SECONDS_FILE) or {"arms": {}}
            run = self.make_run(arm, self.args.settings_of(arm), HELDOUT_SEED, None, "runs")
            evaluates = "evaluation" not in seconds
            parts = {arm: float(PROBE["max_steps"] + evaluates)}
            with RunProgress("measuring", parts, "steps and evaluations", first="first batch") as progress:
                probed = probe(run, evaluates, partial(progress.update, arm))
            tokens[arm] = probed.tokens_per_prompt
            seconds["arms"][arm] = [probed.batch, probed.update]
            seconds.setdefault("evaluation", probed.evaluation)
            write_json(Path(self.args.output_dir) / TOKENS_FILE, tokens)
            write_json(Path(self.args.output_dir) / SECONDS_FILE, seconds)
        return tokens[arm]

    def measured(self, file: str) -> dict[str, Any]:
        """What a file of the directory says of the arms that were measured; empty if none was."""
        path = Path(self.args.output_dir) / file
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
        kept = Path(args.output_dir) / POLICIES / name
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
            policy_path=str(kept) if args.keep_policies and folder == "runs" else None,
        )


def expected_seconds(run: Run, done: dict[str, float], measured: dict[str, Any]) -> float:
    """
    Seconds that a run will take, NaN where nothing tells.

    Args:
        run ([`Run`]):
            The run.
        done (`dict[str, float]`):
            What runs of its arm took for a unit of what is spent, where some are done.
        measured (`dict[str, Any]`):
            What probes say of arms and evaluations, where they were made.
    """
    if run.arm in done:
        return run.amount * done[run.arm]
    evaluations = (run.num_evals + 1) * measured.get("evaluation", 0.0)
    if run.cost == "seconds":
        return run.amount + evaluations
    if run.cost != "generated_tokens" or run.arm not in measured.get("arms", {}):
        return math.nan
    batch, update = measured["arms"][run.arm]
    return run.amount * (batch + (run.settings.get("num_iterations", 1) - 1) * update) + evaluations


def _told_hours(hours: float) -> str:
    return "" if math.isnan(hours) else f", {hours:.1f} hours of one worker" if hours >= 0.05 else ", minutes"


def best_points(arm: str, points: list[Settings], runs: list[Run]) -> list[Settings]:
    """Points of an arm's grid, the one with the highest mean of held-out pass@1 along its runs first."""
    if len(points) == 1:
        return points
    return ranked(points, [(run.settings, mean_accuracy(read_result(run))) for run in runs if run.arm == arm])
