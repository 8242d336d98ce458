"""
Does what a batch is worth at one policy predict learning curves? At policies along a run of GRPO, with the batch size
that is used.

    fr3e compare --config recipes/bench/compare_chain.yaml --num_workers 2
    fr3e compare --config recipes/bench/compare_shapes.yaml --num_workers 2
    python benchmarks/gradient_along_a_run.py

For each arm of both: the mean cosine of its updates with the gradient of the expected reward, and the share of a
noiseless step of Adam's that its steps gain: Adam divides by the root of each coordinate's mean square, so that the
expected step is mean / root mean square, and its gain the product with the reference. Printed is the rank correlation
of both with the mean of pass@1 along the runs.
"""

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

import torch
import yaml
from transformers import TrainerCallback

from fr3e_trl.bench.arms import make_trainer
from fr3e_trl.bench.gradient_check import REFERENCE
from fr3e_trl.bench.gradients import batch_gradients, cosine
from fr3e_trl.bench.policies import starting_policy
from fr3e_trl.bench.results import mean_accuracy
from fr3e_trl.bench.runs import be_quiet, prompts_per_batch
from fr3e_trl.bench.tasks import TASKS

OUTPUT = Path("outputs/bench/gradient_along_a_run")
FAMILIES = ("chain", "shapes")
TOKENS_ALONG, REFERENCE_TOKENS, TOKENS_PER_BATCH, NUM_BATCHES = (20_000, 40_000), 1_200_000, 2000, 24
PER_RUN = ("num_iterations", "learning_rate", "num_prompts")


class KeepPolicies(TrainerCallback):
    """Keeps the policies that a run comes by, and ends it with the last."""

    def __init__(self, trainer):
        self.trainer, self.left = trainer, list(TOKENS_ALONG)

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer.costs.generated_tokens >= self.left[0] and state.global_step % args.num_iterations == 0:
            path = OUTPUT / str(self.left.pop(0))
            self.trainer.save_model(path)
            self.trainer.processing_class.save_pretrained(path)
            control.should_training_stop = not self.left


def policies(task, base):
    start = starting_policy(task)
    settings = base | {"trainer": "grpo", "num_generations": 4, "epsilon_high": None, "learning_rate": 3e-4}
    trainer = make_trainer(
        settings | {"num_prompts": 22, "num_iterations": 4}, start, task, OUTPUT, 77, max_steps=10**6
    )
    trainer.add_callback(KeepPolicies(trainer))
    trainer.train()
    return [start, *(OUTPUT / str(tokens) for tokens in TOKENS_ALONG)]


def reference(task, policy):
    total, tokens, seed = 0, 0, 10**6
    while tokens < REFERENCE_TOKENS:
        gradients: list[torch.Tensor] = []
        trainer = batch_gradients(REFERENCE, policy, task, 8, seed, gradients.append)
        total, tokens, seed = total + torch.stack(gradients).sum(0), tokens + trainer.costs.generated_tokens, seed + 1
    return total


def measures(settings, task, policy, of_reference):
    settings = {name: value for name, value in settings.items() if name not in PER_RUN}
    settings["num_prompts"] = prompts_per_batch(TOKENS_PER_BATCH, settings, policy, task)
    gradients: list[torch.Tensor] = []
    batch_gradients(settings, policy, task, NUM_BATCHES, 0, gradients.append)
    steps = torch.stack(gradients)
    step = (steps.mean(0) / steps.square().mean(0).sqrt()).nan_to_num(0)
    gain = (of_reference @ step / of_reference.abs().sum()).item()
    return mean(cosine(gradient, of_reference) for gradient in gradients), gain


def ranks(values):
    return torch.tensor(values).argsort().argsort().double()


def main():
    be_quiet()
    task, arms, curves = TASKS["chain"], {}, defaultdict(list)
    for family in FAMILIES:
        recipe = yaml.safe_load(Path(f"recipes/bench/compare_{family}.yaml").read_text())
        for arm, settings in recipe["arms"].items():
            if not settings.get("share_prefixes"):  # the same batches as another's
                arms[family, arm] = recipe["base"] | settings
        for path in Path(f"outputs/bench/{family}/runs").glob("*.json"):
            curves[family, path.name.split("-rate")[0]].append(mean_accuracy(json.loads(path.read_text())))
    learned = [mean(curves[arm]) for arm in arms]
    for policy in policies(task, recipe["base"]):
        of_reference = reference(task, policy)
        found = [measures(settings, task, policy, of_reference) for settings in arms.values()]
        for name, values in zip(("cosine", "gain of a step"), zip(*found, strict=True), strict=True):
            correlation = torch.corrcoef(torch.stack([ranks(values), ranks(learned)]))[0, 1].item()
            print(f"{policy}: rank correlation of the {name} with {len(arms)} curves: {correlation:.2f}", flush=True)


if __name__ == "__main__":
    main()
