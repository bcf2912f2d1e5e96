from __future__ import annotations

import random

from rose_dist.frontend.routing import Router


def test_load_is_spread_when_prompts_differ() -> None:
    router = Router()
    loads = dict.fromkeys(range(4), 0)
    generator = random.Random(0)
    for _ in range(400):
        loads[router.choose([generator.randrange(1000) for _ in range(50)], loads)] += 1
    assert set(loads.values()) == {100}


def test_the_same_head_goes_to_the_same_leader() -> None:
    router = Router()
    head = list(range(2000))
    home = router.choose([*head, 1], dict(enumerate([1, 0, 1, 1])))
    assert home == 1
    for tail in range(2, 10):
        assert router.choose([*head, tail, tail], dict(enumerate([0, 2, 0, 0]))) == home


def test_a_leader_that_is_clearly_more_loaded_loses_the_head() -> None:
    router = Router()
    head = list(range(500))
    assert router.choose(head, dict(enumerate([0, 0]))) == 0
    assert router.choose(head, dict(enumerate([20, 4]))) == 1
    assert router.choose(head, dict(enumerate([4, 4]))) == 1  # the head has moved


def test_the_longest_known_head_counts() -> None:
    router = Router()
    system = list(range(128))
    assert router.choose([*system, *[1] * 300], dict(enumerate([0, 1, 1]))) == 0
    assert router.choose([*system, *[2] * 300], dict(enumerate([9, 0, 1]))) == 1
    assert router.choose([*system, *[1] * 300, 7], dict(enumerate([1, 1, 0]))) == 0
    assert router.choose([*system, *[2] * 300, 7], dict(enumerate([1, 1, 0]))) == 1


def test_a_leader_that_is_away_gets_its_heads_back() -> None:
    router = Router()
    head = list(range(500))
    assert router.choose(head, {0: 1, 1: 0, 2: 1}) == 1
    assert router.choose([*head, 7], {0: 0, 2: 3}) == 0
    assert router.choose(head, {0: 1, 1: 0, 2: 1}) == 1
