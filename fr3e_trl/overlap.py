"""Overlap: the next batch's rollouts are drawn while the current one is trained on."""

from dataclasses import replace

from . import resume
from .compat import TypedTrainer, sharding
from .fr3e_config import FR3EConfig
from .generation.ahead import AheadSampler
from .generation.vllm_server import VLLMServerError
from .generation.vllm_weights import send_weights
from .method.refill import PromptStream
from .rollout import Explorer


class Overlap:
    """
    Begins the rollouts of the next batch when `max_staleness` updates of the current one are left.

    Only sampling overlaps; rewards, credit and all collective calls happen at the usual time. The next prompts follow
    from the order of the data, and the sampler compares its requests with the actual ones.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Trainer after its setup.
        config ([`FR3EConfig`]):
            Its settings.
        explorer ([`Explorer`]):
            Turns examples into requests.
        sampler ([`AheadSampler`]):
            Draws the rollouts.
        order ([`PromptStream`]):
            The order of the data.
        is_shared (`bool`):
            Whether batches draw their prompts from `order`, as refill does, instead of TRL's dataloader.
    """

    def __init__(
        self,
        trainer: TypedTrainer,
        config: FR3EConfig,
        explorer: Explorer,
        sampler: AheadSampler,
        order: PromptStream,
        is_shared: bool,
    ):
        self.trainer, self.config, self.explorer, self.sampler = trainer, config, explorer, sampler
        self.order, self.is_shared = order, is_shared
        self.num_prompts = config.generation_batch_size // trainer.num_generations
        self.num_updates = int(config.updates_per_batch)
        self.first_step = trainer.state.global_step

    def due(self) -> int | None:
        """The first step of the next batch, if its rollouts should begin now."""
        state = self.trainer.state
        num_done = self.trainer._step // self.config.gradient_accumulation_steps % self.num_updates
        num_left = self.num_updates - num_done
        next_step = state.global_step + num_left
        is_due = num_left <= self.config.max_staleness and next_step < state.max_steps
        return next_step if is_due and not self.sampler.has_begun else None

    def begin(self, next_step: int) -> None:
        """Send the weights and begin the rollouts of the batch of `next_step`. All processes call this."""
        trainer, num_generations = self.trainer, self.trainer.num_generations
        try:
            indices = self._next_indices(next_step)
            own = {row // num_generations for row in sharding(trainer, self.num_prompts * num_generations).own}
            examples = {i: trainer.train_dataset[indices[i]] for i in sorted(own)}
            requests = self.explorer.requests_ahead(self.sampler, self.num_prompts, examples, next_step)
            if trainer.tools:  # their first turns: tools are called when the batch begins, from the main thread
                requests = [replace(request, branching=None) for request in requests]
            send_weights(trainer, self.explorer.stopwatch.part)
            self.sampler.begin(requests)
        except Exception as error:
            if isinstance(error, VLLMServerError) or error is self.explorer.example_error:
                resume.save_before(trainer, error)
            raise

    def _next_indices(self, next_step: int) -> list[int]:
        """Indices in the training set of the prompts of the batch of `next_step`."""
        if self.is_shared:
            return self.order.peek(self.num_prompts)
        num_examples = len(self.trainer.train_dataset)
        num_batches = num_examples // self.num_prompts  # TRL drops the incomplete batch at the end of an epoch
        if self.config.ignore_data_skip:  # a resumed run has begun the checkpoint's epoch anew
            next_step -= self.first_step % (num_batches * self.num_updates)
        epoch, number = divmod(next_step // self.num_updates, num_batches)
        start = epoch * num_examples + number * self.num_prompts
        if start < self.order.num_drawn:  # a dropped batch is begun again
            self.order.go_to(0)
        self.order.draw(start - self.order.num_drawn)
        return self.order.draw(self.num_prompts)

    def metrics(self) -> dict[str, float]:
        """Seconds that training waited for this step's rollouts, and seconds of sampling that training hid."""
        return {
            "fr3e/overlap/seconds_waited": self.sampler.seconds_waited,
            "fr3e/overlap/seconds_hidden": self.sampler.seconds_hidden,
        }
