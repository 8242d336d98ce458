"""Grows trees of rollouts from the prompts of a step, and turns them into the rows that TRL's step expects."""

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
    The rows of a step, in the form that TRL's step expects.

    Args:
        rows (`list[Row]`):
            The rows of all processes.
        own (`list[Row]`):
            The rows of this process.
        prompts (`list`):
            The prompt of each row in `own`, with its images and its environment's first message.
        is_scored (`bool`):
            Whether rows were scored while the trees grew. If not, TRL scores them, all rows of a prompt in one call.
        tool_counts (`tuple[int, int]`):
            Number of tool calls that this process made, and number of failed calls.
    """

    rows: list[Row]
    own: list[Row]
    prompts: list[Any]
    is_scored: bool
    tool_counts: tuple[int, int] = (0, 0)

    @property
    def dialogues(self) -> list[Dialogue | None]:
        return [row.rollout.dialogue for row in self.own]

    def rollout_func_output(self, with_logps: bool) -> dict[str, Any]:
        """What a `rollout_func` returns: prompt and completion ids, and log-probs, which are `None` in prefixes."""
        logps = None
        if with_logps:
            logps = [[*[None] * len(row.prefix_ids), *_sampling_logps(row)] for row in self.own]
        return {
            "prompt_ids": [row.prompt_ids.tolist() for row in self.own],
            "completion_ids": [row.completion_ids.tolist() for row in self.own],
            "logprobs": logps,
        }

    def images(self) -> tuple[list[list[Any]] | None, list[list[Any]]]:
        """Each row's images, the prompt's before the tools' (`None` if no row has any), and the tools' images alone."""
        prompt_images = [images_of(prompt) for prompt in self.prompts]
        check_all_or_none(list(map(len, prompt_images)))
        tool_images = [[] if dialogue is None else images_of(dialogue.messages) for dialogue in self.dialogues]
        images = [[*first, *later] for first, later in zip(prompt_images, tool_images, strict=True)]
        return images if any(images) else None, tool_images

    def set_rewards(self, rewards: torch.Tensor, weights: torch.Tensor, trees: Sequence[Tree]) -> None:
        """Set the rewards of all processes' rows, given as (rows, reward functions). Broken rollouts have none."""
        totals = weighted_rewards(rewards, weights.to(rewards.device)).tolist()
        for row, row_rewards, total in zip(self.rows, rewards.tolist(), totals, strict=True):
            score = row.rollout.score
            if not score.is_broken:
                row.rollout.score = replace(score, rewards=row_rewards, reward=total)
        for tree in trees:
            tree.score_copies()

    def rewards(self, device: torch.device, num_funcs: int) -> torch.Tensor:
        """Rewards of all processes' rows. A copy's are NaN, so that means are over sampled rollouts only."""
        missing = [math.nan] * num_funcs
        rewards = [row.rollout.score.rewards if row.rollout.copy_of is None else missing for row in self.rows]
        return torch.tensor(rewards, device=device)

    def extra_logs(self) -> dict[str, list[Any]]:
        """Columns that reward functions logged while the trees grew."""
        scores = [row.rollout.score for row in self.own]
        return {name: [score.logs.get(name) for score in scores] for score in scores for name in score.logs}


def _sampling_logps(row: Row) -> list[float] | list[None]:
    """The sampler's log-probs of a row's own tokens, `None` for an abandoned rollout."""
    rollout = row.rollout
    return [None] * len(rollout.token_ids) if rollout.logprobs is None else rollout.logprobs.tolist()


@dataclass(eq=False)
class Explorer:
    """
    Grows trees from prompts.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Provides the policy, the tokenizer, the tools and the reward functions.
        plan ([`Plan`]):
            How trees are grown.
        token_statistics (`TokenStatistics`):
            Computes log-probs and entropies of completions under the policy.
        budget ([`CompletionBudget`]):
            How many tokens a prompt's completions may have.
        stopwatch ([`Stopwatch`]):
            Times generation and rewards.
        obstacle_to_images (`str`, *optional*):
            Why prompts with images cannot be explored, if they cannot.
        scores_early (`bool`):
            Whether rewards are needed while trees grow: to select base trajectories, or to count rows for a refill.
        threshold (`float`, *optional*):
            Entropy above which base trajectories branch, if `anchor_threshold="auto"` and an earlier step set one.

    Attributes:
        trees (`list[Tree]`):
            The trees of this step, one for each prompt of all processes.
        example_error (`Exception`, *optional*):
            The error that an example of this step caused, in all processes.
        ends (`Sequence[int]`):
            Tokens that end or pad a completion of this step.
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
    example_error: Exception | None = None
    ends: Sequence[int] = ()
    _uncertainties: list[float] = field(default_factory=list)
    _in_use: Counter[str | None] = field(default_factory=Counter)  # number of environments by name

    def begin_step(self, sampler: Sampler, masks_truncated: bool) -> None:
        """
        Begin a step without trees, using the trainer's current settings.

        Args:
            sampler ([`Sampler`]):
                Draws the rollouts of this step.
            masks_truncated (`bool`):
                Whether completions that are cut off are masked.
        """
        self.sampler, self.masks_truncated = sampler, masks_truncated
        self.budget.max_completion_length = self.trainer.max_completion_length
        self.ends = (*self.trainer.eos_token_ids, tokenizer_of(self.trainer).pad_token_id)
        self.trees, self._uncertainties = [], []

    def check(self, examples: list[dict[str, Any]]) -> None:
        """Refuse examples that cannot be explored. An error in one process is raised in all."""
        self._noting_errors(lambda: self._check(examples))

    def _check(self, examples: list[dict[str, Any]]) -> None:
        check_images(examples, self.obstacle_to_images)
        if self.trainer.environment_factories is None:  # an environment may provide the prompt
            check_prompts(examples)

    def _noting_errors(self, function: Callable[[], R]) -> list[R]:
        """Call a function in every process. An error that it raises is one of the examples."""
        try:
            return in_every_process(function)
        except (NotImplementedError, ValueError) as error:
            self.example_error = error
            raise

    def end_step(self) -> None:
        """Update an "auto" threshold, once per step however many refills it had."""
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
                Number of prompts.
            examples (`dict[int, dict]`):
                Examples of the dataset, for each prompt that has rows in this process.
            prompts (`dict[int, list]`, *optional*):
                Their prompts as TRL's step prepared them, one for each row of this process. If `None`, they are
                prepared here.
            indices (`Sequence[int]`, *optional*):
                Indices of all prompts in the dataset, if they were drawn from it.

        Returns:
            `list[Row]`: The rows of all processes. The trees are added to `trees`.
        """
        rows = sharding(self.trainer, num_prompts * self.plan.num_rows)
        trees = [Tree(as_ids(), 0) for _ in range(num_prompts)]
        if prompts is None:
            self.check(list(examples.values()))
        for keys in self._noting_errors(lambda: self._set_prompts(trees, rows, examples, prompts)):
            for i, key in keys.items():
                if trees[i].key not in (None, key):
                    raise EnvironmentFailure(
                        "The rows of a prompt are spread over several processes, in which reset(**example) returned "
                        "different observations. Make per_device_train_batch_size times steps_per_generation a "
                        "multiple of num_generations, or let reset depend on nothing but the example's columns."
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
        The first requests that [`explore`] will send to its sampler, for the batch of a later step.

        Args:
            sampler ([`Sampler`]):
                Will get the requests.
            num_prompts (`int`), examples (`dict[int, dict]`):
                See [`explore`].
            step (`int`):
                The later step.
        """
        rows = sharding(self.trainer, num_prompts * self.plan.num_rows)
        trees = [Tree(as_ids(), 0) for _ in range(num_prompts)]
        self.check(list(examples.values()))
        self.sampler, self.budget.max_completion_length = sampler, self.trainer.max_completion_length
        self._noting_errors(lambda: self._set_prompts(trees, rows, examples, None))
        plan, seed = self._plan_and_seed(step)
        return base_requests(trees, plan, rows, AnchorFinder(plan, anchor_rule(plan, self.threshold), seed))

    def _plan_and_seed(self, step: int) -> tuple[Plan, tuple[int, int]]:
        """How the trees of a step are grown, and the seed of its random choices."""
        return replace(self.plan, temperature=self.trainer.temperature), (self.trainer.args.seed, step)

    # From examples to trees

    def _set_prompts(
        self,
        trees: list[Tree],
        rows: RowSharding,
        examples: dict[int, dict[str, Any]],
        prompts: dict[int, list[Any]] | None,
    ) -> dict[int, int]:
        """Set the prompts of trees, and return each tree's key in a value tracker."""
        if isinstance(self.sampler, ToolCallingSampler):
            prompt_ids = self._provide_tools(self.sampler, rows, examples, prompts)
            check_prompts(list(examples.values()))
            tree_prompts = [examples[i]["prompt"] for i in examples]
        else:
            tree_prompts = [prompts[i][0] if prompts else prompt_of(self.trainer, examples[i]) for i in examples]
            prompt_ids = tokenized(self.trainer, tree_prompts)
        check_tokens(self.trainer, (max(ids, default=-1) for ids in prompt_ids))
        images = [images_of(prompt) for prompt in tree_prompts]
        for i, prompt, ids in zip(examples, tree_prompts, prompt_ids, strict=True):
            trees[i].prompt_ids, trees[i].budget = as_ids(ids), self.budget(ids)
            trees[i].multimodal = prompt if any(images) else None
        return {i: prompt_key(trees[i].prompt_ids, pixels) for i, pixels in zip(examples, images, strict=True)}

    def _provide_tools(
        self,
        sampler: ToolCallingSampler,
        rows: RowSharding,
        examples: dict[int, dict[str, Any]],
        prompts: dict[int, list[Any]] | None,
    ) -> list[list[int]]:
        """
        Give the sampler the instances in which rollouts call tools: one for each rollout if there are environments.

        The prompts that environments complete are written into the examples.

        Returns:
            `list[list[int]]`: Token ids of the examples' prompts.
        """
        trainer, num_trees = self.trainer, rows.num_rows // self.plan.num_rows
        has_environments = trainer.environment_factories is not None
        owners = [row // self.plan.num_rows for row in rows.own] if has_environments else list(examples)
        drops_bases = has_environments and not self.plan.reuse_base
        others = [i for i, _ in own_bases(num_trees, self.plan, rows)] if drops_bases else []
        provided: list[tuple[int, Any, Instance]] = []
        try:
            if prompts is None:
                others = [*owners, *others]
            else:
                per_tree = None if has_environments else 1
                row_prompts = [prompt for tree_prompts in prompts.values() for prompt in tree_prompts[:per_tree]]
                provided += zip(owners, row_prompts, instances_of_trl(trainer, row_prompts), strict=True)
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
        """Scores of completions: rewards if they are needed now, and which completions are masked or broken."""
        num_funcs, has_credit = len(self.trainer.reward_funcs), not CREDIT_RULES[self.plan.credit].leaves_out_truncated
        rewards = torch.full((len(owners), num_funcs), math.nan)
        logs: list[dict[str, Any]] = [{} for _ in owners]
        if self.scores_early:
            prompt_ids = [trees[i].prompt_ids for i in owners]
            with self.stopwatch.part("rewards"):
                rewards, logs = score_now(self.trainer, examples, prompt_ids, completion_ids, dialogues)
        totals = weighted_rewards(rewards, self.trainer.reward_weights.to(rewards.device)).tolist()
        scores = []
        for row_rewards, total, row_logs, ids, dialogue in zip(
            rewards.tolist(), totals, logs, completion_ids, dialogues, strict=True
        ):
            is_broken = dialogue is not None and dialogue.is_broken
            is_cut = self.masks_truncated and ids[-1] not in self.ends
            scores.append(
                Score(
                    [math.nan] * num_funcs if is_broken else row_rewards,
                    math.nan if is_broken else total,
                    row_logs,
                    is_masked=is_cut and not has_credit,
                    is_left_out=is_cut and has_credit,
                    is_broken=is_broken,
                )
            )
        return scores


def longest_prompt(trainer: TypedTrainer, examples: list[dict[str, Any]]) -> int:
    """Tokens of the longest prompt of examples, without messages that environments add."""
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
    Score completions before the batch is complete. A collective call: a process without completions takes part too.

    TRL gathers rewards, which requires the same number from each process. A process with fewer completions pads them
    with its last one, or with an empty completion if it has none, and discards the padding's scores.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Provides the reward functions.
        examples (`list[dict]`):
            The example of each completion, with its prompt.
        prompt_ids, completion_ids (`list[TokenIds]`):
            Token ids.
        dialogues (`Sequence[Dialogue | None]`):
            The turns of each completion, if there are tools.

    Returns:
        `tuple[torch.Tensor, list[dict]]`: Rewards of this process, of shape (completions, reward functions), and what
        reward functions logged for each completion.
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
    completion_lists = [ids.tolist() for _, _, ids, _ in rows]
    if any(dialogues):
        completions: list[Any] = [dialogue.messages for *_, dialogue in rows if dialogue is not None]
    else:
        completions = decoded(trainer, prompts, [ids.tolist() for _, ids, _, _ in rows], completion_lists)
    if trainer.environments is not None:  # TRL passes these to reward functions. The complete batch sets them again
        any_environment = trainer.environments[0]
        trainer.environments = [any_environment if turns is None else turns.environment for *_, turns in rows]
    num_logged = {name: len(values) for name, values in trainer._pending_metrics.items()}
    rewards = trainer._calculate_rewards([example for example, *_ in rows], prompts, completions, completion_lists)
    # TRL logs the mean of a metric's values. Repeating a call's value by its rows makes that a mean over rows
    for name, values in list(trainer._pending_metrics.items()):
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
    """Completions as TRL decodes them for reward functions."""
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
