"""`FR3ETrainer`: FR3E as a subclass of `GRPOTrainer`."""

import logging
import math
import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import (
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler, nanstd

from . import checks, images, model_card, policy_logps, prefix_sharing, resume
from .callbacks import Console, Stopwatch, replace_progress_callback
from .compat import (
    check_trl,
    is_sharded,
    model_name,
    own_rows,
    sharding,
    tokenizer_of,
)
from .credit_to_batch import ignore_empty_micro_batch, mask_dropped, reweight_dropped, set_credit, upgrade_batch
from .fr3e_config import FR3EConfig
from .generation import decoding
from .generation.ahead import AheadSampler
from .generation.context import CompletionBudget, context_length
from .generation.sampler import InStepSampler, OwnSampler
from .generation.tools import EnvironmentFailure, ToolCallingSampler
from .generation.vllm_server import VLLMServerError
from .generation.vllm_weights import awake_engine, set_up_vllm, without_vllm
from .logps import Truncation
from .method.credit import CREDIT_RULES, credit_rows
from .method.credit.prior import ValueTracker, track_values
from .method.metrics import tree_metrics
from .method.plan import Plan
from .method.refill import PromptStream, Refill, redistribute
from .method.rows import Row
from .method.sampling import Sampler
from .method.tree import TokenIds, Tree
from .old_logps import OldLogprobs, VLLMCorrection, old_logps_of, score_leftovers
from .overlap import Overlap
from .processes import agree_on_gathered, in_every_process
from .rollout import Explorer, StepRollouts, longest_prompt
from .samplers import LiveSettings, make_sampler
from .tool_loop import TRLToolLoop, limited_tools
from .tree_log.callback import TreeLog

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from trl.trainer.grpo_trainer import EnvironmentFactory, RolloutFunc


logger = logging.getLogger(__name__)

# Required keys of a batch that a subclass returns
REQUIRED_KEYS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages")


class FR3ETrainer(resume.ExactResume):
    """
    Trainer for FR3E, [First Return, Entropy-Eliciting Explore](https://huggingface.co/papers/2507.07017).

    The difference from [`~trl.GRPOTrainer`]: only some of a prompt's completions are sampled from the prompt. The
    others branch from tokens of these where the policy was uncertain, and each token learns from all rollouts that pass
    through it.

    The constructor takes the arguments of [`~trl.GRPOTrainer`]. With `num_anchors=0` the trainer is `GRPOTrainer`.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from fr3e_trl import FR3EConfig, FR3ETrainer
    >>> from trl.rewards import accuracy_reward

    >>> trainer = FR3ETrainer(
    ...     model="Qwen/Qwen2.5-0.5B-Instruct",
    ...     reward_funcs=accuracy_reward,
    ...     args=FR3EConfig(num_generations=4, num_iterations=4, per_device_train_batch_size=32),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()
    ```

    Args:
        args ([`FR3EConfig`] or [`~trl.GRPOConfig`], *optional*):
            Configuration. A `GRPOConfig` gets FR3E's settings at their defaults. If `None`, a default one is used.

        sampler (`Callable`, *optional*):
            Class or function that is called with the finished trainer and returns a [`Sampler`], which then draws the
            rollouts instead of `generate` or vLLM. Log-probs that it returns become the old log-probs of their tokens.
            Evaluation generates as in [`~trl.GRPOTrainer`].

        All other arguments are those of [`~trl.GRPOTrainer`]. `rollout_func` is not supported while exploring. An
        environment is copied with its method `_fork(self)`, if it has one, or with `copy.deepcopy`. If it cannot be
        copied, a branch off a later turn repeats the actions before it.

    Attributes:
        sampler ([`Sampler`]):
            Draws the rollouts.
        stopwatch ([`~callbacks.Stopwatch`]):
            Seconds that a run has spent on each part of a step.

    Raises:
        NotImplementedError: A feature does not work with exploration.
        ValueError: A setting is not allowed, or the dataset is empty.
    """

    _tag_names: ClassVar = ["trl", "fr3e"]  # type: ignore[misc]
    _name = "FR3E"
    _paper: ClassVar = {  # type: ignore[misc]
        "title": "First Return, Entropy-Eliciting Explore",
        "id": "2507.07017",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{zheng2025first,
                title        = {{First Return, Entropy-Eliciting Explore}},
                author       = {Tianyu Zheng and Tianshun Xing and Qingshui Gu and Taoran Liang and Xingwei Qu and Xin Zhou and Yizhi Li and Zhoufutu Wen and Chenghua Lin and Wenhao Huang and Qian Liu and Ge Zhang and Zejun Ma},
                year         = 2025,
                eprint       = {arXiv:2507.07017},
            }"""),  # noqa: E501
    }

    args: FR3EConfig
    reward_funcs: list[Any]

    # Defaults for methods that TRL's constructor calls
    has_own_sampler = False
    _shares_prefixes: bool | None = False  # None if not known yet
    _refill: Refill | None = None
    _value_tracker: ValueTracker | None = None
    _overlap: Overlap | None = None
    _explorer: Explorer | None = None  # None during the constructor of TRL, and for plain GRPO
    _tool_loop: TRLToolLoop | None = None
    _tree_log: TreeLog | None = None
    _rollout_func: "RolloutFunc | None" = None
    _masks_truncated: bool = False
    _head_temperature: float = 1.0  # temperature of TRL's log-probs
    _batch_temperature: float = 1.0  # sampling temperature of the current batch
    _has_warned_about_advantages: bool = False

    # Set within a step, and None or empty between steps
    _inputs: Sequence[dict[str, Any]] = ()  # until trees are grown
    _explored: list[Row]
    _rollouts: StepRollouts | None = None
    _old_logps: OldLogprobs | VLLMCorrection
    _score_old_policy: Callable[..., Any] | None = None  # replaces TRL's scoring of the old policy, once
    _loss_mask: torch.Tensor | None = None  # mask of tokens in the loss, until a micro-batch is scored

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        reward_funcs: "str | PreTrainedModel | Callable[..., Any] | list[Any] | None" = None,
        args: GRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: "PeftConfig | None" = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: "RolloutFunc | None" = None,
        environment_factory: "EnvironmentFactory | dict[str, EnvironmentFactory] | None" = None,
        *,
        sampler: "Callable[[FR3ETrainer], Sampler] | None" = None,
    ):
        if args is None:
            args = FR3EConfig(f"{model_name(model)}-FR3E")
        elif not isinstance(args, FR3EConfig):
            args = FR3EConfig.from_grpo(args)
        check_trl()
        args.resolve().warn()
        if sampler is not None:
            checks.check_sampler(sampler, args)
        if not args.is_plain_grpo:
            if not isinstance(model, str):
                checks.check_model(model)
            checks.check_reward_funcs(reward_funcs)
            checks.check_overrides(self, FR3ETrainer, args)
            checks.refuse_unsupported(args, rollout_func)
            checks.check_generation_kwargs(args)
            checks.warn_about_single_prompt(args)
            checks.warn_about_refill(args)
            if train_dataset is not None:
                checks.check_dataset(train_dataset, args, has_environments=environment_factory is not None)
        with without_vllm(args), checks.explain_missing_architectures(model, args):
            super().__init__(
                model=model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
        self._batch_temperature = self._head_temperature = self.temperature
        if args.use_vllm:
            set_up_vllm(self, args)
        self.stopwatch = Stopwatch()
        replace_progress_callback(self, Console(args, self.stopwatch), callbacks)
        images.take_no_empty_images(self)
        self.share_prefixes(bool(args.share_prefixes))
        if not args.is_plain_grpo:
            self.eos_token_ids = checks.eos_token_ids(self)
            if not self.use_vllm:
                self.generation_config.eos_token_id = self.eos_token_ids
        self.sampler = make_sampler(self)
        self.has_own_sampler = sampler is not None
        if args.log_trees is not None:
            self._tree_log = TreeLog(args.log_trees, tokenizer_of(self), self.reward_func_names, self.accelerator)
            # Before callbacks that report, because these close their service when training ends
            self.callback_handler.callbacks.insert(0, self._tree_log)
        if not args.is_plain_grpo:
            self._set_up_exploration(sampler)

    def _set_up_exploration(self, sampler: "Callable[[FR3ETrainer], Sampler] | None") -> None:
        """Check what TRL has set up, and create everything that only exploration needs."""
        checks.check_model(self.model)
        checks.check_tokenizer(self)
        checks.refuse_unsupported_setup(self)
        obstacle_to_images = checks.obstacle_to_images(self)
        example = None if self.train_dataset is None else next(iter(self.train_dataset))
        checks.check_images([] if example is None else [example], obstacle_to_images)
        context = context_length(self.model.config)
        if self.use_vllm:
            prompt_length = 0 if example is None else longest_prompt(self, [example])
            context = self.vllm_generation.checked_context(context, prompt_length, self.max_completion_length)
            checks.warn_about_unscored_sampling(self.args)
            checks.warn_about_timeouts(self.args)
        budget = CompletionBudget(self.max_completion_length, context, self.processing_class)
        if sampler is not None:
            own = OwnSampler(sampler(self), self.use_vllm and self.vllm_importance_sampling_correction)
            self.sampler = InStepSampler(own) if is_sharded(self) else own
        if self.tools:
            self._video_pad_token_id = None  # tools return no videos, so such a token is the policy's
            self._tool_loop = TRLToolLoop(self, partial(checks.obstacle_to_tool_images, self), self.args.tool_timeout)
            self.sampler = ToolCallingSampler(
                self._tool_loop, self.sampler, skip_mismatches=self.args.replay_mismatch == "skip"
            )
        checks.warn_about_float32_generation(self)
        self._explorer = Explorer(
            self,
            self.args.plan,
            lambda *completions: self.token_statistics(*completions),
            budget,
            self.stopwatch,
            obstacle_to_images,
            scores_early=self.args.max_refills > 0 or self.args.base_selection != "all",
        )
        self._live_settings = LiveSettings(self)

    # A step

    @property
    def is_exploring(self) -> bool:
        """Whether a step grows trees: in training, unless every part of FR3E is off."""
        return self._explorer is not None and self.model.training

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """
        The only change is that a training step's completions are rows of trees, and their credit is its advantages.

        TRL's method is called once. It calls [`_generate`], which grows the trees, and then scores the rows.
        """
        explorer = self._explorer
        if explorer is not None:
            self._apply_live_settings()
        if explorer is None or not self.is_exploring:
            if self._overlap is not None:
                self._overlap.sampler.finish()  # before weights or other requests are sent to the server
            batch = super()._generate_and_score_completions(inputs)
            return prefix_sharing.numbered(batch) if self.model.training and self.shares_prefixes else batch
        try:
            if self._refill is not None:
                inputs = self._refill_inputs()
            checks.check_overrides(self, FR3ETrainer, self.args)  # a script may have set one since
            explorer.check(inputs)
            self._inputs, self._explored = inputs, []
            batch = super()._generate_and_score_completions(inputs)
            batch = self._with_credit(batch)
            return prefix_sharing.numbered(batch) if self.shares_prefixes else batch
        except Exception as error:
            if self._refill is not None:
                self._refill.undo()  # a checkpoint saved now belongs to the previous step
            if self._inputs and self.environment_factories is not None:  # the error is from resetting environments
                failure = EnvironmentFailure(f"While rollouts were prepared: {type(error).__name__}: {error}")
                if self.accelerator.num_processes == 1:  # others may not have failed
                    resume.save_before(self, failure)
                raise failure from error
            if isinstance(error, VLLMServerError | EnvironmentFailure) or error is explorer.example_error:
                resume.save_before(self, error)
            raise
        finally:
            self._inputs, self._rollouts, self._explored, self._score_old_policy = (), None, [], None

    def _apply_live_settings(self) -> None:
        """Apply settings that a script or a callback has changed. The current batch keeps its temperature."""
        self._live_settings.update()
        if self._tool_loop is not None:
            self._tool_loop.eos_token_id = self.eos_token_ids[0]
        if self.model.training:
            self._batch_temperature = self.temperature

    def _refill_inputs(self) -> list[dict[str, Any]]:
        """The examples of this process's rows, with prompts that refill draws."""
        assert self._refill is not None
        num_rows = self.args.generation_batch_size
        indices = self._refill.begin(num_rows // self.num_generations)
        return [self.train_dataset[indices[row // self.num_generations]] for row in sharding(self, num_rows).own]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """The only change is that rows that share prefixes are put into the same micro-batch of a new batch."""
        decoding.drop_surplus_hooks(self.model)
        shares_prefixes = self.model.training and self.shares_prefixes
        last = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._overlap is not None and self.is_exploring and (next_step := self._overlap.due()) is not None:
            self._live_settings.update()
            self._overlap.begin(next_step)
        if self._buffered_inputs is not last:
            if self.is_exploring:
                self._check_batch(self._buffered_inputs[0])
            if shares_prefixes:
                prefix_sharing.keep_together(self._buffered_inputs)  # `inputs` is one of them
        return inputs

    def _check_batch(self, batch: dict[str, torch.Tensor]) -> None:
        """Check a batch that a subclass may have changed."""
        if missing := [name for name in REQUIRED_KEYS if name not in batch]:
            raise ValueError(
                f"{type(self).__name__}._generate_and_score_completions returned a batch without {missing}. It must "
                "return the batch of super(), and may replace values in it."
            )
        is_by_row = CREDIT_RULES[self._plan.credit].by_token and batch["advantages"].dim() == 1
        if is_by_row and not self._has_warned_about_advantages:
            self._has_warned_about_advantages = True
            logger.warning(
                "Tree credit is lost: %s._generate_and_score_completions returned advantages of shape (B,) instead of "
                "(B, T), which are used as the advantages of rows. Set credit='rollout' to get shape (B,) from "
                "super().",
                type(self).__name__,
            )

    @property
    def rollout_func(self) -> "RolloutFunc | None":
        """In a training step, a function that returns the rows of trees, otherwise the user's `rollout_func`."""
        return self._rollout_func_output if self.is_exploring else self._rollout_func

    @rollout_func.setter
    def rollout_func(self, rollout_func: "RolloutFunc | None") -> None:
        self._rollout_func = rollout_func

    def _rollout_func_output(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        assert self._rollouts is not None
        # Also if all rollouts of this process were abandoned, because the correction covers all processes together
        has_logps = any(row.rollout.logprobs is not None for row in self._rollouts.own)
        return self._rollouts.rollout_func_output(
            with_logps=self.use_vllm and (has_logps or self.vllm_importance_sampling_correction)
        )

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """The only change is that trees are grown from the prompts of a training step."""
        if not self.is_exploring:
            return super()._generate(prompts)
        if has_begun := self._overlap is not None and self._overlap.sampler.has_begun:
            # The server keeps the weights with which this batch was begun. Newer ones are sent for the next batch
            loaded_step, self._last_loaded_step = self._last_loaded_step, self.state.global_step
        try:
            with awake_engine(self, self.stopwatch.part):
                rollouts = self._rollouts = self._grow_trees(prompts)
            prompts[:] = rollouts.prompts  # TRL continues with this list, and refill may have replaced prompts
            prompt_ids, completion_ids, _, completions, logps, extra_fields, *_ = super()._generate(prompts)
        finally:
            if has_begun:
                self._last_loaded_step = loaded_step
        images, tool_images = rollouts.images()
        # TRL has logged the lengths of whole completions. Only a row's own tokens are in the loss
        masks = [row.loss_mask for row in rollouts.own]
        return prompt_ids, completion_ids, masks, completions, logps, extra_fields, images, tool_images

    def _grow_trees(self, prompts: list[Any]) -> StepRollouts:
        """Grow trees from the prompts of a step, and return the rows of its batch."""
        explorer, num_generations = self._explorer, self.num_generations
        assert explorer is not None
        if not self._inputs:
            raise NotImplementedError(
                f"{type(self).__name__}._generate_and_score_completions does not call "
                "super()._generate_and_score_completions, which grows the trees. Call it and change the batch that it "
                "returns, or set num_anchors=0 to train with plain GRPO."
            )
        explorer.begin_step(self.sampler, self._masks_truncated)
        num_rows = len(prompts) * self.accelerator.num_processes
        own = sharding(self, num_rows).own
        # TRL repeats an example for each row of its group
        examples = {row // num_generations: example for row, example in zip(own, self._inputs, strict=True)}
        self._inputs = ()
        tree_prompts: dict[int, list[Any]] = {i: [] for i in examples}
        for row, prompt in zip(own, prompts, strict=True):
            tree_prompts[row // num_generations].append(prompt)
        num_prompts = num_rows // num_generations
        if self._refill is None:
            self._explored = explorer.explore(num_prompts, examples, tree_prompts)
            rows = self._explored
        else:
            rows = self._refill.fill(partial(self._explore_indices, examples, tree_prompts), num_prompts, num_rows)
            redistribute(rows, sharding(self, num_rows), in_every_process, self.train_dataset)
        explorer.end_step()
        own_part = own_rows(self, rows)
        rollouts = StepRollouts(
            rows,
            own_part,
            # TRL's prompts, unless refill has replaced rows, or a tree's rows share the prompt of one environment
            prompts
            if self._refill is None and self.environment_factories is None
            else [images.prompt_of(self, row.example) for row in own_part],
            is_scored=explorer.scores_early,
            tool_counts=self.sampler.take_counts() if isinstance(self.sampler, ToolCallingSampler) else (0, 0),
        )
        if self.environment_factories is not None:  # for rewards, and for rendering prompts with tools
            self.environments = [None if turns is None else turns.environment for turns in rollouts.dialogues]
            names = [row.example.get("environment") for row in own_part]
            self._batch_environments = names if self._multi_environment else [None] * len(names)
        self._old_logps = old_logps_of(self, rows, self.has_own_sampler)
        self._score_old_policy = self._old_logps.score_in_place_of_trl
        return rollouts

    def _explore_indices(
        self, examples: dict[int, dict[str, Any]], prompts: dict[int, list[Any]], indices: list[int]
    ) -> list[Row]:
        """Explore the prompts at `indices` of the training set. TRL has prepared those of the first call."""
        assert self._explorer is not None
        if not self._explored:
            self._explored += self._explorer.explore(len(indices), examples, prompts, indices)
        else:
            own = {row // self.num_generations for row in sharding(self, len(indices) * self.num_generations).own}
            others = {i: self.train_dataset[indices[i]] for i in own}
            self._explored += self._explorer.explore(len(indices), others, None, indices)
        credit_rows(self._explored, self.trees, self._plan, self._value_tracker)
        return self._explored

    def _generate_single_turn(
        self, prompt_ids: list[Any], images: Any, *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], Any]:
        """The only changes: a sampler draws the turns of dialogues in trees, and the model stays in its mode."""
        if self._tool_loop is not None and self._tool_loop.write_turns is not None:
            return self._tool_loop.write(prompt_ids, images), None
        with decoding.restored_mode(self):
            return super()._generate_single_turn(prompt_ids, images, *args, **kwargs)

    def _tool_call_loop(
        self, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, logprobs: Any, *args: Any
    ) -> tuple[Any, ...]:
        """The only changes: rows of trees have called their tools already, and other calls end after `tool_timeout`."""
        rollouts = self._rollouts
        if rollouts is not None:
            # TRL uses these masks to log the lengths of whole completions
            masks = [row.path_mask for row in rollouts.own]
            messages = [[] if turns is None else turns.messages for turns in rollouts.dialogues]
            return masks, messages, completion_ids, logprobs, *rollouts.tool_counts, []
        if self._tool_loop is None or self._tool_loop.write_turns is None:  # trees limit their own calls
            for dicts in (self._sync_tool_dicts, self._async_tool_dicts):
                dicts[:] = [limited_tools(self, tools, self.args.tool_timeout) for tools in dicts]
        return super()._tool_call_loop(prompts, prompt_ids, completion_ids, completions, logprobs, *args)

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        """
        The only changes: rows of trees keep their rewards, those of copies are dropped, and errors and unusable rewards
        are reported with the name of the reward function.
        """
        rollouts = self._rollouts
        if rollouts is None:
            return self._checked_rewards(inputs, prompts, completions, completion_ids_list)
        if rollouts.is_scored:
            self._pending_extra_logs.update(rollouts.extra_logs())
        else:
            with self.stopwatch.part("rewards"):
                rewards = self._checked_rewards(inputs, prompts, completions, completion_ids_list)
            rollouts.set_rewards(rewards, self.reward_weights, self.trees)
        return rollouts.rewards(self.accelerator.device, len(self.reward_funcs))

    def _checked_rewards(self, *args: Any) -> torch.Tensor:
        if self._explorer is None:
            return super()._calculate_rewards(*args)
        compute = super()._calculate_rewards

        def computed() -> torch.Tensor:
            with checks.name_reward_func_in_errors(self.reward_func_names):
                return compute(*args)

        num_rows, num_funcs = len(args[0]), len(self.reward_funcs)
        rewards = agree_on_gathered(computed, (num_rows, num_funcs), self.accelerator.device)
        checks.check_rewards(rewards, self.reward_func_names)
        return rewards

    @property
    def _plan(self) -> Plan:
        """The plan, with the current reward weights."""
        assert self._explorer is not None
        return replace(self._explorer.plan, reward_weights=self.reward_weights.tolist())

    def _with_credit(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Replace the advantages in the batch of TRL's step with the credit of its rows, and log metrics."""
        assert self._rollouts is not None and self._explorer is not None
        rows, plan = self._rollouts.rows, self._plan
        metrics: dict[str, float] = {}
        if self._refill is None:
            credit_rows(rows, self.trees, plan, self._value_tracker)
        else:
            metrics = self._refill.metrics
        self._old_logps.finish(batch)
        rule = CREDIT_RULES[plan.credit]
        has_dropped = rule.leaves_out_truncated and mask_dropped(self, batch, rows)
        if has_dropped:
            credit_rows(self._explored, self.trees, plan, self._value_tracker)
        set_credit(self, batch, rows, by_token=rule.by_token)
        if has_dropped:
            reweight_dropped(self, batch)
        if self._tree_log is not None:
            in_batch = {id(row) for row in rows}  # with refill, some may not fit
            logged = [replace(row, in_loss=row.in_loss and id(row) in in_batch) for row in self._explored]
            self._tree_log.write(self.trees, logged, self.args, self.state.global_step + 1)
        if self.multi_objective_aggregation == "sum_then_normalize":
            # TRL lacks the rewards of copies, and finds no deviation in a group with a single other row
            self._metrics["train"]["frac_reward_zero_std"][-1] = self._frac_reward_zero_std(rows)
        for name, value in (self._step_metrics(rows) | metrics).items():
            self._metrics["train"][name].append(value)  # TRL averages and logs them
        if self._refill is not None:
            score_leftovers(self, self._refill.leftovers, self.has_own_sampler)
        for rollout in (rollout for tree in self.trees for rollout in tree.rollouts):
            if rollout.dialogue is not None:  # environments are for the next rollouts
                rollout.dialogue.environment, rollout.dialogue.snapshots = None, []
        return batch

    def _frac_reward_zero_std(self, rows: list[Row]) -> float:
        """TRL's share of groups whose rewards are all equal, including the rewards of copies."""
        rewards = torch.tensor([row.rollout.score.reward for row in rows], dtype=torch.float64)  # without rounding
        size = len(rows) if self.scale_rewards == "batch" else self.num_generations
        deviations = nanstd(rewards.view(-1, size), dim=1)
        return deviations.isclose(torch.zeros_like(deviations)).float().mean().item()

    @property
    def trees(self) -> list[Tree]:
        """The trees of the last generation step, one for each prompt. Empty with `num_anchors=0`."""
        return [] if self._explorer is None else self._explorer.trees

    def _step_metrics(self, rows: list[Row]) -> dict[str, float]:
        """FR3E's metrics of a step. The value tracker learns the values of its prompts."""
        assert self._explorer is not None
        learned = torch.tensor([row.advantage for row in rows if row.teaches], dtype=torch.float64)
        metrics = tree_metrics(self.trees, learned, len(rows))
        if self.args.replay_mismatch == "skip":
            metrics["fr3e/tools/skipped"] = sum(row.rollout.score.is_broken for row in rows) / len(rows)
        if self._explorer.threshold is not None:
            metrics["fr3e/anchor/threshold"] = self._explorer.threshold
        if self._value_tracker is not None:
            metrics |= track_values(self.trees, self._plan, self._value_tracker)
        if self._overlap is not None:
            metrics |= self._overlap.metrics()
        hit_rate = getattr(self.sampler, "hit_rate", None)  # of the last requests, which are for the anchors' rollouts
        if hit_rate is not None and self.args.num_anchors:
            metrics["fr3e/prefix_cache/hit_rate"] = hit_rate
        return metrics

    # The update

    @property
    def mask_truncated_completions(self) -> bool:
        """Whether TRL masks truncated completions. Not if the credit rule still credits some of their tokens."""
        rule = CREDIT_RULES[self._plan.credit] if self.is_exploring else None
        return self._masks_truncated and not (rule is not None and rule.leaves_out_truncated)

    @mask_truncated_completions.setter
    def mask_truncated_completions(self, mask: bool) -> None:
        self._masks_truncated = mask

    def _compute_loss(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The only change is that rows without a token in the loss are skipped."""
        if not self.is_exploring:
            return super()._compute_loss(model, inputs)
        mask = self._loss_mask = inputs["completion_mask"] * inputs["tool_mask"]
        entropy_control = self.entropy_coef, self._last_world_entropy
        loss = super()._compute_loss(model, inputs)
        if self.use_adaptive_entropy and self.accelerator.sync_gradients and self._last_world_entropy == 0:
            # No token of this update is in the loss, which TRL treats as an entropy of 0
            self.entropy_coef, self._last_world_entropy = entropy_control
            self._metrics["train"]["entropy_coef"][-1] = self.entropy_coef
        if not mask.any():
            ignore_empty_micro_batch(self._metrics["train"], self.accelerator.sync_gradients)
        return loss * inputs["row_shares"].mean() if "row_shares" in inputs else loss

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        truncation: Truncation | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """
        The only changes: prefixes that rows share are forwarded once, rows without a token in the loss are skipped, the
        old policy's log-probs may be known already, distributions may be truncated, and the temperature is that of
        the batch, which may differ from the trainer's first one.
        """
        rows = model, input_ids, attention_mask, logits_to_keep
        if self._score_old_policy is not None:
            score_old_policy, self._score_old_policy = self._score_old_policy, None
            return score_old_policy(*rows, **kwargs)
        loss_mask, self._loss_mask = self._loss_mask, None
        if self.shares_prefixes:
            return prefix_sharing.logps_and_entropies(self, *rows, loss_mask, *args, truncation=truncation, **kwargs)
        score = super()._get_per_token_logps_and_entropies
        if truncation is not None or self.scoring_temperature != self._head_temperature:
            score = partial(policy_logps.logps_and_entropies, self, truncation=truncation)
        if loss_mask is None:
            return score(*rows, *args, **kwargs)
        kept = loss_mask.any(1)
        kept[0] |= ~kept.any()  # for a gradient of 0, because other processes wait for one
        kept_images = images.select_rows(images.images_in(kwargs), kept.nonzero().flatten().tolist())
        *scores, aux_loss = score(
            model, input_ids[kept], attention_mask[kept], logits_to_keep, *args, **{**kwargs, **kept_images}
        )
        # 0 in skipped rows
        logps, entropies = (
            None if x is None else x.new_zeros(loss_mask.shape).masked_scatter(kept.unsqueeze(1), x) for x in scores
        )
        assert logps is not None
        return logps, entropies, aux_loss

    @property
    def scoring_temperature(self) -> float:
        """The temperature of log-probs: the sampling temperature of the current batch, except in evaluation."""
        is_evaluating = self._explorer is not None and not self.model.training
        return self.temperature if is_evaluating else self._batch_temperature

    @property
    def shares_prefixes(self) -> bool:
        """Whether shared prefixes are forwarded once. The first access must happen in all processes together."""
        if self._shares_prefixes is None:
            self._shares_prefixes = prefix_sharing.can_share(self)
        return self._shares_prefixes

    def share_prefixes(self, share: bool) -> None:
        """Turn prefix sharing on, if the model supports it, or off."""
        self._shares_prefixes = None if share else False

    # A run and its checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """
        Train, as [`~transformers.Trainer.train`].

        `resume_from_checkpoint=True` resumes from the last complete checkpoint and skips one that was being written
        when the run was killed. A resumed run equals the run without interruption.
        """
        try:
            with prefix_sharing.without_cudnn():
                return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            if self._overlap is not None:
                self._overlap.sampler.abort()

    def begin(self) -> None:
        """Reset the state of an earlier run: tracked values, threshold and the order of prompts."""
        self._value_tracker = ValueTracker() if self.args.value_tracker else None
        if self._explorer is not None:
            self._explorer.threshold = None
        if self.args.max_refills > 0:
            self._refill = Refill(self.train_dataset, self._epoch_order, self.args.max_refills)
        sampler = self.sampler.sampler if isinstance(self.sampler, ToolCallingSampler) else self.sampler
        if self._explorer is not None and isinstance(sampler, AheadSampler):
            sampler.abort()
            order = PromptStream(self._epoch_order) if self._refill is None else self._refill.prompts
            self._overlap = Overlap(self, self.args, self._explorer, sampler, order, self._refill is not None)

    def _epoch_order(self) -> RepeatSampler:
        """Indices of the training set, each once an epoch, in the order that TRL's sampler gives them."""
        indices = range(len(self.train_dataset))
        return RepeatSampler(indices, mini_repeat_count=1, shuffle=self.shuffle_dataset, seed=self.args.seed)

    def state_to_resume(self) -> dict[str, Any]:
        """State that the next step needs in addition to that of TRL and transformers, in plain values and tensors."""
        state: dict[str, Any] = {}
        if self._refill is not None:
            state |= self._refill.state(self.accelerator.num_processes, self.accelerator.process_index)
        if self._value_tracker is not None:
            state["value_memory"] = self._value_tracker.state()
        if self._explorer is not None and self._explorer.threshold is not None:
            state["anchor_threshold"] = self._explorer.threshold
        if self._batch_temperature != self._head_temperature:
            state["batch_temperature"] = self._batch_temperature
        return state

    def resume_from_state(self, state: dict[str, Any], has_changed: bool) -> None:
        """Restore what [`state_to_resume`] returned, without rows left over if the settings have changed."""
        for batch in self._buffered_inputs or []:
            upgrade_batch(self, batch)
        self._batch_temperature = state.get("batch_temperature", self._head_temperature)
        if self._refill is not None and "leftovers" in state:
            self._refill.resume(state, self.accelerator.num_processes)
            if has_changed:
                self._refill.leftovers = []
        elif self._refill is not None:  # the earlier run had no refill, so it only drew the prompts of each batch
            args, num_examples = self.args, len(self.train_dataset)
            num_batches = self.state.global_step * args.gradient_accumulation_steps / args.steps_per_generation
            num_prompts = args.generation_batch_size // self.num_generations
            # TRL drops the incomplete batch at the end of an epoch
            epochs, rest = divmod(math.ceil(num_batches / self.num_iterations), num_examples // num_prompts)
            self._refill.prompts.go_to(epochs * num_examples + rest * num_prompts)
        if self._value_tracker is not None and "value_memory" in state:
            self._value_tracker.resume(state["value_memory"])
        if self._explorer is not None and self.args.anchor_threshold == "auto":
            self._explorer.threshold = state.get("anchor_threshold")

    # For samplers and analyses of rollouts

    def generation_model(self) -> AbstractContextManager[Any]:
        """A context manager that yields the model to generate with, in generation mode as in TRL."""
        return decoding.generation_model(self)

    def token_statistics(
        self, prompt_ids: list[TokenIds], completion_ids: list[TokenIds], multimodal: list[Any] | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Log-probs and entropies of completions under the policy; see [`~policy_logps.token_statistics`]."""
        return policy_logps.token_statistics(self, prompt_ids, completion_ids, multimodal)

    def create_model_card(  # type: ignore[override]
        self, model_name: str | None = None, dataset_name: str | None = None, tags: Any = None
    ) -> None:
        """Write TRL's model card, with a table of the run: model, data, settings and how the rewards changed."""
        super().create_model_card(model_name, model_card.on_hub(dataset_name), tags)
        if not self.args.is_plain_grpo and self.is_world_process_zero():
            model_card.complete(Path(self.args.output_dir) / "README.md", self, dataset_name)
