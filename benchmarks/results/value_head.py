"""
Says how much of the rewards' variance a policy's hidden states tell, on prompts that the fit has not seen:

    fr3e eval --model_name_or_path outputs/policies/short --dataset_name outputs/policies/short/data \
        --dataset_test_split train --reward_funcs fr3e_trl.rewards.math_reward --max_completion_length 56 \
        --limit 400 --num_samples 4 --output_dir outputs/eval/short
    python -m benchmarks.results.value_head outputs/policies/short outputs/eval/short/completions.jsonl

A baseline may be read from them. It is worth something if it tells more than the prompt's other completions do. R² is
the share of the variance that a ridge regression predicts: 0 is that of the mean reward.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import trange
from transformers import AutoModelForCausalLM, AutoTokenizer

from fr3e_trl.commands.eval import read_lines

from ..statistics import mean_interval
from ..tables import number

PLACES = {"at the end of the prompt": 0, "after a quarter": 0.25, "after half": 0.5, "after three quarters": 0.75}
NUM_LAYERS = 3  # whose states are read: evenly spaced, the last among them
NUM_FOLDS = 8
PENALTIES = [10.0**exponent for exponent in range(-3, 5)]  # times the number of rows
BATCH_SIZE = 32


def layers_of(model) -> list[int]:
    return [model.config.num_hidden_layers * i // NUM_LAYERS for i in range(1, NUM_LAYERS + 1)]


def states(model, tokenizer, lines: list[dict]) -> torch.Tensor:
    """Hidden states of shape (layers, places, rows, hidden size), each of the last token before its place."""
    found = []
    for start in trange(0, len(lines), BATCH_SIZE, unit="batch"):
        batch = lines[start : start + BATCH_SIZE]
        prompts = [tokenizer(line["prompt"], add_special_tokens=False).input_ids for line in batch]
        completions = [tokenizer(line["completion"], add_special_tokens=False).input_ids for line in batch]
        rows = [torch.tensor(prompt + rest) for prompt, rest in zip(prompts, completions, strict=True)]
        with torch.no_grad():  # what pads them comes behind, and is seen by none of their tokens
            of_layers = model(pad_sequence(rows, batch_first=True), output_hidden_states=True).hidden_states
        layers = [of_layers[layer] for layer in layers_of(model)]
        ends = [
            torch.tensor([len(p) - 1 + int(share * len(c)) for p, c in zip(prompts, completions, strict=True)])
            for share in PLACES.values()
        ]
        found.append(torch.stack([torch.stack([layer[range(len(batch)), end] for end in ends]) for layer in layers]))
    return torch.cat(found, dim=2).double()


def ridge(x: torch.Tensor, y: torch.Tensor, targets: torch.Tensor, penalties: list[float]) -> torch.Tensor:
    """What regressions of `y` on `x` make of the targets: a row for each penalty, all from one decomposition."""
    center, scale, mean = x.mean(0), x.std(0).clamp(min=1e-6), y.mean()
    inputs = (x - center) / scale
    values, vectors = torch.linalg.eigh(inputs.T @ inputs)
    weights = vectors.T @ (inputs.T @ (y - mean))
    shrunk = torch.stack([weights / (values + penalty * len(x)) for penalty in penalties])
    return mean + shrunk @ ((targets - center) / scale @ vectors).T


def predict(x: torch.Tensor, y: torch.Tensor, prompts: torch.Tensor, unseen: torch.Tensor) -> torch.Tensor:
    """What a ridge regression on the other rows makes of the unseen. A quarter of their prompts decide the penalty."""
    judges = ~unseen & (prompts // NUM_FOLDS % 4 == 0)
    teachers = ~unseen & ~judges
    errors = (ridge(x[teachers], y[teachers], x[judges], PENALTIES) - y[judges]).square().sum(1)
    return ridge(x[~unseen], y[~unseen], x[unseen], [PENALTIES[errors.argmin()]])[0]


def shares(
    x: torch.Tensor | None, others: torch.Tensor | None, y: torch.Tensor, prompts: torch.Tensor
) -> Iterator[float]:
    """R² of each fold of prompts, by the other rows' mean first, and then by `x` what that leaves."""
    for fold in range(NUM_FOLDS):
        unseen = prompts % NUM_FOLDS == fold
        predicted = y[~unseen].mean().expand(len(y))
        if others is not None:
            center = others - others[~unseen].mean()
            slope = (center * y)[~unseen].sum() / center[~unseen].square().sum()
            predicted = predicted + slope * center
        told = predicted[unseen]
        if x is not None:
            told = told + predict(x, y - predicted, prompts, unseen)
        yield 1 - ((y[unseen] - told).square().sum() / (y[unseen] - y[~unseen].mean()).square().sum()).item()


def main() -> None:
    policy, path = sys.argv[1:]
    lines = sorted(read_lines(Path(path)), key=lambda line: (line["problem"], line["sample"]))
    num_samples = 1 + max(line["sample"] for line in lines)
    prompts = torch.tensor([line["problem"] for line in lines])
    y = torch.tensor([sum(line["rewards"].values()) for line in lines]).double()
    of_prompts = y.view(-1, num_samples)
    others = ((of_prompts.sum(1, keepdim=True) - of_prompts) / (num_samples - 1)).flatten()
    model = AutoModelForCausalLM.from_pretrained(policy, dtype="auto").eval()
    found = states(model, AutoTokenizer.from_pretrained(policy), lines)

    def told(x: torch.Tensor | None, others: torch.Tensor | None = None) -> str:
        return number(mean_interval([*shares(x, others, y, prompts)]), 2)

    print(f"{len(lines)} completions of {len(of_prompts)} prompts, mean reward {y.mean():.3f}")
    print(f"R² of the prompt's other completions: {told(None, others)}\n")
    layers = layers_of(model)
    titles = [f"layer {layer}" for layer in layers] + [f"layer {layers[1]} and the other completions"]
    print(f"| R² | {' | '.join(titles)} |\n|{'---|' * (1 + len(titles))}")
    for i, place in enumerate(PLACES):
        cells = [told(of_layer[i], None) for of_layer in found] + [told(found[1, i], others)]
        print(f"| {place} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
