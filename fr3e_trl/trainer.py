"""FR3E in the place of GRPO."""

import math
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from datasets import Dataset, IterableDataset
from transformers import (
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from .fr3e_config import FR3EConfig
from .generation.context import CompletionBudget, context_length
from .generation.sampler import InStepSampler, OwnSampler
from .generation.tools import EnvironmentFailure, ToolCallingSampler
from .generation.vllm_server import VLLMServerError
from .method.anchors import next_threshold
from .method.credit import CREDIT_RULES, credit_rows
from .method.credit.prior import ValueTracker, track_values
from .method.explore import explore
from .method.metrics import tree_metrics
from .method.refill import Refill, hand_over
from .method.rows import Row, rows_of
from .method.sampling import Sampler
from .method.tree import TokenIds, Tree, as_ids
from .page.callback import TreeLog
from .processes import agree, in_every_process, in_step
from .trl_adapter import card, checks, console, decoding, images, logprobs, loss, prompts, resume, shared_forward
from .trl_adapter.assemble import assemble
from .trl_adapter.exploring import Exploring
from .trl_adapter.logs import log_metrics, note_evaluation
from .trl_adapter.old_logprobs import score_leftovers
from .trl_adapter.samplers import make_sampler
from .trl_adapter.setup import (
    EnvironmentFactory,
    RewardFunc,
    RolloutFunc,
    is_sharded,
    model_name,
    own_rows,
    sharding,
    tokenizer_of,
)
from .trl_adapter.shared_attention import without_cudnn
from .trl_adapter.stopwatch import Stopwatch
from .trl_adapter.tools import TRLToolLoop, time_limit
from .trl_adapter.vllm_weights import adapter_sync, awake_engine

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


class FR3ETrainer(GRPOTrainer):
    """
    Trainer for FR3E, [First Return, Entropy-Eliciting Explore](https://huggingface.co/papers/2507.07017).

    The difference from [`~trl.GRPOTrainer`]: a prompt's completions are not all sampled from the prompt, but some of
    them from the positions where the policy was most uncertain, and each is compared with those from the same position.

    The constructor takes what [`~trl.GRPOTrainer`]'s takes. With `num_anchors=0` the trainer is `GRPOTrainer`.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from fr3e_trl import FR3EConfig, FR3ETrainer
    >>> from trl.rewards import accuracy_reward

    >>> trainer = FR3ETrainer(
    ...     model="Qwen/Qwen2.5-0.5B-Instruct",
    ...     reward_funcs=accuracy_reward,
    ...     args=FR3EConfig(num_generations=8, per_device_train_batch_size=32),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )
    >>> trainer.train()
    ```

    Args:
        args ([`FR3EConfig`] or [`~trl.GRPOConfig`], *optional*):
            Configuration. To a plain `GRPOConfig`, FR3E's settings are added. If `None`, a default one is used.

        sampler (`Callable`, *optional*):
            Makes what draws the rollouts, in place of `generate` or vLLM: it is called with the finished trainer, and
            returns a [`Sampler`]. A class whose only argument is the trainer will do. The log-probs that it gives are
            the old log-probs of their tokens; other tokens have the policy's at the start of the step. Evaluation
            generates as [`~trl.GRPOTrainer`]'s does.

        All others are those of [`~trl.GRPOTrainer`]. While exploring, `rollout_func` is not supported. An environment
        that has a method `_fork(self)`, which returns a copy that goes on by itself in the same state, is copied where
        rollouts branch off a later turn; any other does the turns before it again.

    Attributes:
        sampler ([`Sampler`]):
            Draws the rollouts.
        trees (`list[Tree]`):
            What the last generation step explored, one tree for each prompt.
        stopwatch ([`~trl_adapter.stopwatch.Stopwatch`]):
            Where the time of the steps of a run has gone.

    Raises:
        NotImplementedError: What is asked for does not work with exploration yet.
        ValueError: The configuration is impossible, or the dataset empty.
    """

    _tag_names: ClassVar = ["trl", "fr3e"]
    _name = "FR3E"
    _paper: ClassVar = {
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

    # What TRL's methods may meet before the constructor has set it
    has_own_sampler = False
    _shares_prefixes: bool | None = False  # None where it is not known yet
    _refill: Refill | None = None
    _value_tracker: ValueTracker | None = None
    _threshold: float | None = None  # at which base trajectories branch, where past steps say it
    _uncertainties: list[float]  # of a step's base trajectories: those of all its refills count once
    _tree_log: TreeLog | None = None

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
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
        rollout_func: RolloutFunc | None = None,
        environment_factory: EnvironmentFactory | dict[str, EnvironmentFactory] | None = None,
        *,
        sampler: "Callable[[FR3ETrainer], Sampler] | None" = None,
    ):
        if args is None:
            args = FR3EConfig(f"{model_name(model)}-FR3E")
        elif not isinstance(args, FR3EConfig):
            args = FR3EConfig.from_grpo(args)
        args.resolve().warn()
        if sampler is not None:
            checks.check_sampler(sampler, args)
        if not args.is_plain_grpo:
            if not isinstance(model, str):
                checks.check_model(model)
            checks.check_reward_funcs(reward_funcs)
            checks.refuse_unsupported(args, rollout_func)
            checks.check_generation_kwargs(args)
            checks.warn_of_single_prompt(args)
            if train_dataset is not None:
                checks.check_dataset(train_dataset, args, has_environments=environment_factory is not None)
        with adapter_sync(args), checks.classless_model(model, args):
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
        console.take_over(self, callbacks)
        images.take_no_empty_images(self)
        self.share_prefixes(bool(args.share_prefixes))
        self.trees: list[Tree] = []
        self.stopwatch = Stopwatch()
        self.evaluations: list[list[tuple[float, float]]] = []  # see `note_evaluation`
        if not args.is_plain_grpo:
            self.eos_token_ids = checks.ends_of(self)
            if not self.use_vllm:
                self.generation_config.eos_token_id = self.eos_token_ids
        self.sampler = make_sampler(self)
        self.has_own_sampler = sampler is not None
        self._value_tracker = ValueTracker() if args.value_tracker else None
        if args.log_trees is not None:
            self._tree_log = TreeLog(args.log_trees, tokenizer_of(self), self.reward_func_names, self.accelerator)
            # Before those that report, which end what they report to when training does
            self.callback_handler.callbacks.insert(0, self._tree_log)
        if not args.is_plain_grpo:
            self._set_up_exploration(sampler)

    def _set_up_exploration(self, sampler: "Callable[[FR3ETrainer], Sampler] | None") -> None:
        """Check what TRL has set up, and make what only exploration needs."""
        checks.check_model(self.model)
        checks.check_tokenizer(self)
        checks.refuse_unsupported_setup(self)
        self.obstacle_to_images = checks.obstacle_to_images(self)
        example = None if self.train_dataset is None else next(iter(self.train_dataset))
        checks.check_images([] if example is None else [example], self.obstacle_to_images)
        self.reward_funcs = [
            checks.checked_reward_func(func, name)
            for func, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]
        context = context_length(self.model.config)
        if self.use_vllm:
            prompt = [] if example is None else prompts.tokenize(self, prompts.prepare(self, [example]))[0]
            context = self.vllm_generation.checked_context(context, len(prompt), self.max_completion_length)
            checks.warn_of_unscored_sampling(self.args)
            checks.warn_of_timeouts(self.args)
        self.budget = CompletionBudget(self.max_completion_length, context, self.processing_class)
        if sampler is not None:
            own = OwnSampler(sampler(self), self.use_vllm and self.vllm_importance_sampling_correction)
            self.sampler = InStepSampler(own) if is_sharded(self) else own
        if self.tools:
            self.sampler = ToolCallingSampler(
                TRLToolLoop(self), self.sampler, skip_mismatches=self.args.replay_mismatch == "skip"
            )
        checks.warn_of_independent_branches(self)
        checks.warn_of_float32_generation(self)

    # A step

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """The only change is that the batch of a training step has the rows of trees, which are grown here."""
        try:
            if self.args.is_plain_grpo or not self.model.training:
                with time_limit(self), decoding.generating_in_its_mode(self):
                    batch = super()._generate_and_score_completions(inputs)
                if not self.model.training:
                    note_evaluation(self)
                return batch
            return self._explore_and_assemble(inputs)
        except (VLLMServerError, EnvironmentFailure) as error:
            resume.save_before(self, error)
            raise

    def _explore_and_assemble(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Grow trees from the prompts of a step, credit their rows, and have them for its batch."""
        num_rows = len(inputs) * self.accelerator.num_processes
        num_prompts = num_rows // self.num_generations
        self.trees, self._uncertainties = [], []
        explored: list[Row] = []
        metrics: dict[str, float] = {}
        with awake_engine(self):
            if self._refill is None:
                # TRL repeats an example for its group, and deals out the repeats as it does the rows
                own = sharding(self, num_rows).own
                examples = {row // self.num_generations: inputs[i] for i, row in enumerate(own)}
                rows = explored = self._explore(num_prompts, examples)
                credit_rows(rows, self.trees, self.args.plan, self._value_tracker)
            else:
                rows, metrics = self._refill.fill(partial(self._explore_drawn, explored), num_prompts, num_rows)
                hand_over(rows, sharding(self, num_rows), in_every_process, self.train_dataset)
        counts = self.sampler.take_counts() if isinstance(self.sampler, ToolCallingSampler) else (0, 0)
        if self.args.anchor_threshold == "auto":
            self._threshold = next_threshold(self._threshold, self._uncertainties)
        batch = assemble(self, rows, counts)
        rule = CREDIT_RULES[self.args.plan.credit]
        has_dropped = rule.leaves_out_truncated and loss.mask_dropped(self, batch, rows)
        if has_dropped:
            credit_rows(explored, self.trees, self.args.plan, self._value_tracker)
        loss.set_credit(self, batch, rows, of_tokens=rule.by_token)
        if has_dropped:
            loss.weigh_dropped(self, batch)
        if self._tree_log is not None:
            shown = explored
            if self._refill is not None:  # some may have found no place
                placed = {id(row) for row in rows}
                shown = [replace(row, in_loss=row.in_loss and id(row) in placed) for row in explored]
            self._tree_log.write(self.trees, shown, self.args, self.state.global_step + 1)
        log_metrics(self, self._metrics_of_step(rows) | metrics)
        if self._refill is not None:
            score_leftovers(self, self._refill.leftovers)
        return batch

    def _explore_drawn(self, rows: list[Row], indices: list[int]) -> list[Row]:
        """Explore the prompts at `indices` of the training set, and add their rows to `rows`."""
        own = {row // self.num_generations for row in sharding(self, len(indices) * self.num_generations).own}
        rows += self._explore(len(indices), {i: self.train_dataset[indices[i]] for i in own}, indices)
        credit_rows(rows, self.trees, self.args.plan, self._value_tracker)
        return rows

    def _explore(
        self, num_prompts: int, examples: dict[int, dict[str, Any]], indices: list[int] | None = None
    ) -> list[Row]:
        """
        Grow trees from the prompts of all processes.

        Args:
            num_prompts (`int`):
                How many.
            examples (`dict[int, dict]`):
                The dataset's examples of those that have rows in this process.
            indices (`list[int]`, *optional*):
                Places of all of them in the dataset, if they were drawn from it.

        Returns:
            `list[Row]`: The rows of all processes. The trees are added to `trees`.
        """
        of_rows = sharding(self, num_prompts * self.num_generations)
        trees = [Tree(as_ids(), 0) for _ in range(num_prompts)]
        exploring = Exploring(self, trees, examples, of_rows)
        try:
            of_processes = in_every_process(exploring.read)
        except (NotImplementedError, ValueError) as error:  # of an example
            resume.save_before(self, error)
            raise
        for keys in of_processes:
            for i, key in keys.items():
                trees[i].key = key
        call_all, score = in_every_process, exploring.score
        if is_sharded(self):  # all processes run the model together
            call_all, score = in_step, lambda *completions: agree(lambda: exploring.score(*completions))
        with self.stopwatch.part("generation"):
            uncertainties = explore(
                trees,
                replace(self.args.plan, temperature=self.temperature),  # of the loss, whatever a callback sets
                self.sampler,
                score,
                self.token_statistics,
                (self.args.seed, self.state.global_step),
                of_rows,
                call_all,
                self._threshold,
            )
        self._uncertainties += uncertainties
        for dialogue in (rollout.dialogue for tree in trees for state in tree.states for rollout in state.rollouts):
            if dialogue is not None:
                dialogue.environment, dialogue.snapshots = None, []  # for the next rollouts
        self.trees += trees
        return rows_of(trees, of_rows, examples, indices or [None] * num_prompts)

    def _metrics_of_step(self, rows: list[Row]) -> dict[str, float]:
        """What to log of a step, but for TRL's metrics. The value tracker learns what its prompts were worth."""
        learned = torch.tensor([row.advantage for row in rows if row.teaches], dtype=torch.float64)
        metrics = tree_metrics(self.trees, learned, len(rows))
        if self.args.replay_mismatch == "skip":
            dialogues = [row.rollout.dialogue for row in own_rows(self, rows)]
            is_broken = [dialogue is not None and dialogue.is_broken for dialogue in dialogues]
            metrics["fr3e/tools/skipped"] = sum(map(sum, in_every_process(lambda: is_broken))) / len(rows)
        if self._threshold is not None:
            metrics["fr3e/anchor/threshold"] = self._threshold
        if self._value_tracker is not None:
            metrics |= track_values(self.trees, self.args.plan, self._value_tracker)
        hit_rate = getattr(self.sampler, "hit_rate", None)  # of what was sampled last: the anchors' rollouts
        if hit_rate is not None and self.args.num_anchors:
            metrics["fr3e/prefix_cache/hit_rate"] = hit_rate
        return metrics

    # The update

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The only change is that rows that are not in the loss are left out, and out of what TRL divides by."""
        if "in_loss" not in inputs:
            return super()._compute_loss(model, inputs)
        return loss.compute_loss(self, super()._compute_loss, model, inputs)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        loss_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The only change is that prefixes that rows share are forwarded once, and only tokens in `loss_mask`."""
        rows = model, input_ids, attention_mask, logits_to_keep
        if not self.shares_prefixes:
            return super()._get_per_token_logps_and_entropies(*rows, *args, **kwargs)
        return shared_forward.logps_and_entropies(self, *rows, loss_mask, *args, **kwargs)

    @property
    def shares_prefixes(self) -> bool:
        """Whether what rows have in common is forwarded once. All processes must ask for the first time together."""
        if self._shares_prefixes is None:
            self._shares_prefixes = shared_forward.can_share(self)
        return self._shares_prefixes

    def share_prefixes(self, share: bool) -> None:
        """Have what rows have in common forwarded once from now on, if the model allows it, or not."""
        self._shares_prefixes = None if share else False

    # A run, and what of it a checkpoint holds

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """
        Train, as [`~transformers.Trainer.train`].

        `resume_from_checkpoint=True` takes the last checkpoint that is complete: one that was being written when the
        run was killed is passed over. A run that goes on from a checkpoint is the run that was not cut.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = resume.last_complete_checkpoint(self.args.output_dir)
        with (
            resume.exact_resume(self),
            shared_forward.kept_together(self),
            console.without_bars(),
            without_cudnn(),
        ):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def begin(self) -> None:
        """Draw prompts from the beginning of the data, as a run does before its first step."""
        if self.args.max_refills > 0:
            self._refill = Refill(self.train_dataset, partial(prompts.epoch_order, self), self.args.max_refills)

    def state_to_resume(self) -> dict[str, Any]:
        """What the next step depends on, beside what TRL and transformers keep, in plain values and tensors."""
        state: dict[str, Any] = {}
        if self._refill is not None:
            state |= self._refill.state(self.accelerator.num_processes, self.accelerator.process_index)
        if self._value_tracker is not None:
            state["value_memory"] = self._value_tracker.state()
        if self._threshold is not None:
            state["anchor_threshold"] = self._threshold
        return state

    def resume_from_state(self, state: dict[str, Any], has_changed: bool) -> None:
        """Take up what [`state_to_resume`] returned, without rows left over if the settings have changed."""
        if self._refill is not None and "leftovers" in state:
            self._refill.resume(state, self.accelerator.num_processes)
            if has_changed:
                self._refill.leftovers = []
        elif self._refill is not None:  # the run had none: it drew the prompts of each batch, and no more
            args, num_examples = self.args, len(self.train_dataset)
            num_batches = self.state.global_step * args.gradient_accumulation_steps / args.steps_per_generation
            num_prompts = args.generation_batch_size // self.num_generations
            # Of each epoch it left out what makes no whole batch
            epochs, rest = divmod(math.ceil(num_batches / self.num_iterations), num_examples // num_prompts)
            self._refill.prompts.go_to(epochs * num_examples + rest * num_prompts)
        if self._value_tracker is not None:
            self._value_tracker = ValueTracker()
            if "value_memory" in state:
                self._value_tracker.resume(state["value_memory"])
        self._threshold = state.get("anchor_threshold") if self.args.anchor_threshold == "auto" else None

    # For samplers, and for whoever looks at rollouts

    def generation_model(self) -> AbstractContextManager[Any]:
        """Enter generation mode as TRL does, in a context that gives the model to generate with."""
        return decoding.generation_model(self)

    def token_statistics(
        self, prompt_ids: list[TokenIds], completion_ids: list[TokenIds], multimodal: list[Any] | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Log-probs and entropies of completions under the policy; see [`~trl_adapter.logprobs.token_statistics`]."""
        return logprobs.token_statistics(self, prompt_ids, completion_ids, multimodal)

    def create_model_card(self, model_name: str | None = None, dataset_name: str | None = None, tags: Any = None):
        """Write TRL's model card, and have it tell what was trained, on what, how, and what came of it."""
        super().create_model_card(model_name, card.on_hub(dataset_name), tags)
        if not self.args.is_plain_grpo and self.is_world_process_zero():
            card.complete(Path(self.args.output_dir) / "README.md", self, dataset_name)
