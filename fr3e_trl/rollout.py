"""From the prompts of a step to trees of rollouts, and to the rows that TRL's step takes."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from accelerate.utils import gather_object
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational

from .callbacks import Stopwatch
from .checks import check_all_or_none, check_images, check_prompts, check_tokens
from .compat import TypedTrainer, is_sharded, sharding, tokenizer_of
from .generation.context import CompletionBudget
from .generation.tools import EnvironmentFailure, Instance, ToolCallingSampler
from .images import NO_PROMPT, prompt_of
from .method.anchors import anchor_rule, next_threshold
from .method.credit import CREDIT_RULES
from .method.credit.prior import prompt_key
from .method.credit.rollout import weighted_rewards
from .method.explore import AnchorFinder, TokenStatistics, base_requests, explore, own_bases
from .method.plan import Plan
from .method.rows import Row, RowSharding, rows_of
from .method.sampling import Sampler, SamplingRequest, images_of
from .method.tree import Dialogue, Score, TokenIds, Tree, as_ids
from .processes import in_every_process, in_step
from .tool_loop import instances_of_trl, new_instances

R = TypeVar("R")


@dataclass(eq=False)
class StepRollouts:
    """
    The rows of a step, in the form that TRL's step takes them.

    Args:
        rows (`list[Row]`):
            The rows of all processes.
        own (`list[Row]`):
            This process's.
        prompts (`list`):
            The prompt of each of these, with its images and with what its environment said.
        is_scored (`bool`):
            Whether they were scored while the trees grew. If not, TRL scores them, all rows of a prompt in one call.
        tool_counts (`tuple[int, int]`):
            Calls of tools that this process made, and how many of them failed.
    """

    rows: list[Row]
    own: list[Row]
    prompts: list[Any]
    is_scored: bool
    tool_counts: tuple[int, int] = (0, 0)

    @property
    def dialogues(self) -> list[Dialogue | None]:
        return [row.rollout.dialogue for row in self.own]

    def handed_to_trl(self, with_logps: bool) -> dict[str, Any]:
        """What a `rollout_func` returns: token ids of prompts and completions, and log-probs, `None` for a prefix's."""
        logps = None
        if with_logps:
            logps = [[*[None] * len(row.prefix_ids), *_logps_of(row)] for row in self.own]
        return {
            "prompt_ids": [row.prompt_ids.tolist() for row in self.own],
            "completion_ids": [row.completion_ids.tolist() for row in self.own],
            "logprobs": logps,
        }

    def images(self) -> tuple[list[list[Any]] | None, list[list[Any]]]:
        """The images of each row, those of its prompt first, or `None` if there are none; and those of its tools."""
        of_prompts = [images_of(prompt) for prompt in self.prompts]
        check_all_or_none(list(map(len, of_prompts)))
        of_tools = [[] if dialogue is None else images_of(dialogue.messages) for dialogue in self.dialogues]
        images = [[*of_prompt, *of_tool] for of_prompt, of_tool in zip(of_prompts, of_tools, strict=True)]
        return images if any(images) else None, of_tools

    def take_rewards(self, rewards: torch.Tensor, weights: torch.Tensor, trees: Sequence[Tree]) -> None:
        """Give the rows of all processes their rewards, of shape (rows, reward functions)."""
        totals = weighted_rewards(rewards, weights.to(rewards.device)).tolist()
        for row, of_row, total in zip(self.rows, rewards.tolist(), totals, strict=True):
            score = row.rollout.score
            if not score.is_broken:  # which has no reward, whatever was said of it
                row.rollout.score = replace(score, rewards=of_row, reward=total)
        for tree in trees:
            for rollout in tree.states[0].rollouts:
                if rollout.copy_of is not None:
                    rollout.score = tree.bases[rollout.copy_of].score

    def rewards(self, device: torch.device, num_funcs: int) -> torch.Tensor:
        """Rewards of the rows of all processes, NaN for a copy: means are over what was sampled."""
        nothing = [math.nan] * num_funcs
        rewards = [row.rollout.score.rewards if row.rollout.copy_of is None else nothing for row in self.rows]
        return torch.tensor(rewards, device=device)

    def extra_logs(self) -> dict[str, list[Any]]:
        """Columns that reward functions have logged while the trees grew."""
        scores = [row.rollout.score for row in self.own]
        return {name: [score.logs.get(name) for score in scores] for score in scores for name in score.logs}


def _logps_of(row: Row) -> list[float] | list[None]:
    """Log-probs of a row's own tokens. A rollout that was given up has none."""
    rollout = row.rollout
    return [None] * len(rollout.token_ids) if rollout.logprobs is None else rollout.logprobs.tolist()


@dataclass(eq=False)
class Explorer:
    """
    Grows trees from prompts.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Has the policy, the tokenizer, the tools and the reward functions.
        plan ([`Plan`]):
            How trees are grown.
        token_statistics (`TokenStatistics`):
            Gives log-probs and entropies of completions under the policy.
        budget ([`CompletionBudget`]):
            How many tokens a prompt's completions may have.
        stopwatch ([`Stopwatch`]):
            Measures generation and rewards.
        obstacle_to_images (`str`, *optional*):
            Why images cannot be explored from, if there is a reason.
        scores_early (`bool`):
            Whether rewards are needed while trees grow: to select base trajectories, or to see what a refill lacks.
        threshold (`float`, *optional*):
            Entropy above which base trajectories branch, where `anchor_threshold="auto"` and past steps give one.

    Attributes:
        trees (`list[Tree]`):
            Those of this step, one for each prompt of all processes.
        refusal (`Exception`, *optional*):
            The error of this step that an example has caused, in all processes.
        ends (`Sequence[int]`):
            Tokens that end a completion of this step, or pad it.
    """

    trainer: TypedTrainer
    plan: Plan
    token_statistics: TokenStatistics
    budget: CompletionBudget
    stopwatch: Stopwatch
    obstacle_to_images: str | None
    scores_early: bool
    threshold: float | None = None
    trees: list[Tree] = field(default_factory=list)
    refusal: Exception | None = None
    ends: Sequence[int] = ()
    _uncertainties: list[float] = field(default_factory=list)
    _in_use: Counter[str | None] = field(default_factory=Counter)  # environments, by their names

    def begin_step(self, sampler: Sampler, masks_truncated: bool) -> None:
        """
        Begin with no trees, and with the trainer's settings as they are now.

        Args:
            sampler ([`Sampler`]):
                Draws the rollouts of this step.
            masks_truncated (`bool`):
                Whether nothing is learned from completions that are cut off.
        """
        self.sampler, self.masks_truncated = sampler, masks_truncated
        self.budget.max_completion_length = self.trainer.max_completion_length
        self.ends = (*self.trainer.eos_token_ids, tokenizer_of(self.trainer).pad_token_id)
        self.trees, self._uncertainties = [], []

    def check(self, examples: list[dict[str, Any]]) -> None:
        """Refuse examples that cannot be explored from. An error in one process is raised in all."""
        self._refusable(lambda: self._check(examples))

    def _check(self, examples: list[dict[str, Any]]) -> None:
        check_images(examples, self.obstacle_to_images)
        if self.trainer.environment_factories is None:  # these may bring the prompts
            check_prompts(examples)

    def _refusable(self, function: Callable[[], R]) -> list[R]:
        try:
            return in_every_process(function)
        except (NotImplementedError, ValueError) as error:
            self.refusal = error
            raise

    def end_step(self) -> None:
        """Move the threshold that is given step by step. All refills of a step count once."""
        if self.plan.anchor_threshold == "auto":
            self.threshold = next_threshold(self.threshold, self._uncertainties)

    def explore(
        self,
        num_prompts: int,
        examples: dict[int, dict[str, Any]],
        prompts: dict[int, list[Any]] | None = None,
        indices: Sequence[int] | None = None,
    ) -> list[Row]:
        """
        Grow trees from the prompts of all processes.

        Args:
            num_prompts (`int`):
                How many.
            examples (`dict[int, dict]`):
                The dataset's examples of those that have rows in this process.
            prompts (`dict[int, list]`, *optional*):
                What TRL's step has made of them, for each of this process's rows. If `None`, that is done here.
            indices (`Sequence[int]`, *optional*):
                Places of all of them in the dataset, if they were drawn from it.

        Returns:
            `list[Row]`: The rows of all processes. The trees are added to `trees`.
        """
        rows = sharding(self.trainer, num_prompts * self.plan.num_rows)
        trees = [Tree(as_ids(), 0) for _ in range(num_prompts)]
        if prompts is None:
            self.check(list(examples.values()))
        for keys in self._refusable(lambda: self._plant(trees, rows, examples, prompts)):
            for i, key in keys.items():
                if trees[i].key not in (None, key):
                    raise EnvironmentFailure(
                        "An environment says one thing and another when it is reset for one example in several "
                        "processes, and a prompt's rows lie in these. Have per_device_train_batch_size times "
                        "steps_per_generation be a multiple of num_generations, or reset(**example) depend on nothing "
                        "but the example's columns."
                    )
                trees[i].key = key
        plan, seed = self._plan_and_seed(self.trainer.state.global_step)
        is_collective = is_sharded(self.trainer) or (self.scores_early and rows.num_processes > 1)
        with self.stopwatch.part("generation"):
            self._uncertainties += explore(
                trees,
                plan,
                self.sampler,
                lambda owners, *rest: self._score(trees, [examples[i] for i in owners], owners, *rest),
                self.token_statistics,
                seed,
                rows,
                in_step if is_collective else in_every_process,
                self.threshold,
            )
        self.trees += trees
        return rows_of(trees, rows, examples, indices or [None] * num_prompts)

    def requests_ahead(
        self, sampler: Sampler, num_prompts: int, examples: dict[int, dict[str, Any]], step: int
    ) -> list[SamplingRequest]:
        """
        What [`explore`] will ask its sampler for first, of a batch that a later step begins with.

        Args:
            sampler ([`Sampler`]):
                Will be asked.
            num_prompts (`int`), examples (`dict[int, dict]`):
                As for [`explore`].
            step (`int`):
                Which step that is.
        """
        rows = sharding(self.trainer, num_prompts * self.plan.num_rows)
        trees = [Tree(as_ids(), 0) for _ in range(num_prompts)]
        self.check(list(examples.values()))
        self.sampler, self.budget.max_completion_length = sampler, self.trainer.max_completion_length
        self._refusable(lambda: self._plant(trees, rows, examples, None))
        plan, seed = self._plan_and_seed(step)
        return base_requests(trees, plan, rows, AnchorFinder(plan, anchor_rule(plan, self.threshold), seed))

    def _plan_and_seed(self, step: int) -> tuple[Plan, tuple[int, int]]:
        """How the trees of a step are grown, and what decides its random choices."""
        return replace(self.plan, temperature=self.trainer.temperature), (self.trainer.args.seed, step)

    # From examples to trees

    def _plant(
        self,
        trees: list[Tree],
        rows: RowSharding,
        examples: dict[int, dict[str, Any]],
        prompts: dict[int, list[Any]] | None,
    ) -> dict[int, int]:
        """Give trees their prompts, and return what a value tracker knows each by."""
        if isinstance(self.sampler, ToolCallingSampler):
            prompt_ids = self._provide_tools(self.sampler, rows, examples, prompts)
            check_prompts(list(examples.values()))
            of_trees = [examples[i]["prompt"] for i in examples]
        else:
            of_trees = [prompts[i][0] if prompts else prompt_of(self.trainer, examples[i]) for i in examples]
            prompt_ids = tokenized(self.trainer, of_trees)
        check_tokens(self.trainer, (max(ids, default=-1) for ids in prompt_ids))
        images = [images_of(prompt) for prompt in of_trees]
        for i, prompt, ids in zip(examples, of_trees, prompt_ids, strict=True):
            trees[i].prompt_ids, trees[i].budget = as_ids(ids), self.budget(ids)
            trees[i].multimodal = prompt if any(images) else None
        return {i: prompt_key(trees[i].prompt_ids, of_tree) for i, of_tree in zip(examples, images, strict=True)}

    def _provide_tools(
        self,
        sampler: ToolCallingSampler,
        rows: RowSharding,
        examples: dict[int, dict[str, Any]],
        prompts: dict[int, list[Any]] | None,
    ) -> list[list[int]]:
        """
        Provide the sampler with what rollouts call tools in. Where there are environments, each rollout has its own.

        Examples get their prompts, with what the environments said.

        Returns:
            `list[list[int]]`: Token ids of the prompts of the examples.
        """
        trainer, num_trees = self.trainer, rows.num_rows // self.plan.num_rows
        has_environments = trainer.environment_factories is not None
        owners = [row // self.plan.num_rows for row in rows.own] if has_environments else list(examples)
        is_thrown_away = has_environments and not self.plan.reuse_base
        others = [i for i, _ in own_bases(num_trees, self.plan, rows)] if is_thrown_away else []
        provided: list[tuple[int, Any, Instance]] = []
        try:
            if prompts is None:
                others = [*owners, *others]
            else:
                of_rows = [
                    prompt for of_tree in prompts.values() for prompt in of_tree[: None if has_environments else 1]
                ]
                provided += zip(owners, of_rows, instances_of_trl(trainer, of_rows), strict=True)
                self._in_use = Counter(trainer._batch_environments if has_environments else [])
            provided += zip(others, *new_instances(trainer, [examples[i] for i in others], self._in_use), strict=True)
        except Exception as error:
            raise EnvironmentFailure(f"While rollouts were prepared: {type(error).__name__}: {error}") from error
        instances: dict[int, list[Instance]] = {i: [] for i in examples}
        for i, prompt, instance in provided:
            if not instances[i]:
                examples[i] = examples[i] | {"prompt": prompt}
            instances[i].append(instance)
        sampler.provide(instances)
        return [instances[i][0].prompt_ids for i in examples]

    # From rollouts to scores

    def _score(
        self,
        trees: list[Tree],
        examples: list[dict[str, Any]],
        owners: list[int],
        completion_ids: list[TokenIds],
        dialogues: list[Dialogue | None],
    ) -> list[Score]:
        """What is known of completions of trees: their rewards, if these are needed now."""
        num_funcs, has_credit = len(self.trainer.reward_funcs), not CREDIT_RULES[self.plan.credit].leaves_out_truncated
        rewards = torch.full((len(owners), num_funcs), math.nan)
        logs: list[dict[str, Any]] = [{} for _ in owners]
        if self.scores_early:
            prompt_ids = [trees[i].prompt_ids for i in owners]
            with self.stopwatch.part("rewards"):
                rewards, logs = score_now(self.trainer, examples, prompt_ids, completion_ids, dialogues)
        totals = weighted_rewards(rewards, self.trainer.reward_weights.to(rewards.device)).tolist()
        scores = []
        for k, (of_row, total, ids, dialogue) in enumerate(
            zip(rewards.tolist(), totals, completion_ids, dialogues, strict=True)
        ):
            is_broken = dialogue is not None and dialogue.is_broken
            is_cut = self.masks_truncated and ids[-1] not in self.ends
            scores.append(
                Score(
                    [math.nan] * num_funcs if is_broken else of_row,
                    math.nan if is_broken else total,
                    logs[k],
                    is_masked=is_cut and not has_credit,
                    is_left_out=is_cut and has_credit,
                    is_broken=is_broken,
                )
            )
        return scores


def longest_prompt(trainer: TypedTrainer, examples: list[dict[str, Any]]) -> int:
    """Tokens of the longest prompt of examples, without what environments say."""
    if trainer.environment_factories is not None:
        trainer._batch_environments = [
            example.get("environment") if trainer._multi_environment else None for example in examples
        ]
    return max(map(len, tokenized(trainer, [prompt_of(trainer, NO_PROMPT | example) for example in examples])))


def tokenized(trainer: TypedTrainer, prompts: list[Any]) -> list[list[int]]:
    """Token ids of prompts, standard or conversational."""
    return trainer._tokenize_prompts(prompts)[0] if prompts else []


def score_now(
    trainer: TypedTrainer,
    examples: list[dict[str, Any]],
    prompt_ids: list[TokenIds],
    completion_ids: list[TokenIds],
    dialogues: Sequence[Dialogue | None],
) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """
    Score completions before the batch is whole. All processes call this together, each with its own, also with none.

    TRL's computation of rewards gathers them, and so wants as many of each process: those that have fewer score one of
    theirs again, or the end of a completion if they have none, and drop what is said of it.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Has the reward functions.
        examples (`list[dict]`):
            The dataset's example of each, with its prompt.
        prompt_ids, completion_ids (`list[TokenIds]`):
            The tokens.
        dialogues (`Sequence[Dialogue | None]`):
            The turns of each, if there are tools.

    Returns:
        `tuple[torch.Tensor, list[dict]]`: Rewards of this process's own, of shape (completions, reward functions), and
        what reward functions logged of each.
    """
    num_own = len(examples)
    num_rows = max(gather_object([num_own]))
    if num_rows == 0:
        return torch.zeros(0, len(trainer.reward_funcs)), []
    rows: list[tuple[dict[str, Any], TokenIds, TokenIds, Dialogue | None]]
    rows = list(zip(examples, prompt_ids, completion_ids, dialogues, strict=True))
    if not rows:
        example = next(iter(trainer.train_dataset))
        prompt = tokenized(trainer, [prompt_of(trainer, example)])[0]
        rows = [(example, as_ids(prompt), as_ids(trainer.eos_token_ids[:1]), None)]
    rows += [rows[-1]] * (num_rows - len(rows))
    prompts = [prompt_of(trainer, example) for example, *_ in rows]
    ids = [of_row.tolist() for _, _, of_row, _ in rows]
    if any(dialogues):
        completions: list[Any] = [dialogue.messages for *_, dialogue in rows if dialogue is not None]
    else:
        completions = decoded(trainer, prompts, [of_row.tolist() for _, of_row, _, _ in rows], ids)
    if trainer.environments is not None:  # TRL passes these on. They are set anew when the batch is whole
        any_environment = trainer.environments[0]
        trainer.environments = [any_environment if turns is None else turns.environment for *_, turns in rows]
    num_logged = {name: len(values) for name, values in trainer._pending_metrics.items()}
    rewards = trainer._calculate_rewards([example for example, *_ in rows], prompts, completions, ids)
    for name, values in list(trainer._pending_metrics.items()):  # TRL logs their mean: that over rows, not over calls
        values[num_logged.get(name, 0) :] *= num_own
        if not values:
            del trainer._pending_metrics[name]
    columns = {name: values for name, values in trainer._pending_extra_logs.items() if len(values) == num_rows}
    trainer._pending_extra_logs.clear()
    logs = [{name: values[k] for name, values in columns.items()} for k in range(num_own)]
    start = trainer.accelerator.process_index * num_rows
    return rewards[start : start + num_own], logs


def decoded(
    trainer: TypedTrainer, prompts: list[Any], prompt_ids: list[list[int]], completion_ids: list[list[int]]
) -> list[Any]:
    """Completions as reward functions receive them, the same as those that TRL decodes."""
    texts = trainer.processing_class.batch_decode
    if not is_conversational({"prompt": prompts[0]}):
        return list(texts(completion_ids, skip_special_tokens=True))
    tokenizer = tokenizer_of(trainer)
    if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
        return [
            [parse_response(tokenizer, ids, prefix=prefix, tools=trainer.tools)]
            for prefix, ids in zip(prompt_ids, completion_ids, strict=True)
        ]
    return [[{"role": "assistant", "content": text}] for text in texts(completion_ids, skip_special_tokens=True)]
