"""
FR3E in one file: the method in plain PyTorch, to be read from top to bottom.

    python examples/fr3e_in_one_file.py

A small policy learns sums on a CPU. Each step is one of `FR3ETrainer`'s, at its defaults. `tests/test_one_file.py`
holds it to the package: the same rows give the same anchors, credit and loss.

Left out, and in the package:
- Speed: branches sampled while their base trajectory grows, shared prefixes forwarded once.
- Scale: micro-batches, mixed precision, several processes, vLLM, LoRA, checkpoints.
- Several base trajectories of a prompt, rollout credit, the presets, other losses, KL, refill, the value tracker.
- Tools, images, missing rewards, and temperatures other than 1.
- The first step. The package has no threshold yet and takes the highest entropies. Here its own batch sets one.

Sizes: P prompts, R rows of a tree or of the batch, L tokens of a completion, Q of a prompt, V of the vocabulary.
"""

import statistics
from dataclasses import dataclass
from itertools import islice

import torch
from make_demo_policy import GENERATOR, POLICY_DIR, problems
from reasoning_gym.utils import extract_answer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

NUM_PROMPTS = 32  # P, of a step
NUM_ANCHORS = 3  # of a base trajectory, at most: a prompt has four rows, as with num_generations=4
MAX_LENGTH = 64  # tokens of a completion
PRIOR_STRENGTH = 4.0  # κ: the prior counts as four rollouts. `FR3ETrainer` estimates κ from past steps
SMOOTHING = 0.7  # weight of the threshold of the step before
EPSILON_LOW, EPSILON_HIGH = 0.2, 0.28
NUM_UPDATES, LEARNING_RATE = 2, 5e-5  # of each batch


@dataclass
class Row:
    """A completion. The tokens before `start` are its prefix, which another row sampled."""

    prompt: Tensor  # (Q,)
    ids: Tensor  # (L,)
    start: int = 0
    reward: float = 0.0


Tree = list[Row]  # a base trajectory, then its branches


def sample(model: PreTrainedModel, prefixes: list[Tensor], budgets: list[int]) -> list[Tensor]:
    """Continue each prefix up to EOS, or as far as its budget of tokens reaches."""
    ids, mask = pad(prefixes, "left")  # (R, Q)
    ids = model.generate(input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=max(budgets))
    sampled = []
    for row, budget in zip(ids[:, mask.shape[1] :], budgets, strict=True):
        ends = (row == model.config.eos_token_id).nonzero().flatten().tolist()
        sampled.append(row[: min([budget, *(end + 1 for end in ends)])])
    return sampled


def log_probs_and_entropies(model: PreTrainedModel, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Log-prob of each token of each completion, and entropy of the distribution it is from: (R, L) each, in nats."""
    prompts, prompt_mask = pad([row.prompt for row in rows], "left")  # (R, Q)
    completions, mask = pad([row.ids for row in rows], "right")  # (R, L)
    ids, attention_mask = torch.cat([prompts, completions], 1), torch.cat([prompt_mask, mask], 1)
    logits = model(ids, attention_mask=attention_mask).logits[:, prompts.shape[1] - 1 : -1]  # (R, L, V)
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(-1, completions.unsqueeze(-1)).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


def pad(sequences: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Sequences as one tensor, with its attention mask."""
    masks = [torch.ones_like(ids) for ids in sequences]
    padded, mask = (pad_sequence(of, batch_first=True, padding_side=side) for of in (sequences, masks))
    return padded, mask


def first_anchors(entropies: Tensor, threshold: float) -> list[int]:
    """The first positions that reach the threshold. Position 0 is none: a branch there is a sample of the prompt."""
    reached = ((entropies >= threshold) & (entropies > 0)).nonzero().flatten().tolist()
    return [position for position in reached if position > 0][:NUM_ANCHORS]


def uncertainty(entropies: Tensor) -> float:
    """The threshold at which a base trajectory has all its anchors: its third highest entropy."""
    highest = entropies[1:].sort(descending=True).values
    return highest[NUM_ANCHORS - 1].item() if len(highest) >= NUM_ANCHORS else 0.0


def next_threshold(threshold: float | None, uncertainties: list[float]) -> float:
    """The threshold at which half of the base trajectories have all their anchors, smoothed over steps."""
    median = statistics.median(uncertainties)
    return median if threshold is None else SMOOTHING * threshold + (1 - SMOOTHING) * median


@torch.no_grad()
def grow(model: PreTrainedModel, prompts: list[Tensor], threshold: float | None) -> tuple[list[Tree], float]:
    """Sample a tree from each prompt, and find the threshold of the next step."""
    sampled = sample(model, prompts, [MAX_LENGTH] * len(prompts))
    bases = [Row(prompt, ids) for prompt, ids in zip(prompts, sampled, strict=True)]
    _, padded = log_probs_and_entropies(model, bases)  # (P, L)
    entropies = [of_base[: len(base.ids)] for of_base, base in zip(padded, bases, strict=True)]
    following = next_threshold(threshold, [uncertainty(of_base) for of_base in entropies])
    current = following if threshold is None else threshold
    anchors = [(i, p) for i, of_base in enumerate(entropies) for p in first_anchors(of_base, current)]
    prefixes = [torch.cat([bases[i].prompt, bases[i].ids[:p]]) for i, p in anchors]
    sampled = sample(model, prefixes, [MAX_LENGTH - p for _, p in anchors]) if anchors else []
    trees = [[base] for base in bases]
    for (i, p), ids in zip(anchors, sampled, strict=True):
        trees[i].append(Row(bases[i].prompt, torch.cat([bases[i].ids[:p], ids]), p))
    return trees, following


def counts(tree: Tree) -> Tensor:
    """How many rows each row counts as, (R,). Each missing branch counts its base trajectory once more."""
    return torch.tensor([NUM_ANCHORS + 2 - len(tree)] + [1] * (len(tree) - 1), dtype=torch.float64)


def priors_of(trees: list[Tree]) -> Tensor:
    """What each prompt is expected to be worth, (P,): the mean reward of the other prompts' trees."""
    values = [counts(tree) @ torch.tensor([row.reward for row in tree]).double() / (NUM_ANCHORS + 1) for tree in trees]
    return (sum(values) - torch.stack(values)) / (len(trees) - 1)


def tree_credit(tree: Tree, prior: Tensor) -> list[tuple[Tensor, Tensor]]:
    """
    Weight and advantage of each token of each row, (L,) each; 0 in its prefix, and in a row that teaches nothing.

    Of the tree's rows, T pass through the token, and U do not. Its weight is |T|, and its advantage
    |T| * (mean reward of T - (κ prior + sum of the rewards of U) / (κ + |U|)).
    """
    count, rewards = counts(tree), torch.tensor([row.reward for row in tree]).double()  # (R,)
    credit = []
    for i, row in enumerate(tree):
        positions = torch.arange(len(row.ids))
        passes = torch.zeros(len(tree), len(row.ids), dtype=torch.bool)  # (R, L)
        passes[i] = True
        if i == 0:  # branches pass through their base trajectory's tokens before the anchor
            passes |= torch.tensor([branch.start for branch in tree]).unsqueeze(1) > positions
        size, total = count @ passes.double(), (count * rewards) @ passes.double()  # |T|, and the sum of its rewards
        baseline = (PRIOR_STRENGTH * prior + count @ rewards - total) / (PRIOR_STRENGTH + count.sum() - size)
        advantages = (total - size * baseline) * (positions >= row.start)
        advantages[advantages.abs() < 1e-9] = 0  # no more than rounding
        credit.append((size * (positions >= row.start) * advantages.any(), advantages))
    return credit


def policy_loss(log_probs: Tensor, old_log_probs: Tensor, weights: Tensor, advantages: Tensor) -> Tensor:
    """The clipped surrogate, divided by the tokens of all rows' whole paths. All arguments are (R, L)."""
    ratios = (log_probs - old_log_probs).exp()
    surrogate = torch.min(ratios * advantages, ratios.clamp(1 - EPSILON_LOW, 1 + EPSILON_HIGH) * advantages)
    return -surrogate[weights > 0].sum() / weights.sum().clamp(min=1)


def learn(model: PreTrainedModel, optimizer: torch.optim.Optimizer, trees: list[Tree]) -> list[float]:
    """Update the policy by scored trees. Returns the loss of each update."""
    rows, losses = [row for tree in trees for row in tree], []
    credit = [of_row for of_tree in map(tree_credit, trees, priors_of(trees)) for of_row in of_tree]
    weights, advantages = (pad_sequence(list(of), batch_first=True).float() for of in zip(*credit, strict=True))
    with torch.no_grad():
        old_log_probs, _ = log_probs_and_entropies(model, rows)
    for _ in range(NUM_UPDATES):
        loss = policy_loss(log_probs_and_entropies(model, rows)[0], old_log_probs, weights, advantages)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(num_steps: int = 60) -> None:
    torch.manual_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(POLICY_DIR), AutoTokenizer.from_pretrained(POLICY_DIR)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0)
    training, heldout, threshold = problems("train", 0), list(islice(problems("heldout", 0), 500)), None

    def encode(batch: list[dict]) -> list[Tensor]:
        return [torch.tensor(tokenizer(problem["question"])["input_ids"]) for problem in batch]

    def reward(ids: Tensor, problem: dict) -> float:
        answer = extract_answer(tokenizer.decode(ids, skip_special_tokens=True))
        return float(GENERATOR.score_answer(answer, problem) == 1)

    for step in range(num_steps + 1):
        if step % 10 == 0:
            sampled = sample(model, encode(heldout), [MAX_LENGTH] * len(heldout))
            print(f"After {step} steps {statistics.mean(map(reward, sampled, heldout)):.1%} are right", flush=True)
        batch = list(islice(training, NUM_PROMPTS))
        trees, threshold = grow(model, encode(batch), threshold)
        for tree, problem in zip(trees, batch, strict=True):
            for row in tree:
                row.reward = reward(row.ids, problem)
        learn(model, optimizer, trees)


if __name__ == "__main__":
    main()
