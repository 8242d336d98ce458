"""What the tests train: the demo's policy with LoRA, on prompts of some length."""

import factory
import torch
from datasets import Dataset
from factory import letters
from peft import LoraConfig, PeftModel, get_peft_model
from servers import POLICY
from transformers import AutoModelForCausalLM, AutoTokenizer
from trees import rollouts_of

SIZES = {"num_generations": 8, "per_device_train_batch_size": 16, "max_completion_length": 48, "max_steps": 3}


def make_dataset(num_prompts: int = 8, num_terms: int = 20) -> Dataset:
    sums = [" + ".join(str((7 * i + 13 * j) % 90 + 10) for j in range(num_terms)) for i in range(num_prompts)]
    prompts = [f"State the final answer to the following arithmetic problem: {terms} =" for terms in sums]
    return Dataset.from_dict({"prompt": prompts})


def lora(rank: int = 8) -> LoraConfig:
    return LoraConfig(r=rank, target_modules="all-linear")


def make_trainer(server, model=None, **settings):
    defaults = {
        "reward_funcs": letters,
        "dataset": make_dataset(),
        "tokenizer": AutoTokenizer.from_pretrained(POLICY),
        "peft_config": None if isinstance(model, PeftModel) else lora(),
        "learning_rate": 3e-3,
        "use_vllm": True,
        "vllm_mode": "server",
    }
    if server is not None:
        defaults["vllm_server_base_url"] = server.url
    return factory.make_trainer(model=str(POLICY) if model is None else model, **SIZES | defaults | settings)


def load_policy(**overrides):
    return AutoModelForCausalLM.from_pretrained(POLICY, **overrides)


def with_adapter(model, name: str = "default", scale: float = 0.02):
    """A model with a LoRA adapter of random weights: one that has an effect."""
    if not isinstance(model, PeftModel):
        model = get_peft_model(model, lora(), adapter_name=name)
    for param_name, param in model.named_parameters():
        if "lora_" in param_name:
            torch.nn.init.normal_(param, std=scale)
    return model


def loss_mask(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["completion_mask"] * batch["tool_mask"]).bool()


def ratios(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Importance ratios of the rows in the loss, one each."""
    return batch["importance_sampling_ratio"][batch["in_loss"]]


def logprobs_of_policy(trainer, trees) -> torch.Tensor:
    """Of the rows of `trees` under the trainer's weights as they are now, as TRL pads them."""
    rows = [(tree.prompt_ids, state.prefix_ids + rollout.token_ids) for tree, state, rollout in rollouts_of(trees)]
    statistics = trainer.token_statistics([prompt for prompt, _ in rows], [completion for _, completion in rows])
    return torch.nn.utils.rnn.pad_sequence([logprobs for logprobs, _ in statistics], batch_first=True)
