"""A trainer that keeps what it trained on."""

import copy

from fr3e_trl import FR3ETrainer


class Recorder(FR3ETrainer):
    """Keeps what each generation step assembled, and the trees that it came from."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches = []

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if self.model.training and not self.args.is_plain_grpo:
            self.batches.append((copy.deepcopy(batch), self.trees))
        return batch
