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

# Enters TRL's generation mode, and yields the model to generate with
GenerationModel = Callable[[], AbstractContextManager[Any]]

# Returns the model's inputs for images, from the messages of each row's prompt, the images that tools returned in each
# row, token ids (B, L), and the column after each prompt. Inputs with a value per token have the shape (B, L).
ImageInputs = Callable[[list[Any], list[list[Any]], torch.Tensor, list[int]], dict[str, Any]]


class DecodingSteps(Protocol):
    """The parts of transformers' `generate` that a custom decoding loop uses; see `decoding.py`."""

    def run(self, model: Any, loop: Callable[..., torch.Tensor], inputs: dict[str, Any]) -> torch.Tensor:
        """Call `generate` with a custom decoding loop, and return the token ids."""

    def sample(
        self, model: Any, input_ids: torch.Tensor, logits_processor: LogitsProcessorList, arguments: dict[str, Any]
    ) -> torch.Tensor:
        """Run `generate`'s own loop. `arguments` are those that it passes to a custom loop."""

    def restored_state(self, model: Any, device: torch.device) -> AbstractContextManager[None]:
        """Restore the modules' attributes and buffers and the random generators afterwards."""

    def first_inputs(self, model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """The model's inputs for the prompts."""

    def next_inputs(self, model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """The model's inputs for the last token of each row."""

    def updated(self, model: Any, outputs: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """The model's keyword arguments after a step, including the cache."""


# Logits that may accumulate, beyond those of one step, before they are reduced to log-probs and entropies: 16 MiB
MAX_LOGITS = 2**22

# Values of generation settings that keep no state per row, so that rows can be added and removed during decoding
STATELESS_SETTINGS: dict[str, tuple[Any, ...]] = {
    "cache_implementation": (None, "dynamic", "dynamic_full"),
    "guidance_scale": (None, 1),
    "repetition_penalty": (None, 1),
    "use_cache": (None, True),
    "watermarking_config": (None,),
}


class GenerateSampler:
    """
    Samples with transformers' `generate`, all requests in one left-padded batch.

    The batch becomes as wide as the longest row, prefix and budget together, and takes as many steps as the largest
    budget, which is no more than when sampling from the prompts. All rows start at the same width: the rest of a longer
    prefix is forced token by token while other rows already sample. The initial width includes all tokens of images,
    because the model receives images with its first inputs. Either all prompts of a call have images or none.

    Args:
        generation_model (`GenerationModel`):
            Context manager that yields the model.
        generation_config (`Callable`):
            Returns a `GenerationConfig` with the sampling settings, except for the requests' temperatures and budgets.
            Its `min_new_tokens` counts from the end of the prompt, also for branches.
        device (`torch.device`):
            Device on which the model computes, not always that of its weights.
        decoding (`DecodingSteps`):
            The steps of `generate`.
        image_inputs (`ImageInputs`, *optional*):
            Returns the model's inputs for images. By default, images are not supported.
        may_grow (`bool`):
            Whether rollouts may branch off base trajectories during decoding, if the model supports it.
        dtype (`torch.dtype`, *optional*):
            The model's compute dtype. By default, that of its weights.
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
        """A copy of the current settings, with `eos_token_id` as a list."""
        config = copy.copy(self.generation_config())
        if isinstance(config.eos_token_id, int):
            config.eos_token_id = [config.eos_token_id]
        return config

    @property
    def grows(self) -> bool:
        """
        Whether rollouts branch off base trajectories during decoding. Otherwise they are sampled in a second round.

        This depends on the settings and on a test of the model. All processes get the same answer, and must read this
        for the first time together.
        """
        config = self.generation_config()
        is_stateless = all(getattr(config, name, None) in allowed for name, allowed in STATELESS_SETTINGS.items())
        return self.may_grow and is_stateless and self._model_grows

    @functools.cached_property
    def _model_grows(self) -> bool:
        obstacle = next(filter(None, in_every_process(self._obstacle_to_growing)), None)
        if obstacle is not None:
            logger.warning("Rollouts are sampled in a second round, after their base trajectories: %s.", obstacle)
        return obstacle is None

    def _obstacle_to_growing(self) -> str | None:
        config = self._config()
        config.min_new_tokens = None
        with self.generation_model() as model:
            if config.use_cache is None and model.generation_config.use_cache is False:
                return "the model's generation_config has use_cache=False (set generation_kwargs={'use_cache': True})"
            config.suppress_tokens = special_tokens(model.config, config.eos_token_id)
            sampler = GenerateSampler(lambda: nullcontext(model), lambda: config, self.device, self.decoding)
            with self.decoding.restored_state(model, self.device):
                return obstacle_to_growing(model, sampler.draw, self.device, self.dtype or model.dtype)

    def draw(self, requests: Sequence[SamplingRequest], grows: bool) -> list[Sample]:
        """
        Sample all requests.

        Args:
            requests (`Sequence[SamplingRequest]`):
                The requests.
            grows (`bool`):
                Whether rollouts may branch off samples during decoding.

        Returns:
            `list[Sample]`: The samples of all requests, in order. With `grows`, each includes the rollouts from its
            anchors, of which there are at most its share.
        """
        rows = [request for request in requests for _ in range(request.num_samples)]
        shares = [share for request in requests for share in _shares(request)]
        if not rows:
            return []
        config = self._config()
        width = _initial_width(requests, config.eos_token_id)
        begins = [max(width, len(row.prefix_ids)) for row in rows]  # the columns at which sampling starts
        ends = [begin + row.max_new_tokens for begin, row in zip(begins, rows, strict=True)]
        prefixes = np.full((len(rows), max(begins)), -1)
        for ids, begin, row in zip(prefixes, begins, rows, strict=True):
            ids[begin - len(row.prefix_ids) : begin] = row.prefix_ids
        known_ids = torch.from_numpy(prefixes)
        min_new_tokens = config.min_new_tokens or 0
        min_lengths = [
            begin - row.num_sampled_before + min_new_tokens if min_new_tokens else 0
            for begin, row in zip(begins, rows, strict=True)
        ]
        config.max_new_tokens = max(ends) - width
        config.min_new_tokens, config.temperature = 0, 1.0  # `_RowSampling` applies those of each row
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
        # Not with images, for which some models store positions of each row
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
            logprobs, entropies = (values[columns].copy() for values in statistics[i])
            samples.append(Sample(token_ids, logprobs, entropies))
        return samples


def _initial_width(requests: Sequence[SamplingRequest], eos_token_ids: list[int]) -> int:
    """
    Initial width of a batch: the smallest with which it takes no more steps than the largest budget.

    It must include all images, and each EOS in a prefix (of a chat's earlier turns, for example), because `generate`
    takes a row for finished when an EOS is forced.
    """
    widths = [max(len(r.prefix_ids) + r.max_new_tokens for r in requests) - max(r.max_new_tokens for r in requests)]
    widths += [len(r.prefix_ids) - r.num_sampled_before for r in requests if r.multimodal is not None]
    widths += [len(r.prefix_ids) for r in requests if r.tool_images]
    prefixes = [r.prefix_ids for r in requests]
    is_eos = np.isin(np.concatenate(prefixes), eos_token_ids)
    if is_eos.any():
        widths.append(int(np.concatenate([np.arange(len(ids)) for ids in prefixes])[is_eos].max()) + 1)
    return max(widths)


def _shares(request: SamplingRequest) -> Sequence[int]:
    """The maximum number of anchors of each sample from which rollouts branch off during decoding."""
    if request.branching is None or request.rule is None:
        return [0] * request.num_samples
    return request.branching.shares


def _until_eos(token_ids: np.ndarray, is_eos: np.ndarray) -> np.ndarray:
    """A copy up to the first EOS, without the padding that follows."""
    return token_ids[: is_eos.argmax() + 1 if is_eos.any() else None].astype(np.int32)


class _RowSampling(LogitsProcessor):
    """
    Applies each row's temperature and minimum length, and forces the tokens of its prefix.

    `generate` calls it where it would apply the temperature: after penalties, and before top-k and other filters.

    Args:
        known_ids (`torch.Tensor` of shape (B, L)):
            Tokens of the prefixes, -1 for padding and for columns that are sampled.
        temperatures (`torch.Tensor` of shape (B,)):
            Sampling temperatures.
        min_lengths (`torch.Tensor` of shape (B,)):
            Number of columns before an EOS is allowed.
        eos_token_ids (`torch.Tensor` of shape (E,)):
            Tokens that end a completion.
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
        """Select rows."""
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
    Records the log-prob and the entropy of each token: two numbers per token.

    They are those of the policy at the row's temperature, before penalties and filters, so this must be the first of
    the processors.

    Args:
        temperatures (`torch.Tensor` of shape (B,)):
            Sampling temperatures.
        decoding (`DecodingSteps`):
            The steps of `generate`.
    """

    def __init__(self, temperatures: torch.Tensor, decoding: DecodingSteps):
        self.temperatures = temperatures
        self.decoding = decoding
        self.logits: list[torch.Tensor] = []  # of the last steps, each of shape (B, V)
        self.column = 0  # the column that the first of them predict
        self.reduced: list[torch.Tensor] = []  # log-probs and entropies of the steps before, of shape (B, 2, n)

    def sample(self, model: Any, input_ids: torch.Tensor, logits_processor: LogitsProcessorList, **kwargs: Any) -> Any:
        """Run `generate`'s own loop with this processor."""
        return self.decoding.sample(model, input_ids, LogitsProcessorList([self, *logits_processor]), kwargs)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if len(self.logits) * scores.numel() >= MAX_LOGITS:
            self._reduce(input_ids)
        if not self.logits:
            self.column = input_ids.shape[1]
        self.logits.append(scores.clone())
        return scores

    def _reduce(self, token_ids: torch.Tensor) -> None:
        """Reduce logits to log-probs and entropies, for many steps at once to save kernel launches."""
        token_ids = token_ids[:, self.column :]  # `generate` may undo its last steps
        logits, self.logits = self.logits[: token_ids.shape[1]], []
        if logits:
            size = max(MAX_LOGITS // (len(logits) * logits[0].shape[1]), 1)  # rows at a time
            parts = zip(*(part.split(size) for part in (*logits, self.temperatures, token_ids)), strict=True)
            statistics = [
                _statistics(*_policy(torch.stack(steps, 1), temperatures), ids) for *steps, temperatures, ids in parts
            ]
            self.reduced.append(torch.cat(statistics))

    def statistics(self, output_ids: torch.Tensor) -> np.ndarray:
        """Log-probs and entropies of all generated columns, of shape (B, 2, L), in nats."""
        self._reduce(output_ids)
        return torch.cat(self.reduced, dim=2).cpu().numpy()


def _policy(logits: torch.Tensor, temperatures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs (B, L, V) and entropies (B, L) of logits at each row's temperature."""
    logprobs = (logits.float() / temperatures[:, None, None]).log_softmax(2)
    probs = logprobs.exp()
    return logprobs, torch.special.entr(probs, out=probs).sum(2)


def _statistics(logprobs: torch.Tensor, entropies: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of the tokens (B, L), and entropies, of shape (B, 2, L)."""
    return torch.stack([logprobs.gather(2, token_ids[:, :, None]).squeeze(2), entropies], 1)


@dataclass(eq=False)
class _GrowingRow:
    """A row during decoding."""

    request: SamplingRequest
    begin: int  # the column at which its sampling starts
    share: int = 0  # the maximum number of its anchors
    branches: dict[int, list["_GrowingRow"]] = field(default_factory=dict)
    outputs: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None  # once finished: tokens, log-probs, entropies

    @property
    def sample(self) -> Sample:
        """The finished row with its branches."""
        assert self.outputs is not None
        branches = {position: [row.sample for row in rows] for position, rows in self.branches.items()}
        return Sample(*self.outputs, branches)


class _GrowingRows:
    """
    A decoding loop for `generate` in which rollouts branch off base trajectories during decoding.

    A rollout joins the batch as a new row at its anchor's column, and a finished row is removed, so the loop takes as
    many steps as the longest row and computes only unfinished rows.

    Args:
        rows (`list[SamplingRequest]`):
            The request of each row.
        shares, begins (`list[int]`):
            The maximum number of anchors of each row, and the column at which its sampling starts.
        processor ([`_RowSampling`]), ends ([`_RowEnds`]):
            The logits processor and stopping criterion, whose rows are selected too.
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
        self.roots = [_GrowingRow(*fields) for fields in zip(rows, begins, shares, strict=True)]
        self.unfinished = list(self.roots)
        self.processor = processor
        self.ends = ends
        self.decoding = decoding
        rules = [row.rule if share else None for row, share in zip(rows, shares, strict=True)]
        self.rules = [rule for rule in dict.fromkeys(rules) if rule is not None]
        # For each unfinished row: the index of the rule that selects its anchors, -1 if it has none, and `begin`
        device = ends.ends.device
        self.rule_index = torch.tensor([self.rules.index(rule) if rule else -1 for rule in rules], device=device)
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
            del outputs  # frees its logits, which were copied
            logprobs, entropies = _policy(logits[:, None], self.processor.temperatures)
            probs = logits_processor(input_ids, logits).softmax(1)
            parents = self._branch(input_ids.shape[1], entropies[:, 0])
            if parents:
                rows = torch.tensor([*range(len(input_ids)), *parents], device=input_ids.device)
                input_ids, statistics, probs = input_ids[rows], statistics[rows], probs[rows]
                model_kwargs = self._select(rows, model_kwargs)
                self.rule_index[-len(parents) :], self.begins[-len(parents) :] = -1, input_ids.shape[1]
                logprobs, entropies = logprobs[rows], entropies[rows]
            token_ids = torch.multinomial(probs, 1)
            input_ids = torch.cat([input_ids, token_ids], 1)
            statistics = torch.cat([statistics, _statistics(logprobs, entropies, token_ids)], 2)
            is_done = stopping_criteria(input_ids, None)
            if is_done.any():
                for i in is_done.nonzero().flatten().tolist():
                    row = self.unfinished[i]
                    self._finish(row, input_ids[i], statistics[i, :, row.begin - width :], generation_config)
                rows = (~is_done).nonzero().flatten()
                if not len(rows):
                    return input_ids
                self.unfinished = [row for row in self.unfinished if row.outputs is None]
                input_ids, statistics = input_ids[rows], statistics[rows]
                model_kwargs = self._select(rows, model_kwargs)
            inputs = self.decoding.next_inputs(model, input_ids, model_kwargs)

    def _branch(self, column: int, entropies: torch.Tensor) -> list[int]:
        """Add the rollouts that branch off before this column, and return the index of each one's parent row."""
        parents = []
        uncertain = torch.zeros_like(self.rule_index, dtype=torch.bool)
        for k, rule in enumerate(self.rules):
            uncertain |= (self.rule_index == k) & rule.is_uncertain(entropies, column - self.begins)
        for i in uncertain.nonzero().flatten().tolist():
            row, position = self.unfinished[i], column - self.unfinished[i].begin
            branching = row.request.branching
            assert branching is not None and branching.rule is not None
            if not branching.rule.takes(position, row.branches):
                continue
            row.branches[position] = [_GrowingRow(row.request, column) for _ in range(branching.num_rollouts)]
            self.unfinished += row.branches[position]
            parents += [i] * branching.num_rollouts
            if len(row.branches) == row.share:
                self.rule_index[i] = -1
        return parents

    def _select(self, rows: torch.Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Select rows in the state of this loop and of the model, and return the model's keyword arguments for them."""
        num_rows = len(self.rule_index)
        self.rule_index, self.begins, self.ends.ends = self.rule_index[rows], self.begins[rows], self.ends.ends[rows]
        self.processor.select(rows)
        for value in model_kwargs.values():
            if isinstance(value, Cache):
                value.reorder_cache(cast(torch.LongTensor, rows))

        def selected(name: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if name == "position_ids" and value.dim() == 3:  # (positions per token, B, L)
                return value[:, rows]
            return value[rows] if value.shape[:1] == (num_rows,) else value

        return {name: selected(name, value) for name, value in model_kwargs.items()}

    def _finish(
        self, row: _GrowingRow, input_ids: torch.Tensor, statistics: torch.Tensor, config: GenerationConfig
    ) -> None:
        token_ids = input_ids[row.begin :].cpu().numpy()
        token_ids = _until_eos(token_ids, np.isin(token_ids, config.eos_token_id))
        logprobs, entropies = statistics.cpu().numpy().copy()
        row.outputs = token_ids, logprobs, entropies

    def samples(self) -> list[Sample]:
        """The sample of each row, with its branches."""
        return [row.sample for row in self.roots]
