"""
FR3E with rollouts drawn in a way of one's own:

    python examples/own_sampler.py

The demo's policy is trained on sums. Its rollouts are drawn from a mixture of the policy and of what it was when
training began, so that what it has unlearned too early is still tried now and then. A sampler continues token ids, from
the prompt or from the middle of a completion; the log-probs that it gives are of the mixture, against which the
importance ratio then weighs each token.
"""

import argparse
import copy
from collections.abc import Sequence

import torch
from demo import MAX_COMPLETION_LENGTH, is_right, make_dataset
from make_demo_policy import POLICY_DIR
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from fr3e_trl import FR3EConfig, FR3ETrainer, Sample, SamplingRequest

START_SHARE = 0.1  # of a token's probability that comes from the policy at the start


class Mixture(LogitsProcessor):
    """Mixes the next token's distribution with that of another model, at a temperature (B, 1) of each row."""

    def __init__(self, start: PreTrainedModel, attention_mask: torch.Tensor, temperatures: torch.Tensor):
        self.start = start
        self.attention_mask = attention_mask
        self.temperatures = temperatures

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        grown = self.attention_mask.new_ones(len(input_ids), input_ids.shape[1] - self.attention_mask.shape[1])
        mask = torch.cat([self.attention_mask, grown], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        # Without a cache, for brevity: the start model reads everything anew for each token
        of_start = self.start(input_ids, attention_mask=mask, position_ids=positions, logits_to_keep=1).logits[:, -1]
        policy, start = (torch.softmax(logits / self.temperatures, dim=-1) for logits in (scores, of_start))
        return torch.log((1 - START_SHARE) * policy + START_SHARE * start)


class MixtureSampler:
    """Draws from a mixture of the policy with what it was when the trainer was made."""

    def __init__(self, trainer: FR3ETrainer):
        self.trainer = trainer
        assert isinstance(trainer.processing_class, PreTrainedTokenizerBase)
        self.tokenizer = trainer.processing_class
        self.start = copy.deepcopy(trainer.model).eval()

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        rows = [request for request in requests for _ in range(request.num_samples)]
        drawn = iter(self.draw(rows) if rows else [])
        return [[next(drawn) for _ in range(request.num_samples)] for request in requests]

    def draw(self, rows: list[SamplingRequest]) -> list[Sample]:
        """One sample for each row. All are generated to the largest budget, and cut at their own."""
        device, eos_id = self.trainer.accelerator.device, self.tokenizer.eos_token_id
        prefixes = [{"input_ids": row.prefix_ids.tolist()} for row in rows]
        inputs = self.tokenizer.pad(prefixes, padding_side="left", return_tensors="pt").to(device)
        temperatures = torch.tensor([[row.temperature] for row in rows], device=device)
        with self.trainer.generation_model() as model:
            output = model.generate(
                **inputs,
                do_sample=True,
                top_k=0,
                max_new_tokens=max(row.max_new_tokens for row in rows),
                logits_processor=[Mixture(self.start, inputs["attention_mask"], temperatures)],
                output_scores=True,
                return_dict_in_generate=True,
            )
        token_ids = output.sequences[:, inputs["input_ids"].shape[1] :]
        logprobs = torch.stack(output.scores, dim=1).gather(2, token_ids.unsqueeze(2)).squeeze(2)
        samples = []
        for row, ids, of_ids in zip(rows, token_ids.tolist(), logprobs.tolist(), strict=True):
            ends = [i + 1 for i, token_id in enumerate(ids) if token_id == eos_id]
            length = min([*ends, row.max_new_tokens, len(ids)])
            samples.append(Sample(ids[:length], of_ids[:length]))
        return samples


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small policy by FR3E, with rollouts from a mixture.")
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--output_dir", default="outputs/own_sampler")
    options = parser.parse_args()
    trainer = FR3ETrainer(
        model=str(POLICY_DIR),
        reward_funcs=is_right,
        args=FR3EConfig(
            output_dir=options.output_dir,
            max_steps=options.max_steps,
            num_generations=8,
            per_device_train_batch_size=32,  # 4 problems a step
            max_completion_length=MAX_COMPLETION_LENGTH,
            learning_rate=5e-5,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            logging_steps=5,
        ),
        train_dataset=make_dataset("train", seed=0, size=400),
        sampler=MixtureSampler,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
