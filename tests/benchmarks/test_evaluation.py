"""What `python -m benchmarks compare` measures a policy by."""

import gc
from dataclasses import replace

import pytest
import torch
from bench_task import Ones
from factory import make_trainer
from models import make_model, make_tokenizer

from benchmarks.evaluation import evaluate

VOCAB_SIZE = 1009  # of no other tensor


def measure(model=None, task=None, **sizes):
    return evaluate(make_trainer(model=model), task or Ones(), Ones().examples("heldout", 0, 6), **sizes)


def test_entropy_is_that_of_a_forward_pass(monkeypatch):
    """Up to the end of each completion, and not of what pads the others."""
    model, tokenizer = make_model(), make_tokenizer()
    generated, generate = [], model.generate

    def keep(*args, **kwargs):
        generated.append((kwargs, generate(*args, **kwargs)))
        return generated[-1][1]

    monkeypatch.setattr(model, "generate", keep)
    evaluation = measure(model, num_samples=40, batch_size=80)
    entropies = []
    for kwargs, sequences in generated:
        prompt_length = kwargs["input_ids"].shape[1]
        mask = torch.ones_like(sequences)
        mask[:, :prompt_length] = kwargs["attention_mask"]
        with torch.no_grad():
            log_probs = (
                model(input_ids=sequences, attention_mask=mask).logits[:, prompt_length - 1 : -1].log_softmax(-1)
            )
        for of_tokens, ids in zip(-(log_probs.exp() * log_probs).sum(-1), sequences[:, prompt_length:], strict=True):
            ends = (ids == tokenizer.eos_token_id).nonzero().flatten().tolist()
            entropies += of_tokens[: ends[0] + 1 if ends else None].tolist()
    assert evaluation.completion_length == len(entropies) / 240
    assert evaluation.completion_length < 8  # some ended early
    assert evaluation.entropy == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)


def test_rewards(monkeypatch):
    """In the order of the prompts. One without a score is left out, with its prompt, and counted: it is not wrong."""
    completed, unscored = [], set()

    def score(text):
        return min(1.0, sum(map(str.isdigit, text)) / 4)

    def keep(self, completions, right, **kwargs):
        completed.extend(completions)
        first = len(completed) - len(completions)
        return [None if first + i in unscored else score(text) for i, text in enumerate(completions)]

    monkeypatch.setattr(Ones, "reward", keep)
    for without in ((), (5,)):
        completed.clear()
        unscored.update(without)
        evaluation = measure(num_samples=8, batch_size=16)
        texts = [completed[start : start + 8] for start in range(0, 48, 8)]
        assert evaluation.rewards == [list(map(score, of_prompt)) for of_prompt in texts[len(without) :]]
        assert evaluation.num_unscored == len(without)
    assert len({max(of_prompt) for of_prompt in evaluation.rewards}) > 1


def test_logits_are_not_kept():
    """Those of a step take as much memory after many steps as after few: the most numbers that are there at once."""

    def most_held(num_tokens):
        model, held = make_model(vocab_size=VOCAB_SIZE, eos_token_id=VOCAB_SIZE - 1), []

        def count(*args):
            tensors = [value for value in gc.get_objects() if type(value) is torch.Tensor]
            held.append(sum(tensor.numel() for tensor in tensors if tensor.shape[-1:] == (VOCAB_SIZE,)))

        model.register_forward_pre_hook(count)
        measure(model, replace(Ones(), max_completion_length=num_tokens), num_samples=2, batch_size=12)
        return max(held)

    assert 0 < most_held(4) == most_held(16)
