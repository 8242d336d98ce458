"""A tree of rollouts as text: it shows what was explored."""

import math
import textwrap

from transformers import PreTrainedTokenizerBase

from .method.tree import Rollout, State, TokenIds, Tree

WIDTH = 100  # columns of a line
SEGMENT = 160  # characters shown between two anchors

LEGEND = (
    "S0 is the prompt alone; the other states are the prompt and a trajectory up to an anchor, from where rollouts "
    "branch. H: entropy of the policy at the anchor, in nats: the higher, the less certain. V: mean reward of the "
    "state's rollouts. α, where it is not 1: factor on their advantages, below 1 where V rose along the trajectory and "
    "above 1 where it fell. Rejected: there is nothing to learn from its rollouts. ↵: line break."
)


def render_tree(tree: Tree, tokenizer: PreTrainedTokenizerBase) -> str:
    """
    Show what was explored from a prompt, as plain text of at most 100 columns. Long texts are shortened.

    Args:
        tree (`Tree`):
            What to show, for example one of [`FR3ETrainer`]'s `trees`.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer of the policy.

    Returns:
        `str`: The prompt and its rollouts, then each explored base trajectory. Its text has the anchors marked. Under
        tree credit the advantages of the tokens between anchors follow. Each anchor has its entropy, V, α, whether its
        state was rejected, and what its rollouts wrote and scored. A score is ✓ or ✗ if every reward of the tree is 1
        or 0, otherwise the reward.
    """
    lines = ["PROMPT", *_wrap(_shorten(tokenizer.decode(tree.prompt_ids), 4 * SEGMENT)), ""]
    lines += _state_lines(tree, 0, tokenizer)
    for base in dict.fromkeys(state.base for state in tree.states if state.base is not None):
        lines += ["", *_base_lines(tree, base, tokenizer)]
        for i, state in enumerate(tree.states):
            if state.base == base:
                lines += ["", *_state_lines(tree, i, tokenizer)]
    return "\n".join([*lines, "", *textwrap.wrap(LEGEND, WIDTH)])


def _base_lines(tree: Tree, base: int, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A base trajectory's text, with ⟦state: token⟧ for each anchor."""
    token_ids = tree.bases[base].token_ids
    text, start = "", 0
    for i, state in enumerate(tree.states):
        if state.base == base:
            anchor = state.position
            text += _shorten(_text(tokenizer, token_ids[:start], token_ids[start:anchor]), SEGMENT)
            text += f"⟦S{i}: {_shorten(_text(tokenizer, token_ids[:anchor], token_ids[anchor : anchor + 1]), SEGMENT)}⟧"
            start = anchor + 1
    text += _shorten(_text(tokenizer, token_ids[:start], token_ids[start:]), SEGMENT)
    outcome = _outcomes([tree.bases[base]], tree)[0]
    return [
        f"TRAJECTORY {base + 1} {outcome}  explored: rollouts branch before the tokens in ⟦ ⟧",
        *_wrap(text),
        *_wrap(_credit(tree, base)),
    ]


def _credit(tree: Tree, base: int) -> str:
    """Advantages of a base trajectory's stretches; nothing if it is one."""
    if len(tree.bases[base].credit) < 2:
        return ""
    ends = [f"before S{i}" for i, state in enumerate(tree.states) if state.base == base] + ["to the end"]
    advantages = [advantage for _, _, advantage in tree.bases[base].credit]
    return "advantages: " + ", ".join(f"{a:+.2f} {end}" for a, end in zip(advantages, ends, strict=True))


def _state_lines(tree: Tree, i: int, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A state: its origin, its value, and its rollouts."""
    state = tree.states[i]
    lines = [f"S{i}  {_origin(tree, state)}V = {_value(tree, state)}"]
    if state.modulation != 1:
        lines[0] += f", α = {state.modulation:.2f}"
    if state.rejected:
        lines[0] += ", rejected"
    explored = {id(tree.bases[s.base]): s.base for s in tree.states if s.base is not None}
    outcomes = _outcomes(state.rollouts, tree)
    for rollout, outcome in zip(state.rollouts, outcomes, strict=True):
        note = f"  (trajectory {explored[id(rollout)] + 1})" if id(rollout) in explored else ""
        if rollout.copy_of is not None:
            note = f"  (trajectory {rollout.copy_of + 1} again, which had no more anchors)"
        text = _text(tokenizer, state.prefix_ids, rollout.token_ids)
        if len(rollout.token_ids) == 0:
            text = f"({rollout.length} tokens, in another process)"
        lines.append(f"    {outcome} {_shorten(text, WIDTH - 5 - len(outcome) - len(note))}{note}")
    return lines


def _origin(tree: Tree, state: State) -> str:
    if state.base is None:
        return "the prompt: "
    length = tree.bases[state.base].length
    return f"before token {state.position + 1} of {length}: H = {state.entropy:.2f} nats, "


def _value(tree: Tree, state: State) -> str:
    if state.parent is None:
        return f"{state.value:.2f}"
    return f"{state.value:.2f} (S{state.parent}: {tree.states[state.parent].value:.2f})"


def _outcomes(rollouts: list[Rollout], tree: Tree) -> list[str]:
    """The scores of rollouts, padded to equal width. `?` if no reward function scored one."""
    everything = [*tree.bases, *(rollout for state in tree.states for rollout in state.rollouts)]
    scored = {rollout.score.reward for rollout in everything if not math.isnan(rollout.score.reward)}
    symbols = {1.0: "✓", 0.0: "✗"} if scored <= {0, 1} else {reward: f"{reward:.3g}" for reward in scored}
    width = max(map(len, symbols.values()))
    return [symbols.get(rollout.score.reward, "?").rjust(width) for rollout in rollouts]


def _text(tokenizer: PreTrainedTokenizerBase, context_ids: TokenIds, token_ids: TokenIds) -> str:
    """The text that `token_ids` add to `context_ids`. Some tokenizers decode a text's first token differently."""
    context = context_ids.tolist()
    return tokenizer.decode(context + token_ids.tolist())[len(tokenizer.decode(context)) :]


def _shorten(text: str, length: int) -> str:
    """`text` on one line. If it is longer than `length` its middle is cut, because its end has the answer."""
    text = text.replace("\n", "↵")
    if len(text) <= length:
        return text
    head = (length - 3) // 2
    return f"{text[:head]} … {text[len(text) - (length - 3 - head) :]}"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ", drop_whitespace=False)
