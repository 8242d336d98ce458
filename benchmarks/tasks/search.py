"""A search in a register, a look-up at a time: several turns, and uncertain in what to look up."""

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerFast

from .task import Task

KINDS = "person town land firm ship club guild farm".split()
RELATIONS = "home head owner rival maker guest".split()
TITLES = "kin seat ward patron crest heir twin base guard source prize oath".split()
NUM_NAMES = 120
NUM_RELATIONS = 4  # that a kind has
NOTHING = "nothing"

# How often the demonstrator is right about what a title means of a kind, and the share of such meanings
RELIABILITIES, SHARES = (0.98, 0.50, 0.25), (0.3, 0.4, 0.3)

_rng = random.Random(15)
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnrstv" for vowel in "aeiou"]
NAMES = _rng.sample([first + second for first in _SYLLABLES for second in _SYLLABLES], NUM_NAMES)
KIND = {name: _rng.choice(KINDS) for name in NAMES}
RELATIONS_OF = {kind: _rng.sample(RELATIONS, NUM_RELATIONS) for kind in KINDS}
REGISTER = {(name, relation): _rng.choice(NAMES) for name in NAMES for relation in RELATIONS_OF[KIND[name]]}
MEANINGS = {(kind, title): _rng.choice(RELATIONS_OF[kind]) for kind in KINDS for title in TITLES}

# For each kind and title, how often the demonstrator is right about its meaning, and what he takes it for if he is not
SLIPS = {
    entry: (
        _rng.choices(RELIABILITIES, SHARES)[0],
        _rng.choice([relation for relation in RELATIONS if relation != right]),
    )
    for entry, right in MEANINGS.items()
}

# Each message begins with its role, and the policy's end with <eos>
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{{ '<agent> ' ~ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ ' ' ~ call.function.name }}"
    "{% for name, value in call.function.arguments.items() %}{{ ' ' ~ name ~ ' ' ~ value }}{% endfor %}"
    "{% endfor %}{{ ' <eos> ' }}"
    "{% elif message.role in ('user', 'tool') %}"
    "{{ '<' ~ message.role ~ '> ' ~ message.content ~ ' ' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<agent>' }}{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<agent>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\b(?P<name>look_up)\b",
            "close": "<eos>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"\b(?P<key>key|relation) (?P<value>\S+)"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<eos>", "content": "text"},
    },
}


def look_up(key: str, relation: str) -> str:
    """
    Look up an entry of the register that another one names.

    Args:
        key: Name of the entry that is looked up.
        relation: What the entry sought is to it.

    Returns:
        Kind and name of the entry sought, or "nothing".
    """
    name = REGISTER.get((key, relation))
    return NOTHING if name is None else f"{KIND[name]} {name}"


@dataclass(frozen=True)
class Search(Task):
    """
    Four look-ups in a register, each of what the one before has found, with two to spare.

    The prompt `town bado : heir seat oath kin =` asks for the kin of the oath of the seat of the heir of bado, a town.
    The answer to it begins with the call `heir look_up key bado relation owner`, whose result may be `firm keru`, and
    ends with `= miso`. What a title means, as a relation, depends on the kind of the entry. The demonstrator knows most
    meanings, and has a wrong idea of the others that he follows now and then. Where that finds nothing, he looks up
    the right relation next, and where it finds a wrong entry, he does not notice.
    """

    name: str = "search"
    max_completion_length: int = 80
    policy_steps: int = 600
    policy_batch_size: int = 32
    policy_learning_rate: float = 1e-2
    num_titles: int = 4

    words: ClassVar = [
        *("<user>", "<agent>", "<tool>", "look_up", "key", "relation", "nothing", ":", "="),
        *(*KINDS, *RELATIONS, *TITLES, *NAMES),
    ]
    tools: ClassVar = (look_up,)
    max_tool_calling_iterations: ClassVar = 6  # the next call, if the demonstrator needs more, is not made

    def problem(self, rng: random.Random) -> dict[str, Any]:
        name, titles = rng.choice(NAMES), rng.sample(TITLES, self.num_titles)
        prompt = f"{KIND[name]} {name} : {' '.join(titles)} ="
        for title in titles:
            name = REGISTER[name, MEANINGS[KIND[name], title]]
        return {"prompt": [{"role": "user", "content": prompt}], "answer": name}

    def demonstrate(self, problem: dict[str, Any], rng: random.Random, is_noisy: bool = True) -> list[dict[str, Any]]:
        (question,) = problem["prompt"]
        kind, name, _, *titles, _ = question["content"].split()
        messages: list[dict[str, Any]] = []
        for title in titles:
            reliability, wrong = SLIPS[kind, title]
            ideas = [MEANINGS[kind, title]]
            if is_noisy and rng.random() > reliability:
                ideas.insert(0, wrong)
            for relation in ideas:
                result = look_up(name, relation)
                messages += [_call(title, name, relation), {"role": "tool", "name": "look_up", "content": result}]
                if result != NOTHING:
                    break
            kind, name = result.split()
        messages.append({"role": "assistant", "content": f"= {name}"})
        return messages[: 2 * self.max_tool_calling_iterations + 1]

    def is_right(self, completion: Any, problem: dict[str, Any]) -> bool:
        last = completion[-1]
        return (
            last["role"] == "assistant" and not last.get("tool_calls") and last["content"] == f"= {problem['answer']}"
        )

    def make_tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = super().make_tokenizer()
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.response_template = RESPONSE_TEMPLATE
        return tokenizer


def _call(title: str, key: str, relation: str) -> dict[str, Any]:
    """The demonstrator's message that names a title, and calls the tool."""
    function = {"name": "look_up", "arguments": {"key": key, "relation": relation}}
    return {"role": "assistant", "content": title, "tool_calls": [{"type": "function", "function": function}]}
