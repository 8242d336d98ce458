"""
Every name that is relied on without being documented, or that another takes the place of for a while.

They are TRL's, those of transformers' `Trainer` and `generate`, and PyTorch's. `tests/test_trl_contract.py` reads this
table: each name must resolve, each signature hold, and the package touch no private name that is not in it. When a new
version of TRL is tried, that test fails first and says what moved.

Permanent overrides are four methods of `GRPOTrainer`, in `trainer.py`: `_generate_and_score_completions`,
`_prepare_inputs`, `_compute_loss`, `_get_per_token_logps_and_entropies`. `FR3EVLLMGeneration`, a subclass of TRL's
`VLLMGeneration`, has three. Others last for one call, by [`overriding.overridden`].
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Name:
    """
    A name that is relied on.

    Args:
        path (`str`):
            Dotted path. Of an attribute that instances have, the class's path and the attribute's name.
        used_in (`str`):
            Files that use it, by their names in this folder; or a path in the package, where it is used elsewhere.
        why (`str`):
            What for.
        takes (`str`, *optional*):
            Of a function, the parameters that are relied on. With `exactly`, it has no others, in this order.
        exactly (`bool`):
            Whether these are all.
        of_instances (`bool`):
            Whether it is an attribute that instances have and the class has not.
    """

    path: str
    used_in: str
    why: str
    takes: str | None = None
    exactly: bool = True
    of_instances: bool = False

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


def _attributes(owner: str, used_in: str, why: str, names: str) -> list[Name]:
    return [Name(f"{owner}.{name}", used_in, why, of_instances=True) for name in names.split()]


GRPO = "trl.trainer.grpo_trainer.GRPOTrainer"
TRAINER = "transformers.Trainer"
UTILS = "trl.trainer.utils"
VLLM = "trl.generation.vllm_generation.VLLMGeneration"

METHODS = [
    Name(
        f"{GRPO}._generate_and_score_completions",
        "../trainer.py assemble.py prompts.py watching.py",
        "the step: overridden for good, and called to prepare prompts and to assemble a batch",
        "self inputs",
    ),
    Name(
        f"{GRPO}._compute_loss",
        "../trainer.py watching.py",
        "the loss: overridden for good",
        "self model inputs",
    ),
    Name(
        f"{GRPO}._get_per_token_logps_and_entropies",
        "../trainer.py ../prefix_sharing/forward.py assemble.py logprobs.py loss.py old_logprobs.py watching.py",
        "log-probs: overridden for good, in a batch for the old policy, and in the loss for the tokens to score",
        "self model input_ids attention_mask logits_to_keep batch_size compute_entropy compute_aux_loss pixel_values "
        "image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles image_sizes token_type_ids "
        "mm_token_type_ids image_position_ids",
    ),
    Name(
        f"{GRPO}._generate",
        "assemble.py prompts.py tools.py",
        "where prompts are prepared; rows take its place in a batch; generates in several turns for the bench",
        "self prompts",
    ),
    Name(
        f"{GRPO}._tokenize_prompts",
        "assemble.py prompts.py",
        "tokens of prompts; rows bring theirs into a batch",
        "self prompts",
    ),
    Name(
        f"{GRPO}._generate_single_turn",
        "assemble.py decoding.py tools.py",
        "rows bring their completions into a batch; a sampler writes the turns of a dialogue; evaluation stays one",
        "self prompt_ids images multimodal_fields num_generations has_tool_images",
    ),
    Name(
        f"{GRPO}._tool_call_loop",
        "assemble.py tools.py",
        "calls the tools of dialogues; in a batch they were called already",
        "self prompts prompt_ids completion_ids completions logprobs images multimodal_fields",
    ),
    Name(
        f"{GRPO}._calculate_rewards",
        "assemble.py rewards.py watching.py",
        "scores rollouts; rows bring their rewards into a batch",
        "self inputs prompts completions completion_ids_list",
    ),
    Name(
        f"{GRPO}._prepare_inputs",
        "../trainer.py",
        "overridden for good: shuffles and splits a batch, where rows that share prefixes are then put together",
        "self generation_batch",
    ),
    Name(
        f"{GRPO}._get_train_sampler",
        "resume.py",
        "while a trainer trains: the order of the data, which later epochs go on from",
        "self dataset",
    ),
    Name(f"{GRPO}._save_checkpoint", "resume.py", "saves before a run ends by an error", "self model trial"),
    Name(
        f"{TRAINER}._init_training_state",
        "resume.py",
        "while a trainer trains: where in the data it goes on",
        "self max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial",
    ),
    Name(
        "transformers.trainer_callback.CallbackHandler.on_step_begin",
        "resume.py",
        "while a trainer trains: what an update begins with",
        "self args state control kwargs",
    ),
    Name(f"{TRAINER}._save_rng_state", "resume.py", "while a trainer trains: each process saves", "self output_dir"),
    Name(f"{TRAINER}._load_rng_state", "resume.py", "while a trainer trains: each process loads", "self checkpoint"),
    Name(
        f"{TRAINER}._load_from_checkpoint",
        "resume.py",
        "while a trainer trains: weights that are saved under other names than it looks for",
        "self resume_from_checkpoint model",
    ),
    Name(
        f"{TRAINER}._load_best_model",
        "resume.py",
        "when a trainer has trained: weights that are saved under other names than it looks for",
        "self",
    ),
    Name(
        f"{TRAINER}._issue_warnings_after_load",
        "resume.py",
        "while a trainer trains: says which names were missing",
        "self load_result",
    ),
    Name(
        f"{GRPO}.create_model_card",
        "../trainer.py",
        "public: overridden for good, to tell what was trained, on what, how, and what came of it",
        "self model_name dataset_name tags",
    ),
    Name(
        f"{VLLM}._init_vllm",
        "vllm_weights.py",
        "overridden for good, in a subclass: finds the server, and whether it takes an adapter",
        "self",
    ),
    Name(
        f"{VLLM}._iter_named_params",
        "vllm_weights.py",
        "overridden for good, in a subclass: weights with the adapter, which leave those without as they are",
        "self",
    ),
    Name(
        f"{VLLM}.sync_weights",
        "vllm_weights.py",
        "overridden for good, in a subclass: sends the adapter alone",
        "self",
    ),
    Name(
        f"{VLLM}.generate",
        "vllm_weights.py",
        "TRL generates by it in evaluation, from our server in the place of its client",
        "self prompts images num_generations profiler",
    ),
    Name(
        "transformers.GenerationMixin._update_model_kwargs_for_generation",
        "decoding.py",
        "a decoding loop of our own goes on by it",
        "self outputs model_kwargs",
        exactly=False,
    ),
    Name(
        "transformers.GenerationMixin.prepare_inputs_for_generation",
        "decoding.py",
        "public, and its keywords are not",
        "self input_ids next_sequence_length is_first_iteration",
        exactly=False,
    ),
    Name(
        "transformers.GenerationMixin._sample",
        "decoding.py",
        "the decoding loop of `generate`, called with one more processor of logits",
        "self input_ids logits_processor stopping_criteria generation_config synced_gpus",
        exactly=False,
    ),
    Name(
        "transformers.GenerationMixin.generate",
        "decoding.py",
        "public: calls a decoding loop of our own by `custom_generate`",
        "self custom_generate generation_config logits_processor stopping_criteria",
        exactly=False,
    ),
]

FUNCTIONS = [
    Name(
        "accelerate.optimizer.AcceleratedOptimizer",
        "watching.py",
        "the bench measures how long an optimizer step takes",
    ),
    Name("trl.trainer.grpo_trainer", "rewards.py vllm_weights.py", "some of its names are replaced"),
    Name("trl.trainer.grpo_trainer.EnvironmentFactory", "setup.py", "a type of the constructor"),
    Name("trl.trainer.grpo_trainer.RewardFunc", "setup.py", "a type of the constructor"),
    Name("trl.trainer.grpo_trainer.RolloutFunc", "setup.py", "a type of the constructor"),
    Name("trl.trainer.grpo_trainer.VLLMGeneration", "vllm_weights.py", "replaced where a trainer is made"),
    Name(
        "peft.tuners.tuners_utils.BaseTuner.merge_adapter",
        "vllm_weights.py",
        "replaced: one layer is merged at a time",
        "self adapter_names safe_merge",
    ),
    Name("peft.tuners.tuners_utils.BaseTuner.unmerge_adapter", "vllm_weights.py", "the same", "self"),
    Name(VLLM, "vllm_weights.py", "subclassed, to send a LoRA adapter alone"),
    Name("trl.trainer.grpo_trainer.gather", "rewards.py", "replaced: each process scores what it has", None),
    Name(
        f"{UTILS}.RepeatSampler",
        "prompts.py",
        "the order of the data",
        "data_source mini_repeat_count shuffle seed",
        False,
    ),
    Name(f"{UTILS}.get_config_model_id", "setup.py", "the name of a model", "config"),
    Name(f"{UTILS}.is_async_callable", "checks.py", "which reward functions are awaited", "func"),
    Name(f"{UTILS}.pad", "prompts.py", "pads as TRL does", "tensors padding_value padding_side", False),
    Name(f"{UTILS}.split_pixel_values_by_grid", "images.py", "images by rows", "batch"),
    Name(f"{UTILS}.unsplit_pixel_values_by_grid", "images.py", "images end to end", "batch"),
    Name("trl.chat_template_utils.parse_response", "rewards.py tools.py", "messages of tokens", "prefix tools", False),
    Name("trl.data_utils.apply_chat_template", "images.py", "the text of a prompt with images", "tools", False),
    Name("trl.data_utils.is_conversational", "rewards.py", "kinds of prompts", "example"),
    Name("trl.data_utils.prepare_multimodal_messages", "images.py", "images into messages", "messages images", False),
    Name("trl.extras.profiling.profiling_context", "decoding.py samplers.py vllm_weights.py", "timing", "trainer name"),
    Name(
        "trl.models.unwrap_model_for_generation",
        "decoding.py",
        "generation mode",
        "gather_deepspeed3_params generation_kwargs gradient_checkpointing_kwargs",
        False,
    ),
    Name("transformers.trainer_utils.PREFIX_CHECKPOINT_DIR", "resume.py", "names of checkpoints"),
    Name(
        "transformers.models.qwen3.modeling_qwen3.eager_attention_forward",
        "../prefix_sharing/attention.py",
        "replaced, in each module of a model: attention along the paths of a trie",
        "module query key value attention_mask",
        False,
    ),
    Name(
        "transformers.modeling_flash_attention_utils._flash_attention_forward",
        "../prefix_sharing/attention.py",
        "takes rows end to end by these names, which models pass on to it",
        "cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k",
        False,
    ),
    Name(
        "transformers.utils.generic.is_flash_attention_requested",
        "../prefix_sharing/attention.py",
        "which kernels are called as FlashAttention is",
        "requested_attention_implementation",
        False,
    ),
    Name(
        "torch._dynamo",
        "../prefix_sharing/attention.py",
        "its configuration: how many forms of flex_attention are compiled",
    ),
    Name(
        "torch.nn.attention.varlen.varlen_attn",
        "../prefix_sharing/attention.py",
        "torch's FlashAttention for rows end to end",
        "query key value cu_seq_q cu_seq_k max_q max_k scale window_size enable_gqa",
        False,
    ),
    Name(
        "torch.nn.attention.flex_attention.BlockMask.from_kv_blocks",
        "../prefix_sharing/attention.py",
        "which blocks flex_attention looks at",
        "kv_num_blocks kv_indices full_kv_num_blocks full_kv_indices BLOCK_SIZE mask_mod seq_lengths",
        False,
    ),
    Name("torch.nn.Module._buffers", "decoding.py", "put back after a trial", of_instances=True),
    Name(
        "torch.nn.Module._forward_hooks", "decoding.py", "surplus hooks of transformers' are removed", of_instances=True
    ),
    Name("transformers.PreTrainedModel._is_stateful", "../prefix_sharing/probe.py", "whether layers are recurrent"),
    Name(
        "transformers.PreTrainedConfig._attn_implementation", "../prefix_sharing/probe.py", "which attention is called"
    ),
]

ATTRIBUTES = [
    *_attributes(GRPO, "resume.py", "what a step goes on from", "_step"),
    *_attributes(
        GRPO, "resume.py ../trainer.py", "a batch in micro-batches: what a step goes on from", "_buffered_inputs"
    ),
    *_attributes(TRAINER, "resume.py", "what a step goes on from", "_tr_loss _globalstep_last_logged"),
    *_attributes(GRPO, "logs.py resume.py", "metrics that are not logged yet", "_metrics"),
    *_attributes(GRPO, "logs.py", "what the adaptive entropy bonus goes by", "_last_world_entropy"),
    *_attributes(GRPO, "logs.py loss.py resume.py", "rewards and advantages of the last batch", "_logs"),
    *_attributes(GRPO, "assemble.py resume.py rewards.py", "columns that reward functions log", "_pending_extra_logs"),
    *_attributes(GRPO, "resume.py rewards.py", "metrics that reward functions log", "_pending_metrics"),
    *_attributes(GRPO, "prompts.py rewards.py setup.py tools.py", "the tokenizer, of the processor too", "_tokenizer"),
    *_attributes(GRPO, "checks.py images.py ../prefix_sharing/forward.py", "whether there are images", "_is_vlm"),
    *_attributes(GRPO, "checks.py decoding.py setup.py", "how processes share the weights", "_dist"),
    *_attributes(VLLM, "vllm_weights.py", "how processes share the weights", "_dist"),
    *_attributes(GRPO, "checks.py images.py", "the token in an image's place", "_image_pad_token_id"),
    *_attributes(GRPO, "assemble.py", "replaced: no tool returns a video", "_video_pad_token_id"),
    *_attributes(GRPO, "assemble.py", "replaced: credit says what stays of a row", "mask_truncated_completions"),
    *_attributes(GRPO, "checks.py", "whether environments have names", "_multi_environment"),
    *_attributes(GRPO, "tools.py", "environments that are not in use", "_environment_pool"),
    *_attributes(GRPO, "tools.py", "replaced: the tools of each row", "_sync_tool_dicts _async_tool_dicts"),
    *_attributes(GRPO, "tools.py", "replaced: the environment of each row, and its tools", "_batch_environments"),
    *_attributes(GRPO, "tools.py", "the tools of an environment", "_env_tools"),
    *_attributes(GRPO, "resume.py vllm_weights.py", "when weights were sent to vLLM last", "_last_loaded_step"),
    *_attributes(VLLM, "vllm_weights.py", "whether the engine sleeps", "_llm_weights_sleeping"),
    *_attributes(GRPO, "loss.py", "public: replaced in the loss", "beta"),
    *_attributes(GRPO, "assemble.py", "public: replaced in a batch", "environment_factories"),
    *_attributes(GRPO, "assemble.py rewards.py", "public: replaced in a batch and for rewards", "environments"),
    *_attributes(
        GRPO,
        "this folder",
        "public, and not documented",
        "aux_loss_enabled chat_template_kwargs continuous_batching_config eos_token_ids generation_config "
        "generation_kwargs log_multimodal loss_type max_completion_length min_p num_generations num_iterations "
        "ref_model reward_func_names reward_funcs reward_weights shuffle_dataset temperature tools top_k top_p "
        "use_transformers_continuous_batching use_vllm vllm_generation vllm_importance_sampling_correction vllm_mode",
    ),
    *_attributes(
        VLLM,
        "../generation/vllm.py",
        "public, and not documented: see `Engine` there",
        "accelerator generation_kwargs llm min_p model repetition_penalty tensor_parallel_size top_k top_p tp_group",
    ),
    *_attributes(
        VLLM,
        "vllm_weights.py",
        "public, and not documented",
        "enable_sleep_mode mode processing_class server_base_url server_host server_port server_timeout vllm_client",
    ),
]

NAMES = [*METHODS, *FUNCTIONS, *ATTRIBUTES]
