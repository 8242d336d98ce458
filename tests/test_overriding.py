"""Overrides that last for one call leave nothing behind."""

import pytest

from fr3e_trl.trl_adapter.overriding import overridden


class Trainer:
    limit = 3

    def __init__(self):
        self.rewards = [1.0]

    def generate(self):
        return "generated"

    def step(self):
        return self.generate(), self.limit, self.rewards


def test_all_who_call_it_on_the_object_find_the_other_method():
    trainer, other = Trainer(), Trainer()
    with overridden(trainer, generate=lambda: "given", limit=5, rewards=None):
        assert trainer.step() == ("given", 5, None)
        assert other.step() == ("generated", 3, [1.0])
    assert trainer.step() == ("generated", 3, [1.0])


def test_nothing_stays_behind():
    trainer = Trainer()
    before = dict(vars(trainer))
    with overridden(trainer, generate=lambda: "given", limit=5, rewards=[]):
        pass
    assert vars(trainer) == before


def test_an_error_undoes_it():
    trainer = Trainer()
    with pytest.raises(KeyError), overridden(trainer, generate=lambda: "given", rewards=[]):
        raise KeyError
    assert vars(trainer) == {"rewards": [1.0]} and trainer.generate() == "generated"


def test_it_may_be_nested_and_call_what_it_replaces():
    trainer = Trainer()
    of_class = trainer.generate
    with overridden(trainer, generate=lambda: f"outer of {of_class()}"):
        outer = trainer.generate
        with overridden(trainer, generate=lambda: f"inner of {outer()}"):
            assert trainer.generate() == "inner of outer of generated"
        assert trainer.generate() == "outer of generated"
    assert trainer.generate() == "generated" and "generate" not in vars(trainer)


def test_a_module_is_overridden_too():
    import math

    with overridden(math, pi=3):
        assert math.pi == 3
    assert math.pi > 3.14
