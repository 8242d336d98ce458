"""FR3E in the place of GRPO."""

import logging
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate.utils import gather_object
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
from .generation.on_transformers import ContinuousBatchingSampler, GenerateSampler
from .generation.on_vllm import VLLMColocateSampler, VLLMServerSampler
from .generation.sampler import Sampler, SharedSampler
from .generation.vllm_server import VLLMServerError
from .method.advantages import compute_advantages, weighted_rewards
from .method.explore import explore
from .method.metrics import tree_metrics
from .method.refill import PromptStream, Row, fill_batch, num_to_draw, row_from, state_of
from .method.tree import Score, Tree, chains_of, rollouts_of
from .training.card import add_settings
from .training.checks import check_dataset, checked_reward_func, refuse_unsupported
from .training.processes import in_shares
from .training.ratio import RatioGRPOTrainer
from .training.trl_seams import Rows

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

        All others are those of [`~trl.GRPOTrainer`]. While exploring, `tools`, `rollout_func`, `environment_factory`
        and images are not supported.

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
    ):
        if args is None:
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = FR3EConfig(f"{model_name.split('/')[-1]}-FR3E")
        elif not isinstance(args, FR3EConfig):
            args, added = FR3EConfig.from_grpo(args)
            logger.warning(
                "Added to the GRPOConfig: %s. Use FR3EConfig to set them.",
                ", ".join(f"{name}={value!r}" for name, value in added.items()),
            )
        if not args.is_plain_grpo:
            refuse_unsupported(args, tools, rollout_func, environment_factory)
            if train_dataset is not None:
                check_dataset(train_dataset, args)
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
        self._prompts: PromptStream | None = None
        self._leftovers: list[Row] = []
        if args.is_plain_grpo:
            return
        if self._dist.fsdp_version == 1:
            raise NotImplementedError(
                "FR3ETrainer does not support FSDP of version 1. Set fsdp_version: 2 in accelerate's configuration, or "
                "num_anchors=0 to train with plain GRPO."
            )
        if self._dist.is_fsdp and self.use_transformers_continuous_batching:
            raise NotImplementedError(
                "use_transformers_continuous_batching=True does not work with FSDP, whose processes must generate in "
                "step. Leave it out, or use vLLM."
            )
        if self._is_vlm:
            raise NotImplementedError(
                "FR3ETrainer does not support multimodal processors yet. To train a model on text alone, pass its "
                "tokenizer as `processing_class`; set num_anchors=0 to train with plain GRPO."
            )
        self.reward_funcs = [
            checked_reward_func(func, name)
            for func, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]
        self.trees: list[Tree] = []
        self._context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.sampler = self._make_sampler()
        if self.use_vllm:
            self._check_vllm(train_dataset)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.max_refills > 0:
            self._prompts = PromptStream(len(self.train_dataset), self.shuffle_dataset, self.args.seed)
            self._leftovers = []
        return super()._get_train_sampler(*args, **kwargs)

    def state_to_resume(self) -> dict[str, Any]:
        if self._prompts is None:
            return {}
        return {"num_drawn": self._prompts.num_drawn, "leftovers": [state_of(row) for row in self._leftovers]}

    def resume_from_state(self, state: dict[str, Any]) -> None:
        if self._prompts is not None and state:
            self._prompts.go_to(state["num_drawn"])
            self._leftovers = [row_from(row, self.train_dataset) for row in state["leftovers"]]

    @property
    def _is_sharded(self) -> bool:
        """Whether the policy's forward pass is a collective call, which all processes must make together."""
        return self._dist.is_fsdp or self._dist.is_zero3

    def _make_sampler(self) -> Sampler:
        profiler = partial(profiling_context, self, "vLLM.generate")
        sampler: Sampler
        if self.use_vllm and self.vllm_mode == "server":
            return VLLMServerSampler(self.vllm_generation, self.eos_token_ids, profiler)
        if self.use_vllm:
            sampler = VLLMColocateSampler(self.vllm_generation, self.eos_token_ids, profiler)
        elif self.use_transformers_continuous_batching:
            sampler = ContinuousBatchingSampler(
                self.generation_model, self.generation_config, self.continuous_batching_config
            )
        else:
            sampler = GenerateSampler(self.generation_model, self.generation_config, self.accelerator.device)
        if self.accelerator.num_processes == 1:
            return sampler
        return SharedSampler(self.accelerator, sampler, in_step=self._is_sharded and not self.use_vllm)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        try:
            if self.args.is_plain_grpo or not self.model.training:
                return super()._generate_and_score_completions(inputs)
            return self._explore_and_assemble(inputs)
        except VLLMServerError as error:
            self._save_before(error)
            raise

    def _explore_and_assemble(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        # Every process knows all trees and rows, and trains on its own rows. TRL repeats an example for its group.
        examples = gather_object(inputs)[:: self.num_generations]
        num_rows = len(examples) * self.num_generations
        with self.vllm_engine():
            rows, num_refills = self._explore(examples)
        batch_rows, left_over, num_reused = fill_batch(rows, self._leftovers, num_rows)
        batch = self.assemble(self._to_rows(batch_rows))
        advantages = torch.tensor([row.advantage for row in batch_rows], dtype=torch.float64)
        in_loss = torch.tensor([row.in_loss for row in batch_rows])
        self.set_advantages(batch, advantages, in_loss)
        metrics = tree_metrics(self.trees, advantages[in_loss], num_rows)
        if self._prompts is not None:
            kept = left_over if self.args.refill_leftovers == "next" else []
            metrics |= {
                "fr3e/refill/rounds": num_refills,
                "fr3e/refill/prompts": len(self.trees) - len(examples),
                "fr3e/refill/rows": int(in_loss.sum()) - sum(row.in_loss for row in rows[:num_rows]),
                "fr3e/refill/reused": num_reused,
                "fr3e/refill/dropped": len(self._leftovers) - num_reused + len(left_over) - len(kept),
            }
            self._keep(kept)
        hit_rate = getattr(self.sampler, "hit_rate", None)  # of what was sampled last: the anchors' rollouts
        if hit_rate is not None and self.args.num_anchors:
            metrics["fr3e/prefix_cache/hit_rate"] = hit_rate
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        return batch

    def _explore(self, examples: list[dict[str, Any]]) -> tuple[list[Row], int]:
        """
        Explore from the prompts of a step and, while rejection leaves its batch short of rows, of further ones.

        Returns:
            `tuple[list[Row], int]`: The rows of all prompts, in order, and how many times further ones were drawn.
        """
        num_prompts = len(examples)
        if self._prompts is None:
            self.trees = self._grow_trees(examples)
            return self._make_rows(examples, [None] * num_prompts), 0
        indices = self._prompts.draw(num_prompts)  # what the data loader brings only says how many
        examples = [self.train_dataset[i] for i in indices]
        self.trees = self._grow_trees(examples)
        rows = self._make_rows(examples, indices)
        for num_refills in range(self.args.max_refills):
            num_informative = sum(row.in_loss for row in rows)
            num_missing = num_prompts * self.num_generations - num_informative - len(self._leftovers)
            if num_missing <= 0:
                return rows, num_refills
            drawn = self._prompts.draw(num_to_draw(num_missing, num_informative, len(self.trees), num_prompts))
            further = [self.train_dataset[i] for i in drawn]
            self.trees += self._grow_trees(further)
            examples += further
            indices += drawn
            rows = self._make_rows(examples, indices)
        return rows, self.args.max_refills

    def _keep(self, rows: list[Row]) -> None:
        """Keep rows for the next step, which must know how likely they are under the policy as it is now."""
        self._leftovers = rows
        if self.use_vllm and self.vllm_importance_sampling_correction:
            return  # against vLLM's log-probs, which are of the policy as it is now
        for temperature in dict.fromkeys(row.temperature for row in rows):
            sampled_at_it = [row for row in rows if row.temperature == temperature]
            with self.scoring_temperature(temperature):
                statistics = self._statistics(
                    [row.prompt_ids for row in sampled_at_it], [row.completion_ids for row in sampled_at_it]
                )
            for row, (logprobs, _) in zip(sampled_at_it, statistics, strict=True):
                row.old_logprobs = logprobs

    def _grow_trees(self, examples: list[dict[str, Any]]) -> list[Tree]:
        """Explore from the prompt of each example."""
        trees = [
            Tree(prompt_ids, self._budget(prompt_ids))
            for prompt_ids in self.tokenize_prompts([example["prompt"] for example in examples])
        ]

        def score(completions: list[tuple[int, list[int]]]) -> list[Score]:
            owners, completion_ids = zip(*completions, strict=True)
            rewards_per_func, logs = self.score(
                [examples[i] for i in owners], [trees[i].prompt_ids for i in owners], list(completion_ids)
            )
            rewards = weighted_rewards(rewards_per_func, self.reward_weights.to(rewards_per_func.device))
            return [
                Score(*scores, {column: values[row] for column, values in logs.items()})
                for row, scores in enumerate(zip(rewards_per_func.tolist(), rewards.tolist(), strict=True))
            ]

        def shared_score(owners: list[int], completion_ids: list[list[int]]) -> list[Score]:
            completions = list(zip(owners, completion_ids, strict=True))
            return in_shares(self.accelerator, score, completions, [len(ids) for ids in completion_ids])

        seed = (self.args.seed, self.state.global_step)
        explore(trees, self.args, self.sampler, shared_score, self._statistics, seed)
        return trees

    def _statistics(
        self, prompt_ids: list[list[int]], completion_ids: list[list[int]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[`token_statistics`], shared out between the processes."""
        rows = list(zip(prompt_ids, completion_ids, strict=True))
        return in_shares(
            self.accelerator,
            lambda share: self.token_statistics(*map(list, zip(*share, strict=True))),
            rows,
            [len(prompt) + len(completion) for prompt, completion in rows],
            in_step=self._is_sharded,
        )

    def _budget(self, prompt_ids: list[int]) -> int:
        """Longest completion of a prompt, in tokens: `max_completion_length`, or what the model's context leaves."""
        if self._context is None:
            return self.max_completion_length
        if len(prompt_ids) >= self._context:
            raise ValueError(
                f"A prompt has {len(prompt_ids)} tokens, and the model's context {self._context}. Prompts must be "
                "shorter, to leave room for a completion: filter the dataset by length. The prompt begins with "
                f"{self.processing_class.decode(prompt_ids[:20])!r}."
            )
        return min(self.max_completion_length, self._context - len(prompt_ids))

    def _check_vllm(self, train_dataset: Dataset | IterableDataset | None) -> None:
        """Take vLLM's context for the model's, if it has room for completions; tell of biases that stay."""
        available = self.vllm_generation.max_context()
        if self._context is None or available < self._context:
            self._context = available
            prompt = [] if train_dataset is None else self.tokenize_prompts([next(iter(train_dataset))["prompt"]])[0]
            needed = len(prompt) + self.max_completion_length
            if available < needed:
                raise ValueError(
                    f"vLLM has a context of {available} tokens, too few for the {len(prompt)} of the first prompt and "
                    f"max_completion_length={self.max_completion_length}. Start it with --max-model-len {needed} or "
                    "more (in colocate mode: vllm_max_model_length), or lower max_completion_length."
                )
        unscored = sorted(UNSCORED_SAMPLING & set(self.args.generation_kwargs or {}))
        if self.repetition_penalty != 1:
            unscored.append("repetition_penalty")
        if unscored and self.vllm_importance_sampling_correction:
            logger.warning(
                "vLLM samples with %s, which the loss knows nothing of: log-probs of the two differ by more than "
                "rounding, and the importance ratio (importance_sampling_ratio) corrects for the difference as if the "
                "policy had changed. It is biased towards tokens that these settings make rarer. Leave them out, or "
                "set vllm_importance_sampling_correction=False.",
                " and ".join(unscored),
            )

    def _save_before(self, error: VLLMServerError) -> None:
        """Save a checkpoint of the last step before a run ends with `error`."""
        if self.state.global_step > 0:
            self._save_checkpoint(self.model_wrapped, trial=None)
            error.add_note(
                f"Step {self.state.global_step}, the last that was trained, is saved in {self.args.output_dir}. When "
                "the server is up, go on with trainer.train(resume_from_checkpoint=True)."
            )

    def _make_rows(self, examples: list[dict[str, Any]], indices: Sequence[int | None]) -> list[Row]:
        """Give every state its value, modulation and rejection; and the rollouts of all, with their advantages."""
        advantages, in_loss = self._compute_advantages()
        numbers = {id(tree): i for i, tree in enumerate(self.trees)}
        return [
            Row(
                example=examples[numbers[id(tree)]],
                index=indices[numbers[id(tree)]],
                prompt_ids=tree.prompt_ids,
                prefix_ids=state.prefix_ids,
                rollout=rollout,
                temperature=self.temperature * (1 if state.parent is None else self.args.explore_temperature_scale),
                advantage=advantage,
                in_loss=is_in_loss,
            )
            for (tree, state, rollout), advantage, is_in_loss in zip(
                rollouts_of(self.trees), advantages.tolist(), in_loss.tolist(), strict=True
            )
        ]

    def _to_rows(self, batch_rows: list[Row]) -> Rows:
        """This process's part of the batch, as TRL's rows."""
        rows = self.own_rows(batch_rows)
        logprobs = [
            [*[None] * len(row.prefix_ids), *row.rollout.logprobs] for row in rows if row.rollout.logprobs is not None
        ]
        columns = {column: None for row in rows for column in row.rollout.score.logs}
        return Rows(
            inputs=[row.example for row in rows],
            prompt_ids=[row.prompt_ids for row in rows],
            completion_ids=[row.completion_ids for row in rows],
            loss_mask=[[0] * len(row.prefix_ids) + [1] * len(row.rollout.token_ids) for row in rows],
            logprobs=logprobs if len(logprobs) == len(rows) else None,
            temperatures=[row.temperature for row in rows],
            rewards_per_func=torch.tensor(
                [row.rollout.score.rewards for row in batch_rows], device=self.accelerator.device
            ),
            old_logprobs=[row.old_logprobs for row in rows]
            if any(row.old_logprobs is not None for row in batch_rows)
            else None,
            extra_logs={column: [row.rollout.score.logs.get(column) for row in rows] for column in columns},
        )

    def _compute_advantages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Give every state its value, modulation and rejection.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: For each row its modulated advantage, and whether it is in the loss.
        """
        states, parents = chains_of(self.trees)
        row_states = torch.tensor([i for i, state in enumerate(states) for _ in state.rollouts])
        result = compute_advantages(
            torch.tensor([r.score.reward for _, _, r in rollouts_of(self.trees)], dtype=torch.float64),
            row_states,
            parents,
            modulation=self.args.modulation if self.args.num_anchors else "none",
            modulation_clip=self.args.modulation_clip,
            scale=self.args.scale_rewards,
            prior_strength=self.args.value_prior_strength or 0.0,
            reject=bool(self.args.reject_degenerate_states),
            negative_scale=self.args.negative_advantage_scale or 0.0,
        )
        for state, value, factor, rejected in zip(
            states, result.values.tolist(), result.factors.tolist(), result.rejected.tolist(), strict=True
        ):
            state.value, state.modulation, state.rejected = value, factor, rejected
        return result.advantages, ~result.rejected[row_states]

    def create_model_card(self, model_name: str | None = None, dataset_name: str | None = None, tags: Any = None):
        super().create_model_card(model_name, dataset_name, tags)
        if not self.args.is_plain_grpo and self.is_world_process_zero():
            add_settings(Path(self.args.output_dir) / "README.md", self.args)


# Settings of vLLM that change what is sampled, and that neither the policy's log-probs nor ours take into account
UNSCORED_SAMPLING = {
    "allowed_token_ids", "bad_words", "frequency_penalty", "logit_bias", "min_p", "min_tokens", "presence_penalty",
    "repetition_penalty", "structured_outputs", "top_k", "top_p",
}  # fmt: skip
