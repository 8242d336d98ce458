"""
The format of logged trees.

The trees of a step are in `trees/step-N.json.gz` of the output directory. N is the first step that trains on them:

    step            N
    num_trees       number of trees of that step, of which the first MAX_TREES are logged
    reward_funcs    names of the reward functions
    credit          "rollout" or "tree"
    trees           for each:
        prompt          text of each of its tokens, in order
        has_images      true if it contains images
        states          S_0, then the anchors', each with
            base, position  its base trajectory, and how many of that one's tokens precede it; null and 0 for S_0
            parent          the state before it in its chain, null for S_0
            entropy         of the policy at the anchor, in nats; null for S_0
            value, modulation, rejected     V, α, and whether it was left out of the loss
            rollouts        indices of its rollouts
        bases           indices of the base trajectories, which are among S_0's rollouts if they are reused
        rollouts        each with
            tokens          text of each of its own tokens, without the state's prefix. A character of several tokens
                            belongs to the last of them, even if the others are in the prefix
            entropies       entropy at each token of a base trajectory; null at tokens of tools
            tools           stretches of tokens of tools: first token, and the one after the last
            length          number of its tokens
            reward, rewards the weighted sum, and by reward function; null if it was not scored
            advantage       null for a base trajectory that is not reused; under tree credit the mean over its tokens
            in_loss         whether it was in this batch's loss. With refill, a row may not fit into the batch
            copies          for a base trajectory: number of missing branches that it also counts for
            num_rows        under tree credit: number of rows that it counts as, including its copies
            differs         for a branch: whether its first token differs from the base trajectory's token there
            credit          stretches of its tokens: number of tokens, weight and advantage of each

Unknown values are null. `trees/metrics.jsonl` has the trainer's logs, one entry per line, each with its
`step`.
"""

import gzip
import json
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..method.rows import Row
from ..method.tree import Rollout, TokenIds, Tree
from ..tree_log.display import token_texts

FOLDER = "trees"
METRICS = "metrics.jsonl"
PAGE = "trees.html"
MAX_TREES = 16  # of a step


def record_trees(
    trees: list[Tree], rows: list[Row], tokenizer: PreTrainedTokenizerBase, credit: str
) -> list[dict[str, Any]]:
    """
    The first trees of a step in plain values, which are `None` if another process has them.

    Args:
        trees (`list[Tree]`):
            Finished trees of the step.
        rows (`list[Row]`):
            Their rows, with advantages.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer of the policy.
        credit (`str`):
            The credit rule. With `"tree"`, a base trajectory counts for its copies too.
    """
    row_by_id = {id(row.rollout): row for row in rows}
    trees = trees[:MAX_TREES]
    rollouts = [_rollouts(tree) for tree in trees]
    sequences: list[tuple[TokenIds, TokenIds]] = []
    for tree, tree_rollouts in zip(trees, rollouts, strict=True):
        sequences.append((tree.prompt_ids[:0], tree.prompt_ids))
        for rollout, prefix in tree_rollouts:
            before, row = [tree.prompt_ids, prefix], row_by_id.get(id(rollout))
            if row is not None and len(row.prompt_ids):  # only the row has the prefix if refill has moved it here
                before = [row.prompt_ids, row.prefix_ids]
            sequences.append((np.concatenate(before), rollout.token_ids))
    texts = iter(token_texts(tokenizer, sequences))
    return [
        {
            "prompt": next(texts) or None,
            "has_images": True if tree.multimodal else None,
            **_plain(tree, [r for r, _ in tree_rollouts], row_by_id, texts, credit),
        }
        for tree, tree_rollouts in zip(trees, rollouts, strict=True)
    ]


def _rollouts(tree: Tree) -> list[tuple[Rollout, TokenIds]]:
    """The rollouts of a tree's states with their prefixes, then base trajectories that are not among them."""
    rollouts = [(r, state.prefix_ids) for state in tree.states for r in state.rollouts if r.copy_of is None]
    included = {id(rollout) for rollout, _ in rollouts}
    return rollouts + [(base, base.token_ids[:0]) for base in tree.bases if id(base) not in included]


def _plain(
    tree: Tree, rollouts: list[Rollout], row_by_id: dict[int, Row], texts: Iterator[list[str]], credit: str
) -> dict[str, Any]:
    copies = Counter(rollout.copy_of for rollout in tree.rollouts if rollout.copy_of is not None)
    num_copies = {id(tree.bases[b]): num for b, num in copies.items()}
    index = {id(rollout): i for i, rollout in enumerate(rollouts)}
    entropies = {id(base): values for base, values in zip(tree.bases, tree.entropies, strict=True)}
    return {
        "states": [
            {
                "base": None if state.base is None else index[id(tree.bases[state.base])],
                "position": state.position,
                "parent": state.parent,
                "entropy": _rounded(state.entropy),
                "value": _significant(state.value),
                "modulation": _significant(state.modulation),
                "rejected": state.rejected,
                "rollouts": [index[id(rollout)] for rollout in state.rollouts if rollout.copy_of is None],
            }
            for state in tree.states
        ],
        "bases": [index[id(base)] for base in tree.bases],
        "rollouts": [
            _plain_rollout(rollout, row_by_id.get(id(rollout)), entropies.get(id(rollout)), next(texts))
            | {
                "copies": num_copies.get(id(rollout), 0),
                "num_rows": 1 + num_copies.get(id(rollout), 0) if credit == "tree" else None,
            }
            for rollout in rollouts
        ],
    }


def _plain_rollout(rollout: Rollout, row: Row | None, entropies: Any, tokens: list[str]) -> dict[str, Any]:
    return {
        "tokens": tokens or None,
        "entropies": None if entropies is None else [_rounded(entropy) for entropy in entropies.tolist()],
        "tools": None if rollout.mask is None else _stretches(~rollout.mask),
        "length": rollout.length,
        "reward": _significant(rollout.score.reward),
        "rewards": [_significant(reward) for reward in rollout.score.rewards],
        "advantage": None if row is None else _significant(row.advantage),
        "in_loss": row is not None and row.teaches,
        "differs": rollout.differs,
        "credit": [[n, _significant(weight), _significant(advantage)] for n, weight, advantage in rollout.credit],
    }


def _stretches(mask: Any) -> list[list[int]]:
    """First position of each stretch where `mask` is true, and the position after its last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    return edges.reshape(-1, 2).tolist()


def _rounded(x: float | None) -> float | None:
    return None if x is None or not math.isfinite(x) else round(x, 3)


def _significant(x: float) -> float | None:
    return float(f"{x:.4g}") if math.isfinite(x) else None


def merge_records(records: list[Any]) -> Any:
    """Merge the records of several processes. A record has `None` for values that its process does not have."""
    known = [record for record in records if record is not None]
    if not known:
        return None
    if isinstance(known[0], dict):
        return {name: merge_records([record[name] for record in known]) for name in known[0]}
    if isinstance(known[0], list) and known[0] and isinstance(known[0][0], dict):
        return [merge_records(list(records)) for records in zip(*known, strict=True)]
    return known[0]


def step_path(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step}.json.gz"


def logged_steps(run: Path) -> list[int]:
    """The steps whose trees a run has logged, in order."""
    names = [re.fullmatch(r"step-(\d+)\.json\.gz", path.name) for path in (run / FOLDER).glob("step-*.json.gz")]
    return sorted(int(name[1]) for name in names if name is not None)


def write_step(run: Path, record: dict[str, Any]) -> None:
    """Log a step's trees atomically."""
    path = step_path(run, record["step"])
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(record, separators=(",", ":")).encode()
    write_whole(path, gzip.compress(data, compresslevel=6, mtime=0))


def read_step(run: Path, step: int) -> dict[str, Any]:
    """
    The trees of a step.

    Raises:
        ValueError: The file is damaged.
    """
    path = step_path(run, step)
    data = path.read_bytes()
    try:
        record = json.loads(gzip.decompress(data))
        _ = record["trees"], record["reward_funcs"]
    except (EOFError, KeyError, OSError, TypeError, ValueError, zlib.error) as error:
        raise ValueError(
            f"{path} is not a complete tree log ({type(error).__name__}: {error}). Move it away to make the "
            "page without it."
        ) from error
    return record


def write_logs(path: Path, logs: list[dict[str, Any]]) -> None:
    """Write the trainer's logs, one per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(map(_line, logs)).encode())


def append_log(path: Path, log: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(_line(log))


def _line(log: dict[str, Any]) -> str:
    """An entry as JSON, with null for NaN and infinity."""
    finite = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in log.items()}
    return json.dumps(finite, default=str) + "\n"


def is_number(value: Any) -> bool:
    """Whether a logged value is a finite number. TRL logs `None` without a score."""
    return isinstance(value, int | float) and math.isfinite(value)


def evaluated(entry: dict[str, Any]) -> str | None:
    """The evaluation set of a log entry, if there are several. TRL's `eval_reward`, for example, does not name it."""
    names = [re.fullmatch("eval_(.+)_runtime", name) for name in entry]
    return next((found[1] for found in names if found is not None), None)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """
    The trainer's logs, without an incomplete last line.

    Raises:
        ValueError: A line is damaged.
    """
    path = run / FOLDER / METRICS
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    entries = []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            continue
        try:
            entries.append({**json.loads(line)})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}, is not an entry of a log ({error}). Remove that line.") from error
    return entries


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    os.replace(part, path)


def set_aside(run: Path, step: int) -> Path | None:
    """
    Move the logs of an earlier run after a step to a folder of their own: `trees-1`, or the next number.

    Args:
        run (`Path`):
            Output directory.
        step (`int`):
            The step that the run resumes from. At step 0, all logs and the page belong to an earlier run.

    Returns:
        `Path`, *optional*: The folder, if there was anything to move.
    """
    moved = [step_path(run, logged) for logged in logged_steps(run) if logged > step]
    moved += [run / FOLDER / METRICS] if _has_metrics_after(run, step) else []
    moved += [run / PAGE] if step == 0 and (run / PAGE).exists() else []
    if not moved:
        return None
    folder = next(path for i in count(1) if not (path := run / f"{FOLDER}-{i}").exists())
    folder.mkdir()
    for path in moved:
        path.rename(folder / path.name)
    return folder


def _has_metrics_after(run: Path, step: int) -> bool:
    try:
        return any(entry.get("step", 0) > step for entry in read_metrics(run))
    except ValueError:
        return True  # unreadable, so possible
