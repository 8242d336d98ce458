"""Comparisons of arms whose true means are known, drawn without a training."""

import numpy as np

from benchmarks.outcomes import Results

# Log-odds of a right completion: at the start, and how much further each arm is in the end
START, GAINS = -0.5, {"grpo": 1.0, "fr3e": 1.6, "prior": 1.3, "tree": 1.9, "dapo": 0.8, "shared": 1.0}

# Standard deviations of the log-odds: between prompts; between runs, which the arms of a seed share, or do not; of a
# prompt in a run, which depends on the arm, or on seed and arm
PROMPTS, SEEDS, RUNS, ARMS, RESTS = 1.2, 0.25, 0.2, 0.3, 0.3
BUDGET = 100


def share(log_odds):
    return 1 / (1 + np.exp(-log_odds))


def truth(arm, k=1):
    """pass@k of an arm in the end, over all seeds and prompts that could be drawn; of `None`, at the start."""
    spread = PROMPTS if arm is None else np.hypot.reduce([PROMPTS, SEEDS, RUNS, ARMS, RESTS])
    return expected(START + GAINS.get(arm, 0), spread, k)


def expected(log_odds, spread, k=1):
    """pass@k where log-odds are normal, by quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    return float(1 - weights @ (1 - share(log_odds + spread * nodes)) ** k / weights.sum())


def simulated(generator, num_seeds, arms=("grpo", "fr3e"), num_prompts=48, num_samples=4, num_evals=1, extra=None):
    """A comparison of these arms, with evaluations at the start, in the end, and evenly between."""
    draw, prompts = generator.normal, PROMPTS * generator.normal(size=num_prompts)
    of_seeds = SEEDS * draw(size=(num_seeds, 1))
    runs = []
    at_start = generator.binomial(num_samples, share(START + prompts))
    for number, arm in enumerate(arms):
        place = ARMS * draw(size=num_prompts)
        steady = of_seeds + RUNS * draw(size=(num_seeds, 1)) + RESTS * draw(size=(num_seeds, num_prompts)) + place
        for seed in range(num_seeds):
            evaluations = []
            for i in range(num_evals + 1):
                progress = 1 - (1 - i / num_evals) ** 2
                log_odds = START + prompts + progress * (GAINS[arm] + steady[seed])
                right = at_start if i == 0 else generator.binomial(num_samples, share(log_odds))
                spent = BUDGET * i / num_evals * (1 + 0.01 * number * (i == num_evals))
                costs = {"generated_tokens": spent, "training_rows": 10 * i, "forward_backward_tokens": 3 * spent}
                costs |= {"batches": i, "seconds": spent * (1 - 0.1 * number)}
                found = {"entropy": 1 - 0.5 * progress, "completion_length": 20.0 + i, "num_unscored": 0}
                rewards = [[1.0] * n + [0.0] * (num_samples - n) for n in right.tolist()]
                evaluations.append(costs | found | {"rewards": rewards})
            batch = {"differing": 0.4, "signal": 0.8, "rejected": 0.0, "advantage_mean": 0.0, "advantage_std": 0.5}
            batches = [batch | {"generated_tokens": 10 * i, "reward": i / 10} for i in range(1, 11)]
            about = {"arm": arm, "seed": seed, "cost": "generated_tokens", "amount": BUDGET}
            runs.append(about | {"evaluations": evaluations, "evaluation_seconds": 1.0, "batches": batches})
    settings = {arm: {"num_prompts": 8, "num_generations": 4, "learning_rate": 1e-3} for arm in arms}
    arguments = {"task": "simulated", "dataset_name": None, "reference": arms[0], "arms": settings, "pass_at": [4]}
    arguments |= {"generated_tokens": BUDGET, "seeds": list(range(num_seeds)), "num_evals": num_evals}
    arguments |= {"num_heldout": num_prompts, "num_samples": num_samples, "tuning_tokens": None} | (extra or {})
    return Results(arguments, "python -m benchmarks compare --config simulated.yaml", settings, runs, [], [])
