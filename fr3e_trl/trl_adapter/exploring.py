"""The prompts that are explored in a step: from examples to trees, and from rollouts to scores."""

import math
import os
import random
from dataclasses import replace
from typing import Any

from ..generation.tools import EnvironmentFailure, Instance, ToolCallingSampler
from ..method.credit import CREDIT_RULES
from ..method.credit.prior import prompt_key
from ..method.explore import own_bases
from ..method.rows import RowSharding
from ..method.sampling import images_of
from ..method.tree import Dialogue, Score, TokenIds, Tree, as_ids
from . import prompts
from .checks import check_images, check_prompts
from .images import prompt_of
from .rewards import score
from .setup import tokenizer_of
from .tools import instances


def root_ids(tree: Tree, prefix: list[int]) -> TokenIds:
    return tree.prompt_ids[: len(tree.prompt_ids) - len(prefix)]


class Prefixes:
    """Prefix Sampling (2605.05112): prompts that mostly fail go on from a success, those that mostly pass from a failure.

    How much of it they get is steered by the pass rate of the last visit, towards one half.
    """

    def __init__(self, share: float, seed: int):
        self.share, self.rng, self.known = share, random.Random(seed), {}
        self.visits = {"prompt": [], "success": [], "failure": []}

    def prefix_of(self, prompt_ids: TokenIds) -> list[int]:
        entry = self.known.get(prompt_key(prompt_ids))
        if not self.share or entry is None:
            return []
        entry["kind"] = None
        kind = "success" if entry["value"] < 0.5 else "failure"
        if abs(entry["value"] - 0.5) < 0.2 or entry[kind] is None or self.rng.random() > self.share:
            return []
        entry["kind"] = kind
        trajectory = entry[kind]
        return list(trajectory[: max(1, min(len(trajectory) - 2, round(entry["cut"][kind] * len(trajectory))))])

    def learn(self, tree: Tree, prefix: list[int]) -> None:
        if not self.share:
            return
        new = {"value": 0.5, "weight": 0.0, "success": None, "failure": None, "kind": None}
        entry = self.known.setdefault(prompt_key(root_ids(tree, prefix)), new)
        cuts = entry.setdefault("cut", {"success": 0.5, "failure": 0.5})
        rollouts = [(state, rollout) for state in tree.states for rollout in state.rollouts]
        mean = sum(rollout.score.reward for _, rollout in rollouts) / len(rollouts)
        kind = entry["kind"] if prefix else None
        self.visits[kind or "prompt"].append(mean)
        if kind is None:
            entry["value"] = (0.75 * entry["weight"] * entry["value"] + mean) / (0.75 * entry["weight"] + 1)
            entry["weight"] = 0.75 * entry["weight"] + 1
        else:  # a longer head start to what still fails, a longer handicap to what still passes
            longer = mean < 0.5 if kind == "success" else mean > 0.5
            cuts[kind] = min(0.95, max(0.05, cuts[kind] + (0.1 if longer else -0.1 if mean != 0.5 else 0.0)))
        for state, rollout in rollouts:
            of = "success" if rollout.score.reward > 0.5 else "failure"
            entry[of] = [*prefix, *state.prefix_ids.tolist(), *rollout.token_ids.tolist()]
        if os.environ.get("STEER_LOG") and sum(map(len, self.visits.values())) % 256 == 0:
            with open(os.environ["STEER_LOG"], "a") as log:
                told = {k: (len(v), round(sum(v) / len(v), 2)) for k, v in self.visits.items() if v}
                log.write(f"{told}\n")
            self.visits = {"prompt": [], "success": [], "failure": []}


class Exploring:
    """
    This process's part in exploring prompts.

    Args:
        trainer ([`FR3ETrainer`]):
            Explores.
        trees (`list[Tree]`):
            One for each prompt of all processes. Those of this process get their prompts by [`read`].
        examples (`dict[int, dict]`):
            The dataset's example of each tree that has rows in this process.
        sharding ([`RowSharding`]):
            Which rows these are.
    """

    def __init__(self, trainer: Any, trees: list[Tree], examples: dict[int, dict[str, Any]], sharding: RowSharding):
        self.trainer = trainer
        self.trees = trees
        self.examples = examples
        self.sharding = sharding
        self.prefixes: dict[int, list[int]] = {}

    def read(self) -> dict[int, int]:
        """Give trees their prompts, and return what a value tracker knows each by."""
        trainer, examples = self.trainer, self.examples
        check_images(list(examples.values()), trainer.obstacle_to_images)
        if trainer.tools:
            all_ids = self._provide_tools()
        check_prompts(list(examples.values()))
        of_examples = [prompt_of(trainer, example) for example in examples.values()]
        if not trainer.tools:
            all_ids = prompts.tokenize(trainer, of_examples) if of_examples else []
        images = [images_of(prompt) for prompt in of_examples]
        for i, prompt, prompt_ids in zip(examples, of_examples, all_ids, strict=True):
            multimodal = prompt if any(images) else None
            prefix = trainer.prefixes.prefix_of(as_ids(prompt_ids))
            self.prefixes[i] = prefix
            self.trees[i] = Tree(
                as_ids([*prompt_ids, *prefix]), trainer.budget(prompt_ids) - len(prefix), multimodal=multimodal
            )
        return {i: prompt_key(self.trees[i].prompt_ids, of_tree) for i, of_tree in zip(examples, images, strict=True)}

    def score(self, owners: list[int], completion_ids: list[TokenIds], dialogues: list[Dialogue | None]) -> list[Score]:
        """Score completions of trees. Those that could not go on from their prefix have no reward."""
        whole = [k for k, dialogue in enumerate(dialogues) if dialogue is None or not dialogue.is_broken]
        scores = [Score([math.nan] * len(self.trainer.reward_funcs), math.nan)] * len(owners)
        scored = score(
            self.trainer,
            [self.examples[owners[k]] for k in whole],
            [root_ids(self.trees[owners[k]], self.prefixes[owners[k]]) for k in whole],
            [as_ids([*self.prefixes[owners[k]], *completion_ids[k]]) for k in whole],
            [dialogues[k] for k in whole],
        )
        for k, of_rollout in zip(whole, scored, strict=True):
            scores[k] = replace(of_rollout, is_masked=self._is_masked(completion_ids[k]))
        return scores

    def _is_masked(self, completion_ids: TokenIds) -> bool:
        """Whether a completion is cut off, as TRL has it, and such ones are left out of credit."""
        trainer = self.trainer
        if not (trainer.mask_truncated_completions and CREDIT_RULES[trainer.args.plan.credit].leaves_out_truncated):
            return False
        return completion_ids[-1] not in (*trainer.eos_token_ids, tokenizer_of(trainer).pad_token_id)

    def _provide_tools(self) -> list[list[int]]:
        """
        Provide the sampler with what rollouts call tools in, each with an environment of its own.

        Examples get their prompts here.

        Returns:
            `list[list[int]]`: Token ids of the prompts of the examples.
        """
        trainer, plan = self.trainer, self.trainer.args.plan
        assert isinstance(trainer.sampler, ToolCallingSampler)
        owners = list(self.examples)
        if trainer.environment_factories is not None:
            owners = [row // plan.num_rows for row in self.sharding.own]
            if not plan.reuse_base:
                owners += [i for i, _ in own_bases(len(self.trees), plan, self.sharding)]
        of_trees: dict[int, list[Instance]] = {i: [] for i in self.examples}
        if owners:
            try:
                of_owners, provided = instances(trainer, [self.examples[i] for i in owners])
            except Exception as error:
                raise EnvironmentFailure(f"While rollouts were prepared: {type(error).__name__}: {error}") from error
            for i, prompt, instance in zip(owners, of_owners, provided, strict=True):
                if not of_trees[i]:
                    self.examples[i] = self.examples[i] | {"prompt": prompt}
                of_trees[i].append(instance)
        trainer.sampler.provide(of_trees)
        return [of_trees[i][0].prompt_ids for i in self.examples]
