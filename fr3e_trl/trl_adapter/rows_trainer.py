"""
The one place that depends on TRL's inside.

[`RowsGRPOTrainer`] is a [`~trl.GRPOTrainer`] that can be handed rows which are already generated and scored, and of
which some leave the loss. `tests/test_trl_contract.py` names everything that it relies on, so that a new version of TRL
that moves any of it fails there first.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object, is_peft_model
from torch import nn
from trl.chat_template_utils import parse_response
from trl.data_utils import apply_chat_template, is_conversational, prepare_multimodal_messages
from trl.extras.profiling import profiling_context
from trl.models import unwrap_model_for_generation
from trl.trainer import grpo_trainer
from trl.trainer import utils as trl_utils
from trl.trainer.grpo_trainer import RolloutFunc
from trl.trainer.utils import add_fused_lm_head, pad, split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from ..config import FR3EConfig
from ..generation.time_limit import limited
from ..method.credit.rollout import weighted_rewards
from ..method.rows import Row, RowSharding, token_credit
from ..method.sampling import images_of
from ..method.tree import Dialogue, Score, TokenIds
from .checks import IMAGE_COLUMNS, check_all_or_none, obstacle_to_tool_images
from .prefix_sharing import Trie, fold, obstacle_to_sharing
from .resume import ResumableGRPOTrainer
from .vllm_weights import FR3EVLLMGeneration

logger = logging.getLogger(__name__)

# Losses that TRL averages over rows rather than over tokens
ROW_MEAN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")

# Losses that TRL sums over the tokens of a micro-batch, and divides by those of all micro-batches
TOKEN_SUM_LOSSES = ("dapo", "cispo", "vespo")

# Losses that TRL divides by tokens
TOKEN_MEAN_LOSSES = ("bnpo", *TOKEN_SUM_LOSSES)

# What says of each token whether it is text
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")

# What TRL's batches have of images, by the names of what it scores log-probs with
OF_IMAGES = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "image_position_ids", *TOKEN_TYPES),
)


# What transformers calls the hooks that have embeddings require gradients
HOOK = "make_inputs_require_grads"


def drop_surplus_hooks(model: nn.Module) -> None:
    """
    Leave one of the hooks that have a module's output require gradients, which are all alike.

    transformers adds one each time that gradient checkpointing is enabled again, which TRL does after each round of
    generation and of log-probs, and removes none: every forward pass would call thousands of them after as many steps.
    """
    for module in model.modules():
        hooks = [k for k, hook in module._forward_hooks.items() if getattr(hook, "__name__", "") == HOOK]
        for k in hooks[:-1]:
            del module._forward_hooks[k]


@contextmanager
def _replaced(name: str, value: Any, module: Any = grpo_trainer) -> Iterator[None]:
    """Have another `value` in the place of what a module of TRL's knows by a name, where there is no other way in."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


# In the place of a prompt that the environment alone gives, for TRL's logs
NO_PROMPT = {"prompt": [{"role": "user", "content": ""}]}


class _Prepared(Exception):
    """Carries prompts out of TRL's step, at the point where it generates."""

    def __init__(self, prompts: list[Any]):
        self.prompts = prompts


# Writes the next turns of completions: prompts and completions so far, and the images that tools returned to each, to
# the tokens of each
TurnWriter = Callable[[list[list[int]], list[list[Any]]], list[list[int]]]


class RowsGRPOTrainer(ResumableGRPOTrainer):
    """[`~trl.GRPOTrainer`] that can train on rows generated and scored before it assembles a batch."""

    beta: float
    rollout_func: RolloutFunc | None
    environment_factories: dict[str | None, Any] | None
    environments: list[Any] | None
    _sync_tool_dicts: list[dict[str, Callable[..., Any]]]
    _async_tool_dicts: list[dict[str, Callable[..., Any]]]
    _last_loaded_step: int
    _image_pad_token_id: int

    def __init__(self, *, args: FR3EConfig, **kwargs: Any):
        with _replaced("VLLMGeneration", functools.partial(FR3EVLLMGeneration, fr3e_args=args)):
            super().__init__(args=args, **kwargs)
        for model in (self.model, self.ref_model):
            if model is not None and self._is_vlm:
                model.register_forward_pre_hook(_without_empty_images, with_kwargs=True)
        self._assembled: tuple[list[Row], torch.Tensor] | None = None  # set while a batch is assembled from these
        self._loss_mask: torch.Tensor | None = None  # set while a loss is computed over these tokens alone
        self._prepares = False  # set while prompts are prepared
        self._write_turns: TurnWriter | None = None  # set while completions over several turns are sampled
        self._tool_counts = (0, 0)  # calls and failures of a batch that is assembled

    @property
    def is_sharded(self) -> bool:
        """Whether the policy's forward pass is a collective call, which all processes must make together."""
        return self._dist.is_fsdp or self._dist.is_zero3

    @property
    def in_float32(self) -> bool:
        """Whether two ways to compute the same agree to the rounding of float32."""
        return self.model.dtype == torch.float32 and self.accelerator.mixed_precision == "no"

    def sharding(self, num_rows: int) -> RowSharding:
        """How rows are dealt out to the processes."""
        return RowSharding(num_rows, self.accelerator.num_processes, self.accelerator.process_index)

    # Before the batch: what is needed to generate and score

    @contextmanager
    def generation_model(self) -> Iterator[Any]:
        """Enter generation mode as TRL does, and yield the model to generate with."""
        training = self.model.training
        with (
            profiling_context(self, "transformers.generate"),
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                generation_kwargs=self.generation_kwargs,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            torch.no_grad(),
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            if self.use_transformers_continuous_batching and (self.args.bf16 or self.args.fp16):
                # As TRL does, for good: the engine's attention kernels take no float32
                model.to(torch.bfloat16 if self.args.bf16 else torch.float16)
                if self.args.cast_lm_head_to_fp32:
                    model.lm_head.to(torch.float32)
            try:
                yield model
            finally:
                if model.training != training:  # continuous batching leaves it in evaluation mode
                    self.model.train(training)

    @contextmanager
    def vllm_engine(self) -> Iterator[None]:
        """Have vLLM ready with the policy's weights; one that may sleep wakes up for as long. Without vLLM, nothing."""
        if not self.use_vllm:
            yield
            return
        generation = self.vllm_generation
        may_sleep = self.vllm_mode == "colocate" and generation.enable_sleep_mode
        if self.state.global_step != self._last_loaded_step or (may_sleep and generation._llm_weights_sleeping):
            with profiling_context(self, "sync_weights"):
                generation.sync_weights()  # wakes up the memory of the weights
            self._last_loaded_step = self.state.global_step
        if may_sleep:
            generation.llm.wake_up(tags=["kv_cache"])
        try:
            yield
        finally:
            if may_sleep:
                generation.llm.sleep(level=2)
                generation._llm_weights_sleeping = True

    def prepare(self, inputs: list[dict[str, Any]]) -> list[Any]:
        """
        Have TRL do what it does with the examples of rows before it generates.

        Each row gets an environment of its own, reset, if there are any (`environments`), and its tools
        (`_sync_tool_dicts`, `_async_tool_dicts`).

        Returns:
            `list`: The prompt of each row, with what its environment says to begin with.
        """
        self._prepares = True
        try:
            super()._generate_and_score_completions(inputs)
        except _Prepared as prepared:
            return prepared.prompts
        finally:
            self._prepares = False
        raise AssertionError("TRL did not generate.")

    def run_tools(
        self, prompt_ids: list[list[int]], first_turns: list[list[int]], write_turns: TurnWriter
    ) -> tuple[list[list[int]], list[list[dict[str, Any]]], int, int]:
        """
        Have TRL's loop call the tools of completions, turn after turn, by the tool dicts of their rows.

        Args:
            prompt_ids, first_turns (`list[list[int]]`):
                Token ids of the prompts, and of what the policy wrote first.
            write_turns (`Callable`):
                Writes the turns that follow. Prompts and completions so far are a prompt's list plus others; images
                that tools returned come with them.

        Returns:
            `tuple`: Token ids and messages of the completions, how many calls were made, and how many failed.
        """
        messages = [
            [parse_response(self._tokenizer, ids, prefix=prompt, tools=self._tools_of(row))]
            for row, (prompt, ids) in enumerate(zip(prompt_ids, first_turns, strict=True))
        ]
        self._write_turns = write_turns
        try:
            _, messages, completion_ids, _, num_calls, num_failures, _ = self._tool_call_loop(
                [[] for _ in prompt_ids], prompt_ids, list(first_turns), messages, None, None, {}
            )
        finally:
            self._write_turns = None
        return completion_ids, messages, num_calls, num_failures

    def _tools_of(self, row: int) -> list[Any]:
        """The tools that a row's prompt was rendered with."""
        return self.tools if self.environment_factories is None else self._env_tools[self._batch_environments[row]]

    def _generate_single_turn(self, prompt_ids: Any, images: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self._write_turns is None:
            return super()._generate_single_turn(prompt_ids, images, *args, **kwargs)
        tool_images = [of_row or [] for of_row in images or [None] * len(prompt_ids)]
        if any(tool_images) and (obstacle := obstacle_to_tool_images(self)):
            raise NotImplementedError(
                f"A tool returned an image, and FR3ETrainer cannot explore from it here: {obstacle}. Or have the tool "
                "return text, or set num_anchors=0 to train with plain GRPO."
            )
        return self._write_turns(prompt_ids, tool_images), None

    def _tool_call_loop(self, *args: Any) -> tuple[Any, ...]:
        if self._assembled is not None:
            _, _, completion_ids, completions, logprobs, *_ = args
            masks = [row.path_mask for row in self._assembled[0]]
            return masks, completions, completion_ids, logprobs, *self._tool_counts, []
        if self._write_turns is None:
            self._sync_tool_dicts, self._async_tool_dicts = (
                [self.limited(of_row) for of_row in dicts] for dicts in (self._sync_tool_dicts, self._async_tool_dicts)
            )
        return super()._tool_call_loop(*args)

    def limited(self, tools: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """Tools that fail where they take longer than `tool_timeout`."""
        seconds = self.args.tool_timeout
        if seconds is None:
            return tools
        return {name: limited(name, tool, seconds, self._abandon) for name, tool in tools.items()}

    def _abandon(self, tool: Callable[..., Any]) -> None:
        """Do not use the environment of a tool again that still goes on in its thread."""
        for pool in getattr(self, "_environment_pool", {}).values():
            pool[:] = [environment for environment in pool if environment is not getattr(tool, "__self__", None)]

    def tokenize_prompts(self, prompts: list[Any]) -> list[list[int]]:
        """Token ids of prompts, standard or conversational."""
        return self._tokenize_prompts(prompts)[0]

    def prompt_of(self, example: dict[str, Any]) -> Any:
        """The prompt of an example, with the images of its other columns in its messages: what TRL makes of it."""
        prompt, images = example["prompt"], example.get("images", [])
        if "images" not in example and "image" in example:
            images = [example["image"]]
        if not self._is_vlm or not images or images_of(prompt):
            return prompt
        return prepare_multimodal_messages(prompt, images=images)

    def multimodal_of(self, example: dict[str, Any]) -> list[dict[str, Any]] | None:
        """The messages of an example's prompt, if there are images in them."""
        prompt = self.prompt_of(NO_PROMPT | example)
        return prompt if images_of(prompt) else None

    def image_inputs(
        self, prompts: list[Any], tool_images: list[list[Any]], input_ids: torch.Tensor, prompt_ends: list[int]
    ) -> dict[str, Any]:
        """
        What the model is called with for the images of rows, beside tokens.

        Args:
            prompts (`list[list[dict]]`):
                Messages of R prompts, with images in each; or none for each, where only tools returned some.
            tool_images (`list[list]`):
                Of each, the images that tools returned since. As TRL has it, only for models with `image_grid_thw`.
            input_ids (`torch.Tensor` of shape (R, T)):
                The rows that the prompts are in.
            prompt_ends (`list[int]`):
                Of each prompt, the column after its last token.

        Returns:
            `dict[str, torch.Tensor]`: Tensors of the model's own shapes, and types of tokens, of shape (R, T).
        """
        if any(tool_images):
            of_rows = zip(map(images_of, prompts), tool_images, strict=True)
            flat = [image for of_prompt, of_tools in of_rows for image in (*of_prompt, *of_tools)]
            inputs = self.processing_class.image_processor(images=flat, return_tensors="pt").to(input_ids.device)
            return {**inputs, "mm_token_type_ids": torch.where(input_ids == self._image_pad_token_id, 1, 0)}
        texts = [
            apply_chat_template(
                {"prompt": prompt}, self.processing_class, tools=self.tools, **self.chat_template_kwargs
            )["prompt"]
            for prompt in prompts
        ]
        images = [images_of(prompt) for prompt in prompts]
        inputs = self.processing_class(images=images, text=texts, padding=True, return_tensors="pt")
        inputs = {
            name: value.to(self.accelerator.device)
            for name, value in inputs.items()
            if name not in ("input_ids", "attention_mask")
        }
        for name in inputs.keys() & set(TOKEN_TYPES):
            of_prompts = inputs[name]  # padded on the left
            inputs[name] = of_prompts.new_zeros(input_ids.shape)
            for of_row, of_prompt, end in zip(inputs[name], of_prompts, prompt_ends, strict=True):
                length = min(end, len(of_prompt))
                of_row[end - length : end] = of_prompt[-length:]
        return inputs

    def score(
        self,
        inputs: list[dict[str, Any]],
        prompt_ids: list[TokenIds],
        completion_ids: list[TokenIds],
        dialogues: Sequence[Dialogue | None] = (),
    ) -> list[Score]:
        """
        Score completions with the trainer's reward functions, by one call of each, in this process alone.

        Args:
            inputs (`list[dict]`):
                The dataset's example of each, with the prompt as it was rendered.
            prompt_ids, completion_ids (`list[TokenIds]`):
                The tokens.
            dialogues (`Sequence[Dialogue | None]`):
                The turns of each, if there are tools.
        """
        num_own = len(inputs)
        if num_own == 0:
            if not (self.is_sharded and any(isinstance(func, nn.Module) for func in self.reward_funcs)):
                return []
            # A reward model whose weights are sharded runs in all processes together
            inputs, completion_ids = [next(iter(self.train_dataset))], [np.array(self.eos_token_ids[:1])]
            inputs[0] = inputs[0] | {"prompt": self.prepare(inputs)[0]}
            prompt_ids = [np.array(self.tokenize_prompts([inputs[0]["prompt"]])[0])]
        prompts = [self.prompt_of(example) for example in inputs]  # with their images, as TRL hands them on
        ids = [row.tolist() for row in completion_ids]
        if any(dialogues):
            completions: list[Any] = [dialogue.messages for dialogue in dialogues if dialogue is not None]
            if self.environment_factories is not None:
                self.environments = [dialogue.environment for dialogue in dialogues if dialogue is not None]
        else:
            completions = self._decode(prompts, [row.tolist() for row in prompt_ids], ids)
        with _replaced("gather", lambda tensor: tensor):  # TRL's last step, which wants as many rows of each process
            rewards_per_func = self._calculate_rewards(inputs, prompts, completions, ids)
        rewards = weighted_rewards(rewards_per_func, self.reward_weights.to(rewards_per_func.device)).tolist()
        logs = {column: v for column, v in self._pending_extra_logs.items() if len(v) == len(inputs)}
        self._pending_extra_logs.clear()
        return [
            Score(*scores, {column: values[row] for column, values in logs.items()})
            for row, scores in enumerate(zip(rewards_per_func.tolist(), rewards, strict=True))
        ][:num_own]

    def _decode(self, prompts: list[Any], prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> list[Any]:
        """Completions as reward functions receive them, the same as those that TRL decodes."""
        if not is_conversational({"prompt": prompts[0]}):
            return self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        if any(getattr(self._tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
            return [
                [parse_response(self._tokenizer, ids, prefix=prefix, tools=self.tools)]
                for prefix, ids in zip(prompt_ids, completion_ids, strict=True)
            ]
        contents = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        return [[{"role": "assistant", "content": content}] for content in contents]

    @torch.no_grad()
    def token_statistics(
        self, prompt_ids: list[TokenIds], completion_ids: list[TokenIds], multimodal: list[Any] | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """
        Log-probabilities and entropies of completions under the policy, at the sampling temperature.

        Dropout is as it is for TRL's own generation and log-probs: on, unless `disable_dropout` turns it off. Where the
        weights are sharded, all processes must call this together, each with its own completions, also with none.

        Args:
            prompt_ids, completion_ids (`list[TokenIds]`):
                Prompts, and a completion of each.
            multimodal (`list`, *optional*):
                Messages of the prompts that have images, `None` for others.

        Returns:
            `list[tuple[torch.Tensor, torch.Tensor]]`: For each completion of L tokens, the log-probability of each
            token and the entropy of the distribution that it was drawn from, both of shape (L,), on the CPU, in nats.
        """
        num_own = len(completion_ids)
        if self.is_sharded:  # as many forward passes as the process with most completions
            num_idle = max(gather_object([num_own])) - num_own
            prompt_ids = [*prompt_ids, *[np.zeros(1, np.int32)] * num_idle]
            completion_ids = [*completion_ids, *[np.zeros(1, np.int32)] * num_idle]
        statistics: list[tuple[torch.Tensor, torch.Tensor]] = []
        size = self.args.per_device_train_batch_size
        for start in range(0, len(completion_ids), size):
            completions = completion_ids[start : start + size]
            batch = self.padded(prompt_ids[start : start + size], completions)
            images = self._image_kwargs((multimodal or [])[start : start + size], batch[0], completions)
            logprobs, entropies, _ = self._get_per_token_logps_and_entropies(
                self.model, *batch, logits_to_keep=max(map(len, completions)), compute_entropy=True, **images
            )
            statistics += [
                (row_logprobs[: len(ids)], row_entropies[: len(ids)])
                for row_logprobs, row_entropies, ids in zip(
                    logprobs.float().cpu(), entropies.float().cpu(), completions, strict=True
                )
            ]
        return statistics[:num_own]

    def _image_kwargs(
        self, multimodal: list[Any], input_ids: torch.Tensor, completions: list[TokenIds]
    ) -> dict[str, Any]:
        """What TRL scores log-probs with for the images of rows, which are passed to the model in one call."""
        prompts = [prompt for prompt in multimodal if prompt is not None]
        if not prompts:
            return {}
        prompt_ends = [input_ids.size(1) - max(map(len, completions))] * len(prompts)
        inputs = self.image_inputs(prompts, [[] for _ in prompts], input_ids, prompt_ends)
        num_tiles = [len(inputs["pixel_values"])] + [0] * (len(prompts) - 1)  # as a whole, where TRL slices by tiles
        num_images = [len(images_of(prompt)) for prompt in prompts]
        return {**images_in(inputs), "num_images": num_images, "num_tiles": num_tiles}

    def padded(self, prompt_ids: list[TokenIds], completion_ids: list[TokenIds]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask, (B, T), prompts padded on the left and completions on the right, as by TRL."""
        sides = [(prompt_ids, "left"), (completion_ids, "right")]
        pad_id = self._tokenizer.pad_token_id
        input_ids = [
            pad([torch.as_tensor(ids, dtype=torch.long) for ids in rows], pad_id, side) for rows, side in sides
        ]
        mask = [pad([torch.ones(len(ids), dtype=torch.long) for ids in rows], 0, side) for rows, side in sides]
        return torch.cat(input_ids, 1).to(self.accelerator.device), torch.cat(mask, 1).to(self.accelerator.device)

    @contextmanager
    def scoring_temperature(self, temperature: float, kernel: Callable[..., Any] | None = None) -> Iterator[None]:
        """
        Score log-probs at another temperature: TRL's LM head has its own built in, so it gets another head.

        Args:
            temperature (`float`):
                Which.
            kernel (`Callable`, *optional*):
                What computes them, in the place of the head's own kernel. The head finds the hidden states, the weights
                however they are sharded, and the scale and the softcap of the logits.
        """
        model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        forward = model.forward
        function = trl_utils._ChunkedLogProbFunction if kernel is None else SimpleNamespace(apply=kernel)
        add_fused_lm_head(model, temperature, self.args.cast_lm_head_to_fp32, outputs=("log_probs", "entropy"))
        try:
            with _replaced("_ChunkedLogProbFunction", function, trl_utils):
                yield
        finally:
            model.forward = forward

    # Prefixes that rows share

    @functools.cached_property
    def shares_prefixes(self) -> bool:
        """Whether what rows have in common is forwarded once. All processes must ask for the first time together."""
        if not self.args.share_prefixes:
            return False
        obstacle = self._obstacle_to_sharing()
        if obstacle is not None:
            logger.warning("share_prefixes is off, and every row forwarded with all of its tokens: %s.", obstacle)
        return obstacle is None

    def _obstacle_to_sharing(self) -> str | None:
        if self._is_vlm:
            return "the images of a prompt are forwarded with each of its rows"
        if self.aux_loss_enabled:
            return "the loss of the routers (router_aux_loss_coef) is a mean over the tokens of all rows"
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision, self.model.dtype)
        score = super()._get_per_token_logps_and_entropies
        return obstacle_to_sharing(
            *(self.model, dtype, self.accelerator.device),
            score_apart=lambda *rows: score(self.model, *rows)[0],
            score_shared=lambda trie: trie.to_rows(self._forward_trie(self.model, trie).log_probs),
        )

    def _score_shared(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, scored: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Log-probs and entropies of rows, what they share forwarded once.

        Args:
            model (`nn.Module`):
                Policy or reference model.
            input_ids, attention_mask (`torch.Tensor` of shape (R, T)):
                The rows.
            scored (`torch.Tensor` of shape (R, C)):
                Boolean mask of the tokens to score. It has at least one.

        Returns:
            `tuple`: Both of shape (R, C), 0 where nothing is scored, and entropies of a reference model, which TRL has
            give none.
        """
        trie = fold(input_ids, attention_mask, scored)
        outputs = self._forward_trie(model, trie)
        logprobs = trie.to_rows(outputs.log_probs)
        return logprobs, torch.zeros_like(logprobs) if outputs.entropy is None else trie.to_rows(outputs.entropy)

    def _forward_trie(self, model: Any, trie: Trie) -> Any:
        """What TRL's LM head makes of a trie."""
        # Without Triton it takes all positions, with a label or without
        with self.accelerator.autocast(), _replaced("_use_triton", lambda device: True, trl_utils):
            return model(**trie.model_inputs, shift_labels=trie.labels, fused_lm_head=True)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any, torch.Tensor | None]:
        scored = attention_mask[:, -logits_to_keep:].bool()
        if self._loss_mask is not None:
            scored &= self._loss_mask.bool()
        has_more = any(value is not None and value is not False for value in kwargs.values())  # a router's loss
        if not self.shares_prefixes or has_more or not scored.any():
            return super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                **kwargs,
            )
        size = batch_size or len(input_ids)
        parts = [
            self._score_shared(model, *(rows[start : start + size] for rows in (input_ids, attention_mask, scored)))
            for start in range(0, len(input_ids), size)
        ]
        logprobs, entropies = (torch.cat(of_parts) for of_parts in zip(*parts, strict=True))
        return logprobs, entropies if compute_entropy else None, None

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Keep rows that share prefixes together when TRL shuffles a batch before it splits it into micro-batches."""
        drop_surplus_hooks(self.model)
        if not self.shares_prefixes:
            return super()._prepare_inputs(generation_batch)
        with _replaced("shuffle_sequence_dict", shuffle_by_prompt):
            return super()._prepare_inputs(generation_batch)

    # The batch

    def assemble(self, batch_rows: list[Row], tool_counts: tuple[int, int] = (0, 0)) -> dict[str, torch.Tensor]:
        """
        Have TRL make its batch of finished rows: padding, log-probs of the old and the reference policy, logs.

        Args:
            batch_rows (`list[Row]`):
                The rows of all processes, each of which holds its own.
            tool_counts (`tuple[int, int]`):
                Calls of tools that this process made for the batch, and how many of them failed.

        Returns:
            `dict[str, torch.Tensor]`: This process's part of TRL's batch.
        """
        own = self.own_rows(batch_rows)
        logprobs = [
            [*[None] * len(row.prefix_ids), *row.rollout.logprobs.tolist()]
            for row in own
            if row.rollout.logprobs is not None and self.use_vllm
        ]
        output = {
            "prompt_ids": [row.prompt_ids.tolist() for row in own],
            "completion_ids": [row.completion_ids.tolist() for row in own],
            "logprobs": logprobs if len(logprobs) == len(own) else None,
        }
        self.rollout_func = lambda prompts, trainer: output
        # What was generated needs no environment any more
        environment_factories, self.environment_factories, self.environments = self.environment_factories, None, None
        rewards = [row.rollout.score.rewards for row in batch_rows]
        self._tool_counts = tool_counts
        self._assembled = own, torch.tensor(rewards, device=self.accelerator.device)
        columns = {column for row in own for column in row.rollout.score.logs}
        self._pending_extra_logs.update({c: [row.rollout.score.logs.get(c) for row in own] for c in columns})
        try:
            with _replaced("_video_pad_token_id", None, self):  # no tool returns a video: such a token is the policy's
                return super()._generate_and_score_completions([self._rendered(row.example) for row in own])
        finally:
            self._assembled = None
            self.rollout_func = None
            self.environment_factories = environment_factories

    def _rendered(self, example: dict[str, Any]) -> dict[str, Any]:
        """An example whose images are in its prompt alone, where TRL would put those of its columns a second time."""
        if not self._is_vlm:
            return NO_PROMPT | example
        others = {name: value for name, value in example.items() if name not in IMAGE_COLUMNS}
        return others | {"prompt": self.prompt_of(NO_PROMPT | example)}

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        if self._prepares:
            raise _Prepared(prompts)
        output = super()._generate(prompts)
        if self._assembled is None:
            return output
        # The mask goes in here, and not by `rollout_func`, for TRL to log the lengths of whole completions
        prompt_ids, completion_ids, _, completions, logprobs, extra_fields, *_ = output
        masks = [row.loss_mask for row in self._assembled[0]]
        # So do images, which TRL finds in messages only where it tokenizes them itself, or where it calls the tools
        images = [images_of(prompt) for prompt in prompts]
        check_all_or_none(list(map(len, images)))
        dialogues = [row.rollout.dialogue for row in self._assembled[0]]
        tool_images = [[] if dialogue is None else images_of(dialogue.messages) for dialogue in dialogues]
        images = [[*of_prompt, *of_tools] for of_prompt, of_tools in zip(images, tool_images, strict=True)]
        return (
            *(prompt_ids, completion_ids, masks, completions, logprobs, extra_fields),
            *(images if any(images) else None, tool_images),
        )

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        if self._assembled is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._assembled[1]

    def set_advantages(self, batch: dict[str, torch.Tensor], advantages: torch.Tensor, in_loss: torch.Tensor) -> None:
        """
        Replace the advantages of an assembled batch, and take rows out of its loss.

        Args:
            batch (`dict[str, torch.Tensor]`):
                What [`assemble`] returned, changed in place.
            advantages (`torch.Tensor` of shape (A,)):
                Advantages of the rows of all processes.
            in_loss (`torch.Tensor` of shape (A,)):
                Boolean mask. Rows outside leave the loss, numerator and denominator both.
        """
        advantages, in_loss = advantages.to(batch["advantages"]), in_loss.to(batch["advantages"].device)
        self._logs["advantages"].extend(advantages.tolist())  # it holds one batch: TRL's own drop out
        batch["num_rows_in_loss"] = in_loss.sum()
        batch["advantages"], batch["in_loss"] = self.own_rows(advantages), self.own_rows(in_loss)
        batch["tool_mask"] = batch["tool_mask"] * batch["in_loss"].unsqueeze(1)
        # TRL counted the tokens of all rows
        num_tokens = (batch["completion_mask"] * batch["tool_mask"]).sum()
        batch["num_items_in_batch"] = self.accelerator.gather(num_tokens).sum()

    def set_token_advantages(self, batch: dict[str, torch.Tensor], batch_rows: list[Row]) -> None:
        """
        Give an assembled batch, whose rows in the loss are set, advantages of shape (B, C), a token's own each.

        Args:
            batch (`dict[str, torch.Tensor]`):
                What [`assemble`] returned, changed in place.
            batch_rows (`list[Row]`):
                The rows of all processes, with the credit of their tokens.
        """
        mask = batch["completion_mask"] * batch["tool_mask"]
        credit = token_credit(self.own_rows(batch_rows), mask.size(1))
        weights, batch["advantages"] = torch.from_numpy(credit).to(batch["advantages"])
        # A token counts for all rows that pass through it
        num_counted = self.accelerator.gather((weights * mask).sum()).sum()
        batch["tokens_per_counted"] = batch["num_items_in_batch"] / num_counted.clamp(min=1)

    def own_rows(self, rows: Any) -> Any:
        """This process's part of the rows of all."""
        own = self.sharding(len(rows)).own
        return rows[own.start : own.stop]

    # The loss

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Leave rows that are not in the loss out of the forward pass, and out of what TRL divides by."""
        if "in_loss" not in inputs:
            return super()._compute_loss(model, inputs)
        # As many as the process with most of them has, since TRL gathers by row; at least one, for a backward pass
        num_rows = int(self.accelerator.gather(inputs["in_loss"].sum()).max().clamp(min=1))
        keep = inputs["in_loss"].int().argsort(descending=True, stable=True)[:num_rows]
        inputs = select_rows(inputs, keep.tolist())
        # Micro-batches, of which each process has its own, now differ in how many rows r they have. Each counts by
        # them: the mean of their losses L that TRL takes becomes sum(r * L) / sum(r), where one without rows has no
        # share, and which is TRL's mean where all have as many. This defines bnpo, whose L is a mean over tokens, and
        # the entropy bonus, which is such a mean with any loss type.
        own_rows = inputs["in_loss"].sum()
        num_micro_batches = self.args.steps_per_generation * self.accelerator.num_processes
        weight = own_rows * num_micro_batches / inputs["num_rows_in_loss"].clamp(min=1)
        beta = self.beta
        if self.loss_type in TOKEN_MEAN_LOSSES and "tokens_per_counted" in inputs:
            # The policy term is divided by the tokens that were counted for it, other terms by the tokens in the loss
            inputs["advantages"] = inputs["advantages"] * inputs["tokens_per_counted"]
        if self.loss_type in ROW_MEAN_LOSSES:
            # TRL divides by `num_rows`, of which this process may have fewer. The policy term is linear in the
            # advantages, and the KL term in beta; that may not become 0 in one process alone, for what TRL gathers.
            share = own_rows.clamp(min=1) / num_rows
            inputs["advantages"] = inputs["advantages"] / share
            self.beta = beta / share.item()
        elif self.loss_type in TOKEN_SUM_LOSSES:
            # TRL divides by the tokens of all micro-batches: no weight is wanted
            inputs["num_items_in_batch"] = inputs["num_items_in_batch"] * weight
        self._loss_mask = inputs["completion_mask"] * inputs["tool_mask"]
        try:
            return super()._compute_loss(model, inputs) * weight
        finally:
            self.beta, self._loss_mask = beta, None


def _without_empty_images(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pass a model no images for rows that have none, where other rows of the batch do: TRL passes empty tensors."""
    grid = kwargs.get("image_grid_thw")
    if grid is not None and len(grid) == 0:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("pixel_values", "image_grid_thw")}
    return args, kwargs


def images_in(batch: dict[str, Any]) -> dict[str, Any]:
    """What a batch of TRL's, or what it scores log-probs with, has of images."""
    return {name: value for name, value in batch.items() if name in OF_IMAGES and value is not None}


def select_rows(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """These rows of a batch, or of a part of it, with their images, which TRL has end to end."""

    def selected(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[rows] if value.dim() > 0 else value
        return [value[row] for row in rows]

    return unsplit_pixel_values_by_grid(
        {name: selected(value) for name, value in split_pixel_values_by_grid(batch).items()}
    )


def shuffle_by_prompt(batch: dict[str, Any]) -> dict[str, Any]:
    """
    Shuffle the prompts of a batch, where TRL shuffles its rows.

    The rows of a prompt stay together, and are sorted by their tokens: of micro-batches smaller than that, each has
    those that share most. A gradient that is accumulated over all micro-batches stays the same, but for what is a mean
    over those of each; of several optimizer steps a batch, each has fewer prompts, with more rows of them.
    """
    prompts = [row.tobytes() for row in torch.where(batch["prompt_mask"].bool(), batch["prompt_ids"], -1).cpu().numpy()]
    completions = [row.tobytes() for row in batch["completion_ids"].cpu().numpy()]
    ranks: dict[bytes, int] = {}
    for prompt, rank in zip(prompts, torch.randperm(len(prompts)).tolist(), strict=True):
        ranks.setdefault(prompt, rank)
    order = sorted(range(len(prompts)), key=lambda row: (ranks[prompts[row]], completions[row]))

    def permuted(value: Any) -> Any:
        if value is None or (isinstance(value, torch.Tensor) and value.dim() == 0):
            return value
        return value[order] if isinstance(value, torch.Tensor) else [value[row] for row in order]

    return {key: permuted(value) for key, value in batch.items()}
