"""FR3E in the place of GRPO."""

import logging
import math
import textwrap
from collections.abc import Callable
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
from trl import GRPOConfig
from trl.extras.profiling import profiling_context
from trl.trainer.grpo_trainer import EnvironmentFactory, RewardFunc, RolloutFunc
from trl.trainer.utils import get_config_model_id

from .config import FR3EConfig
from .generation.context import CompletionBudget, context_length
from .generation.continuous_batching import ContinuousBatchingSampler
from .generation.generate import GenerateSampler
from .generation.sampler import InStepSampler, OwnSampler
from .generation.tools import EnvironmentFailure, Instance, ToolCallingSampler
from .generation.vllm import VLLMColocateSampler, VLLMServerSampler
from .generation.vllm_server import VLLMServerError
from .method.anchors import next_threshold
from .method.credit.prior import ValueTracker, prompt_key
from .method.explore import explore, own_bases
from .method.metrics import tree_metrics
from .method.refill import Refill, hand_over
from .method.rows import Row, RowSharding, remember, rows_of, set_advantages
from .method.sampling import Sampler, images_of
from .method.tree import Dialogue, Score, TokenIds, Tree, as_ids
from .page.callback import TreeLog
from .processes import in_every_process
from .trl_adapter.card import add_settings
from .trl_adapter.checks import (
    check_dataset,
    check_generation_kwargs,
    check_images,
    check_prompts,
    check_sampler,
    checked_reward_func,
    obstacle_to_images,
    refuse_unsupported,
    refuse_unsupported_setup,
    warn_of_single_prompt,
    warn_of_unscored_sampling,
)
from .trl_adapter.old_logprobs import RatioGRPOTrainer

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

logger = logging.getLogger(__name__)


class FR3ETrainer(RatioGRPOTrainer):
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
            returns a [`Sampler`]. A class whose only argument is the trainer will do. Tokens for which it gives
            log-probs are weighed by those in the importance ratio, others by the policy's at the start of the step.
            Evaluation generates as [`~trl.GRPOTrainer`]'s does.

        All others are those of [`~trl.GRPOTrainer`]. While exploring, `rollout_func` is not supported. An environment
        that has a method `_fork(self)`, which returns a copy that goes on by itself in the same state, is copied where
        rollouts branch off a later turn; any other does the turns before it again.

    Attributes:
        sampler ([`Sampler`]):
            Draws the rollouts.
        trees (`list[Tree]`):
            What the last generation step explored, one tree for each prompt.

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
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = FR3EConfig(f"{model_name.split('/')[-1]}-FR3E")
        elif not isinstance(args, FR3EConfig):
            args = FR3EConfig.from_grpo(args)
        if sampler is not None:
            check_sampler(sampler, args)
        if not args.is_plain_grpo:
            refuse_unsupported(args, rollout_func, has_tools=bool(tools or environment_factory))
            check_generation_kwargs(args)
            warn_of_single_prompt(args)
            if train_dataset is not None:
                check_dataset(train_dataset, args, has_environments=environment_factory is not None)
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
        self.trees: list[Tree] = []
        self.sampler = self._make_sampler()
        self.has_own_sampler = sampler is not None
        self._refill: Refill | None = None
        self._memory = ValueTracker() if args.value_tracker else None
        self._threshold: float | None = None  # that base trajectories branch above, where past steps say it
        self._tree_log: TreeLog | None = None
        if args.log_trees is not None:
            self._tree_log = TreeLog(args.log_trees, self._tokenizer, self.reward_func_names, self.accelerator)
            # Before those that report, which end what they report to when training does
            self.callback_handler.callbacks.insert(0, self._tree_log)
        if args.is_plain_grpo:
            return
        refuse_unsupported_setup(self)
        self._obstacle_to_images = obstacle_to_images(self)
        example = None if train_dataset is None else next(iter(train_dataset))
        check_images([] if example is None else [example], self._obstacle_to_images)
        self.reward_funcs = [
            checked_reward_func(func, name)
            for func, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]
        context = context_length(self.model.config)
        if self.use_vllm:
            prompt = [] if example is None else self.tokenize_prompts(self.prepare([example]))[0]
            context = self.vllm_generation.checked_context(context, len(prompt), self.max_completion_length)
            warn_of_unscored_sampling(args)
        self._budget = CompletionBudget(self.max_completion_length, context, self.processing_class)
        if sampler is not None:
            own = OwnSampler(sampler(self), self.use_vllm and self.vllm_importance_sampling_correction)
            self.sampler = InStepSampler(own) if self.is_sharded else own
        if self.tools:
            self.sampler = ToolCallingSampler(self, self.sampler, skip_mismatches=args.replay_mismatch == "skip")

    def _make_sampler(self) -> Sampler:
        profiler = partial(profiling_context, self, "vLLM.generate")
        sampler: Sampler
        if self.use_vllm and self.vllm_mode == "server":
            return VLLMServerSampler(self.vllm_generation, self.eos_token_ids, profiler)
        if self.use_vllm:
            return VLLMColocateSampler(self.vllm_generation, self.eos_token_ids, profiler)
        if self.use_transformers_continuous_batching:
            sampler = ContinuousBatchingSampler(
                self.generation_model, self.generation_config, self.continuous_batching_config
            )
        else:
            branches_early = bool(self.args.num_anchors) and self.args.anchor_threshold is not None
            sampler = GenerateSampler(
                *(self.generation_model, self.generation_config, self.accelerator.device, self.image_inputs),
                may_grow=branches_early and not self.is_sharded and not self.tools,
            )
        return InStepSampler(sampler) if self.is_sharded else sampler

    # Refill, and what of it and of the memory a checkpoint holds

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.max_refills > 0:
            self._refill = Refill(self.train_dataset, self.shuffle_dataset, self.args.seed, self.args.max_refills)
        return super()._get_train_sampler(*args, **kwargs)

    def state_to_resume(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self._refill is not None:
            state |= self._refill.state(self.accelerator.num_processes, self.accelerator.process_index)
        if self._memory is not None:
            state["value_memory"] = self._memory.state()
        if self._threshold is not None:
            state["anchor_threshold"] = self._threshold
        return state

    def resume_from_state(self, state: dict[str, Any]) -> None:
        if self._refill is not None and "leftovers" in state:
            self._refill.resume(state, self.accelerator.num_processes)
        if self._memory is not None and "value_memory" in state:
            self._memory.resume(state["value_memory"])
        self._threshold = state.get("anchor_threshold")

    # A step

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        try:
            if self.args.is_plain_grpo or not self.model.training:
                return super()._generate_and_score_completions(inputs)
            return self._explore_and_assemble(inputs)
        except (VLLMServerError, EnvironmentFailure) as error:
            self._save_before(error)
            raise

    def _explore_and_assemble(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Grow trees from the prompts of a step, and have their rows for its batch."""
        num_rows = len(inputs) * self.accelerator.num_processes
        num_prompts = num_rows // self.num_generations
        self.trees = []
        explored: list[Row] = []
        with self.vllm_engine():
            if self._refill is None:
                # TRL repeats an example for its group, and deals out the repeats as it does the rows
                examples = {row // self.num_generations: inputs[i] for i, row in enumerate(self.sharding(num_rows).own)}
                rows = explored = self._explore(num_prompts, examples)
                set_advantages(rows, self.trees, self.args, self._memory)
            else:
                rows, refill_metrics = self._refill.fill(partial(self._explore_drawn, explored), num_prompts, num_rows)
                hand_over(rows, self.sharding(num_rows), in_every_process, self.train_dataset)
        if self._tree_log is not None:
            self._tree_log.write(self.trees, explored, self.args, self.state.global_step + 1)
        tool_counts = (0, 0)
        if isinstance(self.sampler, ToolCallingSampler):
            tool_counts = self.sampler.num_calls, self.sampler.num_failures
            self.sampler.num_calls = self.sampler.num_failures = 0
        batch = self.assemble(rows, tool_counts)
        advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float64)
        in_loss = torch.tensor([row.in_loss for row in rows])
        self.set_advantages(batch, advantages, in_loss)
        if self.args.credit == "tree":
            self.set_token_advantages(batch, rows)
        metrics = tree_metrics(self.trees, advantages[in_loss], num_rows)
        if self.args.replay_mismatch == "skip":
            dialogues = [row.rollout.dialogue for row in self.own_rows(rows)]
            is_broken = [dialogue is not None and dialogue.is_broken for dialogue in dialogues]
            metrics["fr3e/tools/skipped"] = sum(map(sum, in_every_process(lambda: is_broken))) / num_rows
        if self._threshold is not None:
            metrics["fr3e/anchor/threshold"] = self._threshold
        if self._memory is not None:
            metrics |= remember(self.trees, self.args, self._memory)
        if self._refill is not None:
            metrics |= refill_metrics
            self.score_leftovers(self._refill.leftovers)
        hit_rate = getattr(self.sampler, "hit_rate", None)  # of what was sampled last: the anchors' rollouts
        if hit_rate is not None and self.args.num_anchors:
            metrics["fr3e/prefix_cache/hit_rate"] = hit_rate
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        return batch

    def _explore_drawn(self, rows: list[Row], indices: list[int]) -> list[Row]:
        """Explore the prompts at `indices` of the training set, and add their rows to `rows`."""
        own = {row // self.num_generations for row in self.sharding(len(indices) * self.num_generations).own}
        rows += self._explore(len(indices), {i: self.train_dataset[indices[i]] for i in own}, indices)
        set_advantages(rows, self.trees, self.args, self._memory)
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
        sharding = self.sharding(num_prompts * self.num_generations)
        trees = [Tree(as_ids(), 0) for _ in range(num_prompts)]

        def set_prompts() -> dict[int, int]:
            check_images(list(examples.values()), self._obstacle_to_images)
            if self.tools:
                all_ids = self._provide_tools(examples, sharding)
            check_prompts(list(examples.values()))
            prompts = [self.prompt_of(example) for example in examples.values()]
            if not self.tools:
                all_ids = self.tokenize_prompts(prompts) if prompts else []
            images = [images_of(prompt) for prompt in prompts]
            for i, prompt, prompt_ids in zip(examples, prompts, all_ids, strict=True):
                multimodal = prompt if any(images) else None
                trees[i] = Tree(as_ids(prompt_ids), self._budget(prompt_ids), multimodal=multimodal)
            return {i: prompt_key(trees[i].prompt_ids, of_tree) for i, of_tree in zip(examples, images, strict=True)}

        def score(owners: list[int], completion_ids: list[TokenIds], dialogues: list[Dialogue | None]) -> list[Score]:
            whole = [k for k, dialogue in enumerate(dialogues) if dialogue is None or not dialogue.is_broken]
            scores = [Score([math.nan] * len(self.reward_funcs), math.nan)] * len(owners)
            scored = self.score(
                [examples[owners[k]] for k in whole],
                [trees[owners[k]].prompt_ids for k in whole],
                [completion_ids[k] for k in whole],
                [dialogues[k] for k in whole],
            )
            for k, of_rollout in zip(whole, scored, strict=True):
                scores[k] = of_rollout
            return scores

        for keys in in_every_process(set_prompts):
            for i, key in keys.items():
                trees[i].key = key
        seed = (self.args.seed, self.state.global_step)
        uncertainties = explore(
            trees,
            self.args,
            self.sampler,
            score,
            self.token_statistics,
            seed,
            sharding,
            in_every_process,
            self._threshold,
        )
        if self.args.anchor_threshold == "auto":
            self._threshold = next_threshold(self._threshold, uncertainties)
        for dialogue in (rollout.dialogue for tree in trees for state in tree.states for rollout in state.rollouts):
            if dialogue is not None:
                dialogue.environment, dialogue.snapshots = None, []  # for the next rollouts
        self.trees += trees
        explore_temperature = self.temperature * self.args.explore_temperature_scale
        return rows_of(
            trees, sharding, self.temperature, explore_temperature, examples, indices or [None] * num_prompts
        )

    def _provide_tools(self, examples: dict[int, dict[str, Any]], sharding: RowSharding) -> list[list[int]]:
        """
        Provide the sampler with what this process's rollouts call tools in: each with an environment of its own.

        Args:
            examples (`dict[int, dict]`):
                The dataset's example of each tree that has rows in this process, which gets its prompt here.
            sharding ([`RowSharding`]):
                Which rows these are.

        Returns:
            `list[list[int]]`: Token ids of the prompts of the examples.
        """
        assert isinstance(self.sampler, ToolCallingSampler)
        owners = list(examples)
        if self.environment_factories is not None:
            owners = [row // self.num_generations for row in sharding.own]
            if not self.args.reuse_base:
                owners += [i for i, _ in own_bases(sharding.num_rows // self.num_generations, self.args, sharding)]
        instances: dict[int, list[Instance]] = {i: [] for i in examples}
        if owners:
            try:
                prompts = self.prepare([examples[i] for i in owners])
            except Exception as error:
                raise EnvironmentFailure(f"While rollouts were prepared: {type(error).__name__}: {error}") from error
            prompt_ids = self.tokenize_prompts(prompts)
            for k, i in enumerate(owners):
                instance = Instance(prompt_ids[k], (self._sync_tool_dicts[k], self._async_tool_dicts[k]))
                if self.environments is not None:
                    instance.name, instance.environment = self._batch_environments[k], self.environments[k]
                if not instances[i]:
                    examples[i] = examples[i] | {"prompt": prompts[k]}
                instances[i].append(instance)
        self.sampler.provide(instances)
        return [instances[i][0].prompt_ids for i in examples]

    def _save_before(self, error: Exception) -> None:
        """Save a checkpoint of the last step before a run ends with `error`."""
        if self.state.global_step > 0:
            self._save_checkpoint(self.model_wrapped, trial=None)
            error.add_note(
                f"Step {self.state.global_step}, the last that was trained, is saved in {self.args.output_dir}. When "
                "that is mended, go on with trainer.train(resume_from_checkpoint=True)."
            )

    def create_model_card(self, model_name: str | None = None, dataset_name: str | None = None, tags: Any = None):
        super().create_model_card(model_name, dataset_name, tags)
        if not self.args.is_plain_grpo and self.is_world_process_zero():
            add_settings(Path(self.args.output_dir) / "README.md", self.args)
