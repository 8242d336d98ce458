"""The prompts that are explored in a step: from examples to trees, and from rollouts to scores."""

import math
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
from .checks import check_images, check_prompts, check_tokens
from .images import prompt_of
from .rewards import score
from .setup import tokenizer_of
from .tools import instances


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
        check_tokens(trainer, (max(ids, default=-1) for ids in all_ids))
        images = [images_of(prompt) for prompt in of_examples]
        for i, prompt, prompt_ids in zip(examples, of_examples, all_ids, strict=True):
            multimodal = prompt if any(images) else None
            self.trees[i] = Tree(as_ids(prompt_ids), trainer.budget(prompt_ids), multimodal=multimodal)
        return {i: prompt_key(self.trees[i].prompt_ids, of_tree) for i, of_tree in zip(examples, images, strict=True)}

    def score(self, owners: list[int], completion_ids: list[TokenIds], dialogues: list[Dialogue | None]) -> list[Score]:
        """Score completions of trees. Those that could not go on from their prefix have no reward."""
        whole = [k for k, dialogue in enumerate(dialogues) if dialogue is None or not dialogue.is_broken]
        scores = [Score([math.nan] * len(self.trainer.reward_funcs), math.nan)] * len(owners)
        with self.trainer.stopwatch.part("rewards"):
            scored = score(
                self.trainer,
                [self.examples[owners[k]] for k in whole],
                [self.trees[owners[k]].prompt_ids for k in whole],
                [completion_ids[k] for k in whole],
                [dialogues[k] for k in whole],
            )
        for k, of_rollout in zip(whole, scored, strict=True):
            if self._is_truncated(completion_ids[k]):
                has_credit = not CREDIT_RULES[self.trainer.args.plan.credit].leaves_out_truncated
                of_rollout = replace(of_rollout, is_masked=not has_credit, is_left_out=has_credit)
            scores[k] = of_rollout
        return scores

    def _is_truncated(self, completion_ids: TokenIds) -> bool:
        """Whether a completion is cut off, as TRL has it, and such ones are masked."""
        trainer = self.trainer
        ends = (*trainer.eos_token_ids, tokenizer_of(trainer).pad_token_id)
        return trainer.mask_truncated_completions and completion_ids[-1] not in ends

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
