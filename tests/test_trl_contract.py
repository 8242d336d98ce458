"""
What FR3E relies on in TRL, by name. When a new version of TRL is tried, this fails first and says what moved.

All of it is used in `trl_seams.py`, `vllm_sync.py` and `resume.py`, but for the constructor and the model card. What is
relied on in transformers' trainer is named here too.
"""

import inspect

import pytest
import torch
import trl
from datasets import Dataset
from fr3e_trl.trl_adapter.rows_trainer import OF_IMAGES
from models import make_model, make_tokenizer
from packaging.version import Version
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import parse_response
from trl.data_utils import apply_chat_template, is_conversational, prepare_multimodal_messages
from trl.extras.profiling import profiling_context
from trl.generation.vllm_generation import VLLMGeneration
from trl.models import unwrap_model_for_generation
from trl.trainer import grpo_trainer, utils
from trl.trainer.base_trainer import _BaseTrainer
from trl.trainer.utils import (
    add_fused_lm_head,
    get_config_model_id,
    is_async_callable,
    pad,
    split_pixel_values_by_grid,
    unsplit_pixel_values_by_grid,
)

from fr3e_trl import FR3ETrainer


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_version_is_one_that_was_tried():
    assert Version("1.16") <= Version(trl.__version__) < Version("1.17")


def test_the_constructor_takes_what_grpo_trainer_takes():
    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in (FR3ETrainer, GRPOTrainer))
    own = inspect.Parameter("sampler", inspect.Parameter.KEYWORD_ONLY, default=None)
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in (*theirs.values(), own)
    ]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (GRPOTrainer._generate, ["self", "prompts"]),
        (GRPOTrainer._calculate_rewards, ["self", "inputs", "prompts", "completions", "completion_ids_list"]),
        (GRPOTrainer._generate_and_score_completions, ["self", "inputs"]),
        (GRPOTrainer._compute_loss, ["self", "model", "inputs"]),
        (GRPOTrainer._prepare_inputs, ["self", "generation_batch"]),
        (GRPOTrainer._tokenize_prompts, ["self", "prompts"]),
        (
            GRPOTrainer._tool_call_loop,
            [
                *("self", "prompts", "prompt_ids", "completion_ids", "completions", "logprobs", "images"),
                "multimodal_fields",
            ],
        ),
        (
            GRPOTrainer._generate_single_turn,
            ["self", "prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"],
        ),
        (_BaseTrainer.create_model_card, ["self", "model_name", "dataset_name", "tags"]),
        (GRPOTrainer._save_checkpoint, ["self", "model", "trial"]),
        (
            Trainer._init_training_state,
            [
                *("self", "max_steps", "num_update_steps_per_epoch", "num_train_epochs"),
                *("resume_from_checkpoint", "trial"),
            ],
        ),
        (Trainer._save_rng_state, ["self", "output_dir"]),
        (Trainer._load_from_checkpoint, ["self", "resume_from_checkpoint", "model"]),
        (Trainer._issue_warnings_after_load, ["self", "load_result"]),
        (Trainer._load_rng_state, ["self", "checkpoint"]),
        (GRPOTrainer._get_train_sampler, ["self", "dataset"]),
        (VLLMGeneration._init_vllm, ["self"]),
        (VLLMGeneration.sync_weights, ["self"]),
        (VLLMGeneration.generate, ["self", "prompts", "images", "num_generations", "profiler"]),
    ],
)
def test_methods_that_are_called_or_overridden(method, expected):
    assert parameters(method) == expected


@pytest.mark.parametrize(
    ("function", "used"),
    [
        (
            GRPOTrainer._get_per_token_logps_and_entropies,
            ["model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", *OF_IMAGES],
        ),
        (prepare_multimodal_messages, ["messages", "images"]),
        (apply_chat_template, ["tools"]),
        (add_fused_lm_head, ["model", "temperature", "cast_lm_head_to_fp32", "outputs"]),
        (pad, ["padding_value", "padding_side"]),
        (parse_response, ["prefix", "tools"]),
        (
            unwrap_model_for_generation,
            ["gather_deepspeed3_params", "generation_kwargs", "gradient_checkpointing_kwargs"],
        ),
    ],
)
def test_arguments_that_are_passed(function, used):
    assert set(used) <= set(parameters(function))


def test_what_the_trainer_makes_for_vllm(monkeypatch):
    """It looks its class up in its own module, and the names of what it passes are attributes that are read."""
    made = {}

    def make(**arguments):
        made.update(arguments)
        raise StopIteration

    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", make)
    with pytest.raises(StopIteration):
        train(GRPOTrainer, use_vllm=True, vllm_mode="server", per_device_train_batch_size=8)
    assert made.keys() <= set(parameters(VLLMGeneration.__init__))
    assert {
        *("model", "accelerator", "processing_class", "mode", "server_base_url", "server_host", "server_port"),
        *("server_timeout", "enable_sleep_mode", "top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs"),
    } <= made.keys()


def test_rewards_are_gathered_by_a_name_of_trls_module(monkeypatch):
    """The last step of `_calculate_rewards`, left out where each process scores as many completions as it has."""
    gathered = []
    monkeypatch.setattr(grpo_trainer, "gather", lambda tensor: gathered.append(tensor.shape) or tensor)
    train(GRPOTrainer, per_device_train_batch_size=8, max_steps=1)
    assert gathered == [(8, 1)]


def test_images_that_are_end_to_end_are_split_by_rows_and_joined():
    """Of Qwen, of which pixels have a row for each patch, and of models with a row for each image."""
    by_patch = {"image_grid_thw": torch.tensor([[1, 2, 2], [1, 1, 1]]), "pixel_values": torch.arange(5.0)[:, None]}
    for images in (by_patch, {"pixel_values": torch.zeros(2, 3, 4, 4)}):
        batch = {"prompt_ids": torch.zeros(2, 1), "num_images": [1, 1], **images}
        split = split_pixel_values_by_grid(batch)
        assert all(len(value) == 2 for value in split.values())
        joined = unsplit_pixel_values_by_grid(split)
        assert joined.keys() == batch.keys() and all(joined[name].equal(images[name]) for name in images)


def test_functions_that_are_called_by_position():
    assert is_conversational({"prompt": [{"role": "user", "content": "1+1="}]})
    assert parameters(profiling_context)[:2] == ["trainer", "name"]
    assert not is_async_callable(len)
    assert get_config_model_id(make_model().config) == ""


def test_groups_are_consecutive_and_each_is_generated_once():
    """`inputs[::num_generations]` are the prompts of a batch."""
    seen = []

    class Spy(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            seen.append([example["prompt"] for example in inputs])
            return super()._generate_and_score_completions(inputs)

    train(Spy, per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=2)
    assert len(seen) == 2
    for prompts in seen:
        assert len(prompts) == 16
        assert [prompt for prompt in prompts[::8] for _ in range(8)] == prompts


def test_what_a_batch_consists_of():
    """The shapes and keys that are read, replaced or added, at the seam where each is."""
    seen = {}

    class Spy(GRPOTrainer):
        def _generate(self, prompts):
            seen["generated"] = super()._generate(prompts)
            return seen["generated"]

        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            seen["rewards"] = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            return seen["rewards"]

        def _generate_and_score_completions(self, inputs):
            seen["batch"] = super()._generate_and_score_completions(inputs)
            seen["logged advantages"] = list(self._logs["advantages"])
            return seen["batch"]

        def _compute_loss(self, model, inputs):
            seen["in loss"] = inputs
            return super()._compute_loss(model, inputs)

    trainer = train(Spy, per_device_train_batch_size=8, num_iterations=2, max_steps=1)
    prompt_ids, completion_ids, tool_mask, completions, logprobs, *_ = seen["generated"]
    assert len(prompt_ids) == len(completion_ids) == len(completions) == 8 and tool_mask is None and logprobs is None
    assert len(seen["generated"]) == 8
    assert seen["rewards"].shape == (8, 1)
    batch = seen["batch"]
    tokens = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask"}
    assert {*tokens, "advantages", "num_items_in_batch", "old_per_token_logps"} == batch.keys()
    assert batch["num_items_in_batch"].dim() == 0 and batch["advantages"].shape == (8,)
    assert batch["prompt_mask"][0, -1] == 1 and batch["completion_mask"][0, 0] == 1  # padded on the outside
    assert seen["logged advantages"][-8:] == batch["advantages"].tolist()
    assert batch.keys() == seen["in loss"].keys()
    # Attributes
    assert trainer.rollout_func is None and trainer.tools == [] and not trainer._is_vlm
    assert trainer.num_generations == 8 and trainer.max_completion_length == 6 and trainer.temperature == 1.0
    assert trainer.generation_config.eos_token_id == [1] and trainer.generation_config.pad_token_id == 0
    assert trainer.reward_func_names == ["reward"] and trainer.reward_weights.tolist() == [1.0]
    assert not trainer.use_transformers_continuous_batching and trainer._tokenizer is trainer.processing_class
    assert {"beta", "loss_type", "continuous_batching_config", "generation_kwargs", "_dist"} <= vars(trainer).keys()
    assert {"_step", "_tr_loss", "_globalstep_last_logged", "_buffered_inputs", "_metrics"} <= vars(trainer).keys()
    assert {"_image_pad_token_id", "_video_pad_token_id", "log_multimodal", "ref_model"} <= vars(trainer).keys()
    assert not trainer._pending_extra_logs and trainer._logs["advantages"].maxlen == 8
    assert "reward" in trainer.state.log_history[0]


def test_the_rollout_func_supplies_finished_completions():
    supplied = []

    def rollout_func(prompts, trainer):
        supplied.append(len(prompts))
        return {
            "prompt_ids": [[5, 6]] * len(prompts),
            "completion_ids": [[7, 8, 1]] * len(prompts),
            "logprobs": None,
        }

    class Spy(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            self.rollout_func = rollout_func
            batch = super()._generate_and_score_completions(inputs)
            assert batch["prompt_ids"].tolist() == [[5, 6]] * 8 and batch["completion_ids"].tolist() == [[7, 8, 1]] * 8
            return batch

    train(Spy, per_device_train_batch_size=8, max_steps=1)
    assert supplied == [8]


def test_what_tools_and_environments_are_known_by():
    """The loop's turns are asked for by prompts that completions are added to, so that each says whose it is."""
    loop = inspect.getsource(GRPOTrainer._tool_call_loop)
    assert "prompt_ids[idx_with_tool] + completion_ids[idx_with_tool] + suffix_ids" in loop
    assert "self._generate_single_turn(\n                prompt_completion_tool_ids," in loop
    step = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    for name in ("environments", "_batch_environments", "_sync_tool_dicts", "_async_tool_dicts"):
        assert f"self.{name} = " in step and step.index(f"self.{name} = ") < step.index("self._generate(prompts)")
    for name in ("_environment_pool", "_env_tools", "environment_factories"):
        assert f"self.{name} = " in inspect.getsource(GRPOTrainer.__init__)


def test_the_fused_head_scores_at_its_temperature():
    """`_scoring_temperature` puts another head in its place, and gets the old one back by its `forward`."""
    model = make_model().eval()
    input_ids = torch.tensor([[5, 6, 7, 8]])
    logits = model(input_ids).logits
    forward = model.forward
    add_fused_lm_head(model, temperature=2.0, cast_lm_head_to_fp32=False)
    assert model.forward != forward
    model.forward = forward
    torch.testing.assert_close(model(input_ids).logits, logits)


def test_the_fused_head_takes_labels_that_are_shifted(monkeypatch):
    """And projects the positions that have one, if asked for by the name of what says whether there is Triton."""
    model = make_model().eval()
    input_ids, labels = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[-100, 9, -100, 10]])
    expected = model(input_ids).logits.log_softmax(-1)[0, [1, 3], [9, 10]]
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    projected = []

    class Kernel:
        @staticmethod
        def apply(hidden, *args):
            projected.append(len(hidden))
            return kernel.apply(hidden, *args)

    kernel = utils._ChunkedLogProbFunction
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Kernel)
    monkeypatch.setattr(utils, "_use_triton", lambda device: True)
    output = model(input_ids=input_ids, shift_labels=labels, fused_lm_head=True)
    assert projected == [2]
    torch.testing.assert_close(output.log_probs[0, [1, 3]], expected)
    assert output.log_probs[0, [0, 2]].tolist() == output.entropy[0, [0, 2]].tolist() == [0, 0]


def test_the_batch_is_shuffled_by_a_name_of_trls_module(monkeypatch):
    shuffled = []
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda batch: shuffled.append(batch.keys()) or batch)
    trainer = train(GRPOTrainer, per_device_train_batch_size=8, max_steps=1)
    assert len(shuffled) == 1 and {"prompt_ids", "prompt_mask", "completion_ids"} <= set(shuffled[0])
    assert not trainer.aux_loss_enabled


def test_the_fused_head_finds_its_kernel_by_a_name():
    """Another is put in its place, which takes the same arguments by position."""
    expected = ["hidden", "weight", "bias", "targets", "temperature", "chunk_size"]
    expected += ["final_logit_softcapping", "logit_scale", "outputs"]
    assert parameters(utils._ChunkedLogProbFunction.forward) == ["ctx", *expected]


def reward(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def train(cls: type[GRPOTrainer], **settings) -> GRPOTrainer:
    defaults = {"bf16": False, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    sizes = {"num_generations": 8, "max_completion_length": 6, "logging_steps": 1}
    trainer = cls(
        make_model(),
        reward,
        GRPOConfig("unused", **defaults | sizes | settings),
        train_dataset=Dataset.from_dict({"prompt": [f"{a}+{a}=" for a in range(8)]}),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    return trainer
