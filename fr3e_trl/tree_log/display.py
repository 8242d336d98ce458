"""A tree of rollouts as text."""

import math
import textwrap
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from ..method.tree import Rollout, State, TokenIds, Tree

WIDTH = 100  # columns of a line
SEGMENT = 160  # characters shown between two anchors

# Written by decoders if the bytes of a token are not a whole character
FRAGMENT = "\ufffd"

# Maximum number of tokens of a character. Longer sequences are shown as fragments
MAX_FRAGMENTS = 8

# Control characters of C0, C1 and text direction, and the symbols that replace them
CONTROLS = {code: 0x2400 + code for code in range(32)} | {0x7F: 0x2421}
CONTROLS |= dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], ord(FRAGMENT))

LEGEND = (
    "S0 is the prompt. The other states are the prompt and a trajectory up to an anchor, from which rollouts branch. "
    "H: entropy of the policy at the anchor, in nats; the higher, the less certain. V: mean reward of the state's "
    "rollouts, if there are several. α, if it is not 1: factor applied to their advantages, below 1 if V rose along "
    "the trajectory and above 1 if it fell. Rejected: its rollouts teach nothing. Same token: the branch begins with "
    "the token that the trajectory has there. ↵: line break."
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
        `str`: The prompt and its rollouts, then each explored base trajectory with its anchors marked, followed under
        tree credit by the advantages of the tokens between anchors. Each anchor has its entropy, V if it has several
        rollouts, α, whether its state was rejected, and the text and score of its rollouts. A score is ✓ or ✗ if every
        reward of the tree is 1 or 0, otherwise the reward.
    """
    lines = ["PROMPT", *_wrap(_shorten(str(tokenizer.decode(tree.prompt_ids)), 4 * SEGMENT)), ""]
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
    """Advantages of a base trajectory's stretches; empty if there is only one."""
    if len(tree.bases[base].credit) < 2:
        return ""
    anchors = {state.position: (i, state) for i, state in enumerate(tree.states) if state.base == base}
    parts, end = [], 0
    for length, _, advantage in tree.bases[base].credit:
        end += length
        where = f"before S{anchors[end][0]}" if end in anchors else "to the end"
        parts.append(f"{advantage:+.2f} {where}")
    return "advantages: " + ", ".join(parts)


def _state_lines(tree: Tree, i: int, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A state: its origin, its value, and its rollouts."""
    state = tree.states[i]
    facts = [] if state.entropy is None else [f"H = {state.entropy:.2f} nats"]
    facts += _value(tree, state)
    facts += [f"α = {state.modulation:.2f}"] if state.modulation != 1 else []
    facts += ["rejected"] if state.rejected else []
    lines = [f"S{i}  {_origin(tree, state)}" + (f": {', '.join(facts)}" if facts else "")]
    explored = {id(tree.bases[s.base]): s.base for s in tree.states if s.base is not None}
    outcomes = _outcomes(state.rollouts, tree)
    for rollout, outcome in zip(state.rollouts, outcomes, strict=True):
        notes = [f"trajectory {explored[id(rollout)] + 1}"] if id(rollout) in explored else []
        if rollout.copy_of is not None:
            notes = [f"copy: trajectory {rollout.copy_of + 1} again, which had no more anchors"]
        elif rollout.differs is False:
            notes.append("same token")
        note = f"  ({', '.join(notes)})" if notes else ""
        text = _text(tokenizer, state.prefix_ids, rollout.token_ids)
        if len(rollout.token_ids) == 0:
            text = f"({rollout.length} tokens, in another process)"
        lines.append(f"    {outcome} {_shorten(text, WIDTH - 5 - len(outcome) - len(note))}{note}")
    return lines


def _origin(tree: Tree, state: State) -> str:
    if state.base is None:
        return "the prompt"
    length = tree.bases[state.base].length
    return f"before token {state.position + 1} of {length}"


def _value(tree: Tree, state: State) -> list[str]:
    """V, and V of the state before it, of states with several rollouts."""
    if not _has_value(state):
        return []
    if state.parent is None or not _has_value(tree.states[state.parent]):
        return [f"V = {state.value:.2f}"]
    return [f"V = {state.value:.2f} (S{state.parent}: {tree.states[state.parent].value:.2f})"]


def _has_value(state: State) -> bool:
    return sum(rollout.copy_of is None for rollout in state.rollouts) > 1


def _outcomes(rollouts: list[Rollout], tree: Tree) -> list[str]:
    """The scores of rollouts, padded to equal width; `?` without a score."""
    scores = [rollout.score.reward for rollout in [*tree.bases, *tree.rollouts]]
    rewards = {reward for reward in scores if not math.isnan(reward)}
    symbols = {1.0: "✓", 0.0: "✗"} if rewards <= {0, 1} else {reward: f"{reward:.3g}" for reward in rewards}
    width = max(map(len, symbols.values()))
    return [symbols.get(rollout.score.reward, "?").rjust(width) for rollout in rollouts]


def _text(tokenizer: PreTrainedTokenizerBase, context_ids: TokenIds, token_ids: TokenIds) -> str:
    """The text that `token_ids` add to `context_ids`."""
    (texts,) = token_texts(tokenizer, [(context_ids, token_ids)])
    return "".join(texts)


def token_texts(tokenizer: PreTrainedTokenizerBase, sequences: list[tuple[TokenIds, TokenIds]]) -> list[list[str]]:
    """
    The text that each token adds to the text before it.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer.
        sequences (`list[tuple[TokenIds, TokenIds]]`):
            For each sequence, the tokens before it, of shape (C,), and its own, of shape (L,).

    Returns:
        `list[list[str]]`: L texts for each sequence. A character of several tokens belongs to the last of them, even
        if the others are before the sequence.
    """
    token_ids = [(before.tolist(), ids.tolist()) for before, ids in sequences]
    singles = sorted({token for before, ids in token_ids for token in [*before[-1:], *ids]})
    alone = dict(zip(singles, _decode(tokenizer, [[token] for token in singles]), strict=True))
    token_ids = [(_context(tokenizer, before, alone), ids) for before, ids in token_ids]
    # Some tokenizers decode a text's first token differently, so what a token adds depends on the one before it
    pairs = sorted({pair for before, ids in token_ids for pair in pairwise([*before, *ids])})
    added = {
        (first, second): text[len(alone[first]) :]
        for (first, second), text in zip(pairs, _decode(tokenizer, [list(pair) for pair in pairs]), strict=True)
    }
    results = []
    for before, ids in token_ids:
        texts: list[str] = []
        fragments: list[int] = []  # tokens of an incomplete character
        for previous, token in zip([None, *before, *ids], [*before, *ids], strict=False):
            if FRAGMENT in alone[token]:
                fragments.append(token)
                (text,) = _decode(tokenizer, [fragments])
                is_whole = FRAGMENT not in text or len(fragments) == MAX_FRAGMENTS
                texts.append(text if is_whole else "")
                fragments = [] if is_whole else fragments
                continue
            if fragments:  # not a character after all
                (texts[-1],) = _decode(tokenizer, [fragments])
                fragments = []
            texts.append(alone[token] if previous is None else added[previous, token])
        if fragments:
            (texts[-1],) = _decode(tokenizer, [fragments])
        results.append(texts[len(before) :])
    return results


def _context(tokenizer: PreTrainedTokenizerBase, before: list[int], alone: dict[int, str]) -> list[int]:
    """The last tokens before a sequence, starting with a whole character. Their texts are added to `alone`."""
    for start in reversed(range(len(before))):
        token = before[start]
        if token not in alone:
            (alone[token],) = _decode(tokenizer, [[token]])
        if FRAGMENT not in alone[token]:
            return before[start:]
    return before


def _decode(tokenizer: PreTrainedTokenizerBase, sequences: list[list[int]]) -> list[str]:
    return tokenizer.batch_decode(sequences, clean_up_tokenization_spaces=False) if sequences else []


def _shorten(text: str, length: int) -> str:
    """
    `text` on one line, without control characters. Beyond `length` characters its middle is cut, since the end has the
    answer.
    """
    text = text.replace("\n", "↵").translate(CONTROLS)
    if len(text) <= length:
        return text
    head = (length - 3) // 2
    return f"{text[:head]} … {text[len(text) - (length - 3 - head) :]}"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ", drop_whitespace=False)
