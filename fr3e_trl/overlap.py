"""Generation and training at the same time: the next batch's rollouts are drawn while this one is trained on."""

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
    Begins the rollouts of the next batch when `max_staleness` updates of this one are still to come.

    Rewards, credit, and all else that processes do together stay where they are. The next prompts are those that follow
    in the order of the data. The sampler compares them with those that arrive.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            A trainer that is set up.
        config ([`FR3EConfig`]):
            Its settings.
        explorer ([`Explorer`]):
            Turns examples into requests.
        sampler ([`AheadSampler`]):
            Draws.
        order ([`PromptStream`]):
            The order of the data.
        is_shared (`bool`):
            Whether each batch draws its prompts from `order`, as refill does, and not from TRL's dataloader.
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

    def due(self) -> int | None:
        """The step that the next batch begins with, if its rollouts are to be begun now."""
        state = self.trainer.state
        num_done = self.trainer._step // self.config.gradient_accumulation_steps % self.num_updates
        num_to_come = self.num_updates - num_done
        next_step = state.global_step + num_to_come
        is_due = num_to_come <= self.config.max_staleness and next_step < state.max_steps
        return next_step if is_due and not self.sampler.has_begun else None

    def begin(self, next_step: int) -> None:
        """Send the weights and begin the rollouts of the batch that a step begins with. All processes call this."""
        trainer, num_generations = self.trainer, self.trainer.num_generations
        try:
            indices = self._next_indices(next_step)
            own = {row // num_generations for row in sharding(trainer, self.num_prompts * num_generations).own}
            examples = {i: trainer.train_dataset[indices[i]] for i in sorted(own)}
            requests = self.explorer.requests_ahead(self.sampler, self.num_prompts, examples, next_step)
            send_weights(trainer, self.explorer.stopwatch.part)
            self.sampler.begin(requests)
        except Exception as error:
            if isinstance(error, VLLMServerError) or error is self.explorer.example_error:
                resume.save_before(trainer, error)
            raise

    def _next_indices(self, next_step: int) -> list[int]:
        """Places in the training set of the prompts of the batch that a step begins with."""
        if self.is_shared:
            return self.order.peek(self.num_prompts)
        num_examples = len(self.trainer.train_dataset)
        # TRL leaves out what makes no whole batch at the end of an epoch
        epoch, number = divmod(next_step // self.num_updates, num_examples // self.num_prompts)
        place = epoch * num_examples + number * self.num_prompts
        if place < self.order.num_drawn:  # a dropped batch is begun again
            self.order.go_to(0)
        self.order.draw(place - self.order.num_drawn)
        return self.order.draw(self.num_prompts)

    def metrics(self) -> dict[str, float]:
        """Of this step's rollouts: how long they were waited for, and how long they were drawn while it trained."""
        return {
            "fr3e/overlap/seconds_waited": self.sampler.seconds_waited,
            "fr3e/overlap/seconds_hidden": self.sampler.seconds_hidden,
        }
