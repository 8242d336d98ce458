"""One run of a comparison: an arm, trained with one seed until it has spent so much."""

import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import datasets
import transformers

from fr3e_trl.commands.outputs import as_json, damaged, read_object, revision, write_json
from fr3e_trl.commands.usage import UsageError
from fr3e_trl.resume import checkpoints
from fr3e_trl.tree_log.record import write_whole

from .arms import FALLING, make_trainer
from .evaluation import evaluate
from .measures import Costs, MeasuredTrainer, now
from .outcomes import COSTS, pass_rate
from .own_task import OwnTask
from .tasks import HELDOUT_SEED, Task

PAUSE = 60.0  # seconds between two lines on how far a run is

UNBOUNDED = 10**9  # steps: what is spent ends a run

UNDER_WAY = "under_way"  # the folder of what there is of runs that are not done

# In the folder of such a run
CURVE = "curve.jsonl"
MEASURED = "measured.json"  # in its checkpoint, whose last file it is: without it, the checkpoint was cut

# The batches by which an arm's tokens per prompt are measured, whatever its own batches are. With a model of the user's
# own, which may be large, they are smaller
PROBE = {"num_train_examples": 64, "num_iterations": 2, "max_steps": 4}
PROBE_PROMPTS, PROBE_PROMPTS_OF_OWN = 32, 8

# How a batch is divided
PARTS = ("per_device_train_batch_size", "steps_per_generation", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Run:
    """
    What decides a run: an arm with all its settings, trained until after the first batch at which it has spent `amount`
    of `cost`, one of [`Costs`].

    Its result is written to the file `path`, and its policy, if it is to be kept, to the directory `policy_path`.
    """

    arm: str
    settings: dict[str, Any]
    seed: int
    cost: str
    amount: float
    task: Task | OwnTask
    policy: str
    num_evals: int
    num_heldout: int
    num_samples: int
    eval_batch_size: int
    path: str
    policy_path: str | None = None

    @property
    def under_way(self) -> Path:
        """Folder of what there is of it until its result is written."""
        path = Path(self.path)
        return path.parent.parent / UNDER_WAY / f"{path.parent.name}-{path.stem}"

    @property
    def what_it_is(self) -> dict[str, Any]:
        """What its file says of itself, with names for the task and the policy."""
        named = {
            "task": repr(self.task) if isinstance(self.task, OwnTask) else self.task.name,
            "policy": Path(self.policy).name,
        }
        names = "arm settings seed cost amount num_evals num_heldout num_samples eval_batch_size".split()
        return as_json({name: getattr(self, name) for name in names} | named)


def read_result(run: Run) -> dict[str, Any]:
    """The result of a run that is done. Raises a `UsageError` if the file is damaged, or of another run."""
    result = read_object(run.path)
    for name, value in run.what_it_is.items():
        if result.get(name, value) != value:
            raise UsageError(
                f"{run.path} belongs to another comparison: {name} was {result[name]!r} and is {value!r}. Use another "
                "output_dir, or delete that one."
            )
    if not result.get("evaluations"):
        raise damaged(run.path, "it has no evaluations")
    return result


class Course(transformers.TrainerCallback):
    """
    Measures a run along its course, saves it at each evaluation but the first, and ends it when its budget is spent.
    A learning rate that falls does so by the share of the budget that is spent. `checkpoint` is what the trainer goes
    on from.
    """

    def __init__(self, run: Run, trainer: MeasuredTrainer, checkpoint: Path | None):
        self.run = run
        self.trainer = trainer
        self.checkpoint = checkpoint
        self.heldout = run.task.examples("heldout", HELDOUT_SEED, run.num_heldout)
        self.evaluations: list[dict[str, Any]] = []
        self.evaluation_seconds = 0.0
        self._since = 0.0  # when the step began
        self._printed = time.monotonic()  # when its progress was last printed

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.checkpoint is None:
            self._evaluate()
        else:
            measured = read_object(self.checkpoint / MEASURED)
            self.trainer.costs = Costs(**measured["costs"])
            self.trainer.batches = measured["batches"]
            self.evaluations = measured["evaluations"]
            self.evaluation_seconds = measured["evaluation_seconds"]
            self._write_curve()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = now(args.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.costs.seconds += now(args.device) - self._since
        micro_batches = state.global_step * args.gradient_accumulation_steps
        if micro_batches % (args.steps_per_generation * args.num_iterations) != 0:
            return  # the batch is still being trained on
        run, spent = self.run, self._spent
        if args.lr_scheduler_type in FALLING:
            self._set_learning_rate(spent / run.amount)
        control.should_training_stop = spent >= run.amount
        # Several fractions of the budget that one batch steps over are measured once
        num_measured = self.evaluations[-1][run.cost] * run.num_evals // run.amount
        if spent * run.num_evals >= (num_measured + 1) * run.amount:
            self._evaluate()
            control.should_save = not control.should_training_stop

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The trainer's part of a checkpoint is written: add what was measured, and remove the checkpoint before."""
        saved = checkpoints(self.run.under_way)
        measured = {
            "costs": asdict(self.trainer.costs),
            "batches": self.trainer.batches,
            "evaluations": self.evaluations,
            "evaluation_seconds": self.evaluation_seconds,
        }
        write_json(saved.pop(state.global_step) / MEASURED, measured)
        for other in saved.values():
            shutil.rmtree(other)

    def _set_learning_rate(self, share: float) -> None:
        """Have the schedule be where `share` of its steps are done: of `UNBOUNDED`, as the trainer has made it."""
        scheduler = self.trainer.lr_scheduler
        assert scheduler is not None
        scheduler.last_epoch = int(min(share, 1) * UNBOUNDED) - 1
        scheduler.step()

    @property
    def _spent(self) -> float:
        return getattr(self.trainer.costs, self.run.cost)

    def _evaluate(self) -> None:
        trainer, run = self.trainer, self.run
        start = now(trainer.args.device)
        evaluation = evaluate(trainer, run.task, self.heldout, run.num_samples, run.eval_batch_size)
        self.evaluations.append(asdict(trainer.costs) | asdict(evaluation))
        self.evaluation_seconds += now(trainer.args.device) - start
        self._write_curve()
        if time.monotonic() - self._printed >= PAUSE:
            self._printed = time.monotonic()
            spent = f"{self._spent:,.0f} of {run.amount:,.0f} {COSTS[run.cost]}"
            line = f"{Path(run.path).stem}: {spent}, pass@1 {pass_rate(self.evaluations[-1]):.3f}"
            print(line, file=sys.stderr, flush=True)

    def _write_curve(self) -> None:
        """For those who look at it: nothing goes on from here."""
        lines = []
        for evaluation in self.evaluations:
            rates = {f"pass@{k}": pass_rate(evaluation, k) for k in sorted({1, self.run.num_samples})}
            lines.append(json.dumps({cost.name: evaluation[cost.name] for cost in fields(Costs)} | rates) + "\n")
        path = self.run.under_way / CURVE
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(lines).encode())


def execute(run: Run) -> None:
    """Train, from where the run was saved last if it was cut, and write what was measured to the run's file."""
    be_quiet()
    checkpoint = last_checkpoint(run)
    trainer = make_trainer(run.settings, Path(run.policy), run.task, run.under_way, run.seed, max_steps=UNBOUNDED)
    course = Course(run, trainer, checkpoint)
    trainer.add_callback(course)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if run.policy_path is not None:
        save_policy(trainer, Path(run.policy_path))
    result = {
        **run.what_it_is,
        "evaluations": course.evaluations,
        "evaluation_seconds": course.evaluation_seconds,
        "batches": trainer.batches,
        "revision": revision(),
    }
    write_json(Path(run.path), result)
    shutil.rmtree(run.under_way)


def last_checkpoint(run: Run) -> Path | None:
    """The last that is complete of a run that was cut, if there is one."""
    complete = {step: path for step, path in checkpoints(run.under_way).items() if (path / MEASURED).exists()}
    return complete[max(complete)] if complete else None


def save_policy(trainer: MeasuredTrainer, path: Path) -> None:
    """Save what a run has trained, an adapter alone where it is one, whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    trainer.save_model(str(partial))
    shutil.rmtree(path, ignore_errors=True)  # of a run that was killed before its result was written
    partial.rename(path)


def probe(run: Run) -> dict[str, float]:
    """
    Train two batches of a run's arm with two updates each, and evaluate.

    Returns:
        `dict[str, float]`: `tokens_per_prompt`, that the first batch generates. Seconds for each generated token of the
        second batch, as in the first much is done once: `batch`, to generate it and update by it once, and `update`, to
        update by it once more. Seconds of an `evaluation`.
    """
    be_quiet()
    num_prompts = PROBE_PROMPTS_OF_OWN if isinstance(run.task, OwnTask) else PROBE_PROMPTS
    size = run.settings.get("per_device_train_batch_size")
    settings = {name: value for name, value in run.settings.items() if name not in PARTS}
    if size is not None and num_prompts * settings["num_generations"] % size == 0:
        settings["per_device_train_batch_size"] = size  # of a large model, there may be no room for more
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = make_trainer(
            settings, Path(run.policy), run.task, Path(output_dir), HELDOUT_SEED, **PROBE, num_prompts=num_prompts
        )
        ends = StepEnds()
        trainer.add_callback(ends)
        trainer.train()
        began = now(trainer.args.device)
        heldout = run.task.examples("heldout", HELDOUT_SEED, run.num_heldout)
        evaluate(trainer, run.task, heldout, run.num_samples, run.eval_batch_size)
        evaluation = now(trainer.args.device) - began
    first, both = (batch["generated_tokens"] for batch in trainer.batches)
    _, begin, once, twice = ends.times
    tokens = both - first
    return {
        "tokens_per_prompt": first / num_prompts,
        "batch": (once - begin) / tokens,
        "update": (twice - once) / tokens,
        "evaluation": evaluation,
    }


class StepEnds(transformers.TrainerCallback):
    """When the steps ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.times.append(now(args.device))


def be_quiet() -> None:
    """Have the libraries keep their progress bars and forecasts to themselves."""
    warnings.simplefilter("ignore", FutureWarning)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
