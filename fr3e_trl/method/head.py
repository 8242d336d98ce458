"""A linear value head on the policy's last hidden states, fitted over past steps: a candidate, to be measured."""

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

RIDGE = 20.0
DECAY = 0.9  # of what a step has shown, with each further one


class ValueHead:
    """What is left of a token's advantage before the token is known, by ridge regression on the hidden state."""

    def __init__(self):
        self.xx = self.xy = None
        self.before = self.after = 0.0

    @torch.no_grad()
    def apply(self, rows, model, args):
        """Subtract the prediction from every token's advantage, and then learn from this step."""
        ids = [torch.as_tensor(np.concatenate([row.prompt_ids, row.completion_ids]).astype(np.int64)) for row in rows]
        padded = pad_sequence(ids, batch_first=True)
        mask = pad_sequence([torch.ones(len(x), dtype=torch.long) for x in ids], batch_first=True)
        hidden = model.model(input_ids=padded, attention_mask=mask).last_hidden_state.double()
        xs, ys, ws = [], [], []
        for k, row in enumerate(rows):
            start = len(row.prompt_ids) + len(row.prefix_ids)
            xs.append(hidden[k, start - 1 : len(ids[k]) - 1])
            weights, advantages = row.token_credit[:, len(row.prefix_ids) :]
            ys.append(torch.as_tensor(advantages / np.maximum(weights, 1)))
            ws.append(torch.as_tensor(weights))
        x, y, w = torch.cat(xs), torch.cat(ys), torch.cat(ws)
        x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
        if self.xx is None:
            self.xx, self.xy = torch.zeros(x.size(1), x.size(1), dtype=x.dtype), torch.zeros(x.size(1), dtype=x.dtype)
        ridge = RIDGE * torch.eye(x.size(1), dtype=x.dtype)
        correction = x @ torch.linalg.solve(self.xx + ridge, self.xy)
        self.before = 0.9 * self.before + (w * y**2).sum().item()
        self.after = 0.9 * self.after + (w * (y - correction) ** 2).sum().item()
        if (log := __import__("os").environ.get("HEAD_LOG")) is not None:
            with open(log, "a") as file:
                print(args.seed, args.num_anchors, self.after / max(self.before, 1e-9), file=file)
        self.xx = DECAY * self.xx + (x * w[:, None]).T @ x
        self.xy = DECAY * self.xy + (x * (w * y)[:, None]).sum(0)
        at = 0
        for row in rows:
            length = row.rollout.length
            weights = w[at : at + length]
            advantages = weights * (y - correction)[at : at + length]
            row.rollout.credit = [(1, a, b) for a, b in zip(weights.tolist(), advantages.tolist(), strict=True)]
            row.advantage = advantages.mean().item()
            row.in_loss = row.in_loss or bool((advantages != 0).any())
            at += length
