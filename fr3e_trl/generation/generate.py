"""Sampling with transformers' `generate`."""

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import torch
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ..method.sampling import Sample, SamplingRequest
from ..processes import in_every_process
from .growing_probe import obstacle_to_growing, special_tokens

logger = logging.getLogger(__name__)

# Enters generation mode, as TRL does, and yields the model to generate with.
GenerationModel = Callable[[], AbstractContextManager[Any]]

# Makes of images what the model is called with for them: (messages of each row's prompt, images that tools returned
# to it, tokens (B, L), the column after each prompt) to tensors, of which those of tokens are of that shape.
ImageInputs = Callable[[list[Any], list[list[Any]], torch.Tensor, list[int]], dict[str, Any]]


class DecodingSteps(Protocol):
    """What a decoding loop of one's own takes from transformers' `generate`; see `decoding.py`."""

    def run(self, model: Any, loop: Callable[..., torch.Tensor], inputs: dict[str, Any]) -> torch.Tensor:
        """Have `generate` prepare everything from `inputs`, call `loop` in the place of its own, and return its ids."""

    def sample(
        self, model: Any, input_ids: torch.Tensor, logits_processor: LogitsProcessorList, arguments: dict[str, Any]
    ) -> torch.Tensor:
        """The loop of `generate` itself, with the other arguments that it calls one with."""

    def unchanged(self, model: Any, device: torch.device) -> AbstractContextManager[None]:
        """Put back what the model's modules keep to themselves, and the generators of random numbers."""

    def first_inputs(self, model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """What the model is called with for the prompts."""

    def next_inputs(self, model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """What the model is called with for the token of each row that came last."""

    def updated(self, model: Any, outputs: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """The model's keyword arguments after a step, with its cache."""


# How many logits are kept until log-probs and entropies are made of them, beside those of one step: 16 MiB
MAX_LOGITS = 2**22

# Settings that rollouts can leave a row under while it grows, where they have these values: no state of a row's own
BY_ROW: dict[str, tuple[Any, ...]] = {
    "cache_implementation": (None, "dynamic", "dynamic_full"),
    "guidance_scale": (None, 1),
    "repetition_penalty": (None, 1),
    "use_cache": (None, True),
    "watermarking_config": (None,),
}


class GenerateSampler:
    """
    Draws with transformers' `generate`: all requests as one left-padded batch.

    The batch is as wide as the longest row, prefix and budget together, and takes as many steps as the largest budget:
    no more of either than if all were drawn from their prompts. All rows begin at one width, with what fits there of
    their prefixes, and the rest of a longer prefix is forced token by token while the others sample. Prompts with
    images fit there as a whole, and so do prefixes with those of tools, since the model takes images with its first
    tokens. All prompts of a call have some, or none.

    Args:
        generation_model (`GenerationModel`):
            Context manager that yields the model.
        generation_config (`Callable`):
            Returns the sampling settings of a call, a `GenerationConfig`; temperature and budget are those of requests.
            Its `min_new_tokens` counts from the prompt, like that of a completion drawn at once.
        device (`torch.device`):
            Where the model computes: not always where its weights are.
        decoding (`DecodingSteps`):
            The steps of `generate`.
        image_inputs (`ImageInputs`, *optional*):
            What the model is called with for images. Without it, it takes none.
        may_grow (`bool`):
            Whether rollouts may leave base trajectories that still grow, where the model can have it.
        dtype (`torch.dtype`, *optional*):
            What the model computes in. By default, that of its weights.
    """

    def __init__(
        self,
        generation_model: GenerationModel,
        generation_config: Callable[[], GenerationConfig],
        device: torch.device,
        decoding: DecodingSteps,
        image_inputs: ImageInputs | None = None,
        may_grow: bool = False,
        dtype: torch.dtype | None = None,
    ):
        self.generation_model = generation_model
        self.generation_config = generation_config
        self.device = device
        self.decoding = decoding
        self.image_inputs = image_inputs
        self.dtype = dtype
        self.may_grow = may_grow

    def sample(self, requests: Sequence[SamplingRequest]) -> list[list[Sample]]:
        drawn = iter(self.draw(requests, self.grows))
        return [[next(drawn) for _ in range(request.num_samples)] for request in requests]

    def _config(self) -> GenerationConfig:
        """A copy of the settings as they are now, with a list of the tokens that end a completion."""
        config = copy.copy(self.generation_config())
        if isinstance(config.eos_token_id, int):
            config.eos_token_id = [config.eos_token_id]
        return config

    @property
    def grows(self) -> bool:
        """
        Whether rollouts leave base trajectories that still grow. Otherwise they are drawn in a second round.

        The settings decide, and the model by a trial. All processes must ask for the first time together, and all
        decide alike.
        """
        config = self.generation_config()
        allows = all(getattr(config, name, None) in allowed for name, allowed in BY_ROW.items())
        return self.may_grow and allows and self._model_grows

    @functools.cached_property
    def _model_grows(self) -> bool:
        obstacle = next(filter(None, in_every_process(self._obstacle_to_growing)), None)
        if obstacle is not None:
            logger.warning("Rollouts are drawn in a second round, after their base trajectories: %s.", obstacle)
        return obstacle is None

    def _obstacle_to_growing(self) -> str | None:
        config = self._config()
        config.min_new_tokens = None
        with self.generation_model() as model:
            if config.use_cache is None and model.generation_config.use_cache is False:
                return "the model's generation_config has use_cache=False (set generation_kwargs={'use_cache': True})"
            config.suppress_tokens = special_tokens(model.config, config.eos_token_id)
            trial = GenerateSampler(lambda: nullcontext(model), lambda: config, self.device, self.decoding)
            with self.decoding.unchanged(model, self.device):
                return obstacle_to_growing(model, trial.draw, self.device, self.dtype or model.dtype)

    def draw(self, requests: Sequence[SamplingRequest], grows: bool) -> list[Sample]:
        """
        Draw samples.

        Args:
            requests (`Sequence[SamplingRequest]`):
                What to continue.
            grows (`bool`):
                Whether rollouts may leave samples that still grow.

        Returns:
            `list[Sample]`: The samples of all requests, end to end. If they grow, each has the rollouts of as many
            anchors as its share, or fewer.
        """
        rows = [request for request in requests for _ in range(request.num_samples)]
        shares = [share for request in requests for share in _shares(request)]
        if not rows:
            return []
        config = self._config()
        width = _initial_width(requests, config.eos_token_id)
        begins = [max(width, len(row.prefix_ids)) for row in rows]  # the columns at which sampling begins
        ends = [begin + row.max_new_tokens for begin, row in zip(begins, rows, strict=True)]
        known = np.full((len(rows), max(begins)), -1)
        for of_row, begin, row in zip(known, begins, rows, strict=True):
            of_row[begin - len(row.prefix_ids) : begin] = row.prefix_ids
        known_ids = torch.from_numpy(known)
        min_new_tokens = config.min_new_tokens or 0
        min_lengths = [
            begin - row.num_sampled_before + min_new_tokens if min_new_tokens else 0
            for begin, row in zip(begins, rows, strict=True)
        ]
        config.max_new_tokens = max(ends) - width
        config.min_new_tokens, config.temperature = 0, 1.0  # each row has its own
        temperatures = torch.tensor([row.temperature for row in rows], device=self.device)
        processor = _RowSampling(
            known_ids.to(self.device),
            temperatures,
            torch.tensor(min_lengths, device=self.device),
            torch.tensor(config.eos_token_id, device=self.device),
        )
        is_known = known_ids[:, :width] >= 0
        row_ends = _RowEnds(torch.tensor(ends, device=self.device))
        inputs: dict[str, Any] = {
            "input_ids": known_ids[:, :width].where(is_known, config.pad_token_id).to(self.device),
            "attention_mask": is_known.long().to(self.device),
            "generation_config": config,
            "logits_processor": LogitsProcessorList([processor]),
        }
        has_images = any(row.multimodal is not None or row.tool_images for row in rows)
        if has_images:
            assert self.image_inputs is not None
            prompt_ends = [begin - row.num_sampled_before for begin, row in zip(begins, rows, strict=True)]
            prompts, tool_images = [row.multimodal or [] for row in rows], [row.tool_images for row in rows]
            inputs |= self.image_inputs(prompts, tool_images, inputs["input_ids"], prompt_ends)
        # With images, a row has a state of its own: some models keep each row's positions to themselves
        if grows and any(shares) and not has_images:
            growing = _GrowingRows(rows, shares, begins, processor, row_ends, self.decoding)
            inputs["stopping_criteria"] = StoppingCriteriaList([row_ends])
            with self.generation_model() as model:
                self.decoding.run(model, growing, inputs)
            return growing.samples()
        record = _PolicyRecord(temperatures, self.decoding)
        inputs["stopping_criteria"] = StoppingCriteriaList([row_ends])
        with self.generation_model() as model:
            output_ids = self.decoding.run(model, record.sample, inputs)
        statistics = record.statistics(output_ids)
        samples = []
        output = output_ids.cpu().numpy()
        is_eos = np.isin(output, config.eos_token_id)
        for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            token_ids = _until_eos(output[i, begin:end], is_eos[i, begin:end])
            columns = slice(begin - width, begin - width + len(token_ids))
            logprobs, entropies = (of_row[columns].copy() for of_row in statistics[i])
            samples.append(Sample(token_ids, logprobs, entropies))
        return samples


def _initial_width(requests: Sequence[SamplingRequest], eos_token_ids: list[int]) -> int:
    """
    The width that a batch begins with: the smallest from which it takes no more steps than the largest budget.

    It becomes as wide as its longest row then. But whatever has an EOS in it is there at the beginning, as `generate`
    takes a row for finished where it is forced: a prompt may have one, of a chat's earlier turns. So are images.
    """
    width = max(len(r.prefix_ids) + r.max_new_tokens for r in requests) - max(r.max_new_tokens for r in requests)
    there = [len(r.prefix_ids) - r.num_sampled_before for r in requests if r.multimodal is not None]
    there += [len(r.prefix_ids) for r in requests if r.tool_images]
    prefixes = [r.prefix_ids for r in requests]
    is_eos = np.isin(np.concatenate(prefixes), eos_token_ids)
    if is_eos.any():
        there.append(int(np.concatenate([np.arange(len(ids)) for ids in prefixes])[is_eos].max()) + 1)
    return max([width, *there])


def _shares(request: SamplingRequest) -> Sequence[int]:
    """The most anchors of each sample that rollouts may leave while it grows."""
    if request.branching is None or request.rule is None:
        return [0] * request.num_samples
    return request.branching.shares


def _until_eos(token_ids: np.ndarray, is_eos: np.ndarray) -> np.ndarray:
    """A copy that ends with the first EOS: what follows is padding."""
    return token_ids[: is_eos.argmax() + 1 if is_eos.any() else None].astype(np.int32)


class _RowSampling(LogitsProcessor):
    """
    Scores of rows that are sampled each in its own way, or not yet, as long as their next token is known.

    `generate` calls it in the place where it would scale by the temperature: after penalties, before top-k and others.

    Args:
        known_ids (`torch.Tensor`):
            Tokens of the first columns, of shape (B, L), -1 where a row has none or is sampled.
        temperatures (`torch.Tensor`):
            Of shape (B,).
        min_lengths (`torch.Tensor`):
            Columns that a row must have before an EOS, of shape (B,).
        eos_token_ids (`torch.Tensor`):
            Of shape (E,).
    """

    def __init__(
        self,
        known_ids: torch.Tensor,
        temperatures: torch.Tensor,
        min_lengths: torch.Tensor,
        eos_token_ids: torch.Tensor,
    ):
        self.known_ids = known_ids
        self.temperatures = temperatures
        self.min_lengths = min_lengths
        self.longest_minimum = int(min_lengths.max())
        self.eos_token_ids = eos_token_ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        column = input_ids.shape[1]
        scores = scores / self.temperatures[:, None]
        if column < self.longest_minimum:
            too_short = (column < self.min_lengths)[:, None]
            scores[:, self.eos_token_ids] = scores[:, self.eos_token_ids].masked_fill(too_short, -torch.inf)
        if column >= self.known_ids.shape[1]:
            return scores
        token_ids = self.known_ids[:, column, None]
        is_known = token_ids >= 0
        index = token_ids.clamp(min=0)
        score = scores.gather(1, index).masked_fill(is_known, 0.0)
        return scores.masked_fill_(is_known, -torch.inf).scatter_(1, index, score)

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these of the present rows."""
        self.known_ids, self.min_lengths = self.known_ids[rows], self.min_lengths[rows]
        self.temperatures = self.temperatures[rows]


class _RowEnds(StoppingCriteria):
    """Stops each row of a batch at its own number of columns, `ends` (B,)."""

    def __init__(self, ends: torch.Tensor):
        self.ends = ends

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


class _PolicyRecord(LogitsProcessor):
    """
    Keeps how likely each token was that a row went on with, and the entropy there: two numbers a token.

    They are the policy's, at the row's temperature: of logits that no penalty has changed and nothing has cut off. So
    it comes before all other processors, whichever module computes the logits, compiled or not.

    Args:
        temperatures (`torch.Tensor`):
            Of shape (B,).
        decoding (`DecodingSteps`):
            The steps of `generate`.
    """

    def __init__(self, temperatures: torch.Tensor, decoding: DecodingSteps):
        self.temperatures = temperatures
        self.decoding = decoding
        self.logits: list[torch.Tensor] = []  # of the last steps, of shape (B, V)
        self.column = 0  # of the token that the first of them are for
        self.columns: list[torch.Tensor] = []  # of the steps before, of shape (B, 2, n)

    def sample(self, model: Any, input_ids: torch.Tensor, logits_processor: LogitsProcessorList, **kwargs: Any) -> Any:
        """Sample as `generate` does, and keep them."""
        return self.decoding.sample(model, input_ids, LogitsProcessorList([self, *logits_processor]), kwargs)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if len(self.logits) * scores.numel() >= MAX_LOGITS:
            self._reduce(input_ids)
        if not self.logits:
            self.column = input_ids.shape[1]
        self.logits.append(scores.clone())
        return scores

    def _reduce(self, token_ids: torch.Tensor) -> None:
        """Two numbers in the place of each vocabulary. Many at a time: where they are small, it is calls that cost."""
        token_ids = token_ids[:, self.column :]  # `generate` may undo its last steps
        logits, self.logits = self.logits[: token_ids.shape[1]], []
        if logits:
            size = max(MAX_LOGITS // (len(logits) * logits[0].shape[1]), 1)  # rows: of many, one step may be large
            parts = zip(*(part.split(size) for part in (*logits, self.temperatures, token_ids)), strict=True)
            reduced = [
                _statistics(*_policy(torch.stack(steps, 1), temperatures), ids) for *steps, temperatures, ids in parts
            ]
            self.columns.append(torch.cat(reduced))

    def statistics(self, output_ids: torch.Tensor) -> np.ndarray:
        """Of shape (B, 2, L): log-probabilities, and entropies in nats, of all columns that were generated."""
        self._reduce(output_ids)
        return torch.cat(self.columns, dim=2).cpu().numpy()


def _policy(logits: torch.Tensor, temperatures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (B, L, V) and entropies (B, L) of the policy, from its logits, at each row's temperature."""
    logprobs = (logits.float() / temperatures[:, None, None]).log_softmax(2)
    probs = logprobs.exp()
    return logprobs, torch.special.entr(probs, out=probs).sum(2)


def _statistics(logprobs: torch.Tensor, entropies: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """What is kept of them, of shape (B, 2, L), once the tokens (B, L) are known."""
    return torch.stack([logprobs.gather(2, token_ids[:, :, None]).squeeze(2), entropies], 1)


@dataclass(eq=False)
class _GrowingRow:
    """
    A row while it grows: where its sampling began, how many anchors it may have, what left it where, and in the end its
    tokens, their log-probs and the entropies.
    """

    request: SamplingRequest
    begin: int
    share: int = 0
    branches: dict[int, list["_GrowingRow"]] = field(default_factory=dict)
    drawn: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    @property
    def sample(self) -> Sample:
        """What it has become, with what left it."""
        assert self.drawn is not None
        branches = {position: [row.sample for row in rows] for position, rows in self.branches.items()}
        return Sample(*self.drawn, branches)


class _GrowingRows:
    """
    A decoding loop for `generate` in which rollouts leave their base trajectories while these grow.

    A rollout that leaves is one more row of the batch from that column on, and a row that has ended is none any more:
    the loop takes as many steps as the longest row, and computes no other rows than those.

    Args:
        rows (`list[SamplingRequest]`):
            Of each row, its request.
        shares, begins (`list[int]`):
            Of each row, how many anchors it may have, and the column at which sampling begins.
        processor ([`_RowSampling`]), ends ([`_RowEnds`]):
            Those parts of processing and stopping that know the rows.
        decoding (`DecodingSteps`):
            The steps of `generate`.
    """

    def __init__(
        self,
        rows: list[SamplingRequest],
        shares: list[int],
        begins: list[int],
        processor: _RowSampling,
        ends: _RowEnds,
        decoding: DecodingSteps,
    ):
        self.roots = [_GrowingRow(*of_row) for of_row in zip(rows, begins, shares, strict=True)]
        self.live = list(self.roots)
        self.processor = processor
        self.ends = ends
        self.decoding = decoding
        # Of the present rows: which of the rules decides where rollouts leave, -1 where none may, and the first column
        rules = [row.rule if share else None for row, share in zip(rows, shares, strict=True)]
        self.rules = [rule for rule in dict.fromkeys(rules) if rule is not None]
        device = ends.ends.device
        self.rule_of = torch.tensor([self.rules.index(rule) if rule else -1 for rule in rules], device=device)
        self.begins = torch.tensor(begins, device=device)

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        width = input_ids.shape[1]
        statistics = torch.empty(len(input_ids), 2, 0, device=input_ids.device)
        if model_kwargs.get("attention_mask") is None:  # `generate` drops one that masks nothing
            model_kwargs["attention_mask"] = torch.ones_like(input_ids)
        inputs = self.decoding.first_inputs(model, input_ids, model_kwargs)
        while True:
            outputs = model(**inputs, return_dict=True)
            model_kwargs = self.decoding.updated(model, outputs, model_kwargs)
            logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)
            del outputs  # logits of all rows, a second time
            logprobs, entropies = _policy(logits[:, None], self.processor.temperatures)
            probs = logits_processor(input_ids, logits).softmax(1)
            leaving = self._leave(input_ids.shape[1], entropies[:, 0])
            if leaving:
                rows = torch.tensor([*range(len(input_ids)), *leaving], device=input_ids.device)
                input_ids, statistics, probs = input_ids[rows], statistics[rows], probs[rows]
                model_kwargs = self._select(rows, model_kwargs)
                self.rule_of[-len(leaving) :], self.begins[-len(leaving) :] = -1, input_ids.shape[1]
                logprobs, entropies = logprobs[rows], entropies[rows]
            token_ids = torch.multinomial(probs, 1)
            input_ids = torch.cat([input_ids, token_ids], 1)
            statistics = torch.cat([statistics, _statistics(logprobs, entropies, token_ids)], 2)
            is_done = stopping_criteria(input_ids, None)
            if is_done.any():
                for i in is_done.nonzero().flatten().tolist():
                    self._end(i, input_ids[i], statistics[i, :, self.live[i].begin - width :], generation_config)
                rows = (~is_done).nonzero().flatten()
                if not len(rows):
                    return input_ids
                self.live = [row for row in self.live if row.drawn is None]
                input_ids, statistics = input_ids[rows], statistics[rows]
                model_kwargs = self._select(rows, model_kwargs)
            inputs = self.decoding.next_inputs(model, input_ids, model_kwargs)

    def _leave(self, column: int, entropies: torch.Tensor) -> list[int]:
        """The rows that rollouts leave before this column's token, as often as they do; these rollouts are added."""
        leaving = []
        uncertain = torch.zeros_like(self.rule_of, dtype=torch.bool)
        for k, rule in enumerate(self.rules):
            uncertain |= (self.rule_of == k) & rule.is_uncertain(entropies, column - self.begins)
        for i in uncertain.nonzero().flatten().tolist():
            row, position = self.live[i], column - self.live[i].begin
            branching = row.request.branching
            assert branching is not None and branching.rule is not None
            if not branching.rule.takes(position, row.branches):
                continue
            row.branches[position] = [_GrowingRow(row.request, column) for _ in range(branching.num_rollouts)]
            self.live += row.branches[position]
            leaving += [i] * branching.num_rollouts
            if len(row.branches) == row.share:
                self.rule_of[i] = -1
        return leaving

    def _select(self, rows: torch.Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Go on with these of the present rows, and what the model is called with."""
        num_rows = len(self.rule_of)
        self.rule_of, self.begins, self.ends.ends = self.rule_of[rows], self.begins[rows], self.ends.ends[rows]
        self.processor.select(rows)
        for value in model_kwargs.values():
            if isinstance(value, Cache):
                value.reorder_cache(cast(torch.LongTensor, rows))

        def selected(name: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if name == "position_ids" and value.dim() == 3:  # several positions a token, in the first dimension
                return value[:, rows]
            return value[rows] if value.shape[:1] == (num_rows,) else value

        return {name: selected(name, value) for name, value in model_kwargs.items()}

    def _end(self, i: int, input_ids: torch.Tensor, statistics: torch.Tensor, config: GenerationConfig) -> None:
        """Take down what a row has become."""
        row = self.live[i]
        token_ids = input_ids[row.begin :].cpu().numpy()
        token_ids = _until_eos(token_ids, np.isin(token_ids, config.eos_token_id))
        logprobs, entropies = statistics.cpu().numpy().copy()
        row.drawn = token_ids, logprobs, entropies

    def samples(self) -> list[Sample]:
        """What each row went on with, with what branches off it."""
        return [row.sample for row in self.roots]
